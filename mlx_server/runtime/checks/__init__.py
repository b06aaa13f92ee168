"""What is checked and measured of a loaded model before it serves."""
