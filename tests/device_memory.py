"""MLX's memory without garbage of earlier tests."""

from __future__ import annotations

import gc

import mlx.core as mx


def active_bytes() -> int:
    """The bytes of live arrays. Garbage of earlier tests is collected first, so that it cannot change a comparison."""
    gc.collect()
    return int(mx.get_active_memory())


def held_bytes() -> int:
    """`active_bytes()` and the memory that MLX keeps for reuse."""
    return active_bytes() + int(mx.get_cache_memory())
