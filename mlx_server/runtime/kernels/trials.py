"""Helpers of kernel self-tests and measurements: rows that quantise without loss, and alternating timings, so that
other work on the machine slows all candidates equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from mlx_server.runtime.attention.interface import LayerSpec
from mlx_server.runtime.cache.row_pool import KV_GROUP_SIZE, side_bits

T = TypeVar("T")

Clock = Callable[[], float]

_NUM_WARM_UPS = 2

KERNEL_TOLERANCES = {mx.float32: 5e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""Wide, because MLX may round float32 products to TF32, and tests of kernels only look for wrongly compiled ones."""


def exact_kv(rng: np.random.Generator, places: tuple[int, ...], spec: LayerSpec) -> tuple[mx.array, mx.array]:
    """K and V `[*places, dim]` for layers like `spec`, made by `exact_rows`."""
    keys, values = side_bits(spec.bits)
    return (
        exact_rows(rng, (*places, spec.key_dim), spec.dtype, keys),
        exact_rows(rng, (*places, spec.value_dim), spec.dtype, values),
    )


def exact_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, bits: int | None) -> mx.array:
    """Random rows of `shape`: normally distributed, or with `bits`, rows that quantise without loss.

    Each group of such a row uses the whole range of codes. Its step is a power of two, and 0 is one of the numbers that
    its codes stand for.
    """
    if bits is None:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
    groups = (*shape[:-1], shape[-1] // KV_GROUP_SIZE)
    num_codes = 2**bits
    codes = rng.integers(0, num_codes, size=(*groups, KV_GROUP_SIZE), dtype=np.uint8).astype(np.float32)
    codes[..., 0], codes[..., 1] = 0, num_codes - 1
    steps = rng.choice(np.array([-2, -1, 1, 2], np.float32), size=(*groups, 1)) * 2 / num_codes
    return mx.array(((codes - num_codes // 2) * steps).reshape(shape)).astype(dtype)


def exhaust(work: Generator[Any, None, T]) -> T:
    """Does all pieces and returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def median_times(
    candidates: Sequence[Callable[[], object]], num_repeats: int, clock: Clock = time.perf_counter
) -> list[float]:
    """The median seconds of each candidate. After a warm-up, each repeat runs all of them, in rotated order."""
    return exhaust(median_times_in_pieces(candidates, num_repeats, clock))


def median_times_in_pieces(
    candidates: Sequence[Callable[[], object]], num_repeats: int, clock: Clock = time.perf_counter
) -> Generator[None, None, list[float]]:
    """As `median_times`; yields after each run."""
    for _ in range(_NUM_WARM_UPS):
        for candidate in candidates:
            candidate()
            yield
    times: list[list[float]] = [[] for _ in candidates]
    for repeat in range(num_repeats):
        for offset in range(len(candidates)):
            index = (repeat + offset) % len(candidates)
            mx.synchronize()  # what other models gave the device meanwhile takes none of the candidate's time
            start_s = clock()
            candidates[index]()
            times[index].append(clock() - start_s)
            yield
    return [statistics.median(column) for column in times]
