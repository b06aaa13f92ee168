"""The kernels of paged attention as MLX calls. Each kernel is made from its text for the sizes of a kind of layer.

`make_kernel` is `mx.fast.metal_kernel`, `mx.fast.cuda_kernel` or another function with that signature: tests pass one
that runs the generated Metal source on the host. The texts are kernel bodies in a dialect that Metal and CUDA share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

import mlx.core as mx

from mlx_server.config import BLOCK_SIZE
from mlx_server.runtime.attention.interface import LayerSpec
from mlx_server.runtime.cache.row_pool import KV_GROUP_SIZE, side_bits
from mlx_server.runtime.kernels.gpu.plan import DecodeIndices
from mlx_server.runtime.kernels.gpu.pool import GpuPool
from mlx_server.runtime.kernels.gpu.variants import (
    MAX_SIMDGROUPS,
    SIMD_WIDTH,
    DecodeShape,
    KernelVariant,
    shared_tiles,
    tile_tokens,
)

Kernel = Callable[..., list[mx.array]]
MakeKernel = Callable[..., Kernel]

_MAX_THREADS = MAX_SIMDGROUPS * SIMD_WIDTH
_LOG2_E = 1.4426950408889634
"""With the scale multiplied by it, kernels can compute exp(x) as exp2(x)."""

_TOKEN = (1,)


@dataclass(frozen=True, slots=True)
class KernelText:
    """One kernel's name, body and argument names, in the order of its buffers."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def body(self) -> str:
        """The body as code, which MLX hashes at every call and searches for argument names."""
        return read_code(f"{self.name}.msl")

    def make(
        self,
        make_kernel: MakeKernel,
        header: str = "",
        sizes: Mapping[str, int | bool] = MappingProxyType({}),
        types: Mapping[str, str] = MappingProxyType({}),
        *,
        is_contiguous: bool = True,
    ) -> Kernel:
        """Makes the kernel with `sizes` as constants and `types` as names of types in its text, because MLX would
        process template arguments at each launch. They are in its name, too, because CUDA tells kernels apart by their
        names. Strided inputs are copied to be contiguous unless `is_contiguous` is False."""
        constants = [f"typedef {kind} {name};" for name, kind in types.items()]
        constants += [f"constexpr {type(size).__name__} {name} = {int(size)};" for name, size in sizes.items()]
        return make_kernel(
            name="__".join([self.name, *types.values(), *(str(int(size)) for size in sizes.values())]),
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=" ".join([*constants, self.body]),  # in one line, so that compilers report the body's lines
            header=header,
            ensure_row_contiguous=is_contiguous,
        )


KV_WRITE = KernelText(
    "kv_write", ("new_keys", "new_values", "key_pool", "value_pool", "slots", "token"), ("token_out",)
)
KV_WRITE_QUANTIZED = KernelText("kv_write_quantized", KV_WRITE.inputs, KV_WRITE.outputs)
KV_GATHER = KernelText("kv_gather", ("key_pool", "value_pool", "rows", "token"), ("keys", "values", "token_out"))
PAGED_DECODE = KernelText(
    "paged_decode",
    ("queries", "key_pool", "value_pool", "block_tables", "work_items", "scale", "sinks", "token"),
    ("out", "stats", "token_out"),
)
PAGED_SHARED = KernelText(
    "paged_shared", (*PAGED_DECODE.inputs[:5], "item_rows", *PAGED_DECODE.inputs[5:]), PAGED_DECODE.outputs
)
PAGED_REDUCE = KernelText("paged_reduce", ("partial_out", "stats", "item_starts"), ("out",))
KERNEL_TEXTS = (KV_WRITE, KV_WRITE_QUANTIZED, KV_GATHER, PAGED_DECODE, PAGED_SHARED, PAGED_REDUCE)


def read_text(file_name: str) -> str:
    """Reads a kernel text or header from the folder `texts`."""
    return resources.files(__package__).joinpath("texts", file_name).read_text(encoding="utf-8")


