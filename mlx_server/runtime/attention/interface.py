"""Paged attention: the step's plan, the interface of backends, the `reference` backend, which tests compare others
with, and its variant for bidirectional embedders.

A backend defines the layout of its pools and of its metadata; the layers only call `attend`. Everything runs on the MLX
thread.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ModelLoadError
from mlx_server.outputs import PoolChange
from mlx_server.runtime.cache.row_pool import (
    KvBits,
    MakeRows,
    PlainRows,
    RowPool,
    Rows,
    RowsShape,
    Slots,
    make_side,
    row_bytes,
    side_bits,
)

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The positions of all tokens of a step, for the layers of one group, as NumPy arrays that the host makes once a
    step. Only `slot_mapping` and `block_tables` differ between groups.

    R requests have T tokens: first `num_decodes` requests with one token each, then prompt chunks. Request r has the
    tokens [query_starts[r], query_starts[r + 1]), which are the last ones of its context:

        positions     [T]      position of each token in its request (rope offset)
        slot_mapping  [T]      block_id * BLOCK_SIZE + offset, where its K/V are stored
        query_starts  [R + 1]  first token of each request; query_starts[R] == T
        context_lens  [R]      tokens of the request after this step, this step's own included
        block_tables  [R, B]   block ids; row r is valid in its first ceil(context_lens[r] / BLOCK_SIZE) entries and 0
                               after them. Entries before the window of the layers are 0, too. Block 0 may belong to any
                               request: what is read there must be masked
        state_slots   [R]      slots with the requests' recurrent states; may be empty
        next_slots    [R]      slots for the states after the step
        both_ways     [R]      1 if the request's tokens see later tokens of the step, too; empty if none do
    """

    num_decodes: int
    positions: IntArray
    slot_mapping: npt.NDArray[np.int64]
    query_starts: IntArray
    context_lens: IntArray
    block_tables: IntArray
    state_slots: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    next_slots: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    both_ways: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))

    def part(self, index: int, num_parts: int) -> StepPlan:
        """The plan for layers that see each block as `num_parts` blocks and use the one at `index`."""
        blocks, offsets = np.divmod(self.slot_mapping, BLOCK_SIZE)
        return replace(
            self,
            slot_mapping=(blocks * num_parts + index) * BLOCK_SIZE + offsets,
            block_tables=self.block_tables * num_parts + index,
        )

    def with_spans(self, spans: IntArray) -> StepPlan:
        """The plan for attention with bidirectional spans `[S, 2]`, rows [first, last) within prompt chunks: each span
        becomes a request whose tokens see each other in both directions, and the rest of its chunk before and after it
        becomes a request, too.

        Example: a chunk with positions 40 to 45 that starts at row 3, and the span [5, 7): query starts 3, 5, 7, 9 and
        context lengths 42, 44, 46. Spans of one row, which may be decodes, stay as they are.
        """
        spans = spans[spans[:, 1] - spans[:, 0] > 1]
        query_starts = np.unique(np.concatenate([self.query_starts, spans.reshape(-1)]))
        owners = np.searchsorted(self.query_starts, query_starts[:-1], side="right") - 1
        return replace(
            self,
            query_starts=query_starts,
            context_lens=self.positions[query_starts[1:] - 1] + 1,
            block_tables=self.block_tables[owners],
            both_ways=np.isin(query_starts[:-1], spans[:, 0]).astype(np.int32),
        )

    def is_both_ways(self, request: int) -> bool:
        return bool(len(self.both_ways) and self.both_ways[request])

    def by_row(self) -> StepPlan:
        """The plan with each token of a prompt chunk as a decode of its own, which sees its context up to itself.
        Raises `ValueError` for tokens that see later ones."""
        if self.both_ways.any():
            raise ValueError(
                "tokens that see each other both ways cannot be computed one by one, as --batch-invariant requires"
            )
        owners = np.repeat(np.arange(self.num_requests), np.diff(self.query_starts))
        return replace(
            self,
            num_decodes=self.num_tokens,
            query_starts=np.arange(self.num_tokens + 1, dtype=np.int32),
            context_lens=self.positions + 1,
            block_tables=self.block_tables[owners],
        )

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_requests(self) -> int:
        return len(self.context_lens)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer stores: for each KV head K rows of `key_dim` and V rows of `value_dim`. With `bits` they
    are quantised: codes, and a scale and a bias of `dtype` for each `KV_GROUP_SIZE` numbers, where a number is
    code * scale + bias as in MLX's affine quantisation. Raises `ConfigError` for dimensions that cannot be
    quantised."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    bits: KvBits | None = None

    def __post_init__(self) -> None:
        _ = self.block_bytes  # raises

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V."""
        return self.num_kv_heads * sum(self.row_bytes)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a token's K row and V row of one head."""
        keys, values = side_bits(self.bits)
        return row_bytes(self.key_dim, self.dtype, keys), row_bytes(self.value_dim, self.dtype, values)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's K and V."""
        return BLOCK_SIZE * self.token_bytes

    def times(self, num_layers: int) -> LayerSpec:
        """A layer whose block has room for the blocks of `num_layers` layers like this one."""
        return replace(self, num_kv_heads=num_layers * self.num_kv_heads)


