"""Requests for checks: their tokens are computed in any chunks by a runner's forward pass, without scheduler or
sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import ScheduledChunk
from mlx_server.runtime.attention.interface import IntArray
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.vision import ImageRows


class TrialRequests:
    """Requests named by the keys of `sequences`, each with its own blocks, in descending order of their ids.

    Allocates the runner's pools again; the caller releases them. MLX thread.
    """

    def __init__(self, runner: ModelRunner, sequences: Mapping[str, Sequence[int]]) -> None:
        self._runner = runner
        self._sequences = dict(sequences)
        self._num_each = -(-max(map(len, sequences.values())) // BLOCK_SIZE)
        windows = runner.cache.windows
        self._groups = range(len(windows))
        # One more slot than requests, for the state behind a chunk with drafts.
        runner.cache.allocate(len(windows) * len(sequences) * self._num_each, num_slots=len(sequences) + 1)
        self._tables = BlockTables(windows)
        for name in sequences:
            self._tables.add(name)

    def blocks(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The ids of a request's blocks in each layer group."""
        rank, count = list(self._sequences).index(name), len(self._sequences)
        firsts = [(group * count + rank) * self._num_each for group in self._groups]
        return tuple(tuple(reversed(range(first, first + self._num_each))) for first in firsts)

    def chunk(self, name: str, start: int, end: int, num_drafts: int = 0) -> ScheduledChunk:
        """Tokens [start, end) of a request. All its blocks come with its first chunk."""
        ids = tuple(self._sequences[name][start:end])
        blocks = self.blocks(name) if start == 0 else ()
        return ScheduledChunk(name, start, end - start, ids, blocks, True, 0, num_drafts=num_drafts)

    def run(
        self,
        chunks: Sequence[ScheduledChunk],
        rows: Sequence[int],
        owners: IntArray | None = None,
        images: ImageRows | None = None,
    ) -> mx.array:
        """One step with these chunks, single tokens first: logits `[len(rows), vocabulary]` of these rows, evaluated.
        `owners` and `images` are as for `ModelForward`."""
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids or ()]
        logits = self._runner.forward(self._tables.plan(chunks), mx.array(ids), rows, owners, images=images)
        mx.eval(logits, *self._runner.cache.state())
        return logits
