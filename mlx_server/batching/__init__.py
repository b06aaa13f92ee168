"""Policy: who runs in the next step, and who holds which block. Knows neither MLX nor threads nor the clock."""