class AttentionBackend(Protocol):
    """Writes K/V into pools of 32-token blocks and attends over them in place.

    With `needs_synchronous_steps`, a step may be built but not submitted while another one runs, because its writes
    would copy the pools.
    """

    name: str

    @property
    def needs_synchronous_steps(self) -> bool: ...

    def make_pool(self, spec: LayerSpec, num_blocks: int, max_blocks: int | None = None) -> Any:
        """Allocates one layer's pool. K and V are logically `[num_blocks, num_kv_heads, BLOCK_SIZE, dim]`. The pool may
        grow to `max_blocks`; without it, the size is fixed."""

    def make_rows(self, shape: RowsShape, dtype: mx.Dtype) -> Rows:
        """Zeros for recurrent states, and for K/V that modules read group by group; written in place if this backend
        can."""

    def change_pool(self, pool: Any, change: PoolChange) -> Any:
        """The pool after the change; the given pool must not be used any more. All steps that use it must have
        ended."""

    def view_pool(self, pool: Any, spec: LayerSpec, num_parts: int) -> Any:
        """A view of a pool's memory for layers like `spec`, of which `num_parts` fill a block: block b of the pool is
        their blocks from num_parts * b on. Pool and view share their content, and `state` of the pool covers its views.
        A view becomes invalid when the pool changes."""

    def warm_up(
        self, spec: LayerSpec, num_query_heads: int, *, sinks: mx.array | None = None
    ) -> Generator[float, None, None]:
        """Compiles and checks what such a layer needs. To be exhausted before `attend`; further calls do nothing. Other
        models' steps may run at each yield, which is of 1."""

    def plan(self, step: StepPlan) -> Any:
        """Makes this backend's metadata from a step's plan. Called once a step for each place that layers have in
        blocks, and used by all layers at that place."""

    def attend(
        self,
        pool: Any,
        queries: mx.array,
        keys: mx.array | None,
        values: mx.array | None,
        metadata: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Stores this step's K/V, then attends causally, or to the end of its context if a request `is_both_ways`.

        queries `[T, H, 1, key_dim]`, keys `[T, Hkv, 1, key_dim]`, values `[T, Hkv, 1, value_dim]` (None if another
        layer has written the shared pool); returns `[T, H, 1, value_dim]`. With `window` w, position p sees positions
        p - w + 1 to p. `sinks` `[H]` are logits that take part in the softmax without a value.
        """

    def state(self, pool: Any) -> list[mx.array]:
        """The arrays to evaluate so that the pool holds what was written."""


def block_sources(num_blocks: int, change: PoolChange) -> IntArray:
    """For each block of a pool after a change, the block whose content it gets: its own, the moved block's, or block 0
    if the pool has grown. `num_blocks` is the number before the change."""
    sources = np.arange(change.num_blocks, dtype=np.int32)
    sources[num_blocks:] = 0
    for move in change.moves:
        sources[move.destination] = move.source
    return sources


@dataclass(frozen=True, slots=True)
class ReferenceMetadata:
    """The step's plan, and the slots that its gathers read."""

    step: StepPlan
    slots: Slots
    chunk_slots: tuple[Slots, ...]
    decode_slots: Slots | None
    decode_positions: mx.array | None


class ReferenceBackend:
    """Gathers K/V and calls `mx.fast.scaled_dot_product_attention`; writes through the rows that `make_rows` makes.
    Slow and simple: other backends are compared with it.

    Gathers all decodes together, padded, and each prompt chunk separately.
    """

    name = "reference"
    needs_synchronous_steps = True

    def __init__(self, make_rows: MakeRows = PlainRows.zeros) -> None:
        self.make_rows = make_rows

    def make_pool(self, spec: LayerSpec, num_blocks: int, max_blocks: int | None = None) -> RowPool:
        places = num_blocks * BLOCK_SIZE, spec.num_kv_heads
        sides = zip((spec.key_dim, spec.value_dim), side_bits(spec.bits))
        keys, values = (make_side((*places, dim), spec.dtype, bits, self.make_rows) for dim, bits in sides)
        return RowPool(keys, values, num_blocks)

    def change_pool(self, pool: RowPool, change: PoolChange) -> RowPool:
        sources = block_sources(pool.num_blocks, change)
        return pool.take(Slots(context_slots(sources, len(sources) * BLOCK_SIZE)))

    def view_pool(self, pool: RowPool, spec: LayerSpec, num_parts: int) -> RowPool:
        return pool.view(num_parts, spec.num_kv_heads, (spec.key_dim, spec.value_dim))

    def warm_up(
        self, spec: LayerSpec, num_query_heads: int, *, sinks: mx.array | None = None
    ) -> Generator[float, None, None]:
        yield from ()

    def plan(self, step: StepPlan) -> ReferenceMetadata:
        chunk_slots = tuple(
            Slots(context_slots(step.block_tables[r], int(step.context_lens[r])))
            for r in range(step.num_decodes, step.num_requests)
        )
        decode_slots = decode_positions = None
        if step.num_decodes:
            longest = int(step.context_lens[: step.num_decodes].max())
            decode_slots = Slots(context_slots(step.block_tables[: step.num_decodes], longest))
            decode_positions = mx.array(step.positions[: step.num_decodes])
        return ReferenceMetadata(step, Slots(step.slot_mapping), chunk_slots, decode_slots, decode_positions)

    def attend(
        self,
        pool: RowPool,
        queries: mx.array,
        keys: mx.array | None,
        values: mx.array | None,
        metadata: ReferenceMetadata,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if keys is not None and values is not None:
            pool.keys.write(metadata.slots, keys[:, :, 0])
            pool.values.write(metadata.slots, values[:, :, 0])
        step = metadata.step
        parts = []
        if metadata.decode_slots is not None and metadata.decode_positions is not None:
            positions = metadata.decode_positions[:, None, None, None]
            mask = causal_mask(positions, mx.arange(metadata.decode_slots.numbers.shape[1]), window)
            parts.append(
                mx.fast.scaled_dot_product_attention(
                    queries[: step.num_decodes],
                    pool.keys.read(metadata.decode_slots).transpose(0, 2, 1, 3),
                    pool.values.read(metadata.decode_slots).transpose(0, 2, 1, 3),
                    scale=scale,
                    mask=mask,
                    sinks=sinks,
                )
            )
        for index, slots in enumerate(metadata.chunk_slots):
            r = step.num_decodes + index
            first, last = int(step.query_starts[r]), int(step.query_starts[r + 1])
            positions = mx.arange(int(step.positions[first]), int(step.positions[first]) + last - first)
            out = mx.fast.scaled_dot_product_attention(
                queries[first:last].transpose(2, 1, 0, 3),
                pool.keys.read(slots).transpose(1, 0, 2)[None],
                pool.values.read(slots).transpose(1, 0, 2)[None],
                scale=scale,
                mask=chunk_mask(positions[:, None], mx.arange(slots.numbers.size), window, step.is_both_ways(r)),
                sinks=sinks,
            )
            parts.append(out.transpose(2, 1, 0, 3))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def state(self, pool: RowPool) -> list[mx.array]:
        return pool.arrays()


def context_slots(block_table: IntArray, length: int) -> IntArray:
    """The slots of positions 0 to length - 1, for one block table `[B]` or several `[R, B]`."""
    offsets = np.arange(BLOCK_SIZE, dtype=np.int32)
    slots = block_table[..., None] * BLOCK_SIZE + offsets
    return slots.reshape(*block_table.shape[:-1], -1)[..., :length]


def causal_mask(positions: mx.array, keys: mx.array, window: int | None) -> mx.array:
    """`[..., keys]`: which keys, given by their positions, are seen by the queries at `positions` `[..., 1]`."""
    mask = keys <= positions
    if window is not None:
        mask = mask & (keys > positions - window)
    return mask


_NO_WINDOW = 2**30


def chunk_mask(positions: mx.array, keys: mx.array, window: int | None, is_both_ways: bool) -> mx.array:
    """As `causal_mask` for one request; if it `is_both_ways`, it sees all keys except those before its window."""
    if not is_both_ways:
        return causal_mask(positions, keys, window)
    return keys > positions - (window or _NO_WINDOW)


class BidirectionalBackend(ReferenceBackend):
    """Attention of embedders in which each position sees its whole input. A request's rows of a step are all of its
    input, so nothing is read from the pools or written to them.

    `window` w lets position p see positions p - w // 2 to p + w // 2, as Gemma 3's embedders were trained.
    """

    name = "bidirectional"
    needs_synchronous_steps = False

    def plan(self, step: StepPlan) -> Any:
        """Where each input's rows start in the step, and the step's end."""
        return step.query_starts.tolist()

    def attend(
        self,
        pool: Any,
        queries: mx.array,
        keys: mx.array | None,
        values: mx.array | None,
        metadata: Any,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if keys is None or values is None:
            raise ModelLoadError("Layers that share K/V cannot be bidirectional; start the model with --pooling off.")
        parts = []
        for first, last in pairwise(metadata):
            mine = [x[first:last].transpose(2, 1, 0, 3) for x in (queries, keys, values)]
            mask = None
            if window is not None and last - first > window // 2 + 1:
                places = mx.arange(last - first)
                mask = mx.abs(places[:, None] - places[None]) <= window // 2
            out = mx.fast.scaled_dot_product_attention(*mine, scale=scale, mask=mask, sinks=sinks)
            parts.append(out.transpose(2, 1, 0, 3))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def state(self, pool: Any) -> list[mx.array]:
        return []
