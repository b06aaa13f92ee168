"""The kernels of paged attention as MLX calls: their texts, template arguments, grids and outputs.

`make_kernel` is `mx.fast.metal_kernel`, `mx.fast.cuda_kernel`, or anything of the same signature: tests pass one
that runs the generated Metal source on the host. The texts are bodies in a dialect that Metal and CUDA share.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import mlx.core as mx

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention import LayerSpec
from mlx_server.runtime.kernels.gpu_plan import SMALL_ARRAY, DecodeIndices
from mlx_server.runtime.kernels.gpu_pool import AnyGpuPool
from mlx_server.runtime.kernels.gpu_variant import MAX_SIMDGROUPS, SIMD_WIDTH, DecodeShape, KernelVariant
from mlx_server.runtime.row_pool import group_size_of

Kernel = Callable[..., list[mx.array]]
MakeKernel = Callable[..., Kernel]

_MAX_THREADS = MAX_SIMDGROUPS * SIMD_WIDTH


@dataclass(frozen=True, slots=True)
class KernelText:
    """One kernel's name, body and argument names, in the order of its buffers."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def body(self) -> str:
        """The body without its comments: MLX hashes it at every call and searches it for argument names."""
        return re.sub(r"[ ]*//[^\n]*", "", read_text(f"{self.name}.msl"))


KV_WRITE = KernelText(
    "kv_write", ("new_keys", "new_values", "key_pool", "value_pool", "slots", "token"), ("token_out",)
)
KV_WRITE_QUANTIZED = KernelText("kv_write_quantized", KV_WRITE.inputs, KV_WRITE.outputs)
KV_WIDEN = KernelText("kv_widen", ("key_pool", "value_pool", "rows", "token"), ("keys", "values", "token_out"))
PAGED_DECODE = KernelText(
    "paged_decode",
    ("queries", "key_pool", "value_pool", "block_tables", "work_items", "scale", "softcap", "sinks", "token"),
    ("out", "stats", "token_out"),
)
PAGED_REDUCE = KernelText("paged_reduce", ("partial_out", "stats", "item_starts"), ("out",))
ORDER_AFTER = KernelText("order_after", ("token", "seen_keys", "seen_values"), ("token_out",))
KERNEL_TEXTS = (KV_WRITE, KV_WRITE_QUANTIZED, KV_WIDEN, PAGED_DECODE, PAGED_REDUCE, ORDER_AFTER)


