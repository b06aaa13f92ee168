"""MLX's memory without what earlier tests left to the garbage collector."""

from __future__ import annotations

import gc

import mlx.core as mx


def active_bytes() -> int:
    """The bytes of arrays that somebody holds. What is measured twice must not shrink by an earlier test's garbage."""
    gc.collect()
    return int(mx.get_active_memory())


def held_bytes() -> int:
    """`active_bytes()` and what MLX keeps for the next arrays."""
    return active_bytes() + int(mx.get_cache_memory())
