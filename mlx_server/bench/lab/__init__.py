"""Instruments for developers of the server: what steps, kernels and prefixes on disk cost, and a machine's report."""
