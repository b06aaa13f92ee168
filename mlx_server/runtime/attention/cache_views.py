"""Groups of a step's rows, and cache views for modules that are written for rectangular batches.

Example: two decodes and a prompt chunk of 5 tokens are a ragged batch `[7, 1]` and two groups, `[2, 1]` and `[1, 5]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention.interface import IntArray, StepPlan, causal_mask, context_slots
from mlx_server.runtime.cache.row_pool import RowPool, Rows, Slots


@dataclass(frozen=True)
class RowPlaces:
    """Where a group of rows has its K/V, in the layers of one place.

        slots          [R * length]  slots for the K/V of the rows
        context_slots  [R, C]        slots of each request's first C tokens, where C is the longest context; after a
                                     request's own tokens and before its window they may belong to other requests

    Both are made at first use, because those of contexts are long.
    """

    _plan: StepPlan
    _rows: slice
    _requests: slice
    _context_length: int

    @cached_property
    def slots(self) -> Slots:
        return Slots(self._plan.slot_mapping[self._rows])

    @cached_property
    def context_slots(self) -> Slots:
        num_blocks = -(-self._context_length // BLOCK_SIZE)
        tables = self._plan.block_tables[self._requests, :num_blocks]
        return Slots(context_slots(tables, self._context_length))


@dataclass(frozen=True)
class RowGroup:
    """Rows [first, last) of a ragged batch: R requests with `length` tokens each, as a batch `[R, length]`.

        starts       [R]  tokens of each request before the step
        places            where the K/V are, in the layers of each place
        state_slots  [R]  slots with the recurrent states
        next_slots   [R]  slots for the states after the step

    In a fresh group all requests start; in other groups none does.
    """

    first: int
    last: int
    length: int
    starts: IntArray
    places: tuple[RowPlaces, ...]
    state_slots: Slots
    next_slots: Slots

    @property
    def num_requests(self) -> int:
        return len(self.starts)

    @property
    def is_fresh(self) -> bool:
        return not self.starts[0]

    @property
    def context_length(self) -> int:
        """Tokens of the longest request, including this step's."""
        return int(self.starts.max()) + self.length

    def cut(self, rows: mx.array) -> mx.array:
        """`[R, length, ...]` of an array `[T, 1, ...]` over all rows."""
        return rows[self.first : self.last].reshape(self.num_requests, self.length, *rows.shape[2:])

    def firsts(self, rows: mx.array) -> mx.array:
        """Values of an array `[T]` at each request's first row: `[R]`, or a scalar for one request."""
        return rows[self.first] if self.num_requests == 1 else rows[self.first : self.last : self.length]

    def flat(self, batch: mx.array) -> mx.array:
        """`[R * length, 1, ...]` of an array `[R, length, ...]`: the inverse of `cut`."""
        return batch.reshape(self.num_requests * self.length, 1, *batch.shape[2:])


def row_groups(plans: Sequence[StepPlan], *, batches_decodes: bool) -> list[RowGroup]:
    """Groups over all rows of a step, in order: decodes together (or one by one), each prompt chunk alone. `plans` has
    the step's plan for each place of layers."""
    return [_group(plans, first, last) for first, last in _request_ranges(plans[0], batches_decodes)]


def _request_ranges(step: StepPlan, batches_decodes: bool) -> Iterator[tuple[int, int]]:
    """Ranges of requests [first, last), one for each group."""
    starts = step.positions[step.query_starts[:-1]]
    first = 0
    while first < step.num_requests:
        last = first + 1
        while batches_decodes and last < step.num_decodes and bool(starts[last]) == bool(starts[first]):
            last += 1
        yield first, last
        first = last


def _group(plans: Sequence[StepPlan], first: int, last: int) -> RowGroup:
    step, requests = plans[0], slice(first, last)
    start, end = int(step.query_starts[first]), int(step.query_starts[last])
    length = (end - start) // (last - first)
    context_lens = step.context_lens[requests]
    longest = int(context_lens.max())
    places = tuple(RowPlaces(plan, slice(start, end), requests, longest) for plan in plans)
    state_slots, next_slots = Slots(step.state_slots[requests]), Slots(step.next_slots[requests])
    if np.array_equal(state_slots.numbers, next_slots.numbers):
        next_slots = state_slots  # they go to the device once
    return RowGroup(start, end, length, context_lens - length, places, state_slots, next_slots)


class UnpageableError(Exception):
    """A layer needs something that blocks and slots cannot provide; the message says what."""


@dataclass(frozen=True, slots=True)
class StepMask:
    """The mask of a ragged batch: position p sees p - window + 1 to p; without a window, all positions up to p.

    Backends apply it themselves; a module that runs on a group gets the group's mask instead.
    """

    window: int | None
    is_array: bool = False


class StateStore(Protocol):
    """The states of a recurrent layer: `entries[i]` is `[slots, ...]`, None before the first write."""

    entries: list[Rows | None]

    def write(self, index: int, slots: Slots, values: mx.array) -> None: ...


