"""The commands of `mlx-serve`: `main.py` has the tree of them, and each other file the verbs of one noun."""
