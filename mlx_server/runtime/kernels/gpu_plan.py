"""The host's half of GPU attention: which tokens each threadgroup reads, as index arrays made once a step.

Windows are resolved here: a work item names the tokens it sees, so the kernels know no window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention import IntArray, StepPlan
from mlx_server.runtime.kernels.gpu_variant import DecodeShape, KernelVariant
from mlx_server.runtime.slots import SMALL_ARRAY

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

    def parts(self, keys: mx.array, values: mx.array) -> Iterator[tuple[Seen, mx.array, mx.array]]:
        """Each with its K and V `[R, num_kv_heads, B * 32, dim]`, of those gathered `[num_rows, 32, dim]`."""
        start = 0
        for one in self.seen:
            sequences, heads, blocks = one.rows.shape
            end = start + one.rows.size
            shape = sequences, heads, blocks * BLOCK_SIZE
            yield one, keys[start:end].reshape(*shape, -1), values[start:end].reshape(*shape, -1)
            start = end


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
            mask = mx.array(_mask(contexts[:, None] - 1, _range(lowest, longest), window))
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
            mask = mx.array(_mask(_range(position, length)[None], _range(lowest, length), window))
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


def _range(first: int, end: int) -> IntArray:
    return np.arange(first, end, dtype=np.int32)


def _mask(positions: IntArray, keys: IntArray, window: int | None) -> npt.NDArray[np.bool_]:
    """`[R, 1, L, keys]`: which keys the queries at `positions` `[R, L]` see."""
    visible = keys <= positions[..., None]
    if window is not None:
        visible &= keys > positions[..., None] - window
    return visible[:, None]
