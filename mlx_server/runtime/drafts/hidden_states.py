"""Hidden states of running requests, kept for a multi-token-prediction head, an assistant or a block
drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_server.outputs import HELD_STATES, ScheduledChunk
from mlx_server.runtime.attention.interface import IntArray
from mlx_server.runtime.cache.row_pool import MakeRows, Slots


class KeptRows(NamedTuple):
    """Rows of a step, and the slots for their hidden states."""

    rows: list[int]
    slots: Slots


class HiddenStates:
    """A ring of `num_held` slots for each of the first `num_requests` requests that run and may draft: the state of
    position p is in the request's slot p % num_held until the state of p + num_held replaces it. MLX thread only."""

    are_last = True
    """Whether these are what the model's output matrix reads."""

    def __init__(
        self, make_rows: MakeRows, num_requests: int, size: int, dtype: mx.Dtype, num_held: int = HELD_STATES
    ) -> None:
        self._rows = make_rows((num_requests * num_held, size), dtype)
        self._num_held = num_held
        self._may_draft: set[str] = set()
        self._places: dict[str, int] = {}
        self._free = list(range(num_requests))
        self.num_bytes = num_requests * num_held * size * dtype.size

    @property
    def needs_synchronous_steps(self) -> bool:
        return self._rows.needs_synchronous_steps

    def plan(self, chunks: Sequence[ScheduledChunk], ends: Sequence[int]) -> KeptRows:
        """The last rows of each chunk, except of requests for which no slots were left. Chunk i ends before row
        `ends[i]` of the step.

        Example: a decode at position 300 and a prompt of 258 tokens, of requests 0 and 1: rows 0, 3, 4, ..., 258; slots
        300 % 256 = 44, 256 + 2, 256 + 3, ..., 256 + 255, 256 + 0, 256 + 1.
        """
        for chunk in chunks:
            request_id = chunk.request_id
            if request_id not in self._places and request_id in self._may_draft and self._free:
                self._places[request_id] = self._free.pop()
        kept = [index for index, chunk in enumerate(chunks) if chunk.request_id in self._places]
        chunks = [chunks[index] for index in kept]
        if not chunks:
            return KeptRows([], Slots(np.zeros(0, np.int32)))
        counts = [min(chunk.num_tokens, self._num_held) for chunk in chunks]
        back = _counted_down(counts)
        rows = np.repeat(np.array([ends[index] for index in kept], dtype=np.int64), counts) - back
        positions = np.repeat([chunk.start + chunk.num_tokens for chunk in chunks], counts) - back
        return KeptRows(rows.tolist(), self._slots(chunks, counts, positions))

    def keep(self, kept: KeptRows, hidden: mx.array | None) -> None:
        """Stores the states of planned rows after the forward pass, in which `hidden` `[R, D]` begins with theirs if
        `are_last`."""
        if kept.rows:
            assert hidden is not None, "the rows were asked for"
            self.write(kept, hidden[: len(kept.rows)])

    def close(self) -> None:
        """The model is used without a drafter from now on."""

    def write(self, kept: KeptRows, hidden: mx.array) -> None:
        """Stores `hidden` `[len(kept.rows), D]`."""
        self._rows.write(kept.slots, hidden)

    def read(self, chunks: Sequence[ScheduledChunk]) -> mx.array:
        """The states `[T, D]` for all positions of a head's chunks, shifted by their `hidden_offset`."""
        counts = [chunk.num_tokens for chunk in chunks]
        ends = [chunk.hidden_offset + chunk.start + chunk.num_tokens for chunk in chunks]
        return self._rows.read(self._slots(chunks, counts, np.repeat(ends, counts) - _counted_down(counts)))

    def add(self, request_id: str) -> None:
        """A request that may draft begins to run."""
        self._may_draft.add(request_id)

    def drop(self, request_id: str) -> None:
        """Forgets a request; unknown ones are ignored."""
        self._may_draft.discard(request_id)
        place = self._places.pop(request_id, None)
        if place is not None:
            self._free.append(place)

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate with a step, so that its states are written."""
        return self._rows.arrays()

    def _slots(self, chunks: Sequence[ScheduledChunk], counts: Sequence[int], positions: IntArray) -> Slots:
        places = np.repeat([self._places[chunk.request_id] for chunk in chunks], counts)
        return Slots((places * self._num_held + positions % self._num_held).astype(np.int32))


def _counted_down(counts: Sequence[int]) -> IntArray:
    """For each count the numbers from it down to 1: for 2 and 3, 2 1 3 2 1."""
    ends = np.cumsum(counts, dtype=np.int32)
    return np.repeat(ends, counts) - np.arange(ends[-1], dtype=np.int32)
