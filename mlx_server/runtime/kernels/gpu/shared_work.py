"""Cuts the attention of rows that read K/V together into work items for the shared kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention.interface import IntArray
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, KernelVariant, rows_at_once, shared_tiles
from mlx_server.runtime.kernels.sharing import MIN_BLOCKS, Readers, Run, spread

THREADGROUPS_PER_CORE = 8
"""Threadgroups of 128 to 256 threads that a core needs to hide the latency of reads."""


@dataclass(frozen=True, slots=True)
class SharedWork:
    """The index arguments of `paged_shared`: `items` `[W, 8]` and `rows` `[N, 4]`, which it describes as `work_items`
    and `item_rows`. Row r of the launch has the partial results [starts[r], starts[r + 1])."""

    items: IntArray
    rows: IntArray
    starts: IntArray

    @property
    def is_split(self) -> bool:
        return len(self.rows) > len(self.starts) - 1


def make_shared_work(
    readers: Readers, runs: list[Run], window: int | None, shape: DecodeShape, variant: KernelVariant, num_cores: int
) -> SharedWork:
    """Cuts shared runs, and the rest of each reader's context, into items of at most `rows_at_once` rows and few enough
    tokens that their threadgroups fill the GPU. The bits of a row depend on the rows that share its reads."""
    counts = readers.counts
    row_starts = np.cumsum(counts) - counts
    owners, nth = spread(counts)
    row_ends = readers.contexts[owners] - counts[owners] + 1 + nth
    row_firsts = np.zeros_like(row_ends) if window is None else np.maximum(row_ends - window, 0)

    rests = row_firsts[row_starts]  # the first token of each reader that is in no shared run
    is_whole = np.ones(len(counts), bool)
    for run in runs:
        rests[run.members] = run.end * BLOCK_SIZE
        is_whole[run.members] = False
    own = np.flatnonzero((readers.contexts > rests) | is_whole)
    members = np.concatenate([*(run.members for run in runs), own])
    sizes = np.array([len(run.members) for run in runs] + [1] * len(own))
    tables = members[np.cumsum(sizes) - sizes]
    firsts = np.concatenate([[run.first * BLOCK_SIZE for run in runs], rests[own]]).astype(np.int64)
    ends = np.concatenate([[run.end * BLOCK_SIZE for run in runs], readers.contexts[own]]).astype(np.int64)
    begins = np.concatenate([firsts[: len(runs)] == 0, is_whole[own]])

    rows_of, nth_of = spread(counts[members])
    rows = row_starts[members[rows_of]] + nth_of  # of all runs, concatenated
    num_rows = np.add.reduceat(counts[members], np.cumsum(sizes) - sizes)
    row_offsets = np.cumsum(num_rows) - num_rows

    pieces = -(-num_rows // rows_at_once(shape, variant))
    run_of, piece = spread(pieces)
    lows = num_rows[run_of] * piece // pieces[run_of]
    highs = num_rows[run_of] * (piece + 1) // pieces[run_of]
    bases = firsts // BLOCK_SIZE * BLOCK_SIZE
    tokens = _tokens_of_item(int(((ends - bases) * pieces).sum()), shape, variant, num_cores)
    parts = np.maximum(-(-(ends - bases) // tokens), 1)[run_of]
    piece_of, part = spread(parts)
    run_of, lows, highs = run_of[piece_of], lows[piece_of], highs[piece_of]
    starts = bases[run_of] + part * tokens

    entries = highs - lows
    item_of, nth_of = spread(entries)
    row_of = rows[row_offsets[run_of[item_of]] + lows[item_of] + nth_of]
    results = np.empty_like(row_of)
    results[np.argsort(row_of, kind="stable")] = np.arange(len(row_of))
    items = np.zeros((len(run_of), 8), np.int32)
    items[:, 0] = tables[run_of]
    items[:, 1] = np.maximum(starts, firsts[run_of])
    items[:, 2] = np.minimum(starts + tokens, ends[run_of])
    items[:, 3] = begins[run_of] & (part == 0)
    items[:, 4] = np.cumsum(entries) - entries
    items[:, 5] = entries
    item_rows = np.stack([readers.rows[row_of], results, row_firsts[row_of], row_ends[row_of]], axis=1)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=len(owners)))])
    return SharedWork(items, item_rows.astype(np.int32), bounds.astype(np.int32))


def _tokens_of_item(num_tokens: int, shape: DecodeShape, variant: KernelVariant, num_cores: int) -> int:
    """The tokens of an item: an even share of all tokens read, in whole blocks, but at least `MIN_BLOCKS`, since
    partial results cost time, too."""
    wanted = max(1, THREADGROUPS_PER_CORE * num_cores // (shape.num_kv_heads * shared_tiles(shape, variant)))
    return BLOCK_SIZE * max(-(-num_tokens // (BLOCK_SIZE * wanted)), MIN_BLOCKS)
