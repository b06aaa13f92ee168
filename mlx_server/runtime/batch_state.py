"""The runner's memory of running requests, and the host's half of a step: NumPy index arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import NULL_BLOCK_ID, BlockMove, ScheduledChunk
from mlx_server.runtime.attention import IntArray, StepPlan


class BlockTables:
    """Block tables of running requests, one row each in every layer group, grown as chunks bring new blocks.

    Entries that lie before a group's window are never cleared: a plan does not show them.
    """

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        """`windows` are those of the layer groups."""
        self._windows = tuple(windows)
        self._tables: IntArray = np.zeros((len(self._windows), 8, 16), dtype=np.int32)
        self._rows: dict[str, int] = {}
        self._lengths: dict[str, list[int]] = {}
        self._free_rows: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def add(self, request_id: str) -> None:
        """A request with empty tables."""
        assert request_id not in self._rows, f"{request_id} is here already"
        row = self._free_rows.pop() if self._free_rows else len(self._rows)
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

    def row(self, request_id: str) -> int:
        """The request's row, no other's until it is dropped; rows are as many as there ever were requests at once."""
        return self._rows[request_id]

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Blocks have got other ids."""
        if moves:
            ids = np.arange(max(int(self._tables.max()), max(move.source for move in moves)) + 1, dtype=np.int32)
            for move in moves:
                ids[move.source] = move.destination
            self._tables = ids[self._tables]

    def plan(self, chunks: Sequence[ScheduledChunk]) -> tuple[StepPlan, ...]:
        """Appends the chunks' new blocks and lays the step out, once for each layer group. Single-token chunks must
        come first."""
        rows = np.zeros(len(chunks), dtype=np.int32)
        for index, chunk in enumerate(chunks):
            rows[index] = self._rows[chunk.request_id]
            if chunk.new_block_ids:
                self._extend(chunk.request_id, chunk.new_block_ids)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
        num_decodes = int(np.count_nonzero(lengths == 1))
        assert bool((lengths[:num_decodes] == 1).all()), "single-token chunks come first"
        context_lens = starts + lengths
        query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        if num_decodes == len(chunks):
            owners, positions = np.arange(len(chunks)), starts
        else:
            owners = np.repeat(np.arange(len(chunks)), lengths)
            positions = np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1])[owners]
        num_blocks = int(-(-context_lens.max() // BLOCK_SIZE))
        block_tables = self._tables[:, :, :num_blocks].take(rows, axis=1)
        blocks = block_tables[:, owners, positions // BLOCK_SIZE].astype(np.int64)
        slot_mapping = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        return tuple(
            StepPlan(
                num_decodes=num_decodes,
                positions=positions,
                slot_mapping=slots,
                query_starts=query_starts,
                context_lens=context_lens,
                block_tables=_seen(tables, starts, window),
                state_slots=rows,
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
    """The tables `[R, B]` of requests that go on at `starts` `[R]`, without the blocks that lie before the window:
    these are others' by now."""
    if window is not None:
        firsts = np.maximum(starts - window + 1, 0) // BLOCK_SIZE
        block_tables[np.arange(block_tables.shape[1]) < firsts[:, None]] = NULL_BLOCK_ID
    return block_tables
