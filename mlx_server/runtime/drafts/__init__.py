"""Drafting on the device: a draft model's runner, and a model's own heads."""
