"""Measures attention over K/V in a backend's pools and over the same K/V, contiguous, by MLX; how fast this machine
copies memory; and which variant of the decode kernel is fastest for a shape."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention.interface import AttentionBackend, IntArray, StepPlan
from mlx_server.runtime.kernels.cpu.native import default_threads
from mlx_server.runtime.kernels.gpu.backend import CudaBackend, GpuBackend, MetalBackend
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, KernelVariant, check_variant, default_variant
from mlx_server.runtime.kernels.trials import exact_kv, exhaust, median_times

_RUN_BLOCKS = 8
_MAX_LAYER_BYTES = 256 * 2**20
"""The most K/V of all layers of a case, unless one layer has more: more than caches hold."""

_NUM_COPIES = 8
"""Copies in one measurement, so that the time to start a GPU does not count. On a GPU, each copies the result of the
one before."""

_SIMDGROUPS = (8, 4, 2, 1)
_LANES = (32, 16, 8)
_ROWS_AHEAD = (4, 2)
_PARTITIONS = (256, 512, 1024, 2048)

MakeBackend = Callable[[KernelVariant], GpuBackend]
Measure = Callable[[KernelVariant], tuple[float, ...] | None]
"""Returns the seconds of one layer in each case, or None if the variant cannot run here or computes wrong results."""


@dataclass(frozen=True, slots=True)
class Case:
    """Attention of the last `num_queries` tokens of each of `num_sequences` contexts, all `context` tokens long."""

    shape: DecodeShape
    num_sequences: int
    num_queries: int
    context: int

    @property
    def is_decode(self) -> bool:
        return self.num_queries == 1

    @property
    def kv_bytes(self) -> int:
        """The bytes of K and V of one layer, as they are stored."""
        return self.num_sequences * self.context * self.shape.spec.token_bytes

    @property
    def required_bytes(self) -> int:
        """The bytes that every implementation must move: each K and V row once, the queries and the results."""
        shape = self.shape
        token = shape.num_query_heads * (shape.key_dim + shape.value_dim) * shape.dtype.size
        return self.kv_bytes + self.num_sequences * self.num_queries * token

    def num_layers(self, most: int) -> int:
        """The number of layers to run: at most `most`, and as many as replace the contents of all caches in each
        run."""
        return max(1, min(most, _MAX_LAYER_BYTES // self.kv_bytes))


class World:
    """A case with several layers, as in a model: each has its own K/V and takes the last one's result as queries.

    K/V are stored beforehand, in blocks in random order, so that only attention is timed. They are numbers that
    quantisation does not change, so MLX attends over the same numbers in full precision. MLX thread.
    """

    def __init__(self, case: Case, num_layers: int, backend: AttentionBackend) -> None:
        shape = case.shape
        blocks = -(-case.context // BLOCK_SIZE)
        ids = np.random.default_rng(0).permutation(case.num_sequences * blocks).astype(np.int32)
        tables = ids.reshape(case.num_sequences, blocks)
        self.case = case
        self.step = _attending_step(case, tables)
        self._scale = shape.key_dim**-0.5
        rows = (case.num_sequences, case.num_queries, shape.num_query_heads, shape.key_dim)
        self._queries = _random(0, rows, shape.dtype)
        self._contiguous = [_random_rows(case, layer) for layer in range(num_layers)]
        self._pools = [_pool_of(backend, shape, tables, *rows) for rows in self._contiguous]

    @property
    def num_layers(self) -> int:
        return len(self._pools)

    def paged(self, backend: AttentionBackend) -> Callable[[], mx.array]:
        """A function that runs all layers over the pools and returns `[sequences, queries, heads, dim]`. `backend` may
        be another instance of the class that made the pools."""
        metadata = backend.plan(self.step)
        queries = self._queries.reshape(-1, self.case.shape.num_query_heads, 1, self.case.shape.key_dim)
        mx.eval(queries)

        def run() -> mx.array:
            out = queries
            for pool in self._pools:
                out = backend.attend(pool, out, None, None, metadata, scale=self._scale)
            mx.eval(out, *(array for pool in self._pools for array in backend.state(pool)))
            return out.reshape(self._queries.shape)

        return run

    def contiguous(self) -> Callable[[], mx.array]:
        """A function that computes the same with `mx.fast.scaled_dot_product_attention`."""
        queries = mx.contiguous(self._queries.swapaxes(1, 2))
        mx.eval(queries)
        mask = None if self.case.is_decode else "causal"

        def run() -> mx.array:
            out = queries
            for keys, values in self._contiguous:
                out = mx.fast.scaled_dot_product_attention(out, keys, values, scale=self._scale, mask=mask)
            mx.eval(out)
            return out.swapaxes(1, 2)

        return run


def _random_rows(case: Case, layer: int) -> tuple[mx.array, mx.array]:
    """Keys and values of a layer, `[sequences, KV heads, context, dim]`."""
    shape = case.shape
    rows = (case.num_sequences, shape.num_kv_heads, case.context)
    if shape.bits is not None:
        return exact_kv(np.random.default_rng(layer), rows, shape.spec)
    keys = _random(2 * layer + 1, (*rows, shape.key_dim), shape.dtype)
    return keys, _random(2 * layer + 2, (*rows, shape.value_dim), shape.dtype)


def _random(seed: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    array = mx.random.normal(shape, dtype, key=mx.random.key(seed))
    mx.eval(array)
    return array


def _pool_of(backend: AttentionBackend, shape: DecodeShape, tables: IntArray, keys: mx.array, values: mx.array) -> Any:
    """A pool with each sequence's keys and values in the blocks of its table."""
    pool = backend.make_pool(shape.spec, tables.size)
    for table, sequence_keys, sequence_values in zip(tables, keys, values):
        new_keys, new_values = (rows.swapaxes(0, 1)[:, :, None] for rows in (sequence_keys, sequence_values))
        metadata = backend.plan(_storing_step(table, len(new_keys)))
        # Any queries of the right shape will do: the result is not used.
        out = backend.attend(pool, mx.zeros_like(new_keys), new_keys, new_values, metadata, scale=1.0)
        mx.eval(out, *backend.state(pool))
    return pool


