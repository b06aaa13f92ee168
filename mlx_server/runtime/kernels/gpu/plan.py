"""The host's half of GPU attention: how the decode kernel is cut for a shape, and which tokens each threadgroup reads.

Index arrays are made once a step. Windows are resolved here: a work item names the tokens it sees, so the kernels know
no window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention import IntArray, LayerSpec, StepPlan, causal_mask
from mlx_server.runtime.row_pool import SMALL_ARRAY

SIMD_WIDTH = 32
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256, 512)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
MAX_SIMDGROUPS = 8
MAX_THREADGROUP_BYTES = 32768

_FLOATS_PER_LANE = 16
"""Floats of queries (and as many of sums) that a lane may hold before registers spill; MLX measured the same
limit for its own grouped kernel: 8 heads at head_dim 64, 4 at 128."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The attention of one layer as a decode kernel sees it."""

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    bits: int | None = None

    @classmethod
    def of(cls, spec: LayerSpec, num_query_heads: int) -> DecodeShape:
        return cls(num_query_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.dtype, spec.bits)

    @property
    def spec(self) -> LayerSpec:
        """What the layer stores."""
        return LayerSpec(self.num_kv_heads, self.key_dim, self.value_dim, self.dtype, self.bits)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """The choices that change speed and never the result; `bench kernels` sweeps them.

    heads_per_simdgroup  query heads that share each K/V row read, in registers
    simdgroups           of a threadgroup; those that the heads leave over read different blocks
    lanes_per_row        lanes that split one K/V row; 32 / lanes_per_row rows are read side by side
    rows_ahead           rows that each lane loads before it uses the first
    partition_tokens     tokens of a work item, a multiple of 32; None: chosen by the sequence's own length
    """

    heads_per_simdgroup: int
    simdgroups: int
    lanes_per_row: int
    rows_ahead: int
    partition_tokens: int | None = None

    def head_simdgroups(self, shape: DecodeShape) -> int:
        """Simdgroups side by side over the query heads of one KV head."""
        return min(self.simdgroups, -(-shape.group_size // self.heads_per_simdgroup))

    def streams(self, shape: DecodeShape) -> int:
        """Simdgroups side by side over the blocks of a work item."""
        return self.simdgroups // self.head_simdgroups(shape)

    def tiles(self, shape: DecodeShape) -> int:
        """Threadgroups that share one KV head's work item."""
        return -(-shape.group_size // (self.heads_per_simdgroup * self.head_simdgroups(shape)))

    def row_reads(self, shape: DecodeShape) -> int:
        """Times that each K/V row is read: once for every `heads_per_simdgroup` query heads."""
        return self.tiles(shape) * self.head_simdgroups(shape)

    def threads(self, shape: DecodeShape) -> int:
        """Threads of a threadgroup."""
        return SIMD_WIDTH * self.head_simdgroups(shape) * self.streams(shape)

    def threadgroup_bytes(self, shape: DecodeShape) -> int:
        """Threadgroup memory of `paged_decode`: a row of sums, a maximum and a total for each simdgroup."""
        return 4 * (shape.value_dim + 2) * self.head_simdgroups(shape) * self.streams(shape)


def unsupported_reason(shape: DecodeShape) -> str | None:
    """Why no decode kernel exists for `shape`, or None if one does."""
    known = ", ".join(map(str, HEAD_DIMS))
    for name, dim in (("key", shape.key_dim), ("value", shape.value_dim)):
        if dim not in HEAD_DIMS:
            return f"{name} head_dim {dim} is none of {known}"
    if shape.dtype not in DTYPES:
        return f"dtype {shape.dtype} is none of float16, bfloat16, float32"
    if shape.num_query_heads % shape.num_kv_heads:
        return f"{shape.num_query_heads} query heads do not divide over {shape.num_kv_heads} KV heads"
    return None


def check_variant(shape: DecodeShape, variant: KernelVariant) -> None:
    """Raises `ValueError` if `variant` cannot be launched for `shape`."""
    lanes = variant.lanes_per_row
    if lanes not in (4, 8, 16, 32) or shape.key_dim % (2 * lanes) or shape.value_dim % (2 * lanes):
        raise ValueError(f"{lanes} lanes cannot split rows of {shape.key_dim} and {shape.value_dim} elements evenly")
    if not 1 <= variant.simdgroups <= MAX_SIMDGROUPS:
        raise ValueError(f"{variant.simdgroups} simdgroups; a threadgroup takes 1 to {MAX_SIMDGROUPS}")
    if variant.heads_per_simdgroup < 1 or variant.rows_ahead < 1:
        raise ValueError(f"{variant} reads no heads or no rows")
    if variant.threadgroup_bytes(shape) > MAX_THREADGROUP_BYTES:
        raise ValueError(f"{variant} needs {variant.threadgroup_bytes(shape)} bytes of threadgroup memory")
    tokens = variant.partition_tokens
    if tokens is not None and (tokens < BLOCK_SIZE or tokens % BLOCK_SIZE):
        raise ValueError(f"partition_tokens is {tokens}; it must be a multiple of {BLOCK_SIZE}")


def default_variant(shape: DecodeShape) -> KernelVariant:
    """A choice that is sound on every GPU: no spills, 128 to 256 threads, rows split without idle lanes."""
    lanes = max(n for n in (8, 16, 32) if shape.key_dim % (2 * n) == 0 and shape.value_dim % (2 * n) == 0)
    part = max(shape.key_dim, shape.value_dim) // lanes
    most_heads = max(2, _FLOATS_PER_LANE // part)
    heads = -(-shape.group_size // -(-shape.group_size // most_heads))
    head_simdgroups = min(MAX_SIMDGROUPS, -(-shape.group_size // heads))
    streams = max(1, min(4, MAX_SIMDGROUPS // head_simdgroups))
    return KernelVariant(
        heads_per_simdgroup=heads,
        simdgroups=head_simdgroups * streams,
        lanes_per_row=lanes,
        rows_ahead=max(1, min(4, _FLOATS_PER_LANE // part)),
    )


THREADGROUPS_PER_CORE = 8
"""Threadgroups of 128 to 256 threads that hide the latency of a core's reads."""

GATHER_TOKENS = 32_768
"""Of contexts whose rows are gathered at once, unless a single one is longer: they take memory together, and those
gathered one after the other wait for each other."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """How the decodes of a kind of layer are cut. Equal to itself alone: a step looks up what it has for one."""

    shape: DecodeShape
    variant: KernelVariant


@dataclass(frozen=True, slots=True)
class Work:
    """Work items `[W, 4]`: sequence, first token, end token, 1 for a sequence's first item.

    Sequence s owns items [starts[s], starts[s + 1]).
    """

    items: IntArray
    starts: IntArray

    @property
    def is_split(self) -> bool:
        return len(self.items) > len(self.starts) - 1


def make_work(
    context_lens: IntArray, window: int | None, shape: DecodeShape, variant: KernelVariant, num_cores: int
) -> Work:
    """Cuts the visible tokens of each decoding sequence into runs of whole blocks.

    How a sequence is cut depends on its own length, the shape and the GPU alone, so its result is the same to the bit
    whoever runs beside it. Each is cut as if it ran alone: the longest item is then no more than an even share of all,
    and a batch of many has more items than it needs, which cost it a few percent.
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
    """Tokens of each sequence's work items: as many as leave threadgroups enough to fill the GPU with this sequence
    alone, and a block for each stream."""
    if variant.partition_tokens is not None:
        return np.full_like(lengths, variant.partition_tokens)
    groups_per_item = shape.num_kv_heads * variant.tiles(shape)
    wanted_items = max(1, THREADGROUPS_PER_CORE * num_cores // groups_per_item)
    blocks = -(-lengths // (BLOCK_SIZE * wanted_items))
    return BLOCK_SIZE * np.maximum(blocks, variant.streams(shape))


@dataclass(frozen=True, slots=True)
class DecodeIndices:
    """A `Work` on the device, and the blocks of its sequences.

    `item_starts` is None where each sequence is one item, which needs no merging.
    """

    block_tables: mx.array
    work_items: mx.array
    num_sequences: int
    num_items: int
    item_starts: mx.array | None

    @classmethod
    def of(cls, work: Work, block_tables: mx.array) -> DecodeIndices:
        return cls(
            block_tables=block_tables,
            work_items=mx.array(_at_least(SMALL_ARRAY // 4, work.items)),
            num_sequences=len(work.starts) - 1,
            num_items=len(work.items),
            item_starts=mx.array(_at_least(SMALL_ARRAY, work.starts)) if work.is_split else None,
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """The K/V rows that some queries of a step see.

    queries  which of the step's rows they are
    rows     [R, num_kv_heads, B]: rows of a pool viewed `[num_blocks * num_kv_heads, 32, dim]`, one line a sequence
    first, end  the tokens wanted, of the B * 32 that the rows give
    mask     boolean, [R or 1, 1, L, end - first], or "causal"
    """

    queries: slice
    rows: IntArray
    first: int
    end: int
    mask: mx.array | str


@dataclass(frozen=True, slots=True)
class Gather:
    """What several see, to be gathered at once: the `num_rows` of `rows` are those of `seen`, one after the other."""

    seen: tuple[Seen, ...]
    rows: mx.array
    num_rows: int

    @classmethod
    def of(cls, *seen: Seen) -> Gather:
        rows = np.concatenate([one.rows.reshape(-1) for one in seen])
        return cls(seen, mx.array(_at_least(SMALL_ARRAY, rows)), len(rows))


@dataclass(slots=True)
class GpuMetadata:
    """A step's plan with its index arrays on the device; those that depend on a layer's shape are made when asked
    for and kept for the layers like it."""

    step: StepPlan
    slots: mx.array
    block_tables: mx.array
    num_cores: int
    num_decodes: int
    num_chunks: int
    _decodes: dict[tuple[Cut, int | None], DecodeIndices] = field(default_factory=dict)
    _gathers: dict[tuple[bool, int, int | None], tuple[Gather, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, step: StepPlan, num_cores: int) -> GpuMetadata:
        tables = step.block_tables[: step.num_decodes]
        if tables.size < SMALL_ARRAY:
            tables = np.pad(tables, ((0, max(0, 1 - len(tables))), (0, SMALL_ARRAY)))
        return cls(
            step=step,
            slots=mx.array(_at_least(SMALL_ARRAY, step.slot_mapping.astype(np.int32))),
            block_tables=mx.array(tables),
            num_cores=num_cores,
            num_decodes=step.num_decodes,
            num_chunks=step.num_requests - step.num_decodes,
        )

    def decode_indices(self, cut: Cut, window: int | None) -> DecodeIndices:
        """Work items of the step's decodes for layers that are cut so and have this window."""
        key = cut, window
        if key not in self._decodes:
            contexts = self.step.context_lens[: self.num_decodes]
            work = make_work(contexts, window, cut.shape, cut.variant, self.num_cores)
            self._decodes[key] = DecodeIndices.of(work, self.block_tables)
        return self._decodes[key]

    def chunk_gathers(self, num_kv_heads: int, window: int | None) -> tuple[Gather, ...]:
        """What the prompt chunks see: each its own past and itself, causally, in its window. Together, as many as
        `GATHER_TOKENS` allow."""
        key = True, num_kv_heads, window
        if key not in self._gathers:
            chunks = [self._chunk(r, num_kv_heads, window) for r in range(self.num_decodes, self.step.num_requests)]
            self._gathers[key] = tuple(Gather.of(*group) for group in _in_groups(chunks))
        return self._gathers[key]

    def decodes_gather(self, num_kv_heads: int, window: int | None) -> Gather:
        """What all decodes see, padded to the longest: for layers that no decode kernel supports."""
        key = False, num_kv_heads, window
        if key not in self._gathers:
            contexts = self.step.context_lens[: self.num_decodes]
            longest = int(contexts.max())
            lowest = 0 if window is None else max(0, int(contexts.min()) - window)
            rows, base = _pool_rows(self.step.block_tables[: self.num_decodes], lowest, longest, num_kv_heads)
            positions = mx.array(contexts - 1)[:, None, None, None]
            mask = causal_mask(positions, mx.arange(lowest, longest), window)
            seen = Seen(slice(0, self.num_decodes), rows, lowest - base, longest - base, mask)
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
        if window is not None and length > window:
            positions = mx.arange(position, length)[None, None, :, None]
            mask = causal_mask(positions, mx.arange(lowest, length), window)
        return Seen(slice(first_query, end_query), rows, lowest - base, length - base, mask)


def _in_groups(chunks: Sequence[Seen]) -> Iterator[list[Seen]]:
    """Neighbours together while they see no more than `GATHER_TOKENS`; never less than one."""
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
    """Pool rows `[R, num_kv_heads, B]` of the blocks that hold tokens first to end - 1, and B's first token."""
    blocks = tables[:, first // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
    heads = np.arange(num_kv_heads, dtype=np.int32)
    return blocks[:, None, :] * num_kv_heads + heads[:, None], first // BLOCK_SIZE * BLOCK_SIZE


def decode_bytes(shape: DecodeShape, context_lens: Sequence[int], variant: KernelVariant, *, num_cores: int) -> int:
    """What the loads and stores of one layer's decode attention of `len(context_lens)` sequences add up to, caches not
    counted, on a GPU of `num_cores`."""
    work = make_work(np.asarray(context_lens, np.int32), None, shape, variant, num_cores)
    blocks = int((-(-work.items[:, 2] // BLOCK_SIZE) - work.items[:, 1] // BLOCK_SIZE).sum())
    rows = sum(context_lens) * shape.spec.token_bytes
    queries = shape.num_query_heads * shape.key_dim * shape.dtype.size
    results = shape.num_query_heads * shape.value_dim * shape.dtype.size

    num_items = len(work.items)
    reads = variant.row_reads(shape)
    indices = 4 * shape.num_kv_heads * reads * (blocks + 4 * num_items)
    stats = 2 * 4 * num_items * shape.num_query_heads
    moved = rows * reads + num_items * queries * variant.streams(shape) + indices + stats
    if work.is_split:
        partial = num_items * shape.num_query_heads * shape.value_dim * mx.float32.size
        moved += 2 * partial + stats
    return moved + len(context_lens) * results