def read_code(file_name: str) -> str:
    """Reads a kernel text or header without its comments."""
    return re.sub(r"[ ]*//[^\n]*", "", read_text(file_name))


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns dot products into softmax logits."""

    scale: float
    sinks: mx.array | None = None


class PagedKernels:
    """Makes the kernels for each kind of layer once. MLX thread."""

    def __init__(self, make_kernel: MakeKernel, header: str = "") -> None:
        self._make_kernel = make_kernel
        self._header = header
        self._pools: dict[LayerSpec, PoolKernels] = {}
        self._numbers: dict[float, mx.array] = {}

    def make(self, text: KernelText, sizes: Mapping[str, int | bool]) -> Kernel:
        """Makes one kernel with `sizes`. Rows may be strided; pools never are, and would otherwise be copied."""
        return text.make(self._make_kernel, self._header, sizes)

    def of_pool(self, spec: LayerSpec) -> PoolKernels:
        """The kernels that write and gather for layers like `spec`."""
        if spec not in self._pools:
            self._pools[spec] = PoolKernels(self, spec)
        return self._pools[spec]

    def number(self, value: float) -> mx.array:
        """A float as an array `[1]`, which MLX passes in constant memory. They are kept, since a model has few."""
        if value not in self._numbers:
            self._numbers[value] = mx.array([value], mx.float32)
        return self._numbers[value]


class PoolKernels:
    """Writes into pools of one kind of layer, and gathers from them. MLX thread."""

    def __init__(self, kernels: PagedKernels, spec: LayerSpec) -> None:
        sizes = {**_row_sizes(spec), "KV_HEADS": spec.num_kv_heads}
        dims = spec.key_dim, spec.value_dim
        self.spec = spec
        self._dims = dims
        if spec.bits is None:
            self._write, width = kernels.make(KV_WRITE, sizes), max(dims) // 4
        else:
            self._write, width = kernels.make(KV_WRITE_QUANTIZED, sizes), sum(dims) // KV_GROUP_SIZE
        self._write_grid = width, spec.num_kv_heads
        self._write_threads = _rows_threadgroup(width, spec.num_kv_heads)
        self._gather = kernels.make(KV_GATHER, _row_sizes(spec))
        self._gather_width = sum(dims) // 4
        self._gather_threads = _rows_threadgroup(self._gather_width, BLOCK_SIZE)
        self._template = [("T", spec.dtype)]

    def write(self, pool: GpuPool, keys: mx.array, values: mx.array, slots: mx.array) -> None:
        """Writes rows `[T, num_kv_heads, 1, dim]` into their slots. Replaces the pool's token."""
        dtype = self.spec.dtype
        if keys.dtype != dtype:
            keys, values = keys.astype(dtype), values.astype(dtype)
        memory = pool.memory
        (memory.token,) = self._write(
            inputs=[keys, values, *memory.handles, slots, memory.token],
            output_shapes=[_TOKEN],
            output_dtypes=[mx.int32],
            grid=(*self._write_grid, keys.shape[0]),
            threadgroup=self._write_threads,
            template=self._template,
        )

    def gather(self, pool: GpuPool, rows: mx.array, num_rows: int) -> tuple[mx.array, mx.array]:
        """Returns K and V `[num_rows, 32, dim]` of the first `num_rows` of `rows`, which are block * num_kv_heads +
        head. Replaces the pool's token, so that later writes wait for it."""
        memory = pool.memory
        keys, values, memory.token = self._gather(
            inputs=[*memory.handles, rows, memory.token],
            output_shapes=[*((num_rows, BLOCK_SIZE, dim) for dim in self._dims), _TOKEN],
            output_dtypes=[self.spec.dtype, self.spec.dtype, mx.int32],
            grid=(num_rows * self._gather_width, BLOCK_SIZE, 1),
            threadgroup=self._gather_threads,
            template=self._template,
        )
        return keys, values


