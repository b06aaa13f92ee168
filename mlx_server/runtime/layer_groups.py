"""Which layers share blocks: groups of equally many layers that look equally far back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MAX_GROUPS = 8
"""More groups waste less on a last one that is not full, but each has a block table of its own in every step."""

_LONG_CONTEXT = 4
"""A request is taken to be so many times as long as the widest window when groups are sized."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`members` are the numbers of its layers; `window` is what they see, the last token included, None if all.

    Block b of a pool holds K/V of one group: its i-th layer's in the i-th array. So blocks of all groups are alike,
    and memory goes to whichever needs it.
    """

    window: int | None
    members: tuple[int, ...]


def group_layers(windows: Sequence[int | None]) -> list[LayerGroup]:
    """Groups over layers with these windows, those that see everything first."""
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = _group_size({window: len(layers) for window, layers in kinds.items()})
    return [
        LayerGroup(window, tuple(layers[first : first + size]))
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for first in range(0, len(layers), size)
    ]


def _group_size(counts: dict[int | None, int]) -> int:
    """Layers a group, so that a long request takes least."""
    longest = _LONG_CONTEXT * max(window or 1 for window in counts)

    def num_groups(size: int) -> int:
        return sum(-(-count // size) for count in counts.values())

    def cost(size: int) -> tuple[int, int]:
        reach = sum(-(-count // size) * size * (window or longest) for window, count in counts.items())
        return reach, num_groups(size)

    sizes = range(1, max(counts.values()) + 1)
    return min((size for size in sizes if num_groups(size) <= max(_MAX_GROUPS, len(counts))), key=cost)