def _attending_step(case: Case, tables: IntArray) -> StepPlan:
    """The plan of a step that attends with the last queries of all sequences."""
    positions = np.arange(case.context - case.num_queries, case.context, dtype=np.int32)
    slots = tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepPlan(
        num_decodes=case.num_sequences if case.is_decode else 0,
        positions=np.tile(positions, case.num_sequences),
        slot_mapping=slots.reshape(-1),
        query_starts=np.arange(case.num_sequences + 1, dtype=np.int32) * case.num_queries,
        context_lens=np.full(case.num_sequences, case.context, np.int32),
        block_tables=tables,
    )


def _storing_step(table: IntArray, length: int) -> StepPlan:
    """The plan of a step that stores a whole context. Each `_RUN_BLOCKS` blocks are planned as a prompt of their own,
    because attention over the whole context would cost the square of its length."""
    runs = np.pad(table, (0, -len(table) % _RUN_BLOCKS)).reshape(-1, _RUN_BLOCKS)
    positions = np.arange(length, dtype=np.int32)
    starts = np.append(np.arange(0, length, _RUN_BLOCKS * BLOCK_SIZE), length).astype(np.int32)
    return StepPlan(
        num_decodes=0,
        positions=positions % (_RUN_BLOCKS * BLOCK_SIZE),
        slot_mapping=table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=starts,
        context_lens=np.diff(starts),
        block_tables=runs,
    )


@dataclass(frozen=True, slots=True)
class Copy:
    """The fastest of a few copies of `num_bytes`. `bytes_per_s` counts bytes read and bytes written."""

    how: str
    num_bytes: int
    bytes_per_s: float


def measure_copy(num_bytes: int) -> Copy:
    """Measures copies by MLX on a GPU, or by NumPy on the CPU, where MLX copies on one thread only."""
    if mx.default_device() == mx.cpu:
        threads = default_threads()
        how = f"NumPy on {threads} thread{'s' if threads > 1 else ''}"
        return Copy(how, num_bytes, _best_rate(_numpy_copies(num_bytes, threads), num_bytes))
    return Copy("MLX on the GPU", num_bytes, _best_rate(_mlx_copies(num_bytes), num_bytes))