class DecodeKernels:
    """Attention of decodes in one kind of layer, in one launch, or in two if a sequence is split. With `is_shared`, of
    rows that share reads of K/V. MLX thread."""

    def __init__(
        self,
        kernels: PagedKernels,
        shape: DecodeShape,
        variant: KernelVariant,
        scores: Scores,
        *,
        is_shared: bool = False,
    ) -> None:
        """Only whether `scores` has sinks, and their type, is used here: `decode` gets the sinks themselves."""
        sizes = {
            **_row_sizes(shape.spec),
            "QUERY_HEADS": shape.num_query_heads,
            "KV_HEADS": shape.num_kv_heads,
            "GROUP": shape.group_size,
            "HEADS": variant.heads_per_simdgroup,
            "LANES": variant.lanes_per_row,
            "AHEAD": variant.rows_ahead,
            "SINKS": scores.sinks is not None,
        }
        if is_shared:
            sizes |= {"SIMDGROUPS": variant.simdgroups, "TILE": tile_tokens(shape, variant)}
            tiles, threads = shared_tiles(shape, variant), SIMD_WIDTH * variant.simdgroups
        else:
            sizes |= {"HEAD_SIMDGROUPS": variant.head_simdgroups(shape), "STREAMS": variant.streams(shape)}
            tiles, threads = variant.tiles(shape), variant.threads(shape)
        self.shape = shape
        self._decode = kernels.make(PAGED_SHARED if is_shared else PAGED_DECODE, sizes)
        self._reduce = kernels.make(PAGED_REDUCE, {"VALUE_DIM": shape.value_dim, "QUERY_HEADS": shape.num_query_heads})
        self._factor = kernels.number(scores.scale * _LOG2_E)
        self._no_sinks = kernels.number(0.0)
        pool_dtype = shape.dtype if shape.bits is None else mx.uint32
        sinks_dtype = self._no_sinks.dtype if scores.sinks is None else scores.sinks.dtype
        types = [("T", shape.dtype), ("P", pool_dtype), ("ST", sinks_dtype)]
        self._templates = {dtype: [*types, ("OT", dtype)] for dtype in (shape.dtype, mx.float32)}
        self._threads = threads, 1, 1
        self._width = threads * shape.num_kv_heads * tiles
        self._reduce_grid = shape.value_dim // 4, shape.num_query_heads
        self._reduce_threads = _rows_threadgroup(*self._reduce_grid)
        self._reduce_template = [("T", shape.dtype)]

    def decode(self, pool: GpuPool, queries: mx.array, indices: DecodeIndices, sinks: mx.array | None) -> mx.array:
        """Returns the attention `[B, H, 1, value_dim]` of B rows of queries `[T, H, 1, key_dim]` over the pool: the
        rows that `indices` name if shared, else the first B, one for each sequence. Replaces the pool's token, so that
        later writes wait for it."""
        shape, memory = self.shape, pool.memory
        asked = queries.dtype
        if asked != shape.dtype:
            queries = queries.astype(shape.dtype)
        starts = indices.item_starts
        dtype = shape.dtype if starts is None else mx.float32
        rows = indices.num_results, shape.num_query_heads
        numbers = self._factor, self._no_sinks if sinks is None else sinks
        out, stats, memory.token = self._decode(
            inputs=[queries, *memory.handles, *indices.arrays, *numbers, memory.token],
            output_shapes=[(*rows, 1, shape.value_dim), (*rows, 2), _TOKEN],
            output_dtypes=[dtype, mx.float32, mx.int32],
            grid=(self._width, indices.num_items, 1),
            threadgroup=self._threads,
            template=self._templates[dtype],
        )
        if starts is not None:
            (out,) = self._reduce(
                inputs=[out, stats, starts],
                output_shapes=[(indices.num_sequences, shape.num_query_heads, 1, shape.value_dim)],
                output_dtypes=[shape.dtype],
                grid=(*self._reduce_grid, indices.num_sequences),
                threadgroup=self._reduce_threads,
                template=self._reduce_template,
            )
        return out if asked == shape.dtype else out.astype(asked)


def _row_sizes(spec: LayerSpec) -> dict[str, int | bool]:
    """The layout of K and V rows in a block; 0 bits are unquantised rows."""
    key_bits, value_bits = side_bits(spec.bits)
    return {
        "KEY_DIM": spec.key_dim,
        "VALUE_DIM": spec.value_dim,
        "BLOCK": BLOCK_SIZE,
        "KEY_BITS": key_bits or 0,
        "VALUE_BITS": value_bits or 0,
        "KV_GROUP": KV_GROUP_SIZE,
    }


def _rows_threadgroup(width: int, heads: int) -> tuple[int, int, int]:
    """A threadgroup for a grid of `width` by `heads`: as large as possible, with sizes that divide the grid's."""
    across = _largest_divisor(width, _MAX_THREADS)
    return across, _largest_divisor(heads, _MAX_THREADS // across), 1


def _largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, most + 1) if number % n == 0)
