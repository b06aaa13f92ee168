"""Random K/V that pools give back as they were written, in fewer bits too: what a test reads can be told beforehand."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_server.runtime.row_pool import group_size_of


def exact_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, bits: int | None) -> mx.array:
    """Rows of `shape`: normal ones, or for `bits` such as lose nothing when they are quantised.

    Each group of such a row has all that `bits` can count from, its steps are a power of two, and 0 is one of them.
    """
    if bits is None:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
    group_size = group_size_of(shape[-1])
    groups = (*shape[:-1], shape[-1] // group_size)
    num_codes = 2**bits
    codes = rng.integers(0, num_codes, size=(*groups, group_size), dtype=np.uint8).astype(np.float32)
    codes[..., 0], codes[..., 1] = 0, num_codes - 1
    steps = rng.choice(np.array([-2, -1, 1, 2], np.float32), size=(*groups, 1)) * 2 / num_codes
    return mx.array(((codes - num_codes // 2) * steps).reshape(shape)).astype(dtype)
