"""The commands of `mlx-serve bench`, listed by `cli/main.py`: measurements for users, and in `lab/` for developers."""
