"""What is measured: one attention over the same K/V, in a backend's pools and contiguous for MLX's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention import AttentionBackend, IntArray, StepPlan
from mlx_server.runtime.kernels.cpu.rows import exact_rows
from mlx_server.runtime.kernels.gpu.plan import DecodeShape

_RUN_BLOCKS = 8
_MOST_LAYER_BYTES = 256 * 2**20
"""K/V of all layers of a case: beyond what caches hold, one layer will do."""


@dataclass(frozen=True, slots=True)
class Case:
    """Attention of the last `num_queries` tokens of each of `num_sequences` contexts of equal length."""

    shape: DecodeShape
    num_sequences: int
    num_queries: int
    context: int

    @property
    def is_decode(self) -> bool:
        return self.num_queries == 1

    @property
    def kv_bytes(self) -> int:
        """K and V of one layer, as they are stored."""
        return self.num_sequences * self.context * self.shape.spec.token_bytes

    @property
    def required_bytes(self) -> int:
        """Each K and V row once, queries in, results out: nothing can move less."""
        shape = self.shape
        token = shape.num_query_heads * (shape.key_dim + shape.value_dim) * shape.dtype.size
        return self.kv_bytes + self.num_sequences * self.num_queries * token

    def num_layers(self, most: int) -> int:
        """Of `most`, as many as are needed to leave nothing in a cache for the next measurement."""
        return max(1, min(most, _MOST_LAYER_BYTES // self.kv_bytes))


class World:
    """A case in several layers, as in a model: each has its own K/V and attends with the result of the one before.

    The K/V are stored beforehand, in blocks in random order; what is timed is attention alone. Quantised K/V lose
    nothing, so that MLX's whole ones are the same numbers. MLX thread.
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
        """Runs all layers over the pools, which may be another instance's of the same backend. Returns
        `[sequences, queries, heads, dim]`."""
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
        """The same by `mx.fast.scaled_dot_product_attention`."""
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
        rng = np.random.default_rng(layer)
        keys, values = (
            exact_rows(rng, (*rows, dim), shape.dtype, shape.bits) for dim in (shape.key_dim, shape.value_dim)
        )
        return keys, values
    keys = _random(2 * layer + 1, (*rows, shape.key_dim), shape.dtype)
    return keys, _random(2 * layer + 2, (*rows, shape.value_dim), shape.dtype)


def _random(seed: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    array = mx.random.normal(shape, dtype, key=mx.random.key(seed))
    mx.eval(array)
    return array


def _pool_of(backend: AttentionBackend, shape: DecodeShape, tables: IntArray, keys: mx.array, values: mx.array) -> Any:
    """A pool that holds each sequence's rows in the blocks of its table."""
    pool = backend.make_pool(shape.spec, tables.size)
    for table, sequence_keys, sequence_values in zip(tables, keys, values):
        new_keys, new_values = (rows.swapaxes(0, 1)[:, :, None] for rows in (sequence_keys, sequence_values))
        metadata = backend.plan(_storing_step(table, len(new_keys)))
        # Queries may be any rows of the right shape: nobody wants the result.
        out = backend.attend(pool, mx.zeros_like(new_keys), new_keys, new_values, metadata, scale=1.0)
        mx.eval(out, *backend.state(pool))
    return pool


def _attending_step(case: Case, tables: IntArray) -> StepPlan:
    """The last queries of all sequences."""
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
    """Writes a whole context. Each run of blocks poses as a prompt of its own: attention over all of it would
    cost the square of its length."""
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
