"""The kernels that write rows in place, for recurrent states and for K/V that are read by group. Also attention
over gathered K/V, for prompt chunks and for decodes that no kernel supports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.cache.row_pool import SMALL_ARRAY, RowsInPlace, RowsShape, Slots
from mlx_server.runtime.kernels.gpu.kernels import KernelText, MakeKernel, PoolKernels, Scores
from mlx_server.runtime.kernels.gpu.plan import Gather, Seen
from mlx_server.runtime.kernels.gpu.pool import GpuPool, buffer_address
from mlx_server.runtime.kernels.gpu.variants import SIMD_WIDTH
from mlx_server.runtime.memory import max_elements

ROW_READ = KernelText("row_read", ("pool", "slots", "token"), ("rows", "token_out"))
ROW_WRITE = KernelText("row_write", ("rows", "pool", "slots", "token"), ("token_out",))
ROW_TEXTS = (ROW_READ, ROW_WRITE)

_MAX_THREADS = 256
_ELEMENTS_PER_THREAD = 4
_STEPS = 8


class RowKernels:
    """The kernels that read and write rows: the `RowOperations` of a GPU. MLX thread."""

    def __init__(self, make_kernel: MakeKernel, header: str = "") -> None:
        self._read, self._write = (
            text.make(make_kernel, header, is_contiguous=False)  # a pool must never be copied
            for text in ROW_TEXTS
        )

    def read(self, pool: mx.array, slots: Slots, row: RowsShape, token: mx.array) -> tuple[mx.array, mx.array]:
        """As `RowOperations.read`."""
        rows, token_out = self._read(
            inputs=[pool, slots.padded, token],
            output_shapes=[(*slots.numbers.shape, *row), (1,)],
            output_dtypes=[pool.dtype, mx.int32],
            **_launch(pool.dtype, math.prod(row), slots.numbers.size),
        )
        return rows, token_out

    def write(self, pool: mx.array, slots: Slots, rows: mx.array, token: mx.array) -> mx.array:
        """As `RowOperations.write`."""
        return self._write(
            inputs=[mx.contiguous(rows), pool, slots.padded, token],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            **_launch(pool.dtype, math.prod(rows.shape[1:]), rows.shape[0]),
        )[0]


def row_failure(kernels: RowKernels, size: int, dtype: mx.Dtype) -> str | None:
    """The reason why rows of `size` numbers cannot be written in place on this GPU, or None.

    Writes two slots repeatedly, reads them back after every write, and submits all of this without waiting, so that a
    write that is lost or in the wrong order makes a reading wrong.
    """
    rows = RowsInPlace(kernels, mx.zeros((max(3, -(-SMALL_ARRAY // size)), size), dtype))
    (array, _), slots = rows.arrays(), Slots(np.array([2, 1], np.int32))
    address = buffer_address(array)
    readings = []
    try:
        for step in range(_STEPS):
            written = mx.array((np.arange(2 * size).reshape(2, size) * 7 + step + 1) % 127).astype(dtype)
            rows.write(slots, written)
            seen = rows.read(slots)
            mx.async_eval(seen, *rows.arrays())  # type: ignore[no-untyped-call]
            readings.append((written, seen))
        for step, (written, seen) in enumerate(readings):
            if not mx.array_equal(written, seen).item():
                return f"write {step} of {_STEPS} was not read back"
        if array[0].any().item():
            return "a slot that nobody wrote has changed"
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "the array was copied" if buffer_address(array) != address else None


def _launch(dtype: mx.Dtype, size: int, num_rows: int) -> dict[str, object]:
    """Grid, threadgroup and template for rows of `size` elements. A row gets whole simdgroups: one threadgroup of up to
    `_MAX_THREADS`, or several whole ones."""
    width = -(-size // _ELEMENTS_PER_THREAD)
    threads = min(-(-width // SIMD_WIDTH) * SIMD_WIDTH, _MAX_THREADS)
    width = -(-width // threads) * threads
    return {
        "grid": (num_rows * width, 1, 1),
        "threadgroup": (threads, 1, 1),
        "template": [("T", dtype), ("SIZE", size), ("WIDTH", width)],
    }


FUSED_DIMS = (64, 72, 80, 96, 128)
"""The head dimensions for which MLX computes the attention of prompts without storing the logits."""

_MIN_QUERIES = 32
"""The fewest queries of a piece; with fewer, matrix products would be inefficient."""


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """K and V `[R, num_kv_heads, B * 32, dim]` of what some queries see."""

    seen: Seen
    keys: mx.array
    values: mx.array


def read_rows(kernels: PoolKernels, pool: GpuPool, gather: Gather) -> Iterator[GatheredRows]:
    """Gathers, and yields K and V for each of `gather.seen`. Replaces the pool's token, so that later writes wait for
    it; if the pool is scattered, MLX gathers and orders its own operations."""
    if pool.memory.is_scattered:
        rows = gather.rows[: gather.num_rows]
        keys, values = (array.reshape(-1, *array.shape[2:])[rows] for array in (pool.keys, pool.values))
    else:
        keys, values = kernels.gather(pool, gather.rows, gather.num_rows)
    start = 0
    for seen in gather.seen:
        sequences, heads, blocks = seen.rows.shape
        end = start + seen.rows.size
        shape = sequences, heads, blocks * BLOCK_SIZE, -1
        yield GatheredRows(seen, keys[start:end].reshape(shape), values[start:end].reshape(shape))
        start = end


def attend_rows(queries: mx.array, rows: GatheredRows, scores: Scores) -> mx.array:
    """Returns the attention `[R, H, L, value_dim]` of queries `[R, H, L, key_dim]` over what they see.

    Queries are computed in pieces if MLX has to store logits and those of all queries would take too much memory.
    """
    seen = rows.seen
    keys, values = (array[:, :, seen.first : seen.end] for array in (rows.keys, rows.values))
    length, num_keys = queries.shape[2], keys.shape[2]
    piece = _queries_at_once(queries, num_keys, values.shape[-1])
    if piece >= length:
        return _attend(queries, keys, values, seen.mask, scores)
    parts = []
    for first in range(0, length, piece):
        last = min(first + piece, length)
        mask, end = seen.mask, num_keys
        if isinstance(mask, str):
            end -= length - last
        else:
            mask = mask[:, :, first:last]
        parts.append(_attend(queries[:, :, first:last], keys[:, :, :end], values[:, :, :end], mask, scores))
    return mx.concatenate(parts, axis=2)


def _queries_at_once(queries: mx.array, num_keys: int, value_dim: int) -> int:
    """The number of queries to compute at once: all if MLX does not store their logits, else as many as have logits
    that fit a command buffer. The logits of a prompt chunk with a long context would take gigabytes."""
    sequences, num_heads, length, key_dim = queries.shape
    if key_dim == value_dim and key_dim in FUSED_DIMS:
        return int(length)
    return max(_MIN_QUERIES, max_elements() // (2 * sequences * num_heads * num_keys))


def _attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str, scores: Scores) -> mx.array:
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scores.scale, mask=mask, sinks=scores.sinks
    )
