"""All models of a server: which are loaded, and which are unloaded to make room."""
