"""DeepSeek V4 by mlx-vlm's code, with its faults mended on the instance: so an answer does not depend on how its prompt
was split into chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_server.runtime.layers.products import mix_in


def mend(part: Any) -> None:
    """Mends a module of the model.

    - Layers attend to a chunk of 2 to 8 tokens one token at a time, with as many writes to the cache. They take it at
      once, like any other.
    - From 4,096 tokens on, indexers look for the best windows in the best blocks of 64 only (HISA). What is found
      depends on where a chunk ends, and never is in the last blocks. They look at all windows, as DeepSeek's code does.
    - A model with a vision encoder reads ids from the device to look for images, which are not served.
    """
    if hasattr(part, "attn_sink"):
        mix_in(part, _AtOnce)
    elif hasattr(part, "index_block"):
        mix_in(part, _SeesAllWindows)
    elif hasattr(part, "hc_head"):
        part.args = replace(part.args, vision_n_layers=0)


def mend_caches(caches: list[Any]) -> None:
    """Lets caches of windows that overlap keep the window before, which a layer's rows depend on."""
    for layer in caches:
        for part in getattr(layer, "caches", ()):
            if getattr(part, "ratio", None) == _OVERLAPPING:
                mix_in(part, _KeepsWindow)
                part.before = None


_OVERLAPPING = 4
"""Of layers with this many tokens a window, each window also pools the tokens of the one before."""


class _AtOnce:
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, **others: Any) -> mx.array:
        output: mx.array = super().__call__(x, mask, cache, **{**others, "causal": False})  # type: ignore[misc]
        return output


class _SeesAllWindows:
    """DeepSeek's choice of windows: the `index_topk` with the largest sum over heads of weight x max(query . key, 0),
    for a part of the tokens at a time, so that long contexts take no more memory."""

    compressor: Any
    wq_b: Any
    weights_proj: Any
    n_heads: int
    head_dim: int
    index_topk: int
    scale: float

    def __call__(
        self, x: mx.array, q_residual: mx.array, position_rope: Any, pool_cache: Any, offset: Any
    ) -> mx.array | None:
        """Indices of windows `[B, L, k]` for the tokens of `x` `[B, L, D]`; None if there are no windows yet."""
        keys = self.compressor(x, pool_cache, offset)
        num_windows, (batch, length, _) = keys.shape[1], x.shape
        if not num_windows:
            return None
        queries = self.wq_b(q_residual).reshape(batch, length, self.n_heads, self.head_dim).transpose(0, 2, 1, 3)
        queries = position_rope(queries, offset).astype(mx.float32)
        keys = keys[:, None].swapaxes(-1, -2).astype(mx.float32)
        weights = self.weights_proj(x).astype(mx.float32).swapaxes(-1, -2)[..., None] * (self.scale / self.n_heads**0.5)
        mask = None if pool_cache is None else pool_cache.make_mask(length, offset)
        at_a_time = max(1, _MOST_SCORES // (batch * self.n_heads * num_windows))
        chosen = []
        for first in range(0, length, at_a_time):
            rows = slice(first, first + at_a_time)
            scores = (mx.maximum(queries[:, :, rows] @ keys, 0) * weights[:, :, rows]).sum(axis=1)
            if mask is not None:
                scores = mx.where(mask[..., rows, :], scores, -mx.inf)
            few = min(self.index_topk, num_windows)
            chosen.append(mx.argpartition(-scores, few - 1, axis=-1)[..., :few])
        return mx.concatenate(chosen, axis=1)


_MOST_SCORES = 2**26
"""How many scores of tokens, heads and windows are in memory at a time, as float32."""


class _KeepsWindow:
    """Returns the windows that new tokens complete behind the one before: their first row is known, and dropped."""

    ratio: int
    offset: int
    before: tuple[mx.array, mx.array] | None

    def accumulate_windows(self, values: mx.array, gates: mx.array, offset: Any) -> tuple[mx.array, mx.array, Any]:
        ready = super().accumulate_windows(values, gates, offset)  # type: ignore[misc]
        if not ready[0].shape[1]:
            return ready  # type: ignore[no-any-return]
        before, self.before = self.before, (ready[0][:, -self.ratio :], ready[1][:, -self.ratio :])
        if before is None:
            return ready  # type: ignore[no-any-return]
        values, gates = (mx.concatenate([old, new], axis=1) for old, new in zip(before, ready))
        return values, gates, ready[2] - self.ratio

    def update_and_fetch(self, rows: mx.array) -> mx.array:
        fetched: mx.array = super().update_and_fetch(rows[:, 1:] if self.offset else rows)  # type: ignore[misc]
        return fetched
