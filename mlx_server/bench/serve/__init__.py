"""`mlx-serve bench serve`: load over HTTP on any OpenAI-compatible server, which is known from outside only."""
