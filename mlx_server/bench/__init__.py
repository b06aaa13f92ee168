"""Measurements as programs: each claim of speed in BENCHMARKS.md is one command of `mlx-serve bench`.

Here is what users measure with; what only developers of the server need is in `lab/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One command: its module, below this package, and its line in the help."""

    module: str
    summary: str


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "throughput": Benchmark("throughput", "offline: this engine beside mlx-lm's own, on the same prompts"),
        "serve": Benchmark("serve.command", "over HTTP: latencies and throughput of any OpenAI-compatible server"),
        "compare": Benchmark("compare", "over HTTP: several servers side by side, in turns"),
        "peers": Benchmark("peers", "install the servers of others that run here, and compare with them"),
        "structured": Benchmark("lab.structured", "over HTTP: what structured requests cost the streams beside them"),
        "tiers": Benchmark("lab.tiers", "over HTTP: what a full server leaves of the best tier's latency"),
        "sweep": Benchmark("lab.sweep", "over HTTP: how many streams keep stated latencies, by context"),
        "invariance": Benchmark("lab.invariance", "over HTTP: whether answers have the same bits alone and in batches"),
        "kernels": Benchmark("lab.kernels", "the attention kernels alone, each beside MLX's own"),
        "kv-bits": Benchmark("lab.kv_bits", "what K/V in fewer bits cost a model, on a text"),
        "kv-disk": Benchmark("lab.kv_disk", "prefixes on disk: the index, and streams beside saving and loading"),
        "simulate": Benchmark("lab.simulator.command", "the scheduler alone, on recorded or made-up traffic"),
        "fleet": Benchmark("lab.simulator.fleet", "many simulated servers behind a router, by how it places requests"),
        "host-cost": Benchmark("lab.host_cost", "what scheduling a step costs the host"),
        "random-folder": Benchmark("random_folder", "write a random model that any mlx-lm server can load"),
    }
)
"""By command; the command line reads it without importing any of the modules."""
