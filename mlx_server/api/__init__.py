"""HTTP. The only floor that knows FastAPI."""
