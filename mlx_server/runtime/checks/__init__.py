"""What is found out of a loaded model before it serves."""