class PagedView:
    """A group's K/V as contiguous arrays `[R, num_kv_heads, C, dim]`, gathered from the pool.

    Requests shorter than the longest have rows of other requests at the end, and before their window; the mask hides
    these rows.
    """

    start_position = 0
    """mlx-lm's chunked cache drops its front; this view keeps everything, and the mask hides it."""

    def __init__(self, pool: RowPool, window: int | None, group: RowGroup, place: int = 0) -> None:
        self._pool = pool
        self._window = window
        self._group = group
        self._places = group.places[place]
        self._num_new = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def offset(self) -> int | mx.array:
        """Tokens before those of the group, and including them once they are stored; an array `[R]` for several
        requests."""
        if self._group.num_requests == 1:
            return int(self._group.starts[0]) + self._num_new
        return mx.array(self._group.starts) + self._num_new

    @property
    def max_size(self) -> int | None:
        return self._window

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def size(self) -> int:
        return self._group.context_length - self._group.length + self._num_new

    def empty(self) -> bool:
        return self.size() == 0

    def maybe_trim_front(self) -> None:
        return None

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """The mask for N tokens of each request after the content of the cache, in mlx-lm's forms."""
        group, window = self._group, window_size or self._window
        if self._window is not None and window is not None and window > self._window:
            raise UnpageableError(f"a window of {window} tokens where its cache keeps {self._window}")
        if group.num_requests == 1:
            start = int(group.starts[0])
            is_windowed = window is not None and start + N > window
            if not is_windowed and N == 1:
                return None
            if not is_windowed and not return_array:
                return "causal"
            return causal_mask(mx.arange(start, start + N)[:, None], mx.arange(start + N), window)
        if N != 1:
            raise UnpageableError(f"a mask for {N} tokens of several requests")
        return causal_mask(mx.array(group.starts)[:, None, None, None], mx.arange(group.context_length), window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Stores the K/V of the group's tokens, `[R, num_kv_heads, length, dim]`; returns the K/V of whole contexts."""
        if keys.shape[2] != self._group.length:
            raise UnpageableError(f"{keys.shape[2]} rows of K/V for {self._group.length} tokens")
        self._num_new = self._group.length
        sides = (self._pool.keys, keys), (self._pool.values, values)
        for pool, rows in sides:  # both before a read, which may wait for the writes
            _write(pool, rows, self._places)
        self.keys, self.values = (_read(pool, rows, self._group, self._places) for pool, rows in sides)
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values


class StateView(ArraysCache):  # type: ignore[misc]
    """A group's recurrent states: entry i is `[R, ...]`, or None for requests that start. States may be written to
    other slots than they were read from, so that the old ones stay.

    A subclass of mlx-lm's class, because some modules write only to instances of it.
    """

    lengths = None
    left_padding = None

    def __init__(self, store: StateStore, group: RowGroup) -> None:
        self._store = store
        self._group = group
        self._known: dict[int, mx.array] = {}

    def __getitem__(self, index: int) -> mx.array | None:
        entry = self._store.entries[index]
        if index not in self._known:
            if entry is None or self._group.is_fresh:
                return None
            # Once: a kernel reads even if nothing uses the result.
            self._known[index] = entry.read(self._group.state_slots)
        return self._known[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        if value.shape[0] != self._group.num_requests:
            raise UnpageableError(f"a state of {value.shape[0]} rows for {self._group.num_requests} requests")
        self._known[index] = value
        self._store.write(index, self._group.next_slots, value)

    @property
    def cache(self) -> list[mx.array | None]:
        return [self[index] for index in range(len(self._store.entries))]

    def make_mask(self, N: int, *_: Any) -> None:
        """Nothing is padded."""

    def update_window(self, index: int, source: mx.array, width: int, *, lengths: None = None) -> mx.array:
        """mlx-vlm's way to keep the last `width` tokens of `source` `[R, L, ...]` as entry `index`."""
        state = self[index] = source[:, source.shape[1] - width :]
        return state

    def update_recurrent(self, index: int, length: int, update: Callable[..., Any]) -> tuple[mx.array, mx.array]:
        """mlx-vlm's way to replace entry `index`: `update(state, None)` returns an output and the state after it."""
        output, state = update(self[index], None)[:2]
        self[index] = state
        return output, state

    def empty(self) -> bool:
        return self[0] is None


class ListView(tuple[Any, ...]):
    """The views of a layer with several caches."""

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask for the attention cache among them."""
        paged = next((cache for cache in self if isinstance(cache, PagedView)), None)
        return None if paged is None else paged.make_mask(N, return_array, window_size)

    def size(self) -> int:
        return max(cache.size() for cache in self if isinstance(cache, PagedView))

    def empty(self) -> bool:
        return bool(self[0].empty())


def _write(pool: Rows, rows: mx.array, places: RowPlaces) -> None:
    """Stores `rows` `[R, H, length, dim]`."""
    num_heads, dim = rows.shape[1], rows.shape[3]
    if dim:  # 0 in caches with keys only
        pool.write(places.slots, rows.transpose(0, 2, 1, 3).reshape(-1, num_heads, dim))


def _read(pool: Rows, rows: mx.array, group: RowGroup, places: RowPlaces) -> mx.array:
    """The whole contexts of `rows`: `[R, H, C, dim]`."""
    num_heads, dim = rows.shape[1], rows.shape[3]
    if dim == 0:
        return mx.zeros((group.num_requests, num_heads, group.context_length, 0), rows.dtype)
    return pool.read(places.context_slots).transpose(0, 2, 1, 3)
