"""Plans GPU attention on the host: the kernel launches of a step, and the tokens that each threadgroup reads.

Index arrays are made once a step. Windows are resolved here: a work item names the tokens that it sees, so the kernels
need not know the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention.interface import IntArray, StepPlan, causal_mask, chunk_mask
from mlx_server.runtime.cache.row_pool import SMALL_ARRAY
from mlx_server.runtime.kernels.gpu.shared_work import THREADGROUPS_PER_CORE, SharedWork, make_shared_work
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, KernelVariant
from mlx_server.runtime.kernels.sharing import Indices, Readers, Run, find_runs

GATHER_TOKENS = 32_768
"""The most context tokens that are gathered at once, unless one context is longer. Contexts that are gathered at once
take memory at the same time; those that are gathered one after the other wait for each other."""

DECODES_AT_ONCE = 256
"""Rows of one launch (a few more if requests have several rows). The partial results of all its work items take memory
at the same time."""

FEW_ROWS = 16
"""The most tokens of a request that the shared kernel computes, like decodes: drafts, and short last chunks of prompts.
For usual shapes, it reads the request's K/V once or twice. Gathering moves them three times, once as a write, and needs
launches of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """How the decodes of a kind of layer are cut into work items; `shared` is None if rows cannot share reads. Compared
    by identity, because each step looks up its launches by it."""

    shape: DecodeShape
    variant: KernelVariant
    shared: KernelVariant | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Work items `[W, 4]`: sequence, first token, end token, and 1 for a sequence's first item, else 0.

    Sequence s has the items [starts[s], starts[s + 1]).
    """

    items: IntArray
    starts: IntArray

    @property
    def is_split(self) -> bool:
        return len(self.items) > len(self.starts) - 1


def make_work(
    context_lens: IntArray, window: int | None, shape: DecodeShape, variant: KernelVariant, num_cores: int
) -> Work:
    """Cuts the visible tokens of each decoding sequence into work items of whole blocks.

    The cut of a sequence depends only on its own length, the shape and the GPU, so the bits of its result do not depend
    on the rest of the batch. Each sequence is cut as if it ran alone: no item is then longer than an even share of all
    work, but a large batch has more items than it needs, which costs a few percent.
    """
    firsts = np.zeros_like(context_lens) if window is None else np.maximum(context_lens - window, 0)
    bases = firsts // BLOCK_SIZE * BLOCK_SIZE
    tokens = _partition_tokens(context_lens - bases, shape, variant, num_cores)
    counts = np.maximum(-(-(context_lens - bases) // tokens), 1)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    sequences = np.repeat(np.arange(len(context_lens), dtype=np.int32), counts)
    index = np.arange(len(sequences), dtype=np.int32) - starts[sequences]
    begins = bases[sequences] + index * tokens[sequences]
    items = np.stack(
        [
            sequences,
            np.maximum(begins, firsts[sequences]),
            np.minimum(begins + tokens[sequences], context_lens[sequences]),
            index == 0,
        ],
        axis=1,
    )
    return Work(items.astype(np.int32), starts)


def _partition_tokens(lengths: IntArray, shape: DecodeShape, variant: KernelVariant, num_cores: int) -> IntArray:
    """The tokens of each sequence's work items: few enough that this sequence alone fills the GPU with threadgroups,
    but at least a block for each stream of a threadgroup.

    Example: on 20 cores with 8 KV heads and one tile of query heads, 8 * 20 threadgroups are 20 items. A sequence of
    4,096 tokens is cut every 7 blocks (224 tokens): 19 items.
    """
    if variant.partition_tokens is not None:
        return np.full_like(lengths, variant.partition_tokens)
    groups_per_item = shape.num_kv_heads * variant.tiles(shape)
    wanted_items = max(1, THREADGROUPS_PER_CORE * num_cores // groups_per_item)
    blocks = -(-lengths // (BLOCK_SIZE * wanted_items))
    return BLOCK_SIZE * np.maximum(blocks, variant.streams(shape))


@dataclass(frozen=True, slots=True)
class DecodeIndices:
    """A `Work` or `SharedWork` on the device.

    arrays       the kernel's index inputs: block tables, items and, if shared, the rows of the items
    num_results  the number of partial results: one for each row of each item
    item_starts  `starts` of the work; None if each row is in one item, so that there is nothing to merge
    """

    arrays: tuple[mx.array, ...]
    num_sequences: int
    num_items: int
    num_results: int
    item_starts: mx.array | None

    @classmethod
    def of(cls, work: Work | SharedWork, block_tables: mx.array) -> DecodeIndices:
        """Copies `work` to the device. Small arrays are padded to `SMALL_ARRAY` elements."""
        arrays: tuple[mx.array, ...] = block_tables, mx.array(_at_least(SMALL_ARRAY // 4, work.items))
        num_results = len(work.items)
        if isinstance(work, SharedWork):
            arrays += (mx.array(_at_least(SMALL_ARRAY // 4, work.rows)),)
            num_results = len(work.rows)
        starts = mx.array(_at_least(SMALL_ARRAY, work.starts)) if work.is_split else None
        return cls(arrays, len(work.starts) - 1, len(work.items), num_results, starts)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: attention of some rows of a step. If it `is_shared`, its indices name the rows; otherwise they are
    consecutive from row `first` on. Each of `spans` is a slice of the results and the row of the step at which it
    begins."""

    indices: DecodeIndices
    is_shared: bool
    first: int
    spans: tuple[tuple[int, slice], ...]

    @classmethod
    def of(cls, indices: DecodeIndices, rows: Indices, *, is_shared: bool) -> Launch:
        bounds = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        spans = tuple((int(rows[start]), slice(start, end)) for start, end in pairwise(bounds))
        return cls(indices, is_shared, 0 if is_shared else int(rows[0]), spans)