def _best_rate(copies: Callable[[], object], num_bytes: int) -> float:
    copies()
    return 2 * num_bytes * _NUM_COPIES / min(timeit.repeat(copies, number=1, repeat=3))


def _numpy_copies(num_bytes: int, threads: int) -> Callable[[], object]:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    bounds = np.linspace(0, num_bytes, threads + 1, dtype=np.int64)
    parts = [slice(first, end) for first, end in itertools.pairwise(bounds)]

    def copy_part(part: slice) -> None:  # NumPy releases the interpreter's lock during a copy
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
        for index in range(_NUM_COPIES):  # to another type of the same size: else MLX would not copy
            array = array.astype(mx.float32 if index % 2 else mx.int32)
        mx.eval(array)

    return copies


@dataclass(frozen=True, slots=True)
class Timed:
    """A variant and the seconds of one layer in each case."""

    variant: KernelVariant
    times_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """The geometric mean, so that a long case does not outweigh the others."""
        return statistics.geometric_mean(self.times_s)


def kernel_variants(shape: DecodeShape) -> list[KernelVariant]:
    """The default variant, then all others that can be launched, without fixed partitions. Of variants that are
    compiled to the same kernel, only the first is returned."""
    heads = sorted({-(-shape.group_size // 2**halvings) for halvings in range(shape.group_size.bit_length())})
    sizes = itertools.product(heads, _SIMDGROUPS, _LANES, _ROWS_AHEAD)
    distinct: dict[tuple[int, ...], KernelVariant] = {}
    for variant in [default_variant(shape), *(KernelVariant(*one) for one in sizes)]:
        if _is_allowed(shape, variant):
            distinct.setdefault(_cut(shape, variant), variant)
    return list(distinct.values())


def sweep(shape: DecodeShape, measure: Measure) -> list[Timed]:
    """Measures all variants, then partition lengths for the fastest one. Returns those that run, the fastest first."""
    timed = _timed(kernel_variants(shape), measure)
    if timed:
        best = min(timed, key=lambda one: one.mean_s).variant
        timed += _timed([dataclasses.replace(best, partition_tokens=tokens) for tokens in _PARTITIONS], measure)
    return sorted(timed, key=lambda one: one.mean_s)


def make_measure(worlds: Sequence[World], make_backend: MakeBackend, num_repeats: int) -> Measure:
    """Returns a function that measures a variant in `worlds`, which are decodes of one shape. The function returns None
    if the variant fails the backend's self-test, or if the GPU runs it only with fewer simdgroups, which is a variant
    of its own."""
    shape = worlds[0].case.shape

    def measure(variant: KernelVariant) -> tuple[float, ...] | None:
        backend = make_backend(variant)
        exhaust(backend.warm_up(shape.spec, shape.num_query_heads))
        if backend.variant(shape) != variant:
            return None
        times = (median_times([world.paged(backend)], num_repeats)[0] / world.num_layers for world in worlds)
        return tuple(times)

    return measure


def backend_with(name: str) -> MakeBackend:
    """Returns a function that makes a GPU backend called `name` with the given variant for all shapes."""
    kind = {"metal": MetalBackend, "cuda": CudaBackend}[name]
    return lambda variant: kind(choose_variant=lambda shape: variant)


def _timed(variants: Sequence[KernelVariant], measure: Measure) -> list[Timed]:
    measured = ((variant, measure(variant)) for variant in variants)
    return [Timed(variant, times_s) for variant, times_s in measured if times_s is not None]


def _is_allowed(shape: DecodeShape, variant: KernelVariant) -> bool:
    try:
        check_variant(shape, variant)
    except ValueError:
        return False
    return True


def _cut(shape: DecodeShape, variant: KernelVariant) -> tuple[int, ...]:
    """The sizes that a kernel is compiled for."""
    return (
        variant.heads_per_simdgroup,
        variant.head_simdgroups(shape),
        variant.streams(shape),
        variant.lanes_per_row,
        variant.rows_ahead,
    )
