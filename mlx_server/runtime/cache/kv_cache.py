"""The caches that mlx-lm's layers get, and all caches and pools of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention.cache_views import ListView, PagedView, RowGroup, StateView, StepMask, UnpageableError
from mlx_server.runtime.attention.interface import AttentionBackend, LayerSpec, StepPlan
from mlx_server.runtime.attention.seam import AttendsItself
from mlx_server.runtime.cache.layer_pools import LayerGroup, LayerPool, Place, group_layers, share_blocks
from mlx_server.runtime.cache.row_pool import KvBits, MakeRows, Rows, Slots, rotate
from mlx_server.runtime.kernels.gpu.pool import GpuPool
from mlx_server.runtime.kernels.trials import exhaust


class PagedLayerCache(AttendsItself):
    """One layer's K/V in a ragged forward pass: T tokens of any requests as a batch `[T, 1]`.

    Implements the part of mlx-lm's cache protocol that attention layers use. Keeps the step's K/V until the layer asks
    for attention, so that a backend can write and attend in one call, and warms it up before the first one. In a
    forward pass, `offset` is the position of each row, `[T]`, for rope, and `metadata` the backend's plan. `_offset`,
    mlx-vlm's name, is the largest position: without it, mlx-vlm's models would read it from the device and wait for all
    running work.

    A module that runs on groups of rows gets `view` instead.
    """

    is_recurrent = False
    num_paged = 1

    def __init__(self, window: int | None, spec: LayerSpec, *, is_chunked: bool = False) -> None:
        """`is_chunked`: the module has its own mask, which attends within chunks of the context."""
        self.window = window
        self.is_chunked = is_chunked
        self._warm_for: LayerSpec | None = None
        self.pool = LayerPool(spec)
        self.place = 0
        self._seat = 0
        self._kept_window: int | None = None
        self.offset: mx.array | None = None
        self._offset = 0
        self.metadata: Any = None
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._is_written = False

    @property
    def spec(self) -> LayerSpec:
        return self.pool.specs[self._seat]

    def join(self, place: int, pool: LayerPool, kept_window: int | None) -> None:
        """Makes the layer store its K/V in `pool`, which it shares with layers of other places; each place has its own
        plan. At most `kept_window` tokens of a context are kept."""
        self._seat = pool.specs.index(self.spec)
        self.place, self.pool, self._kept_window = place, pool, kept_window

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> StepMask | None:
        """The backend masks causally. Only a window is passed on; it comes back in `attend`, or for a group."""
        if N != 1:
            raise UnpageableError(f"a mask for {N} tokens of one request")
        window = window_size or self.window
        return StepMask(window, return_array) if window is not None or return_array else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes this step's K/V, `[T, num_kv_heads, 1, dim]`, and returns them as they are. A layer that stores keys
        only chooses what it attends to by those of the whole context."""
        if not self.pool.specs[self._seat].value_dim:
            raise UnpageableError("keys of several requests, to choose from them")
        self.keys, self.values = keys, values
        self._is_written = False
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """For a layer that shares this layer's K/V: what `update_and_fetch` returned in this step."""
        if self.keys is None or self.values is None:
            raise UnpageableError("shared K/V before they are computed")
        return self.keys, self.values

    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Writes the K/V from `update_and_fetch`, unless already written, and attends: `[T, num_heads, 1,
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
            raise UnpageableError("paged attention over K/V that another module reads group by group")
        if self._kept_window is not None and (window is None or window > self._kept_window):
            raise UnpageableError(f"a window of {window or 'all'} tokens where its cache keeps {self._kept_window}")
        is_written, self._is_written = self._is_written, True
        spec = pool.specs[self._seat]  # `spec`, without a call in each layer of each step
        if self._warm_for is not spec:
            exhaust(pool.backend.warm_up(spec, queries.shape[1], sinks=sinks))
            self._warm_for = spec
        keys = None if is_written else self.keys
        if spec.bits is not None:
            queries, keys = rotate(queries), None if keys is None else rotate(keys)
        return pool.backend.attend(
            pool.contents[self._seat],
            queries,
            keys,
            None if is_written else self.values,
            self.metadata,
            scale=scale,
            window=window,
            sinks=sinks,
        )

    def lend(self) -> tuple[mx.array, mx.array]:
        """For a layer of another model that reads what is stored, and writes nothing, between `begin` and `end`: what
        it gives to its attention function as keys and values."""
        self._is_written = True
        self.keys = self.values = mx.zeros(0)
        return self.keys, self.values

    @property
    def backend(self) -> AttentionBackend:
        return self.pool.backend

    def run_layer(self, parts: Any, x: mx.array, mask: Any) -> mx.array | None:
        """The output of a whole transformer layer whose attention is over this cache, by `CpuBackend.run_layer`. None
        if the layer's own code should run, also where `attend` refuses."""
        backend: Any = self.backend
        window = mask.window if isinstance(mask, StepMask) else self.window
        has_other_mask = mask is not None and not isinstance(mask, StepMask)
        is_beyond = self._kept_window is not None and (window is None or window > self._kept_window)
        if has_other_mask or is_beyond or self.is_chunked or self.pool.is_viewed or self.spec.bits is not None:
            return None
        y: mx.array | None = backend.run_layer(
            self.pool.contents[self._seat], parts, x, self.offset, self.metadata, window
        )
        return y

    def view(self, group: RowGroup, kind: type[PagedView] = PagedView) -> Any:
        """The layer's K/V for a module that runs on `group`, as a `kind`."""
        return kind(self.pool.rows(self._seat), self.window, group, self.place)


class StateLayerCache:
    """One layer's recurrent states: one slot for each request in each of several arrays, `[num_slots, ...]`.

    After a request's first few tokens, a state may be shorter than its slot; it is then padded with zeros in front.
    """

    lengths = None
    left_padding = None
    is_recurrent = True
    num_paged = 0

    def __init__(self, entries: Sequence[mx.array | None]) -> None:
        """`entries` have the shapes and types of one request's states, `[1, ...]`; None if nothing was written yet."""
        self.slot_bytes = sum(entry.nbytes for entry in entries if entry is not None)
        self.entries: list[Rows | None] = [None] * len(entries)
        self._kinds = [None if entry is None else (entry.shape[1:], entry.dtype) for entry in entries]
        self._num_slots = 0
        self._make_rows: MakeRows | None = None
        self.needs_synchronous_steps = False

    def allocate(self, make_rows: MakeRows, num_slots: int) -> None:
        """Allocates `num_slots` slots; all states are lost."""
        self._make_rows, self._num_slots = make_rows, num_slots
        self.needs_synchronous_steps = False
        self.entries = [None if kind is None else self._make(*kind) for kind in self._kinds]

    def release(self) -> None:
        """Frees the memory, but keeps the shapes."""
        self.entries = [None] * len(self._kinds)

    def state(self) -> list[mx.array]:
        return [array for entry in self.entries if entry is not None for array in entry.arrays()]

    def tokens(self) -> list[mx.array]:
        """As `Rows.tokens`, for all states."""
        return [token for entry in self.entries if entry is not None for token in entry.tokens()]

    def write(self, index: int, slots: Slots, values: mx.array) -> None:
        """Stores `values` `[R, ...]` as entry `index` at `slots` `[R]`."""
        entry, kind = self.entries[index], self._kinds[index]
        if entry is None or kind is None:
            kind = self._kinds[index] = values.shape[1:], values.dtype
            entry = self.entries[index] = self._make(*kind)
        entry.write(slots, _filled_up(values, kind[0]))

    def copy(self, sources: Slots, destinations: Slots) -> None:
        """Copies whole slots; no slot may be both a source and a destination."""
        for entry in self.entries:
            if entry is not None:
                entry.write(destinations, entry.read(sources))

    def make_mask(self, N: int) -> None:
        """Nothing is padded."""

    def advance(self, N: int) -> None:
        """Nothing is padded."""

    def __getitem__(self, index: int) -> mx.array:
        raise UnpageableError("the recurrent state of a whole batch")

    def view(self, group: RowGroup) -> StateView:
        """The states for a module that runs on `group`."""
        return StateView(self, group)

    def _make(self, shape: tuple[int, ...], dtype: mx.Dtype) -> Rows:
        assert self._make_rows is not None, "states are allocated before they are written"
        rows = self._make_rows((self._num_slots, *shape), dtype)
        self.needs_synchronous_steps |= rows.needs_synchronous_steps
        return rows


def _filled_up(values: mx.array, shape: tuple[int, ...]) -> mx.array:
    """States `[R, ...]`, padded in front with zeros to the `shape` of their slots."""
    if values.shape[1:] == shape:
        return values
    missing = [long - short for long, short in zip(shape, values.shape[1:])]
    if len(shape) != values.ndim - 1 or min(missing) < 0:
        raise UnpageableError(f"a state whose shape changes from {shape} to {values.shape[1:]}")
    return mx.pad(values, [(0, 0), *((count, 0) for count in missing)])


class ListLayerCache(tuple[Any, ...]):
    """The caches of a layer with several, of which `num_paged` store K/V."""

    @cached_property
    def is_recurrent(self) -> bool:
        return any(cache.is_recurrent for cache in self)

    @cached_property
    def num_paged(self) -> int:
        return sum(cache.num_paged for cache in self)

    def tokens(self) -> list[mx.array]:
        return [token for cache in self if cache.is_recurrent for token in cache.tokens()]

    @property
    def index_keys(self) -> list[PagedLayerCache]:
        """Those unlike the first with K/V: by their keys, the layer chooses the tokens that it attends to."""
        paged = [cache for cache in self if isinstance(cache, PagedLayerCache)]
        return [cache for cache in paged if cache.spec != paged[0].spec]

    def view(self, group: RowGroup) -> Any:
        return ListView(cache.view(group) for cache in self)


LayerCache = PagedLayerCache | StateLayerCache | ListLayerCache


def leaves(caches: Sequence[LayerCache]) -> Iterator[PagedLayerCache | StateLayerCache]:
    """All caches that store something, without the lists around them."""
    for cache in caches:
        if isinstance(cache, ListLayerCache):
            yield from leaves(cache)
        else:
            yield cache


class PagedKVCache:
    """The caches and pools of all layers of one model. MLX thread only.

    The model gets `layers` as its cache; `paged` and `recurrent` are its leaves. `groups` are layers that share block
    ids, if some layers have a window and blocks of a few layers have equal sizes. Otherwise there is one group that
    keeps everything, and each layer has its own pool. `PagedLayerCache.place` is an index into `places`. Layers with
    `index_keys` choose by them the tokens that they attend to.
    """

    def __init__(self, layers: Sequence[LayerCache], backend: AttentionBackend) -> None:
        self.layers = list(layers)
        self.paged = [cache for cache in leaves(layers) if isinstance(cache, PagedLayerCache)]
        self.recurrent = [cache for cache in leaves(layers) if isinstance(cache, StateLayerCache)]
        self.index_keys = [keys for layer in layers if isinstance(layer, ListLayerCache) for keys in layer.index_keys]
        self.backend = backend
        self._num_slots = 0
        self.groups, num_parts = _groups_of(self.paged)
        self.pools, self.places = _join_pools(self.paged, self.groups, num_parts)
        self._stores: list[LayerPool | StateLayerCache] = [*self.pools, *self.recurrent]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group's layers in tokens, None for all."""
        return tuple(group.window for group in self.groups)

    def quantize(self, bits: KvBits | None) -> None:
        """From the next allocation on, K/V are stored in `bits`, or unquantised for None; index keys always are. Set a
        suitable `backend` before. Raises `ConfigError` for dimensions that cannot be quantised."""
        whole = [layer.pool for layer in self.index_keys]
        for pool in self.pools:
            pool.quantize(None if pool in whole else bits)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all pools."""
        return sum(pool.spec.block_bytes for pool in self.pools)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one request's recurrent states in all layers."""
        return sum(layer.slot_bytes for layer in self.recurrent)

    @property
    def needs_synchronous_steps(self) -> bool:
        """Whether a step may be submitted only when the previous one has ended, because scatters copy memory in use."""
        return self.backend.needs_synchronous_steps or True in [store.needs_synchronous_steps for store in self._stores]

    def allocate(
        self, num_blocks: int, max_blocks: int | None = None, *, num_slots: int, num_checkpoints: int = 0
    ) -> None:
        """Allocates the pools of all layers, empty; they may grow to `max_blocks`. `num_slots` is the number of slots
        for states of requests, including those behind drafts; `num_checkpoints` the number of kept states."""
        self.release()
        for pool in self.pools:
            pool.allocate(self.backend, num_blocks, max_blocks)
        for states in self.recurrent:
            states.allocate(self.backend.make_rows, num_slots + num_checkpoints)
        self._num_slots = num_slots

    def change(self, change: PoolChange) -> None:
        """Moves, removes or adds blocks in one pool after another, so memory is needed for a copy of one pool only. All
        launched steps must have ended."""
        for pool in self.pools:
            pool.change(change)

    def release(self) -> None:
        """Frees the pools."""
        for store in self._stores:
            store.release()

    def forget_views(self) -> None:
        """Call when stand-ins of the model have changed: the next forward pass shows which layers are read by group."""
        for pool in self.pools:
            pool.is_viewed = False

    def begin(self, plans: Sequence[StepPlan]) -> tuple[StepPlan, ...]:
        """Prepares all layers for a forward pass. `plans` has the step's plan for each group; returns the plans for all
        places."""
        assert not self.recurrent or plans[0].next_slots.max() < self._num_slots, "a request has no slot for its state"
        plans = tuple([place.plan(plans) for place in self.places])
        offset, metadata = mx.array(plans[0].positions), [self.backend.plan(plan) for plan in plans]
        largest = int(plans[0].positions.max())
        for layer in self.paged:
            layer.offset, layer._offset, layer.metadata = offset, largest, metadata[layer.place]
        return plans

    def end(self) -> None:
        """Call after the forward pass: references from here would keep its arrays alive while they are computed."""
        for layer in self.paged:
            layer.offset = layer.metadata = layer.keys = layer.values = None

    def checkpoint_slot(self, checkpoint: int) -> int:
        """The slot of a kept state in `recurrent`."""
        return self._num_slots + checkpoint

    def resume_states(self, resumed: Sequence[tuple[int, int]]) -> None:
        """Copies kept states to requests; `resumed` has pairs of a checkpoint and a request's slot."""
        self._copy_states([(self.checkpoint_slot(checkpoint), slot) for checkpoint, slot in resumed])

    def keep_states(self, kept: Sequence[tuple[int, int]]) -> None:
        """Keeps states after the forward pass; `kept` has pairs of a request's slot and a checkpoint."""
        self._copy_states([(slot, self.checkpoint_slot(checkpoint)) for slot, checkpoint in kept])

    def _copy_states(self, places: Sequence[tuple[int, int]]) -> None:
        sources, destinations = (Slots(side) for side in np.array(places, np.int32).T)
        for states in self.recurrent:
            states.copy(sources, destinations)

    def check_moves(self) -> int:
        """The number of K or V buffers that MLX has copied since the first call; 0 if there is no GPU. Waits for
        launched steps."""
        contents = [pool.contents[0] for pool in self.pools]
        return sum(content.check_moves() for content in contents if isinstance(content, GpuPool))

    def state(self) -> list[mx.array]:
        """The arrays to evaluate with a step, so that its K/V and states are written."""
        pools = [pool.backend.state(pool.contents[0]) for pool in self.pools]
        return list(chain(*pools, *[states.state() for states in self.recurrent]))


def _groups_of(layers: Sequence[PagedLayerCache]) -> tuple[list[LayerGroup], list[int]]:
    """The groups, and for each layer how many layers like it fill a block of a pool."""
    is_windowed = any(layer.window is not None for layer in layers)
    num_parts = share_blocks([layer.spec for layer in layers]) if is_windowed else None
    if num_parts is not None:
        return group_layers([layer.window for layer in layers], num_parts), num_parts
    return [LayerGroup(None, tuple((layer,) for layer in range(len(layers))))], [1] * len(layers)


def _join_pools(
    layers: Sequence[PagedLayerCache], groups: Sequence[LayerGroup], num_parts: Sequence[int]
) -> tuple[list[LayerPool], list[Place]]:
    """The pools, as many as the largest group needs, and the places of the layers' K/V."""
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
