"""Attention by gathering blocks into contiguous rows: prompt chunks, and decodes that no kernel supports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx

from mlx_server.runtime.command_buffers import max_elements
from mlx_server.runtime.kernels.gpu_kernels import PoolKernels, Scores
from mlx_server.runtime.kernels.gpu_plan import Gather, Seen
from mlx_server.runtime.kernels.gpu_pool import AnyGpuPool

_FUSED_DIMS = (64, 72, 80, 96, 128)
"""Head dimensions for which MLX attends over prompts without writing the logits down."""

_FEWEST_QUERIES = 32
"""In a piece: enough for matrix products to be worth it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """K and V `[R, num_kv_heads, B * 32, dim]` that some queries see."""

    seen: Seen
    keys: mx.array
    values: mx.array


def read_rows(kernels: PoolKernels, pool: AnyGpuPool, gather: Gather) -> Iterator[Rows]:
    """What each of the gather's queries see. Takes the pool's next token, which later writes wait for; of a pool that
    is scattered, MLX gathers, and knows the order itself."""
    if pool.is_scattered:
        rows = gather.rows[: gather.num_rows]
        keys, values = (array.reshape(-1, *array.shape[2:])[rows] for array in (pool.keys, pool.values))
    else:
        keys, values = kernels.gather(pool, gather.rows, gather.num_rows)
    return (Rows(*part) for part in gather.parts(keys, values))


def attend_rows(queries: mx.array, rows: Rows, scores: Scores) -> mx.array:
    """Attention of queries `[R, H, L, key_dim]` over what they see: `[R, H, L, value_dim]`.

    Where the logits of all queries would be in memory at once, and would be many, it is done in pieces.
    """
    seen = rows.seen
    keys, values = (array[:, :, seen.first : seen.end] for array in (rows.keys, rows.values))
    length, num_keys = queries.shape[2], keys.shape[2]
    piece = _queries_at_once(queries, num_keys, scores)
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


def _queries_at_once(queries: mx.array, num_keys: int, scores: Scores) -> int:
    """As many as one command buffer has room for the logits of, where MLX has no kernel that keeps these to itself: of
    a prompt's chunk at a long context there would be gigabytes."""
    sequences, num_heads, length, key_dim = queries.shape
    if key_dim in _FUSED_DIMS and scores.softcap is None:
        return int(length)
    return max(_FEWEST_QUERIES, max_elements() // (2 * sequences * num_heads * num_keys))


def _attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str, scores: Scores) -> mx.array:
    if scores.softcap is not None:
        return _attend_capped(queries, keys, values, mask, scores, scores.softcap)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scores.scale, mask=mask, sinks=scores.sinks
    )


def _attend_capped(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str, scores: Scores, cap: float
) -> mx.array:
    """MLX's attention knows no cap on its logits, so this spells it out, in float32."""
    sequences, num_heads, length, _ = queries.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    grouped = queries.astype(mx.float32).reshape(sequences, num_kv_heads, -1, length, queries.shape[-1])
    logits = cap * mx.tanh(grouped @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2) * (scores.scale / cap))
    if isinstance(mask, str):
        mask = mx.arange(num_keys) <= mx.arange(num_keys - length, num_keys)[:, None]
    else:
        mask = mask[:, None]
    logits = mx.where(mask, logits, -mx.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.astype(mx.float32).reshape(1, num_kv_heads, -1, 1, 1)
        sinks = mx.broadcast_to(sinks, (*logits.shape[:-1], 1))
        weights = mx.softmax(mx.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]
    else:
        weights = mx.softmax(logits, axis=-1)
    out = weights @ values.astype(mx.float32)[:, :, None]
    return out.reshape(sequences, num_heads, length, -1).astype(queries.dtype)
