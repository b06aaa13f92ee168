"""All models of a server: which are loaded, and which makes room for another."""
