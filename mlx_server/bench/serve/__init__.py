"""`mlx-serve bench serve`: load over HTTP on any OpenAI-compatible server."""
