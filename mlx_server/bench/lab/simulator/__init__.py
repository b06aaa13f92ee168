"""The real scheduler on recorded or generated traffic, with a simulated device whose costs come from measurements."""