@dataclass(frozen=True, slots=True)
class Launches:
    """How layers of one kind attend in a step. `decodes` compute the requests with few tokens. Chunks of more than
    `gathers_beyond` tokens are gathered, and so are all whose tokens see each other both ways; it is None if there are
    neither. `only` is set if one launch computes all rows in their order."""

    decodes: tuple[Launch, ...]
    gathers_beyond: int | None
    only: Launch | None


@dataclass(frozen=True, slots=True)
class Seen:
    """The K/V rows that some queries of a step see.

    queries     the queries' rows in the step
    rows        [R, num_kv_heads, B], for R sequences: row numbers in a pool viewed as
                `[num_blocks * num_kv_heads, 32, dim]`
    first, end  the range of tokens that is needed, of the B * 32 tokens of the rows
    mask        boolean, [R or 1, 1, L, end - first], or "causal"
    """

    queries: slice
    rows: IntArray
    first: int
    end: int
    mask: mx.array | str


@dataclass(frozen=True, slots=True)
class Gather:
    """Several `Seen` to gather at once: the first `num_rows` of `rows` are the rows of `seen`, concatenated."""

    seen: tuple[Seen, ...]
    rows: mx.array
    num_rows: int

    @classmethod
    def of(cls, *seen: Seen) -> Gather:
        rows = np.concatenate([one.rows.reshape(-1) for one in seen])
        return cls(seen, mx.array(_at_least(SMALL_ARRAY, rows)), len(rows))


@dataclass(frozen=True, slots=True)
class _Sharing:
    """The readers of one launch, their block tables on the device, and the runs that they share."""

    readers: Readers
    tables: mx.array
    runs: list[Run]


