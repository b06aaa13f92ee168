"""What steps cost on machines that were measured, by us or by others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_server.bench.simulate_engine import CostModel


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine with a model: what steps cost, and the target that is the default there."""

    cost: CostModel
    target_step_s: float


PROFILES: Mapping[str, Profile] = {
    # `random:mini`, float32, on two cores of an AMD EPYC: a fit to our own steps.
    "cpu": Profile(CostModel(), 0.2),
    # An 8B in 4 bits. Of an M2 Max no figures were found, so these are an M1 Max's (500 prompt tokens/s at 512, 46 of
    # one stream, normiebench#40) with prompts 38/32 as fast, as it has GPU cores. What more rows cost is of the M3 Max,
    # whose product of 4-bit weights takes 2.5 times as long with 8 rows as with one (mlx#3863); the growth with the
    # context is the M5 Max's.
    "m2-max": Profile(
        CostModel(base_s=0.0175, decode_s=0.0042, prompt_s=0.0017, context_doubling_tokens=20_000.0, host_s=0.003), 0.1
    ),
    # A dense 27B in 4 bits: steps of 32.9, 49.2, 86.8 and 112.6 ms at 1, 4, 8 and 16 rows (TensorFold, MLX 0.31.2);
    # prompts at 894 tokens/s of 1k and 494 of 32k (omlx#2150).
    "m5-max": Profile(
        CostModel(base_s=0.028, decode_s=0.0055, prompt_s=0.0011, context_doubling_tokens=20_000.0, host_s=0.003), 0.1
    ),
    # An 8B in 4 bits on an M4 Max, about: 1,092 prompt tokens/s at 8.6k (mesh-llm#1228), and rows that cost next to
    # nothing, as they do on larger GPUs.
    "gpu": Profile(
        CostModel(base_s=0.02, decode_s=0.0005, prompt_s=0.0008, context_doubling_tokens=16_384.0, host_s=0.003), 0.1
    ),
}
