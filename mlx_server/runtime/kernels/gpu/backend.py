"""Attention on a GPU: kernels over the pools in place for decodes, gathered rows for prompt chunks.

Apple's GPUs and NVIDIA's get the same kernel bodies, by `mx.fast.metal_kernel` and `mx.fast.cuda_kernel`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from operator import itemgetter
from typing import cast

import mlx.core as mx

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention.interface import LayerSpec, StepPlan
from mlx_server.runtime.cache.row_pool import SMALL_ARRAY, PlainRows, Rows, RowsShape
from mlx_server.runtime.kernels.gpu.choice import decode_failure, shared_failure, write_failure
from mlx_server.runtime.kernels.gpu.kernels import (
    DecodeKernels,
    MakeKernel,
    PagedKernels,
    PoolKernels,
    Scores,
    read_text,
)
from mlx_server.runtime.kernels.gpu.plan import Cut, GpuMetadata, Launches
from mlx_server.runtime.kernels.gpu.pool import GpuPool
from mlx_server.runtime.kernels.gpu.rows import GpuRows, RowKernels, attend_rows, read_rows, row_failure
from mlx_server.runtime.kernels.gpu.variants import (
    DecodeShape,
    KernelVariant,
    check_variant,
    default_variant,
    shared_variant,
    unsupported_reason,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """What the attention of one kind of layer launches; `decodes` is None where its decodes gather, and `shared` where
    rows cannot share reads."""

    pool: PoolKernels
    cut: Cut | None
    decodes: DecodeKernels | None
    shared: DecodeKernels | None
    scores: Scores


class GpuBackend:
    """An `AttentionBackend` whose pools are written and read in place. On the MLX thread only.

    Call `warm_up` for each kind of layer before serving. What fails there is not used: a shape whose decode kernel
    is wrong or missing gathers its rows instead, and if in-place writes fail, rows are scattered and
    `needs_synchronous_steps` says what that asks of the caller; only quantised rows are refused then.
    """

    name: str
    prelude: str | None = None
    """The header of each kernel's text."""

    by_row = False
    """Whether the tokens of prompts are computed like decodes, each with the same bits as if it were one, where a
    decode kernel supports the layer. They then read K/V once a token instead of once a chunk, and share no reads."""

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
        self._shared_variants: dict[DecodeShape, KernelVariant | None] = {}
        self._refusals: dict[DecodeShape, str] = {}
        self._write_failures: dict[LayerSpec, str | None] = {}
        self._row_failures: dict[tuple[int, mx.Dtype], str | None] = {}
        self._layers: dict[tuple[LayerSpec, int, float, mx.Dtype | None], _Layer] = {}

    def _most_cores(self) -> int:
        """For GPUs without a known number of cores."""
        return 128

    @property
    def needs_synchronous_steps(self) -> bool:
        """True if pools are written by scatter: a step may be built while another runs, but only submitted once
        that one has finished, or MLX copies every pool at every step. Known after `make_pool`."""
        return any(reason is not None for reason in self._write_failures.values())

    def supports(self, spec: LayerSpec, num_query_heads: int) -> str | None:
        """Why decodes of such a layer gather rows instead of running the kernel, or None."""
        shape = DecodeShape.of(spec, num_query_heads)
        return self._refusals.get(shape) or unsupported_reason(shape)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why decodes of some of the layers met so far gather their rows."""
        return tuple(self._refusals.values())

    def variant(self, spec: LayerSpec, num_query_heads: int) -> KernelVariant | None:
        """How the decode kernel is cut for such a layer; None if there is none."""
        return self._variant(DecodeShape.of(spec, num_query_heads))

    def warm_up(self, spec: LayerSpec, num_query_heads: int, *, sinks: mx.array | None = None) -> None:
        """Compiles every kernel that such a layer can use, and tests each on this machine."""
        self._writes(spec)
        shape = DecodeShape.of(spec, num_query_heads)
        scores = Scores(shape.key_dim**-0.5, sinks)
        failure = self._prove(shape, self._variant(shape), scores, self._variants, decode_failure)
        if failure is not None:
            self._refuse(shape, failure)
        failure = self._prove(shape, self._shared_variant(shape), scores, self._shared_variants, shared_failure)
        if failure is not None:
            self._shared_variants[shape] = None
            logger.warning("%s reads K/V once for each row and gathers drafts: %s", self.name, failure)
        self._layers.clear()  # which may have been made with another variant

    def _prove(
        self,
        shape: DecodeShape,
        variant: KernelVariant | None,
        scores: Scores,
        variants: dict[DecodeShape, KernelVariant] | dict[DecodeShape, KernelVariant | None],
        find_failure: Callable[[PagedKernels, DecodeShape, KernelVariant, Scores], str | None],
    ) -> str | None:
        """Why a kernel cannot be used. A pipeline may allow fewer threads than asked for: then it gets fewer."""
        while variant is not None:
            try:
                return find_failure(self._kernels, shape, variant, scores)
            except (RuntimeError, ValueError) as error:
                if variant.simdgroups == 1:
                    return str(error)
                variant = variants[shape] = dataclasses.replace(variant, simdgroups=variant.simdgroups // 2)
        return None

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
        if self.by_row:
            return GpuMetadata.of(step.by_row(), self._num_cores, may_share=False)
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
    ) -> mx.array:
        """As `AttentionBackend.attend`."""
        kind = pool.spec, queries.shape[1], scale, None if sinks is None else sinks.dtype
        try:
            layer = self._layers[kind]
        except KeyError:
            layer = self._layers[kind] = self._layer(pool.spec, queries.shape[1], Scores(scale, sinks))
        if keys is not None and values is not None:
            if pool.memory.is_scattered:
                slots = metadata.slots[: metadata.step.num_tokens]
                pool.write(slots // BLOCK_SIZE, slots % BLOCK_SIZE, keys[:, :, 0], values[:, :, 0])
            else:
                layer.pool.write(pool, keys, values, metadata.slots)
        if layer.decodes is None or layer.cut is None:
            return _joined(_attend_gathered(layer, pool, queries, metadata, window, sinks, longer_than=0))
        launches = metadata.launches(layer.cut, window)
        only = launches.only
        if only is not None:
            kernels = layer.shared if only.is_shared else layer.decodes
            assert kernels is not None
            return kernels.decode(pool, queries, only.indices, sinks)
        parts = _attend_decodes(layer, pool, queries, launches, sinks)
        if launches.gathers_beyond is not None:
            longer_than = launches.gathers_beyond
            parts += _attend_gathered(layer, pool, queries, metadata, window, sinks, longer_than=longer_than)
        return _joined(parts)

    def state(self, pool: GpuPool) -> list[mx.array]:
        return pool.arrays()

    def _one_of(self, spec: LayerSpec) -> LayerSpec:
        """The same for all layers like it: two objects would be compared at each layer of each step."""
        return self._kernels.of_pool(spec).spec

    def _layer(self, spec: LayerSpec, num_query_heads: int, scores: Scores) -> _Layer:
        shape = DecodeShape.of(spec, num_query_heads)
        kernels, variant = self._kernels, self._variant(shape)
        if variant is None:
            return _Layer(kernels.of_pool(spec), None, None, None, scores)
        shared_variant = self._shared_variant(shape)
        decodes, shared = DecodeKernels(kernels, shape, variant, scores), None
        if shared_variant is not None:
            shared = DecodeKernels(kernels, shape, shared_variant, scores, is_shared=True)
        return _Layer(kernels.of_pool(spec), Cut(shape, variant, shared_variant), decodes, shared, scores)

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

    def _shared_variant(self, shape: DecodeShape) -> KernelVariant | None:
        """None where rows cannot share reads."""
        if shape not in self._shared_variants:
            self._shared_variants[shape] = None if self._variant(shape) is None else shared_variant(shape)
        return self._shared_variants[shape]

    def _refuse(self, shape: DecodeShape, reason: str) -> None:
        self._refusals[shape] = reason
        logger.warning("%s decodes gather K/V instead of reading it in place: %s", self.name, reason)

    def _writes(self, spec: LayerSpec) -> bool:
        """Whether kernels write for such layers, which they must prove at first."""
        if spec not in self._write_failures:
            failure = write_failure(self._kernels, spec)
            if failure is not None and spec.bits is not None:
                raise RuntimeError(f"K/V of {spec.bits.words} cannot be written in place: {failure}")
            self._write_failures[spec] = failure
            if failure is not None:
                logger.warning("%s cannot write K/V in place, so steps are not submitted ahead: %s", self.name, failure)
        return self._write_failures[spec] is None


_Part = tuple[int, mx.array]
"""Attention of some of a step's rows, and the first of them."""


