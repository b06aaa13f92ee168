"""Scheduling policy: which requests run in the next step, and which blocks they hold. No MLX, threads or clock."""
