"""Measurements as programs: each claim of speed in BENCHMARKS.md is one command of `mlx-serve bench`.

Here is what users measure with; what only developers of the server need is in `lab/`.
"""

from collections.abc import Mapping
from types import MappingProxyType

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "throughput": "throughput",
        "serve": "serve.command",
        "compare": "compare",
        "peers": "peers",
        "structured": "lab.structured",
        "tiers": "lab.tiers",
        "sweep": "lab.sweep",
        "kernels": "lab.kernels",
        "simulate": "lab.simulator.command",
        "host-cost": "lab.host_cost",
        "random-folder": "random_folder",
    }
)
"""The module of each command, below this package; the command line reads it without importing any of them."""
