"""Where requests keep their recurrent states from step to step, and where a step with drafts leaves them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_server.outputs import ScheduledChunk
from mlx_server.runtime.attention.interface import IntArray


class StateSlots:
    """The slot of each row of the block tables, which stays a row's own when it goes to another request.

    A step reads and writes it, but for a chunk with drafts: these may be wrong, and a state cannot be cut back. Such a
    chunk writes a slot that nobody has, and the start of the request's next chunk tells which of both holds its state.

        row 3 has slot 3, and 8 is spare
        tokens 40 to 44 of which four are drafts: reads 3, writes 8
        next chunk from 45 on: all were right     row 3 has slot 8, and 3 is spare
        next chunk from 40 on: one was wrong      row 3 has slot 3, and 8 is spare

    So there are as many slots as there ever were rows and, at a time, chunks with drafts.
    """

    def __init__(self) -> None:
        self._slots: IntArray = np.zeros(0, np.int32)
        self._spares: list[int] = []
        self._num_slots = 0
        self._undecided: dict[int, tuple[int, int]] = {}  # of a row, where its drafts end and the slot behind them

    @property
    def num_rows(self) -> int:
        return len(self._slots)

    def add_row(self) -> None:
        """One more row of the tables."""
        self._slots = np.append(self._slots, np.int32(self._num_slots))
        self._num_slots += 1

    def slot(self, row: int) -> int:
        """Where the state is behind the last step that was planned."""
        _, slot = self._undecided.get(row, (0, int(self._slots[row])))
        return slot

    def forget(self, row: int) -> None:
        """The row's request is gone."""
        if row in self._undecided:
            self._spares.append(self._undecided.pop(row)[1])

    def plan(self, chunks: Sequence[ScheduledChunk], rows: IntArray, num_singles: int) -> tuple[IntArray, IntArray]:
        """Slots that a step reads and those that it writes, for the chunks of these rows, of which the first
        `num_singles` have one token."""
        if self._undecided:
            self._decide(chunks, rows)
        before = after = self._slots[rows]
        for index in range(num_singles, len(chunks)):
            chunk = chunks[index]
            if chunk.num_drafts:
                after = before.copy() if after is before else after
                after[index] = self._take()
                self._undecided[int(rows[index])] = chunk.start + chunk.num_tokens, int(after[index])
        return before, after

    def _decide(self, chunks: Sequence[ScheduledChunk], rows: IntArray) -> None:
        for chunk, row in zip(chunks, rows.tolist()):
            end, slot = self._undecided.pop(row, (None, 0))
            if end == chunk.start:
                self._slots[row], slot = slot, int(self._slots[row])
            if end is not None:
                self._spares.append(slot)

    def _take(self) -> int:
        if self._spares:
            return self._spares.pop()
        self._num_slots += 1
        return self._num_slots - 1
