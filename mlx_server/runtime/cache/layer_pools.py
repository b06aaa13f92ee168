"""Groups of layers that share block ids, and the pools with their K/V.

Layers with the same window form groups, and each pool holds the K/V of one layer of every group, or of a few small
layers. Example: of 12 layers, numbers 5 and 11 see everything and ten see 1,024 tokens. Groups of two layers are (5,
11), (0, 1), (2, 3), (4, 6), (7, 8) and (9, 10): two pools instead of twelve, and any other group can use a block that a
windowed group no longer needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention.interface import AttentionBackend, LayerSpec, ReferenceBackend, StepPlan
from mlx_server.runtime.cache.row_pool import KvBits, RowPool

_MAX_GROUPS = 12
"""More groups waste less memory in a last group that is not full, but each has its own block table in every step."""

_LONG_CONTEXT = 4
"""The size of groups is optimised for a request this many times as long as the widest window."""

_MAX_PARTS = 8
"""The maximum number of layers that share one block of a pool. Each needs its own plan of a step."""


class LayerPool:
    """One pool of blocks and the backend that attends over it. MLX thread only.

    A block has the shape of the layer `spec`, the first of `specs`. Layers with smaller K/V see each block as several
    blocks of their own shape. `contents[i]` is the pool for layers like `specs[i]`, in the backend's form.

    `is_viewed` is set once a layer's own code reads its K/V (`rows`) instead of letting the backend attend over them.
    Then the pool is a `RowPool`. `needs_synchronous_steps` is as for `PagedKVCache`, from the first allocation on.
    """

    def __init__(self, spec: LayerSpec, seen_as: Sequence[LayerSpec] = ()) -> None:
        """`seen_as` are the specs of the layers that share the pool."""
        self.contents: list[Any] = []
        self.is_viewed = self.needs_synchronous_steps = False
        self.specs = list(dict.fromkeys([spec, *seen_as]))
        self._num_blocks = 0
        self.backend: AttentionBackend  # from the first allocation on

    @property
    def spec(self) -> LayerSpec:
        return self.specs[0]

    def quantize(self, bits: KvBits | None) -> None:
        """From the next allocation on, K/V are stored in `bits`, or unquantised for None."""
        self.specs = [replace(spec, bits=bits) for spec in self.specs]

    def allocate(self, backend: AttentionBackend, num_blocks: int, max_blocks: int | None = None) -> None:
        """Allocates the blocks, which may grow to `max_blocks`."""
        self.backend = ReferenceBackend(backend.make_rows) if self.is_viewed else backend
        self._num_blocks = num_blocks
        self._show(self.backend.make_pool(self.spec, num_blocks, max_blocks))

    def rows(self, seat: int = 0) -> RowPool:
        """The pool for layers at `seat`, as rows. The first call turns the pool into rows and loses its content."""
        if not self.is_viewed:
            self.is_viewed = True
            self.allocate(self.backend, self._num_blocks)
        rows = self.contents[seat]
        assert isinstance(rows, RowPool)
        return rows

    def change(self, change: PoolChange) -> None:
        """Moves, removes or adds blocks. All launched steps must have ended."""
        self._num_blocks = change.num_blocks
        del self.contents[1:]  # views would keep the old memory
        self._show(self.backend.change_pool(self.contents[0], change))

    def release(self) -> None:
        self.contents.clear()

    def _show(self, content: Any) -> None:
        sides = (content.keys, content.values) if self.is_viewed else ()
        self.needs_synchronous_steps = any(side.needs_synchronous_steps for side in sides)
        views = [
            self.backend.view_pool(content, spec, self.spec.block_bytes // spec.block_bytes) for spec in self.specs[1:]
        ]
        self.contents = [content, *views]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that use the same block ids: block b of every pool holds their K/V of the same 32 tokens.

    `pools[i]` has the numbers of the layers that use pool i: one that fills a block, or several smaller ones that fill
    it together. `window` is how many tokens they see, including the last one; None is all. A block belongs to one group
    at a time, and any group can take any block, so memory goes to the group that needs it.

        pool 0   | layer 0        | layer 5        |      a block of a group with one layer a pool
                 | layer 2, 8     | layer 11       |      and of one with two that are half as large
    """

    window: int | None
    pools: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where layers keep their K/V: in blocks of a layer group, in part `part` of `num_parts` equal parts of each
    block."""

    group: int
    part: int = 0
    num_parts: int = 1

    def plan(self, plans: Sequence[StepPlan]) -> StepPlan:
        """The step's plan for these layers, given the plans of all groups."""
        plan = plans[self.group]
        return plan if self.num_parts == 1 else plan.part(self.part, self.num_parts)


def share_blocks(specs: Sequence[LayerSpec]) -> list[int] | None:
    """For each of `specs`, how many layers like it fill a block, if blocks can have the same sizes of K and of V for
    all; None otherwise."""
    rows = [(spec.num_kv_heads * spec.key_dim, spec.num_kv_heads * spec.value_dim) for spec in specs]
    whole = math.lcm(*[keys for keys, _ in rows])
    num_parts = [whole // keys for keys, _ in rows]
    sizes = {(num * keys, num * values) for num, (keys, values) in zip(num_parts, rows)}
    kinds = {(spec.dtype, spec.bits) for spec in specs}
    is_alike = len(sizes) == len(kinds) == 1
    return num_parts if is_alike and max(num_parts) <= _MAX_PARTS else None


def group_layers(windows: Sequence[int | None], num_parts: Sequence[int] | None = None) -> list[LayerGroup]:
    """Groups of layers with these windows, those that see everything first. `num_parts` is how many layers like each
    fill a block of a pool; without it, one."""
    kinds: dict[int | None, dict[int, list[int]]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, {}).setdefault(num_parts[layer] if num_parts else 1, []).append(layer)
    filled = {window: _fill(layers) for window, layers in kinds.items()}
    size = _group_size({window: len(pools) for window, pools in filled.items()})
    return [
        LayerGroup(window, tuple(pools[first : first + size]))
        for window, pools in sorted(filled.items(), key=lambda kind: kind[0] or 0)
        for first in range(0, len(pools), size)
    ]


def _fill(layers: dict[int, list[int]]) -> list[tuple[int, ...]]:
    """Splits layers, given by how many of them fill a block, into blocks; the last block of each kind may have room
    left."""
    return [
        tuple(alike[first : first + num_parts])
        for num_parts, alike in layers.items()
        for first in range(0, len(alike), num_parts)
    ]


def _group_size(counts: dict[int | None, int]) -> int:
    """The number of pools for each group with which a long request takes least memory. `counts` has the number of pools
    that the layers of each window fill."""
    longest = _LONG_CONTEXT * max(window or 1 for window in counts)

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts.values())

    def cost(size: int) -> tuple[int, int]:
        reach = sum(-(-count // size) * size * (window or longest) for window, count in counts.items())
        return reach, num_groups(size)

    sizes = range(1, max(counts.values()) + 1)
    return min((size for size in sizes if num_groups(size) <= max(_MAX_GROUPS, len(counts))), key=cost)
