"""What mlx-lm's layers see as their cache: this step's positions, and the pools behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention import AttentionBackend, LayerSpec, StepPlan
from mlx_server.runtime.cache_views import ListView, PagedView, RowGroup, StateView, StepMask, UnpageableError
from mlx_server.runtime.layer_pools import LayerGroup, LayerPool, Place, group_layers, share_blocks
from mlx_server.runtime.row_pool import MakeRows, Rows, Slots
from mlx_server.runtime.seam import AttendsItself


class PagedLayerCache(AttendsItself):
    """One layer's K/V, in a ragged forward: T tokens of any requests as a batch `[T, 1]`.

    Speaks mlx-lm's cache protocol as far as attention layers use it. K/V of the step are kept until the
    layer asks for attention, so that a backend may write and attend in one call. `num_query_heads` and
    `sinks` are those of the last call, None before the first. In a forward pass `offset` has the position of each row,
    `[T]`, for rope, and `metadata` the backend's plan of it.

    A layer whose module runs on groups of rows is read through `view`.
    """

    def __init__(self, window: int | None, spec: LayerSpec, *, is_chunked: bool = False) -> None:
        """`is_chunked`: the module masks by chunks of the context, in its own way."""
        self.window = window
        self.is_chunked = is_chunked
        self.num_query_heads: int | None = None
        self.sinks: mx.array | None = None
        self.spec = spec
        self.pool = LayerPool(spec)
        self.place = 0
        self._seat = 0
        self._kept_window: int | None = None
        self.offset: mx.array | None = None
        self.metadata: Any = None
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._is_written = False

    def join(self, place: int, pool: LayerPool, kept_window: int | None) -> None:
        """The layer stores its K/V in a pool that it shares with layers of other places, of which each has plans of its
        own. Of a context, no more than `kept_window` tokens are kept."""
        self.place, self.pool, self._kept_window = place, pool, kept_window
        self._seat = pool.seat_of(self.spec)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> StepMask | None:
        """Causality is the backend's; only a window is passed on, to come back in `attend` or at a group."""
        if N != 1:
            raise UnpageableError(f"a mask for {N} tokens of one request")
        window = window_size or self.window
        return StepMask(window, return_array) if window is not None or return_array else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes this step's K/V, `[T, num_kv_heads, 1, dim]`; what it returns is only passed along."""
        self.keys, self.values = keys, values
        self._is_written = False
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For a layer that shares this one's K/V: what `update_and_fetch` returned in this step."""
        if self.keys is None or self.values is None:
            raise UnpageableError("shared K/V before they are there")
        return self.keys, self.values

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Writes the K/V that `update_and_fetch` took, unless that is done, and attends; `[T, num_heads, 1,
        value_dim]`."""
        window = self.window
        if mask is not None:
            if not isinstance(mask, StepMask):
                raise UnpageableError(f"an attention mask of its own ({type(mask).__name__})")
            window = mask.window
        if self.is_chunked:
            raise UnpageableError("attention within chunks of the context")
        pool = self.pool
        if pool.is_viewed:
            raise UnpageableError("paged attention over K/V that another module reads by group")
        if self._kept_window is not None and (window is None or window > self._kept_window):
            raise UnpageableError(f"a window of {window or 'all'} tokens where its cache keeps {self._kept_window}")
        is_written, self._is_written = self._is_written, True
        self.num_query_heads, self.sinks = queries.shape[1], sinks
        return pool.backend.attend(
            pool.contents[self._seat],
            queries,
            None if is_written else self.keys,
            None if is_written else self.values,
            self.metadata,
            scale=scale,
            window=window,
            sinks=sinks,
        )

    def view(self, group: RowGroup) -> PagedView:
        """The layer's K/V as a module that runs on `group` sees them."""
        return PagedView(self.pool.rows(self._seat), self.window, group, self.place)