def _attend_decodes(
    layer: _Layer, pool: GpuPool, queries: mx.array, launches: Launches, sinks: mx.array | None
) -> list[_Part]:
    """For all requests with few tokens."""
    parts: list[_Part] = []
    for launch in launches.decodes:
        kernels, first = layer.shared if launch.is_shared else layer.decodes, launch.first
        assert kernels is not None
        out = kernels.decode(pool, queries[first:] if first else queries, launch.indices, sinks)
        spans = launch.spans
        parts += [(row, out if len(spans) == 1 else out[results]) for row, results in spans]
    return parts


def _attend_gathered(
    layer: _Layer,
    pool: GpuPool,
    queries: mx.array,
    metadata: GpuMetadata,
    window: int | None,
    sinks: mx.array | None,
    *,
    longer_than: int,
) -> list[_Part]:
    """For longer prompt chunks, and for decodes if no kernel supports them."""
    parts: list[_Part] = []
    num_kv_heads = pool.spec.num_kv_heads
    scores = dataclasses.replace(layer.scores, sinks=sinks)
    if metadata.num_decodes and layer.decodes is None:
        (rows,) = read_rows(layer.pool, pool, metadata.decodes_gather(num_kv_heads, window))
        parts.append((0, attend_rows(queries[rows.seen.queries], rows, scores)))
    for gather in metadata.chunk_gathers(num_kv_heads, window, longer_than=longer_than):
        for rows in read_rows(layer.pool, pool, gather):
            out = attend_rows(queries[rows.seen.queries].transpose(2, 1, 0, 3), rows, scores)
            parts.append((rows.seen.queries.start, out.transpose(2, 1, 0, 3)))
    return parts


def _joined(parts: list[_Part]) -> mx.array:
    """In the order of the rows."""
    if len(parts) == 1:
        return parts[0][1]
    return mx.concatenate([out for _, out in sorted(parts, key=itemgetter(0))], axis=0)


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
