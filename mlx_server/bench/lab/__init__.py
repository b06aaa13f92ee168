"""Instruments for developers of the server: what its steps, kernels and prefixes on disk cost, and how a machine does."""
