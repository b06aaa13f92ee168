"""The shapes that the decode kernels support, and their variants: how work is divided among simdgroups and lanes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention.interface import LayerSpec
from mlx_server.runtime.cache.row_pool import KvBits

SIMD_WIDTH = 32
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256, 512)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
MAX_SIMDGROUPS = 8
MAX_THREADGROUP_BYTES = 32768

_FLOATS_PER_LANE = 16
"""The floats of queries (and as many of sums) that a lane can hold before registers spill. MLX measured the same limit
for its own grouped kernel: 8 heads at head_dim 64, 4 at 128."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The attention of one layer as a decode kernel sees it."""

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    bits: KvBits | None = None

    @classmethod
    def of(cls, spec: LayerSpec, num_query_heads: int) -> DecodeShape:
        return cls(num_query_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.dtype, spec.bits)

    @property
    def spec(self) -> LayerSpec:
        """The spec of what the layer stores."""
        return LayerSpec(self.num_kv_heads, self.key_dim, self.value_dim, self.dtype, self.bits)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """Choices that change the speed, and the result only in its rounding; `bench kernels` measures them.

    heads_per_simdgroup  query heads in a simdgroup's registers, which share each read of a K/V row
    simdgroups           simdgroups of a threadgroup; those that the query heads do not need read different blocks
    lanes_per_row        lanes that split one K/V row; 32 / lanes_per_row rows are read at the same time
    rows_ahead           rows that each lane loads before it uses the first
    partition_tokens     tokens of a work item, a multiple of 32; None: chosen by the sequence's own length
    """

    heads_per_simdgroup: int
    simdgroups: int
    lanes_per_row: int
    rows_ahead: int
    partition_tokens: int | None = None

    def head_simdgroups(self, shape: DecodeShape) -> int:
        """The number of simdgroups among which the query heads of one KV head are divided."""
        return min(self.simdgroups, -(-shape.group_size // self.heads_per_simdgroup))

    def streams(self, shape: DecodeShape) -> int:
        """The number of parts into which the blocks of a work item are divided, each read by its own simdgroups."""
        return self.simdgroups // self.head_simdgroups(shape)

    def tiles(self, shape: DecodeShape) -> int:
        """The number of threadgroups for a work item and KV head, each with some of its query heads."""
        return -(-shape.group_size // (self.heads_per_simdgroup * self.head_simdgroups(shape)))

    def threads(self, shape: DecodeShape) -> int:
        """The threads of a threadgroup."""
        return SIMD_WIDTH * self.head_simdgroups(shape) * self.streams(shape)

    def threadgroup_bytes(self, shape: DecodeShape) -> int:
        """The threadgroup memory of `paged_decode`: a row of sums, a maximum and a total for each simdgroup."""
        return 4 * (shape.value_dim + 2) * self.head_simdgroups(shape) * self.streams(shape)


def unsupported_reason(shape: DecodeShape) -> str | None:
    """The reason why no decode kernel supports `shape`, or None."""
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
    """A variant that works on every GPU: no spilled registers, 128 to 256 threads, no idle lanes. Like the shared one,
    with no more heads and simdgroups than the shape needs."""
    full = shared_variant(shape)
    heads = -(-shape.group_size // -(-shape.group_size // full.heads_per_simdgroup))
    head_simdgroups = min(MAX_SIMDGROUPS, -(-shape.group_size // heads))
    streams = max(1, min(4, MAX_SIMDGROUPS // head_simdgroups))
    return replace(full, heads_per_simdgroup=heads, simdgroups=head_simdgroups * streams)


_MAX_TILE_BYTES = 16384
"""The most K/V in threadgroup memory, so that two or three threadgroups fit on a core and one loads while another
computes."""


def shared_variant(shape: DecodeShape) -> KernelVariant:
    """The variant of `paged_shared` for a shape: eight simdgroups, each with as many packed rows (rows times query
    heads of a KV head) as its registers hold without spilling, so that 16 to 64 packed rows share each read."""
    lanes = max(n for n in (8, 16, 32) if shape.key_dim % (2 * n) == 0 and shape.value_dim % (2 * n) == 0)
    part = max(shape.key_dim, shape.value_dim) // lanes
    return KernelVariant(
        heads_per_simdgroup=max(2, _FLOATS_PER_LANE // part),
        simdgroups=MAX_SIMDGROUPS,
        lanes_per_row=lanes,
        rows_ahead=max(1, min(4, _FLOATS_PER_LANE // part)),
    )


def rows_at_once(shape: DecodeShape, variant: KernelVariant) -> int:
    """The most rows of an item of `paged_shared`: as many as its simdgroups hold with all query heads of a KV head."""
    return max(1, variant.heads_per_simdgroup * variant.simdgroups // shape.group_size)


def shared_tiles(shape: DecodeShape, variant: KernelVariant) -> int:
    """The number of threadgroups for an item and KV head of `paged_shared`; more than 1 if a row's heads do not fit."""
    return -(-shape.group_size // (variant.heads_per_simdgroup * variant.simdgroups))


def tile_tokens(shape: DecodeShape, variant: KernelVariant) -> int:
    """The tokens whose K/V `paged_shared` holds in threadgroup memory, beside the buffer for merging its simdgroups."""
    room = MAX_THREADGROUP_BYTES - 4 * (shape.value_dim + 2) * variant.simdgroups
    token = (shape.key_dim + shape.value_dim) * shape.dtype.size
    tokens = BLOCK_SIZE
    while tokens > 1 and tokens * token > min(room, _MAX_TILE_BYTES):
        tokens //= 2
    return tokens
