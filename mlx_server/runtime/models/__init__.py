"""From a model's name to its weights in memory: folders, downloads, GGUF, random weights."""
