"""Finds rows of a step that can read K/V together: several tokens of one request, and requests whose block tables begin
with the same blocks (cascade attention, as in Hydragen, Juravsky et al. 2024, and FlashInfer). Example:

    blocks of 4 decodes    A  7 3 9 4     contexts A 120, B 125, C 80, D 70
                           B  7 3 9 5
                           C  7 3 6
                           D  2 8 1
    shared runs            blocks 0 to 1 by A, B and C;  block 2 by A and B
    work items             A's table, tokens  0 to 64, rows A B C
                           A's table, tokens 64 to 96, rows A B
                           not shared: A 96 to 120, B 96 to 125, C 64 to 80, D 0 to 70
    K/V rows read          64 + 32 + 24 + 29 + 16 + 70 = 235, instead of 120 + 125 + 80 + 70 = 395
    partial results        A 3, B 3, C 2, D 1: merged for each row, by their maxima and sums of weights

The example allows runs of one block; with `MIN_BLOCKS`, its contexts are too short to share anything.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention.interface import IntArray

Indices = npt.NDArray[np.integer[Any]]

MIN_BLOCKS = 4
"""The fewest blocks of a shared run. The partial results of a shorter one cause about as much traffic as it saves."""

_MAX_RUNS = 16
"""The most shared runs of a launch; those nearer the beginning of contexts come first. Each costs the host about 50
microseconds."""

_MIN_SAVING = 0.25
"""The smallest share of all K/V rows that must be saved. Below it, the kernel without sharing is at least as fast."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Requests of a step whose rows attend in one launch. For each request: its block table, the index of its first row
    in the step (`queries`), its number of rows (`counts`), and its context length; its rows are the context's last."""

    tables: IntArray
    queries: IntArray
    counts: IntArray
    contexts: IntArray

    @property
    def rows(self) -> Indices:
        """The index of each row in the step."""
        owners, nth = spread(self.counts)
        return self.queries[owners] + nth


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks [first, end), by place in a table, that are the same in the tables of all `members` (at least two)."""

    first: int
    end: int
    members: Indices


def find_runs(readers: Readers) -> list[Run]:
    """Finds the leading blocks that several readers share, from the root of the tree of common prefixes to its leaves.
    Only full blocks that all rows of a reader see are shared. Empty if sharing saves less than `_MIN_SAVING`."""
    tables, wholes = readers.tables, (readers.contexts - readers.counts + 1) // BLOCK_SIZE
    found: list[Run] = []
    saved = 0
    pending: deque[tuple[int, int, Indices]] = deque([(0, 0, np.flatnonzero(wholes >= MIN_BLOCKS))])
    while pending and len(found) < _MAX_RUNS:
        first, depth, members = pending.popleft()
        for group in _alike(tables[members, depth], members)[: _MAX_RUNS - len(found)]:
            limit = int(wholes[group].min())
            end = depth + _common_length(tables[group, depth:limit])
            if end - first >= MIN_BLOCKS:
                found.append(Run(first, end, group))
                saved += (len(group) - 1) * (end - first) * BLOCK_SIZE
            start = end if end - first >= MIN_BLOCKS else first
            longer = group[wholes[group] > end]
            if len(longer) > 1:
                pending.append((start, end, longer))
    return found if saved >= _MIN_SAVING * int(readers.contexts.sum()) else []


def _alike(blocks: IntArray, members: Indices) -> list[Indices]:
    """The groups of at least two `members` that have the same block; `blocks` has the block of each member."""
    order = np.argsort(blocks, kind="stable")
    is_new = np.ones(len(blocks) + 1, bool)
    np.not_equal(blocks[order][1:], blocks[order][:-1], out=is_new[1:-1])
    starts = np.flatnonzero(is_new)
    several = np.flatnonzero(np.diff(starts) > 1)
    return [members[order[starts[i] : starts[i + 1]]] for i in several]


def _common_length(tables: IntArray) -> int:
    """The number of leading columns in which all rows are equal."""
    differs = (tables != tables[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else len(differs)


def spread(counts: Indices) -> tuple[Indices, Indices]:
    """For owners with `counts` items each: the owner of each item, and the item's index among the owner's. `2 1` gives
    `0 0 1` and `0 1 0`."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
