"""A step's rows cut into groups that modules written for rectangular batches can compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention import IntArray, StepPlan, context_slots
from mlx_server.runtime.slots import Slots


@dataclass(frozen=True)
class RowPlaces:
    """Where the K/V of a group of rows are, in the layers of one place.

        slots          [R * length]  where those of the rows go
        context_slots  [R, C]        slots of each request's first C tokens, C those of the longest; beyond a
                                     request's own tokens, and before its window, they are anybody's

    Made when a module asks for them: those of contexts are long.
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
    """Rows [first, last) of a ragged batch: R requests of `length` tokens each, as a batch `[R, length]`.

        starts       [R]  tokens that each request has before
        places            where its K/V are, in the layers of each place
        state_slots  [R]  where each request keeps its recurrent state

    In a fresh group every request starts, in any other none does.
    """

    first: int
    last: int
    length: int
    starts: IntArray
    places: tuple[RowPlaces, ...]
    state_slots: Slots

    @property
    def num_requests(self) -> int:
        return len(self.starts)

    @property
    def is_fresh(self) -> bool:
        return not self.starts[0]

    @property
    def context_length(self) -> int:
        """Tokens of the longest request, this step's included."""
        return int(self.starts.max()) + self.length

    def cut(self, rows: mx.array) -> mx.array:
        """`[R, length, ...]` of an array `[T, 1, ...]` over all rows."""
        return rows[self.first : self.last].reshape(self.num_requests, self.length, *rows.shape[2:])

    def firsts(self, rows: mx.array) -> mx.array:
        """For an array `[T]` over all rows, the value at each request's first one: `[R]`, or a scalar for one."""
        return rows[self.first] if self.num_requests == 1 else rows[self.first : self.last : self.length]

    def flat(self, batch: mx.array) -> mx.array:
        """`[R * length, 1, ...]` of an array `[R, length, ...]`: the opposite of `cut`."""
        return batch.reshape(self.num_requests * self.length, 1, *batch.shape[2:])


def row_groups(plans: Sequence[StepPlan], *, batches_decodes: bool) -> list[RowGroup]:
    """Groups over all rows of a step, in order: decodes together (or one by one), each prompt chunk alone. `plans` are
    the step's, one for each place of layers."""
    return [_group(plans, first, last) for first, last in _request_ranges(plans[0], batches_decodes)]


def _request_ranges(step: StepPlan, batches_decodes: bool) -> Iterator[tuple[int, int]]:
    """Ranges of requests [first, last) that make a group."""
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
    return RowGroup(start, end, length, context_lens - length, places, Slots(step.state_slots[requests]))
