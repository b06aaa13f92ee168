"""What a loaded model is compared with before it serves."""
