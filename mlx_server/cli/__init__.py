"""The commands of `mlx-serve`: `main.py` has the tree of them, `remote.py` what those share that talk to a running
server, and each other file one command or the verbs of one noun."""