@dataclass(slots=True)
class GpuMetadata:
    """A step's plan with its index arrays on the device. Arrays that depend on a layer's shape are made at first use
    and kept for other layers like it. Without `may_share`, each row reads its own K/V."""

    step: StepPlan
    slots: mx.array
    block_tables: tuple[mx.array, ...]
    num_cores: int
    may_share: bool = True
    _launches: dict[tuple[Cut, int | None], Launches] = field(default_factory=dict)
    _gathers: dict[tuple[int, int, int | None], tuple[Gather, ...]] = field(default_factory=dict)
    _sharings: dict[bool, tuple[_Sharing, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, step: StepPlan, num_cores: int, *, may_share: bool = True) -> GpuMetadata:
        return cls(
            step=step,
            slots=mx.array(_at_least(SMALL_ARRAY, step.slot_mapping.astype(np.int32))),
            block_tables=tuple(map(_device_tables, _in_launches(step.block_tables[: step.num_decodes]))),
            num_cores=num_cores,
            may_share=may_share,
        )

    def launches(self, cut: Cut, window: int | None) -> Launches:
        """The launches for layers with this cut and window."""
        key = cut, window
        if key not in self._launches:
            self._launches[key] = self._make_launches(cut, window)
        return self._launches[key]

    def _make_launches(self, cut: Cut, window: int | None) -> Launches:
        shares = self.may_share and cut.shared is not None
        launches = self._shared_launches(cut, window, with_decodes=True) if shares and window is None else ()
        if not launches:
            launches = self._plain_launches(cut, window)
            if shares:
                launches += self._shared_launches(cut, window, with_decodes=False)
        most = FEW_ROWS if shares else 0
        gathers_beyond = most if self._chunks(most) else None
        is_one = gathers_beyond is None and len(launches) == 1 and len(launches[0].spans) == 1
        return Launches(launches, gathers_beyond, launches[0] if is_one else None)

    def _plain_launches(self, cut: Cut, window: int | None) -> tuple[Launch, ...]:
        num_decodes = self.step.num_decodes
        contexts, rows = self.step.context_lens[:num_decodes], np.arange(num_decodes, dtype=np.int32)
        works = (make_work(part, window, cut.shape, cut.variant, self.num_cores) for part in _in_launches(contexts))
        return tuple(
            Launch.of(DecodeIndices.of(work, tables), part, is_shared=False)
            for work, tables, part in zip(works, self.block_tables, _in_launches(rows), strict=True)
        )

    def _shared_launches(self, cut: Cut, window: int | None, *, with_decodes: bool) -> tuple[Launch, ...]:
        """Launches of the requests with few rows, decodes included if `with_decodes`. Empty if these share too
        little."""
        assert cut.shared is not None
        launches = []
        for sharing in self._sharing(with_decodes=with_decodes):
            readers = sharing.readers
            work = make_shared_work(readers, sharing.runs, window, cut.shape, cut.shared, self.num_cores)
            launches.append(Launch.of(DecodeIndices.of(work, sharing.tables), readers.rows, is_shared=True))
        return tuple(launches)

    def _sharing(self, *, with_decodes: bool) -> tuple[_Sharing, ...]:
        if with_decodes not in self._sharings:
            lengths = np.diff(self.step.query_starts)
            requests = np.flatnonzero((lengths <= FEW_ROWS) & ~self._both_ways)
            if not with_decodes:
                requests = requests[requests >= self.step.num_decodes]
            launches = np.cumsum(lengths[requests]) // DECODES_AT_ONCE
            parts = [self._readers(requests[launches == launch]) for launch in np.unique(launches)]
            runs = [find_runs(readers) if with_decodes else [] for readers in parts]
            self._sharings[with_decodes] = tuple(
                _Sharing(readers, _device_tables(readers.tables), found)
                for readers, found in zip(parts, runs, strict=True)
                if any(runs) or not with_decodes
            )
        return self._sharings[with_decodes]

    def _readers(self, requests: IntArray) -> Readers:
        step = self.step
        queries, lengths = step.query_starts[requests], np.diff(step.query_starts)[requests]
        return Readers(step.block_tables[requests], queries, lengths, step.context_lens[requests])

    @property
    def _both_ways(self) -> npt.NDArray[np.bool_]:
        """For each request, whether its attention is bidirectional; a single False if none is."""
        return self.step.both_ways > 0 if len(self.step.both_ways) else np.zeros(1, bool)

    def _chunks(self, longer_than: int) -> list[int]:
        """The requests after the decodes that have more rows, or whose tokens see each other both ways, which no decode
        kernel supports."""
        is_chunk = (np.diff(self.step.query_starts) > longer_than) | self._both_ways
        is_chunk[: self.step.num_decodes] = False
        return np.flatnonzero(is_chunk).tolist()

    def chunk_gathers(self, num_kv_heads: int, window: int | None, *, longer_than: int = 0) -> tuple[Gather, ...]:
        """What the prompt chunks with more than `longer_than` tokens see: each its own context, within the window. One
        gather has as many chunks as `GATHER_TOKENS` allows."""
        key = longer_than, num_kv_heads, window
        if key not in self._gathers:
            chunks = [self._chunk(request, num_kv_heads, window) for request in self._chunks(longer_than)]
            self._gathers[key] = tuple(Gather.of(*group) for group in _in_groups(chunks))
        return self._gathers[key]

    def decodes_gather(self, num_kv_heads: int, window: int | None) -> Gather:
        """What all decodes see, padded to the longest context: for layers that no decode kernel supports."""
        key = -1, num_kv_heads, window
        if key not in self._gathers:
            num_decodes = self.step.num_decodes
            contexts = self.step.context_lens[:num_decodes]
            longest = int(contexts.max())
            lowest = 0 if window is None else max(0, int(contexts.min()) - window)
            rows, base = _pool_rows(self.step.block_tables[:num_decodes], lowest, longest, num_kv_heads)
            positions = mx.array(contexts - 1)[:, None, None, None]
            mask = causal_mask(positions, mx.arange(lowest, longest), window)
            seen = Seen(slice(0, num_decodes), rows, lowest - base, longest - base, mask)
            self._gathers[key] = (Gather.of(seen),)
        return self._gathers[key][0]

    def _chunk(self, request: int, num_kv_heads: int, window: int | None) -> Seen:
        step = self.step
        first_query, end_query = (int(start) for start in step.query_starts[request : request + 2])
        length = int(step.context_lens[request])
        position = int(step.positions[first_query])
        lowest = 0 if window is None else max(0, position - window + 1)
        rows, base = _pool_rows(step.block_tables[request : request + 1], lowest, length, num_kv_heads)
        mask: mx.array | str = "causal"
        is_both_ways = step.is_both_ways(request)
        if is_both_ways or (window is not None and length > window):
            positions = mx.arange(position, length)[None, None, :, None]
            mask = chunk_mask(positions, mx.arange(lowest, length), window, is_both_ways)
        return Seen(slice(first_query, end_query), rows, lowest - base, length - base, mask)


def _in_launches(rows: IntArray) -> list[IntArray]:
    """Splits `rows`, one for each decode, into the rows of each launch."""
    return [rows[first : first + DECODES_AT_ONCE] for first in range(0, len(rows), DECODES_AT_ONCE)]


def _device_tables(tables: IntArray) -> mx.array:
    return mx.array(tables if tables.size >= SMALL_ARRAY else np.pad(tables, ((0, 0), (0, SMALL_ARRAY))))


def _in_groups(chunks: Sequence[Seen]) -> Iterator[list[Seen]]:
    """Groups of consecutive chunks that together see at most `GATHER_TOKENS`, or of one chunk that sees more."""
    group: list[Seen] = []
    tokens = 0
    for chunk in chunks:
        more = chunk.rows.shape[-1] * BLOCK_SIZE
        if group and tokens + more > GATHER_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(chunk)
        tokens += more
    if group:
        yield group


def _at_least(count: int, values: IntArray) -> IntArray:
    """`values` with zeros appended until its first axis has `count` entries."""
    missing = max(0, count - len(values))
    return np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1)) if missing else values


def _pool_rows(tables: IntArray, first: int, end: int, num_kv_heads: int) -> tuple[IntArray, int]:
    """Pool rows `[R, num_kv_heads, B]` of the blocks of tokens first to end - 1, and their first token."""
    blocks = tables[:, first // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
    heads = np.arange(num_kv_heads, dtype=np.int32)
    return blocks[:, None, :] * num_kv_heads + heads[:, None], first // BLOCK_SIZE * BLOCK_SIZE
