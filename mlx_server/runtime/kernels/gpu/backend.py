"""Attention on a GPU: kernels over the pools in place for decodes, gathered rows for prompt chunks.

Apple's GPUs and NVIDIA's get the same kernel bodies, by `mx.fast.metal_kernel` and `mx.fast.cuda_kernel`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import cast

import mlx.core as mx

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention import LayerSpec, StepPlan
from mlx_server.runtime.kernels.gpu.choice import decode_failure, write_failure
from mlx_server.runtime.kernels.gpu.kernels import (
    DecodeKernels,
    MakeKernel,
    PagedKernels,
    PoolKernels,
    Scores,
    read_text,
)
from mlx_server.runtime.kernels.gpu.plan import (
    DecodeShape,
    GpuMetadata,
    KernelVariant,
    check_variant,
    default_variant,
    unsupported_reason,
)
from mlx_server.runtime.kernels.gpu.pool import GpuPool
from mlx_server.runtime.kernels.gpu.rows import GpuRows, RowKernels, attend_rows, read_rows, row_failure
from mlx_server.runtime.row_pool import SMALL_ARRAY, PlainRows, Rows, RowsShape

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """What the attention of one kind of layer launches; `decodes` is None where its decodes gather."""

    pool: PoolKernels
    decodes: DecodeKernels | None


class GpuBackend:
    """An `AttentionBackend` whose pools are written and read in place. On the MLX thread only.

    Call `warm_up` for each kind of layer before serving. What fails there is not used: a shape whose decode kernel
    is wrong or missing gathers its rows instead, and if in-place writes fail, rows are scattered and
    `needs_synchronous_steps` says what that asks of the caller; only quantised rows are refused then.
    """

    name: str
    prelude: str | None = None
    """The header of each kernel's text."""

    is_eager = False
    takes_padding = False

    def __init__(
        self,
        make_kernel: MakeKernel | None = None,
        *,
        num_cores: int | None = None,
        choose_variant: Callable[[DecodeShape], KernelVariant] = default_variant,
    ) -> None:
        """Needs no GPU; running kernels does. Without `num_cores`, the most that a chip of this one's class has: only
        how finely work is cut depends on it. Raises `RuntimeError` where MLX cannot make kernels of the kind."""
        make_kernel = make_kernel or cast(MakeKernel, getattr(mx.fast, f"{self.name}_kernel"))
        header = read_text(self.prelude) if self.prelude else ""
        self._kernels = PagedKernels(make_kernel, header)
        self._row_kernels = RowKernels(make_kernel, header)
        self._num_cores = num_cores or self._most_cores()
        self._choose_variant = choose_variant
        self._variants: dict[DecodeShape, KernelVariant] = {}
        self._refusals: dict[DecodeShape, str] = {}
        self._write_failures: dict[LayerSpec, str | None] = {}
        self._row_failures: dict[tuple[int, mx.Dtype], str | None] = {}
        self._layers: dict[tuple[LayerSpec, int, float, float | None, mx.Dtype | None], _Layer] = {}

    def _most_cores(self) -> int:
        """Of GPUs that are not told apart."""
        return 128

    @property
    def needs_synchronous_steps(self) -> bool:
        """True if pools are written by scatter: a step may be built while another runs, but only submitted once
        that one has finished, or MLX copies every pool at every step. Known after `make_pool`."""
        return any(reason is not None for reason in self._write_failures.values())

    def supports(self, spec: LayerSpec, num_query_heads: int) -> str | None:
        """Why decodes of such a layer gather their rows instead of running the kernel, or None."""
        shape = DecodeShape.of(spec, num_query_heads)
        return self._refusals.get(shape) or unsupported_reason(shape)

    def variant(self, spec: LayerSpec, num_query_heads: int) -> KernelVariant | None:
        """How the decode kernel is cut for such a layer; None if there is none."""
        return self._variant(DecodeShape.of(spec, num_query_heads))

    def warm_up(
        self,
        spec: LayerSpec,
        num_query_heads: int,
        *,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> None:
        """Compiles every kernel that such a layer can meet, and proves each right on this machine."""
        self._writes(spec)
        shape = DecodeShape.of(spec, num_query_heads)
        scores = Scores(shape.key_dim**-0.5, softcap, sinks)
        variant = self._variant(shape)
        while variant is not None:
            try:
                failure = decode_failure(self._kernels, shape, variant, scores)
            except (RuntimeError, ValueError) as error:
                failure = str(error)
                if variant.simdgroups > 1:  # a pipeline may allow fewer threads than asked for
                    variant = dataclasses.replace(variant, simdgroups=variant.simdgroups // 2)
                    self._variants[shape] = variant
                    continue
            if failure is not None:
                self._refuse(shape, failure)
            break
        self._layers.clear()  # which may have been made with another variant

    def make_pool(self, spec: LayerSpec, num_blocks: int, max_blocks: int | None = None) -> GpuPool:
        """Raises `RuntimeError` for quantised K/V where kernels cannot write them: nothing scatters those."""
        pool = GpuPool.make(self._one_of(spec), num_blocks)
        if not self._writes(spec):
            pool.scatter()
        return pool

    def make_rows(self, shape: RowsShape, dtype: mx.Dtype) -> Rows:
        """Zeros. Plain rows in place of those that kernels cannot write, and a warning says why, once a kind."""
        kind = size, _ = math.prod(shape[1:]), dtype
        if kind not in self._row_failures:
            failure = self._row_failures[kind] = row_failure(self._row_kernels, size, dtype)
            if failure is not None:
                logger.warning(
                    "%s cannot write rows of %d numbers in place, so steps are not submitted ahead and MLX copies "
                    "what it writes into: %s",
                    self.name,
                    size,
                    failure,
                )
        rows = mx.zeros(shape, dtype)
        if self._row_failures[kind] is None and rows.size >= SMALL_ARRAY:
            return GpuRows(self._row_kernels, rows)
        return PlainRows(rows)

    make_states = make_rows

    def change_pool(self, pool: GpuPool, change: PoolChange) -> GpuPool:
        pool.change(change)
        return pool

    def view_pool(self, pool: GpuPool, spec: LayerSpec, num_parts: int) -> GpuPool:
        """If kernels cannot write for such layers, MLX writes for all that share the pool. So the first views of a pool
        come before anything is written."""
        if not self._writes(spec):
            pool.scatter()
        return GpuPool(self._one_of(spec), pool.memory, num_parts)

    def plan(self, step: StepPlan) -> GpuMetadata:
        return GpuMetadata.of(step, self._num_cores)

    def attend(
        self,
        pool: GpuPool,
        queries: mx.array,
        keys: mx.array | None,
        values: mx.array | None,
        metadata: GpuMetadata,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
        softcap: float | None = None,
    ) -> mx.array:
        """As `AttentionBackend.attend`; `softcap` c bends each logit x to c * tanh(x / c)."""
        kind = pool.spec, queries.shape[1], scale, softcap, None if sinks is None else sinks.dtype
        try:
            layer = self._layers[kind]
        except KeyError:
            layer = self._layers[kind] = self._layer(pool.spec, queries.shape[1], Scores(scale, softcap, sinks))
        if keys is not None and values is not None:
            if pool.memory.is_scattered:
                slots = metadata.slots[: metadata.step.num_tokens]
                pool.write(slots // BLOCK_SIZE, slots % BLOCK_SIZE, keys[:, :, 0], values[:, :, 0])
            else:
                layer.pool.write(pool, keys, values, metadata.slots)
        decoded = None
        if metadata.num_decodes and layer.decodes is not None:
            indices = metadata.decode_indices(layer.decodes.cut, window)
            decoded = layer.decodes.decode(pool, queries, indices, sinks)
            if not metadata.num_chunks:
                return decoded
        parts = _attend_gathered(layer, pool, queries, metadata, window, Scores(scale, softcap, sinks))
        if decoded is not None:
            parts.insert(0, decoded)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)

    def state(self, pool: GpuPool) -> list[mx.array]:
        return pool.arrays()

    def _one_of(self, spec: LayerSpec) -> LayerSpec:
        """The same for all layers like it: two objects would be compared at each layer of each step."""
        return self._kernels.of_pool(spec).spec

    def _layer(self, spec: LayerSpec, num_query_heads: int, scores: Scores) -> _Layer:
        shape = DecodeShape.of(spec, num_query_heads)
        variant = self._variant(shape)
        decodes = None if variant is None else DecodeKernels(self._kernels, shape, variant, scores)
        return _Layer(self._kernels.of_pool(spec), decodes)

    def _variant(self, shape: DecodeShape) -> KernelVariant | None:
        if shape in self._refusals:
            return None
        if shape not in self._variants:
            reason = unsupported_reason(shape)
            if reason is not None:
                self._refuse(shape, reason)
                return None
            variant = self._choose_variant(shape)
            check_variant(shape, variant)
            self._variants[shape] = variant
        return self._variants[shape]

    def _refuse(self, shape: DecodeShape, reason: str) -> None:
        self._refusals[shape] = reason
        logger.warning("%s decodes gather K/V instead of reading it in place: %s", self.name, reason)

    def _writes(self, spec: LayerSpec) -> bool:
        """Whether kernels write for such layers, which they must prove at first."""
        if spec not in self._write_failures:
            failure = write_failure(self._kernels, spec)
            if failure is not None and spec.bits is not None:
                raise RuntimeError(f"K/V of {spec.bits} bits cannot be written in place: {failure}")
            self._write_failures[spec] = failure
            if failure is not None:
                logger.warning("%s cannot write K/V in place, so steps are not submitted ahead: %s", self.name, failure)
        return self._write_failures[spec] is None


def _attend_gathered(
    layer: _Layer, pool: GpuPool, queries: mx.array, metadata: GpuMetadata, window: int | None, scores: Scores
) -> list[mx.array]:
    """Attention of the prompt chunks, and first of the decodes if no kernel supports them."""
    parts = []
    num_kv_heads = pool.spec.num_kv_heads
    if metadata.num_decodes and layer.decodes is None:
        (rows,) = read_rows(layer.pool, pool, metadata.decodes_gather(num_kv_heads, window))
        parts.append(attend_rows(queries[rows.seen.queries], rows, scores))
    for gather in metadata.chunk_gathers(num_kv_heads, window):
        for rows in read_rows(layer.pool, pool, gather):
            out = attend_rows(queries[rows.seen.queries].transpose(2, 1, 0, 3), rows, scores)
            parts.append(out.transpose(2, 1, 0, 3))
    return parts


_CORES = {"p": 6, "g": 16, "s": 40, "d": 80}
"""GPU cores by the last letter of the architecture: phone, base and Pro, Max, Ultra; the largest of each class."""


class MetalBackend(GpuBackend):
    """The `metal` backend."""

    name = "metal"

    def _most_cores(self) -> int:
        architecture = str(mx.device_info()["architecture"]) if mx.metal.is_available() else ""
        return _CORES.get(architecture[-1:], _CORES["g"])


PRELUDE = "cuda_prelude.h"


class CudaBackend(GpuBackend):
    """The `cuda` backend."""

    name = "cuda"
    prelude = PRELUDE
