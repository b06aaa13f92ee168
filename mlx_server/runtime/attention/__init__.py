"""Attention over blocks: its interface, its backends, and how mlx-lm's layers call them."""
