"""Measurements for developers of the server: steps, kernels, the scheduler, and a machine's report."""
