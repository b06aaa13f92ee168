"""Block tables and state slots of running requests, and the plan of a step that is made from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import NULL_BLOCK_ID, BlockMove, ScheduledChunk
from mlx_server.runtime.attention.interface import IntArray, StepPlan


class StateSlots:
    """The state slot of each row of the block tables. A row keeps its slot when another request gets the row.

    A step reads and writes this slot, except for a chunk with drafts, because drafts may be wrong and a state cannot be
    rolled back. Such a chunk writes to a spare slot, and the start of the request's next chunk shows which of the two
    slots has its state.

        row 3 has slot 3, and 8 is spare
        tokens 40 to 44, of which four are drafts: reads 3, writes 8
        next chunk from 45 on: all were right      row 3 has slot 8, and 3 is spare
        next chunk from 40 on: one was wrong       row 3 has slot 3, and 8 is spare

    The number of slots is the largest number of rows so far plus the largest number of chunks with drafts at a time.
    """

    def __init__(self) -> None:
        self._slots: IntArray = np.zeros(0, np.int32)
        self._spares: list[int] = []
        self._num_slots = 0
        self._undecided: dict[int, tuple[int, int]] = {}
        """By row: the position where its drafts end, and the slot with the state after them."""

    @property
    def num_rows(self) -> int:
        return len(self._slots)

    def add_row(self) -> None:
        self._slots = np.append(self._slots, np.int32(self._num_slots))
        self._num_slots += 1

    def slot(self, row: int) -> int:
        """The slot with the state after the last planned step."""
        _, slot = self._undecided.get(row, (0, int(self._slots[row])))
        return slot

    def forget(self, row: int) -> None:
        """Call when the row's request is dropped."""
        if row in self._undecided:
            self._spares.append(self._undecided.pop(row)[1])

    def plan(self, chunks: Sequence[ScheduledChunk], rows: IntArray, num_singles: int) -> tuple[IntArray, IntArray]:
        """The slots that a step reads and the slots that it writes, for the chunks of these rows. The first
        `num_singles` chunks have one token."""
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


class BlockTables:
    """Block tables of running requests: one row for each request in every layer group, extended by the new blocks of
    chunks.

    Entries before a group's window are not cleared here; plans leave them out.
    """

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        """`windows` has the window of each layer group."""
        self._windows = tuple(windows)
        self._tables: IntArray = np.zeros((len(self._windows), 8, 16), dtype=np.int32)
        self._rows: dict[str, int] = {}
        self._lengths: dict[str, list[int]] = {}
        self._free_rows: list[int] = []
        self._states = StateSlots()

    def add(self, request_id: str) -> None:
        """Adds a request with empty tables."""
        assert request_id not in self._rows, f"{request_id} was already added"
        row = self._free_rows.pop() if self._free_rows else len(self._rows)
        if row == self._states.num_rows:
            self._states.add_row()
        if row == self._tables.shape[1]:
            self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)], axis=1)
        self._tables[:, row] = 0
        self._rows[request_id] = row
        self._lengths[request_id] = [0] * len(self._windows)

    def drop(self, request_id: str) -> None:
        """Forgets a request; unknown ones are ignored."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            del self._lengths[request_id]
            self._free_rows.append(row)
            self._states.forget(row)

    def state_slot(self, request_id: str) -> int:
        """The slot with the request's recurrent state after the last planned step."""
        return self._states.slot(self._rows[request_id])

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Renames blocks that were moved."""
        if moves:
            ids = np.arange(max(int(self._tables.max()), max(move.source for move in moves)) + 1, dtype=np.int32)
            for move in moves:
                ids[move.source] = move.destination
            self._tables = ids[self._tables]

    def plan(self, chunks: Sequence[ScheduledChunk], num_ahead: int = 0) -> tuple[StepPlan, ...]:
        """Appends the chunks' new blocks and plans the step for each layer group. Single-token chunks must come first.
        Windows begin `num_ahead` tokens later than those of the chunks' first tokens.

        Example: a decode at position 40 and a prompt of 3 tokens, in blocks (7, 2) and (4,): positions 40, 0, 1, 2;
        slots 2 * 32 + 8 = 72, 128, 129, 130; query starts 0, 1, 4; context lengths 41, 3.
        """
        for chunk in chunks:
            if chunk.new_block_ids:
                self._extend(chunk.request_id, chunk.new_block_ids)
        rows = np.array([self._rows[chunk.request_id] for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        counts = [chunk.num_tokens for chunk in chunks]
        num_decodes = counts.count(1)
        assert counts[:num_decodes] == [1] * num_decodes, "single-token chunks come first"
        lengths = np.array(counts, dtype=np.int32)
        context_lens = starts + lengths
        query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        lengths.cumsum(out=query_starts[1:])
        if num_decodes == len(chunks):
            owners, positions = np.arange(len(chunks)), starts
        else:
            owners = np.repeat(np.arange(len(chunks)), lengths)
            positions = np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1])[owners]
        num_blocks = int(-(-context_lens.max() // BLOCK_SIZE))
        block_tables = self._tables[:, :, :num_blocks].take(rows, axis=1)
        blocks = block_tables[:, owners, positions // BLOCK_SIZE].astype(np.int64)
        slot_mapping = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        state_slots, next_slots = self._states.plan(chunks, rows, num_decodes)
        return tuple(
            StepPlan(
                num_decodes=num_decodes,
                positions=positions,
                slot_mapping=slots,
                query_starts=query_starts,
                context_lens=context_lens,
                block_tables=_seen(tables, starts + num_ahead, window),
                state_slots=state_slots,
                next_slots=next_slots,
            )
            for slots, tables, window in zip(slot_mapping, block_tables, self._windows)
        )

    def _extend(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        lengths = self._lengths[request_id]
        for group, new_ids in enumerate(block_ids):
            end = lengths[group] + len(new_ids)
            if end > self._tables.shape[2]:
                missing = max(end, 2 * self._tables.shape[2]) - self._tables.shape[2]
                self._tables = np.pad(self._tables, ((0, 0), (0, 0), (0, missing)))
            self._tables[group, self._rows[request_id], lengths[group] : end] = new_ids
            lengths[group] = end


def _seen(block_tables: IntArray, starts: IntArray, window: int | None) -> IntArray:
    """The tables `[R, B]` of requests that continue at `starts` `[R]`, without the blocks before the window, which may
    belong to other requests by now."""
    if window is not None:
        firsts = np.maximum(starts - window + 1, 0) // BLOCK_SIZE
        block_tables[np.arange(block_tables.shape[1]) < firsts[:, None]] = NULL_BLOCK_ID
    return block_tables
