"""MLX's memory without garbage of earlier tests."""

from __future__ import annotations

import gc
import time

import mlx.core as mx


def active_bytes() -> int:
    """The bytes of live arrays, the fewest within a twentieth of a second. Garbage of earlier tests is collected first,
    so that it cannot change a comparison. A thread that has ended frees MLX's random key of its own (8 bytes) a moment
    after it was joined."""
    gc.collect()
    readings = [mx.get_active_memory()]
    for _ in range(10):
        time.sleep(0.005)
        readings.append(mx.get_active_memory())
    return int(min(readings))


def held_bytes() -> int:
    """`active_bytes()` and the memory that MLX keeps for reuse."""
    return active_bytes() + int(mx.get_cache_memory())