def read_text(file_name: str) -> str:
    """A kernel text or header that ships beside this module."""
    return resources.files(__package__).joinpath(file_name).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns dot products into softmax logits."""

    scale: float
    softcap: float | None = None
    sinks: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Widened:
    """K and V `[R, num_kv_heads, B * 32, dim]` of quantised blocks, and the token that orders later writes after the
    reads that made them."""

    keys: mx.array
    values: mx.array
    token: mx.array


@dataclass(frozen=True, slots=True)
class Decoded:
    """Attention `[B, H, 1, value_dim]`, and the token that orders later writes after the reads that made it."""

    out: mx.array
    token: mx.array


class PagedKernels:
    """Builds each kernel once and launches it with the right grid. Arrays must be contiguous; on the MLX thread."""

    def __init__(self, make_kernel: MakeKernel, header: str = "") -> None:
        self._write, self._write_quantized, self._widen, self._decode, self._reduce, self._order = (
            make_kernel(
                name=text.name,
                input_names=list(text.inputs),
                output_names=list(text.outputs),
                source=text.body,
                header=header,
                ensure_row_contiguous=False,  # a pool must never be copied
            )
            for text in KERNEL_TEXTS
        )
        self._numbers: dict[float, mx.array] = {}

    def write(self, pool: AnyGpuPool, keys: mx.array, values: mx.array, slots: mx.array) -> mx.array:
        """Writes rows `[T, num_kv_heads, 1, dim]` into their slots of the pool; returns the pool's next token."""
        spec = pool.spec
        if spec.bits is None:
            kernel, width = self._write, max(spec.key_dim, spec.value_dim) // 4
        else:
            kernel = self._write_quantized
            width = sum(dim // group_size_of(dim) for dim in (spec.key_dim, spec.value_dim))
        return kernel(
            inputs=[keys, values, *pool.handles, slots, pool.token],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=(width, spec.num_kv_heads, keys.shape[0]),
            threadgroup=_rows_threadgroup(width, spec.num_kv_heads),
            template=[("T", spec.dtype), *_row_template(spec), ("KV_HEADS", spec.num_kv_heads)],
        )[0]

    def widen(self, pool: AnyGpuPool, rows: mx.array) -> Widened:
        """Gathers the runs at `rows` `[R, num_kv_heads, B]` of a quantised pool viewed
        `[num_blocks * num_kv_heads, words]`."""
        spec = pool.spec
        width = max(spec.key_dim, spec.value_dim) // 4
        flat = rows.reshape(-1)
        tokens = rows.shape[-1] * BLOCK_SIZE
        keys, values, token = self._widen(
            inputs=[*pool.handles, mx.pad(flat, (0, max(0, SMALL_ARRAY - flat.size))), pool.token],
            output_shapes=[(*rows.shape[:2], tokens, dim) for dim in (spec.key_dim, spec.value_dim)] + [(1,)],
            output_dtypes=[spec.dtype, spec.dtype, mx.int32],
            grid=(flat.size * width, BLOCK_SIZE, 1),
            threadgroup=_rows_threadgroup(width, BLOCK_SIZE),
            template=[("T", spec.dtype), *_row_template(spec)],
        )
        return Widened(keys, values, token)

    def decode(
        self,
        pool: AnyGpuPool,
        queries: mx.array,
        indices: DecodeIndices,
        shape: DecodeShape,
        variant: KernelVariant,
        scores: Scores,
    ) -> Decoded:
        """Attention of queries `[B, H, 1, key_dim]` over the pool, in two launches if a sequence is split."""
        out_dtype = shape.dtype if indices.item_starts is None else mx.float32
        threads = variant.threads(shape)
        sinks = scores.sinks if scores.sinks is not None else self._number(0.0)
        rows = (indices.num_items, shape.num_query_heads)
        out, stats, token = self._decode(
            inputs=[
                queries,
                *pool.handles,
                indices.block_tables,
                indices.work_items,
                *self._factors(scores),
                sinks,
                pool.token,
            ],
            output_shapes=[(*rows, 1, shape.value_dim), (*rows, 2), (1,)],
            output_dtypes=[out_dtype, mx.float32, mx.int32],
            grid=(threads * shape.num_kv_heads * variant.tiles(shape), indices.num_items, 1),
            threadgroup=(threads, 1, 1),
            template=_decode_template(shape, variant, scores, out_dtype, sinks.dtype),
        )
        if indices.item_starts is not None:
            out = self._merge(shape, queries.shape[0], out, stats, indices.item_starts)
        return Decoded(out, token)

    def order_after(self, token: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """A token that exists only once `keys` and `values`, gathered from the pools, do."""
        return self._order(
            inputs=[token, keys, values],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            template=[("T", keys.dtype)],
        )[0]

    def _merge(
        self, shape: DecodeShape, num_sequences: int, partial: mx.array, stats: mx.array, item_starts: mx.array
    ) -> mx.array:
        width = shape.value_dim // 4
        return self._reduce(
            inputs=[partial, stats, item_starts],
            output_shapes=[(num_sequences, shape.num_query_heads, 1, shape.value_dim)],
            output_dtypes=[shape.dtype],
            grid=(width, shape.num_query_heads, num_sequences),
            threadgroup=_rows_threadgroup(width, shape.num_query_heads),
            template=[
                ("T", shape.dtype),
                ("VALUE_DIM", shape.value_dim),
                ("QUERY_HEADS", shape.num_query_heads),
            ],
        )[0]

    def _factors(self, scores: Scores) -> tuple[mx.array, mx.array]:
        """What queries are multiplied by, and the cap of capped scores; log2 e makes exp(x) an exp2(x)."""
        log2_e = 1.4426950408889634
        if scores.softcap is None:
            return self._number(scores.scale * log2_e), self._number(0.0)
        return self._number(scores.scale / scores.softcap), self._number(scores.softcap * log2_e)

    def _number(self, value: float) -> mx.array:
        """A float as `(1,)`: MLX passes it in constant memory. A model has few, so they are kept."""
        if value not in self._numbers:
            self._numbers[value] = mx.array([value], mx.float32)
        return self._numbers[value]


def _decode_template(
    shape: DecodeShape, variant: KernelVariant, scores: Scores, out_dtype: mx.Dtype, sinks_dtype: mx.Dtype
) -> list[tuple[str, Any]]:
    """Every type and size of the decode kernel: CUDA tells kernels apart by these alone."""
    return [
        ("T", shape.dtype),
        ("P", shape.dtype if shape.bits is None else mx.uint32),
        ("OT", out_dtype),
        ("ST", sinks_dtype),
        *_row_template(shape.spec),
        ("QUERY_HEADS", shape.num_query_heads),
        ("KV_HEADS", shape.num_kv_heads),
        ("GROUP", shape.group_size),
        ("HEADS", variant.heads_per_simdgroup),
        ("HEAD_SIMDGROUPS", variant.head_simdgroups(shape)),
        ("STREAMS", variant.streams(shape)),
        ("LANES", variant.lanes_per_row),
        ("AHEAD", variant.rows_ahead),
        ("SINKS", scores.sinks is not None),
        ("SOFTCAP", scores.softcap is not None),
    ]


def _row_template(spec: LayerSpec) -> list[tuple[str, int]]:
    """How K and V rows lie in a block; BITS 0 is whole rows."""
    sizes = [("KEY_DIM", spec.key_dim), ("VALUE_DIM", spec.value_dim), ("BLOCK", BLOCK_SIZE), ("BITS", spec.bits or 0)]
    if spec.bits is None:
        return [*sizes, ("KEY_GROUP", spec.key_dim), ("VALUE_GROUP", spec.value_dim)]
    return [*sizes, ("KEY_GROUP", group_size_of(spec.key_dim)), ("VALUE_GROUP", group_size_of(spec.value_dim))]


def _rows_threadgroup(width: int, heads: int) -> tuple[int, int, int]:
    """Whole rows of `width` threads, as many heads as fit; the grid is a multiple of it."""
    most = max(1, _MAX_THREADS // width)
    return (width, max(n for n in range(1, most + 1) if heads % n == 0), 1)
