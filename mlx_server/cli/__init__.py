"""The commands of `mlx-serve`: `main.py` has the tree of commands, `remote.py` what commands that talk to a running
server share, and each other file one command or the verbs of one noun."""
