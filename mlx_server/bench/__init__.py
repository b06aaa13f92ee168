"""Measurements as programs: each claim of speed in BENCHMARKS.md is one command of `mlx-serve bench`.

Here is what users measure with: load over HTTP in `serve/`, and beside it comparisons and what all share. What only
developers of the server need is in `lab/`. `cli/main.py` lists the commands.
"""
