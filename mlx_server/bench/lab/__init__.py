"""Instruments for developers of the server: of its steps, kernels, tiers and structured outputs, and of a machine."""
