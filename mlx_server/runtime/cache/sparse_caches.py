"""Caches of mlx-vlm's layers that choose which tokens they attend to, in blocks and slots. These layers run on one
request at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.attention.cache_views import PagedView, RowGroup, StateView, StepMask, UnpageableError
from mlx_server.runtime.attention.interface import LayerSpec, causal_mask
from mlx_server.runtime.cache.kv_cache import ListLayerCache, PagedLayerCache, StateLayerCache
from mlx_server.runtime.cache.row_pool import Slots


class IndexedLayerCache(ListLayerCache):
    """K/V and the index keys of each token, for mlx-vlm's caches that hold both: a `PagedLayerCache` for each."""

    @property
    def offset(self) -> mx.array | None:
        offset: mx.array | None = self[0].offset
        return offset

    @property
    def _offset(self) -> int:
        offset: int = self[0]._offset
        return offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return self[0].make_mask(N, return_array, window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise UnpageableError("K/V of several requests, to choose from them")

    def view(self, group: RowGroup) -> IndexedView:
        view: IndexedView = self[0].view(group, IndexedView)
        view.index = self[1].view(group)
        return view


class IndexedView(PagedView):
    """A request's K/V, with the methods that layers call for its index keys."""

    index: PagedView

    def update_index_and_fetch(self, keys: mx.array) -> mx.array:
        """MiniMax M3's: stores the keys of new tokens, `[1, H, length, dim]`, and returns those of the context."""
        return self.index.update_and_fetch(keys, keys[..., :0])[0]

    def update_indexer(self, keys: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Qwen4-Exp's, with keys `[1, length, dim]`: also returns the positions of the context, which are those of a
        text. The layer computes the keys of its blocks again in each step."""
        known = self.update_index_and_fetch(keys[:, None])[:, 0]
        everywhere = mx.arange(known.shape[1], dtype=positions.dtype)
        return known, mx.broadcast_to(everywhere, (*positions.shape[:-1], known.shape[1]))


class PooledLayerCache(ListLayerCache):
    """What mlx-vlm's `PoolingCache` keeps: a row for each window of `ratio` tokens, and the tokens since the last one.

    A window's row is stored in parts, one in the slot of each of its last tokens. They are in one block, so blocks that
    are full, and may be shared, are never written. The tokens are a recurrent state; if windows overlap, it also has
    the window before them.
    """

    ratio: int
    num_kept: int

    @classmethod
    def of(cls, ratio: int, tokens: Sequence[mx.array], row: mx.array, *, overlaps: bool) -> PooledLayerCache:
        """`tokens` are arrays `[1, N, dim]` of what is pooled, and `row` `[1, W, dim]` of windows. If the row of a
        window depends on the one before, it `overlaps`. Raises `ModelLoadError`."""
        num_parts, dim = math.gcd(ratio, BLOCK_SIZE), row.shape[-1]
        if dim % num_parts:
            raise ModelLoadError(f"Rows of {dim} numbers for {ratio} tokens each are not supported.")
        num_kept = 2 * ratio if overlaps else ratio
        states = [mx.zeros((1, num_kept, side.shape[-1]), side.dtype) for side in tokens]
        self = cls([StateLayerCache(states), PagedLayerCache(None, LayerSpec(1, dim // num_parts, 0, row.dtype))])
        self.ratio, self.num_kept = ratio, num_kept
        return self

    def view(self, group: RowGroup) -> PooledView:
        view: PooledView = self[1].view(group, PooledView)
        view.ratio, view.num_kept, view.tokens = self.ratio, self.num_kept, self[0].view(group)
        return view


class PooledView(PagedView):
    """A request's windows, with the methods of mlx-vlm's `PoolingCache`."""

    ratio: int
    num_kept: int
    tokens: StateView

    @property
    def offset(self) -> int:
        """The number of windows."""
        return self.size() // self.ratio

    def accumulate_windows(self, values: mx.array, gates: mx.array, offset: int) -> tuple[mx.array, mx.array, int]:
        """Takes those of new tokens, `[1, length, dim]`; returns those of the windows that they complete, and of the
        window before if windows overlap, and the position of their first. `offset` is the position of the first new
        token."""
        kept, length = self.num_kept, values.shape[1]
        self._num_new = length
        num_before = offset % self.ratio + (kept - self.ratio if offset >= self.ratio else 0)
        num_new = (offset + length) // self.ratio - offset // self.ratio
        num_ready = num_before - offset % self.ratio + num_new * self.ratio if num_new else 0
        ready = []
        for index, new in enumerate((values, gates)):
            state = self.tokens[index]
            before = mx.zeros((1, kept, new.shape[-1]), new.dtype) if state is None else state
            known = mx.concatenate([before, new], axis=1)
            self.tokens[index] = known[:, -kept:]
            ready.append(known[:, kept - num_before :][:, :num_ready])
        return ready[0], ready[1], offset - num_before

    def update_and_fetch(self, rows: mx.array) -> mx.array:  # type: ignore[override]
        """Stores the rows of the windows that `accumulate_windows` returned, and returns those of all windows: `[1, W,
        dim]`."""
        num_parts, end = math.gcd(self.ratio, BLOCK_SIZE), self.offset
        first = int(self._group.starts[0]) // self.ratio
        windows = np.arange(end)[:, None] * self.ratio + np.arange(self.ratio - num_parts, self.ratio)
        slots = self._places.context_slots.numbers[0][windows]
        if end > first:
            new = rows[:, first - end :].reshape(-1, 1, rows.shape[-1] // num_parts)
            self._pool.keys.write(Slots(slots[first:].reshape(-1)), new)
        if not end:
            return rows
        return self._pool.keys.read(Slots(slots)).reshape(1, end, rows.shape[-1])

    def make_mask(self, N: int = 1, offset: int = 0, *_: Any) -> mx.array | None:
        """Which windows are complete before the end of each of N tokens from `offset` on, `[N, W]`; None if all are."""
        if N == 1 or not self.offset:
            return None
        return mx.arange(self.offset) < mx.arange(offset + 1, offset + N + 1)[:, None] // self.ratio


class WindowLayerCache(StateLayerCache):
    """The K/V of a sliding window as a recurrent state, which takes no blocks: for models that keep other states, too,
    and whose blocks would otherwise hold all tokens, because those of other layers are smaller."""

    num_paged = 1

    def __init__(self, window: int, keys: mx.array, values: mx.array) -> None:
        """`keys` and `values` `[1, H, N, dim]` of some tokens; `dim` may be 0 for one of them."""
        sides = [mx.zeros((*side.shape[:2], window, side.shape[3]), side.dtype) for side in (keys, values)]
        super().__init__([side if side.size else None for side in sides])
        self.window = window

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> StepMask:  # type: ignore[override]
        """For all rows of a step; it comes back for a group."""
        return StepMask(window_size or self.window, return_array)

    def view(self, group: RowGroup) -> WindowView:  # type: ignore[override]
        return WindowView(self.window, StateView(self, group), group)


class WindowView(PagedView):
    """A group's window: of each request the last K tokens, as many as the first of its new tokens sees and those behind
    it. Requests shorter than the longest have zeros in front; the mask hides them."""

    def __init__(self, window: int, states: StateView, group: RowGroup) -> None:
        self._reach, self._states, self._group = window, states, group
        self._num_new = 0

    def make_mask(self, N: int = 1, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """`[R, 1, N, K]`: for two requests with a window of 4 tokens that decode positions 40 and 2, keys 37 to 40 and,
        behind a hidden one, 0 to 2."""
        if window_size is not None and window_size > self._reach:
            raise UnpageableError(f"a window of {window_size} tokens where its cache keeps {self._reach}")
        starts = mx.array(self._group.starts)[:, None, None, None]
        keys = starts + mx.arange(N - self._num_keys(N), N)
        return causal_mask(starts + mx.arange(N)[:, None], keys, window_size or self._reach) & (keys >= 0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._num_new = self._group.length
        return self._fetched(0, keys), self._fetched(1, values)

    def _fetched(self, index: int, new: mx.array) -> mx.array:
        num_requests, num_heads, num_new, dim = new.shape
        before = self._states[index] if dim else None
        if before is None:
            before = mx.zeros((num_requests, num_heads, self._reach, dim), new.dtype)
        known = mx.concatenate([before, new], axis=2)
        if dim:
            self._states[index] = known[:, :, num_new:]
        return known[:, :, -self._num_keys(num_new) :]

    def _num_keys(self, num_new: int) -> int:
        return min(int(self._group.starts.max()), self._reach - 1) + num_new


class UnkeptLayerCache(ListLayerCache):
    """A cache that layers do not write in every step: they can do without, so nothing is kept."""

    def view(self, group: RowGroup) -> UnkeptView:
        return UnkeptView(group)


class UnkeptView:
    """An empty cache. Layers that see a text's first tokens may store theirs."""

    offset = 0

    def __init__(self, group: RowGroup) -> None:
        self._group = group

    def size(self) -> int:
        return 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if not self._group.is_fresh:
            raise UnpageableError("what another step may not have stored")
        return keys, values
