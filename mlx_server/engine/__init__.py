"""One model: its scheduler, its place on the MLX thread, its memory, and the streams of its requests."""