class StateLayerCache:
    """One layer's recurrent states: a slot a request in each of several arrays, `[num_slots, ...]`.

    What a request keeps of its first few tokens may be shorter than its slot, which then has zeros before it.
    """

    lengths = None
    left_padding = None

    def __init__(self, entries: Sequence[mx.array | None]) -> None:
        """`entries` have the shapes and types of one request's, `[1, ...]`; None where nothing was written yet."""
        self.slot_bytes = sum(entry.nbytes for entry in entries if entry is not None)
        self.entries: list[Rows | None] = [None] * len(entries)
        self._kinds = [None if entry is None else (entry.shape[1:], entry.dtype) for entry in entries]
        self._num_slots = 0
        self._make_rows: MakeRows | None = None

    def allocate(self, make_rows: MakeRows, num_slots: int) -> None:
        """Makes room for `num_slots` requests; all states are lost."""
        self._make_rows, self._num_slots = make_rows, num_slots
        self.entries = [None if kind is None else self._make(*kind) for kind in self._kinds]

    def release(self) -> None:
        """Lets go of the memory, not of the shapes."""
        self.entries = [None] * len(self._kinds)

    @property
    def needs_synchronous_steps(self) -> bool:
        return any(entry.needs_synchronous_steps for entry in self.entries if entry is not None)

    def state(self) -> list[mx.array]:
        return [array for entry in self.entries if entry is not None for array in entry.arrays()]

    def tokens(self) -> list[mx.array]:
        """What exists only once this step's states are written; where a backend has no such thing, nothing."""
        return [token for entry in self.entries if entry is not None for token in entry.tokens()]

    def write(self, index: int, slots: Slots, values: mx.array) -> None:
        """Stores `values` `[R, ...]` as entry `index` of the requests at `slots` `[R]`."""
        entry, kind = self.entries[index], self._kinds[index]
        if entry is None or kind is None:
            kind = self._kinds[index] = values.shape[1:], values.dtype
            entry = self.entries[index] = self._make(*kind)
        entry.write(slots, _filled_up(values, kind[0]))

    def copy(self, sources: Slots, destinations: Slots) -> None:
        """Copies whole slots; none is both."""
        for entry in self.entries:
            if entry is not None:
                entry.write(destinations, entry.read(sources))

    def make_mask(self, N: int) -> None:
        """Nothing is padded."""

    def __getitem__(self, index: int) -> mx.array:
        raise UnpageableError("the recurrent state of a whole batch")

    def view(self, group: RowGroup) -> StateView:
        """The states of a group's requests."""
        return StateView(self, group)

    def _make(self, shape: tuple[int, ...], dtype: mx.Dtype) -> Rows:
        assert self._make_rows is not None, "states are allocated before they are written"
        return self._make_rows((self._num_slots, *shape), dtype)


def _filled_up(values: mx.array, shape: tuple[int, ...]) -> mx.array:
    """States `[R, ...]` with zeros before those that are not yet as long as their slots, which are of `shape`."""
    if values.shape[1:] == shape:
        return values
    missing = [long - short for long, short in zip(shape, values.shape[1:])]
    if len(shape) != values.ndim - 1 or min(missing) < 0:
        raise UnpageableError(f"a state that changes its shape from {shape} to {values.shape[1:]}")
    return mx.pad(values, [(0, 0), *((count, 0) for count in missing)])


class ListLayerCache:
    """The caches of a layer that keeps several."""

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.caches = tuple(caches)

    def __getitem__(self, index: int) -> LayerCache:
        return self.caches[index]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.caches)

    def __len__(self) -> int:
        return len(self.caches)

    def view(self, group: RowGroup) -> ListView:
        return ListView([cache.view(group) for cache in self.caches])


LayerCache = PagedLayerCache | StateLayerCache | ListLayerCache


def leaves(caches: Sequence[LayerCache]) -> Iterator[PagedLayerCache | StateLayerCache]:
    """The caches that store something, lists taken apart."""
    for cache in caches:
        if isinstance(cache, ListLayerCache):
            yield from leaves(cache.caches)
        else:
            yield cache


