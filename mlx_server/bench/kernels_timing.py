"""Time for the kernels' bench: candidates in turns, and how fast this machine copies memory."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.runtime.kernels.cpu.attention import default_threads

_NUM_WARM_UPS = 2
_NUM_COPIES = 8
"""Copies of one measurement, each of the result of the one before, so that a GPU's start does not count."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Copy:
    """The best of a few copies of `num_bytes`. `bytes_per_s` counts what is read and what is written."""

    how: str
    num_bytes: int
    bytes_per_s: float


def median_times(
    candidates: Sequence[Callable[[], object]], num_repeats: int, clock: Clock = time.perf_counter
) -> list[float]:
    """Median seconds of each candidate, warmed up, then measured in turns that begin with another one each time."""
    for _ in range(_NUM_WARM_UPS):
        for candidate in candidates:
            candidate()
    times: list[list[float]] = [[] for _ in candidates]
    for repeat in range(num_repeats):
        for offset in range(len(candidates)):
            index = (repeat + offset) % len(candidates)
            start_s = clock()
            candidates[index]()
            times[index].append(clock() - start_s)
    return [statistics.median(column) for column in times]


def measure_copy(num_bytes: int, clock: Clock = time.perf_counter) -> Copy:
    """Of MLX on a GPU; of NumPy where MLX computes on the CPU, whose own copies run on one thread."""
    if mx.default_device() == mx.cpu:
        threads = default_threads()
        how = f"NumPy on {threads} thread{'s' if threads > 1 else ''}"
        return Copy(how, num_bytes, _best_rate(_numpy_copies(num_bytes, threads), num_bytes, clock))
    return Copy("MLX on the GPU", num_bytes, _best_rate(_mlx_copies(num_bytes), num_bytes, clock))


def _best_rate(copies: Callable[[], object], num_bytes: int, clock: Clock) -> float:
    def timed() -> float:
        start_s = clock()
        copies()
        return clock() - start_s

    copies()
    return 2 * num_bytes * _NUM_COPIES / min(timed() for _ in range(3))


def _numpy_copies(num_bytes: int, threads: int) -> Callable[[], object]:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    bounds = np.linspace(0, num_bytes, threads + 1, dtype=np.int64)
    parts = [slice(first, end) for first, end in itertools.pairwise(bounds)]

    def copy_part(part: slice) -> None:  # NumPy lets go of the interpreter's lock meanwhile
        for _ in range(_NUM_COPIES):
            np.copyto(target[part], source[part])

    def copies() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(copy_part, parts))

    return copies


def _mlx_copies(num_bytes: int) -> Callable[[], object]:
    source = mx.ones((num_bytes // 4,), mx.float32)
    mx.eval(source)

    def copies() -> None:
        array = source
        for index in range(_NUM_COPIES):  # another type of the same size: MLX would not copy otherwise
            array = array.astype(mx.float32 if index % 2 else mx.int32)
        mx.eval(array)

    return copies
