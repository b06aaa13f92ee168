"""Attention by gathering blocks into contiguous rows: prompt chunks, and decodes that no kernel supports."""

from __future__ import annotations

import mlx.core as mx

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.kernels.gpu_kernels import PagedKernels, Scores
from mlx_server.runtime.kernels.gpu_plan import Gather
from mlx_server.runtime.kernels.gpu_pool import AnyGpuPool


def read_rows(kernels: PagedKernels, pool: AnyGpuPool, gather: Gather) -> tuple[mx.array, mx.array]:
    """K and V `[R, num_kv_heads, B * 32, dim]` of blocks, quantised or not. Takes the pool's next token, which later
    writes wait for."""
    if pool.spec.bits is not None:
        widened = kernels.widen(pool, gather.rows)
        pool.token = widened.token
        return widened.keys, widened.values
    rows = gather_rows(pool, gather)
    pool.token = kernels.order_after(pool.token, *rows)
    return rows


def gather_rows(pool: AnyGpuPool, gather: Gather) -> tuple[mx.array, mx.array]:
    """The same of a pool of whole rows, with no order among later uses but MLX's own.

    The token is part of the indices, not only of the graph: a native operation's order follows from the buffers
    that it really reads.
    """
    rows = gather.rows + pool.token
    keys, values = (_take(array, rows) for array in (pool.keys, pool.values))
    return keys, values


def _take(array: mx.array, rows: mx.array) -> mx.array:
    tiles = array.reshape(-1, BLOCK_SIZE, array.shape[-1])[rows]
    return tiles.reshape(*rows.shape[:2], -1, array.shape[-1])


def attend_rows(queries: mx.array, rows: tuple[mx.array, mx.array], gather: Gather, scores: Scores) -> mx.array:
    """Attention of queries `[R, H, L, key_dim]` over the gather's tokens in `rows`: `[R, H, L, value_dim]`."""
    keys, values = (array[:, :, gather.first : gather.end] for array in rows)
    if scores.softcap is not None:
        return _attend_capped(queries, keys, values, gather.mask, scores, scores.softcap)
    return mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scores.scale, mask=gather.mask, sinks=scores.sinks
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