class PagedKVCache:
    """All layers' caches and pools of one model. MLX thread only.

    `layers` is what the model gets as its cache. `paged` and `recurrent` are the leaves of it, `groups` the groups of
    layers that share blocks: if some see a window only, and a few of each fill the same memory. Else they are one
    group that keeps everything, each with a pool of its own. `places` are those that `PagedLayerCache.place` counts.
    """

    def __init__(self, layers: Sequence[LayerCache], backend: AttentionBackend) -> None:
        self.layers = list(layers)
        self.paged = [cache for cache in leaves(layers) if isinstance(cache, PagedLayerCache)]
        self.recurrent = [cache for cache in leaves(layers) if isinstance(cache, StateLayerCache)]
        self.backend = backend
        self.num_blocks = 0
        self._num_slots = 0
        self.groups, num_parts = _groups_of(self.paged)
        self._pools, self.places = _join_pools(self.paged, self.groups, num_parts)
        self._stores: list[LayerPool | StateLayerCache] = [*self._pools, *self.recurrent]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """What the layers of each group see, None for all."""
        return tuple(group.window for group in self.groups)

    def quantize(self, bits: int) -> None:
        """From the next allocation on, K/V are stored in `bits` a number: `backend` must be one for such layers by
        then. Raises `ConfigError` for dimensions that cannot be."""
        for pool in self._pools:
            pool.quantize(bits)
        for layer in self.paged:
            layer.spec = replace(layer.spec, bits=bits)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes: in as many pools as a group fills."""
        return sum(pool.spec.block_bytes for pool in self._pools)

    @property
    def slot_bytes(self) -> int:
        """Bytes that one request's recurrent state takes in all layers together."""
        return sum(layer.slot_bytes for layer in self.recurrent)

    @property
    def is_eager(self) -> bool:
        """Whether a forward pass evaluates itself as it goes."""
        return self.backend.is_eager and (bool(self.recurrent) or any(not pool.is_viewed for pool in self._pools))

    @property
    def needs_synchronous_steps(self) -> bool:
        """Whether a step may be submitted only when the one before has finished: scatters copy what is in use."""
        return self.backend.needs_synchronous_steps or any(store.needs_synchronous_steps for store in self._stores)

    def allocate(
        self, num_blocks: int, max_blocks: int | None = None, *, num_slots: int, num_checkpoints: int = 0
    ) -> None:
        """Makes (or makes anew, empty) the pools of all layers, which may grow to `max_blocks`, for `num_slots`
        requests at a time and as many kept states as `num_checkpoints`."""
        self.release()
        for pool in self._pools:
            pool.allocate(self.backend, num_blocks, max_blocks)
        for states in self.recurrent:
            states.allocate(self.backend.make_states, num_slots + num_checkpoints)
        self._num_slots = num_slots
        self.num_blocks = num_blocks

    def change(self, change: PoolChange) -> None:
        """Moves, cuts or grows the blocks of all pools, one after the other, so that only one is there twice at a
        time. Every step launched must have finished."""
        for pool in self._pools:
            pool.change(change)
        self.num_blocks = change.num_blocks

    def release(self) -> None:
        """Lets go of the pools."""
        for store in self._stores:
            store.release()
        self.num_blocks = 0

    def forget_views(self) -> None:
        """The model's modules are put together anew: who is read by group shows again."""
        for pool in self._pools:
            pool.is_viewed = False
        for layer in self.paged:
            layer.num_query_heads = None

    def warm_up(self) -> None:
        """Lets the backend get ready for every kind of layer that a forward pass has shown."""
        done: set[tuple[LayerSpec, int, bool]] = set()
        for layer in self.paged:
            if layer.num_query_heads is None:
                continue
            kind = (layer.spec, layer.num_query_heads, layer.sinks is not None)
            if kind not in done:
                self.backend.warm_up(layer.spec, layer.num_query_heads, sinks=layer.sinks)
                done.add(kind)

    def begin(self, plans: Sequence[StepPlan], num_rows: int) -> tuple[StepPlan, ...]:
        """Prepares all layers for a forward pass over a step, of which each group has a plan; in `num_rows`, those
        beyond its tokens at position 0. The plans of all places."""
        plans = tuple([place.plan(plans) for place in self.places])
        positions = mx.array(np.pad(plans[0].positions, (0, num_rows - plans[0].num_tokens)))
        metadata = [self.backend.plan(plan) for plan in plans]
        for layer in self.paged:
            layer.offset, layer.metadata = positions, metadata[layer.place]
        return plans

    def end(self) -> None:
        """The forward pass is over: what it has made must not be kept alive from here while it is computed."""
        for layer in self.paged:
            layer.offset = layer.metadata = layer.keys = layer.values = None

    def resume_states(self, checkpoints: Sequence[int], slots: Sequence[int]) -> None:
        """Requests at `slots` go on from kept states."""
        self._copy_states([self._num_slots + checkpoint for checkpoint in checkpoints], slots)

    def keep_states(self, slots: Sequence[int], checkpoints: Sequence[int]) -> None:
        """Keeps the states that requests at `slots` have after the forward pass."""
        self._copy_states(slots, [self._num_slots + checkpoint for checkpoint in checkpoints])

    def _copy_states(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        if sources:
            places = Slots(np.array(sources, np.int32)), Slots(np.array(destinations, np.int32))
            for states in self.recurrent:
                states.copy(*places)

    def check_moves(self) -> int:
        """How many K or V buffers MLX has copied, since the first call, between two calls. Waits for launched steps."""
        return sum(pool.check_moves() for pool in self._pools)

    def state(self) -> list[mx.array]:
        """What must be evaluated with a step for what it keeps to be written."""
        return [array for store in self._stores for array in store.state()]


def _groups_of(layers: Sequence[PagedLayerCache]) -> tuple[list[LayerGroup], list[int]]:
    """Groups, and how many layers like each fill a block of a pool."""
    is_windowed = any(layer.window is not None for layer in layers)
    num_parts = share_blocks([layer.spec for layer in layers]) if is_windowed else None
    if num_parts is not None:
        return group_layers([layer.window for layer in layers], num_parts), num_parts
    return [LayerGroup(None, tuple((layer,) for layer in range(len(layers))))], [1] * len(layers)


def _join_pools(
    layers: Sequence[PagedLayerCache], groups: Sequence[LayerGroup], num_parts: Sequence[int]
) -> tuple[list[LayerPool], list[Place]]:
    """As many pools as the largest group fills, and the places where layers have their K/V."""
    pools = []
    for index in range(max(len(group.pools) for group in groups)):
        members = [member for group in groups for member in chain.from_iterable(group.pools[index : index + 1])]
        first = min(members, key=lambda member: num_parts[member])
        pools.append(LayerPool(layers[first].spec.times(num_parts[first]), [layers[member].spec for member in members]))
    places: dict[Place, int] = {}
    for number, group in enumerate(groups):
        for pool, members_there in zip(pools, group.pools):
            for part, member in enumerate(members_there):
                place = Place(number, part, num_parts[member])
                layers[member].join(places.setdefault(place, len(places)), pool, group.window)
    return pools, list(places) or [Place(0)]
