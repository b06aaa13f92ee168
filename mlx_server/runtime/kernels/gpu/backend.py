"""Attention on a GPU: decodes read K/V in place, by kernels of this project; prompt chunks gather K/V for MLX's kernel.

Apple's and NVIDIA's GPUs get the same kernel bodies, by `mx.fast.metal_kernel` and `mx.fast.cuda_kernel`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Generator
from operator import itemgetter
from typing import cast

import mlx.core as mx

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention.interface import LayerSpec, StepPlan
from mlx_server.runtime.cache.row_pool import SMALL_ARRAY, PlainRows, Rows, RowsInPlace, RowsShape
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
from mlx_server.runtime.kernels.gpu.rows import RowKernels, attend_rows, read_rows, row_failure
from mlx_server.runtime.kernels.gpu.variant_choice import decode_failure, shared_failure, write_failure
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
    """The kernels of one kind of layer. `decodes` is None if its decodes gather, and `shared` if rows cannot share
    reads."""

    pool: PoolKernels
    cut: Cut | None
    decodes: DecodeKernels | None
    shared: DecodeKernels | None
    scores: Scores


class GpuBackend:
    """An `AttentionBackend` whose pools are written and read in place. MLX thread.

    Call `warm_up` for each kind of layer before its first use: kernels that fail their test there are not used. If the
    decode kernel is wrong or there is none, decodes gather their rows instead. If in-place writes fail, MLX scatters
    rows (see `needs_synchronous_steps`), and quantised K/V are refused.
    """

    name: str
    prelude: str | None = None
    """The file with the header of each kernel; None if it has none."""

    by_row = False
    """Whether prompt tokens are computed like decodes, with the same bits, in layers that a decode kernel supports. K/V
    are then read once for each token instead of once for each chunk, and no reads are shared."""

    def __init__(
        self,
        make_kernel: MakeKernel | None = None,
        *,
        num_cores: int | None = None,
        choose_variant: Callable[[DecodeShape], KernelVariant] = default_variant,
    ) -> None:
        """Needs no GPU; only running kernels does. `num_cores` (default: the most that a chip of this class has) only
        decides how finely work is cut. Raises `RuntimeError` if MLX cannot make such kernels here."""
        make_kernel = make_kernel or cast(MakeKernel, getattr(mx.fast, f"{self.name}_kernel"))
        header = read_text(self.prelude) if self.prelude else ""
        self._kernels = PagedKernels(make_kernel, header)
        self._row_kernels = RowKernels(make_kernel, header)
        self._num_cores = num_cores or self._most_cores()
        self._choose_variant = choose_variant
        self._variants: dict[DecodeShape, KernelVariant] = {}
        self._shared_variants: dict[DecodeShape, KernelVariant] = {}
        self._refusals: dict[DecodeShape, str] = {}
        self._shared_failures: dict[DecodeShape, str] = {}
        self._write_failures: dict[LayerSpec, str | None] = {}
        self._row_failures: dict[tuple[int, mx.Dtype], str | None] = {}
        self._layers: dict[tuple[LayerSpec, int, float, mx.Dtype | None], _Layer] = {}
        self._warm: set[tuple[DecodeShape, mx.Dtype | None]] = set()

    def _most_cores(self) -> int:
        """The number of cores to assume if none is given."""
        return 128

    @property
    def needs_synchronous_steps(self) -> bool:
        """True if pools are written by scatter. A step may then be built while another runs, but must be submitted
        after that one has finished, or MLX copies every pool in every step. Known after `make_pool`."""
        return any(reason is not None for reason in self._write_failures.values())

    def supports(self, spec: LayerSpec, num_query_heads: int) -> str | None:
        """The reason why decodes of such a layer gather rows; None if the decode kernel supports them."""
        shape = DecodeShape.of(spec, num_query_heads)
        return self._refusals.get(shape) or unsupported_reason(shape)

    def shared_failure(self, spec: LayerSpec, num_query_heads: int) -> str | None:
        """The failure of the shared kernel, found by `warm_up`; None if it passed or was not tested."""
        return self._shared_failures.get(DecodeShape.of(spec, num_query_heads))

    @property
    def refusals(self) -> tuple[str, ...]:
        """The reasons why decodes gather rows, for the layers seen so far."""
        return tuple(self._refusals.values())

    def variant(self, shape: DecodeShape) -> KernelVariant | None:
        """The variant of the decode kernel for such a layer; None if no kernel is used."""
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

    def warm_up(
        self, spec: LayerSpec, num_query_heads: int, *, sinks: mx.array | None = None
    ) -> Generator[float, None, None]:
        """Compiles and tests every kernel that such a layer can use, one after another. Raises as `make_pool` does."""
        shape = DecodeShape.of(spec, num_query_heads)
        kind = shape, None if sinks is None else sinks.dtype
        if kind in self._warm:
            return
        self._writes(spec)
        yield 1.0
        scores = Scores(shape.key_dim**-0.5, sinks)
        failure = self._prove(shape, self.variant(shape), scores, self._variants, decode_failure)
        if failure is not None:
            self._refuse(shape, failure)
        yield 1.0
        failure = self._prove(shape, self._shared_variant(shape), scores, self._shared_variants, shared_failure)
        if failure is not None:
            self._shared_failures[shape] = failure
            logger.warning("%s reads K/V once for each row and gathers drafts: %s", self.name, failure)
        self._layers.clear()  # they may have been made with another variant
        self._warm.add(kind)

    def _prove(
        self,
        shape: DecodeShape,
        variant: KernelVariant | None,
        scores: Scores,
        variants: dict[DecodeShape, KernelVariant],
        find_failure: Callable[[PagedKernels, DecodeShape, KernelVariant, Scores], str | None],
    ) -> str | None:
        """The reason why a kernel cannot be used, or None. If it cannot run with its simdgroups, which may be too many
        for the pipeline, it is tried with half of them, down to one."""
        while variant is not None:
            try:
                return find_failure(self._kernels, shape, variant, scores)
            except (RuntimeError, ValueError) as error:
                if variant.simdgroups == 1:
                    return str(error)
                variant = variants[shape] = dataclasses.replace(variant, simdgroups=variant.simdgroups // 2)
        return None

    def make_pool(self, spec: LayerSpec, num_blocks: int, max_blocks: int | None = None) -> GpuPool:
        """Raises `RuntimeError` for quantised K/V that kernels cannot write, since MLX cannot scatter them."""
        pool = GpuPool.make(self._one_of(spec), num_blocks)
        if not self._writes(spec):
            pool.scatter()
        return pool

    def make_rows(self, shape: RowsShape, dtype: mx.Dtype) -> Rows:
        """Rows of zeros, written in place; plain rows if kernels cannot write them, with one warning for each kind, or
        if they are fewer than `SMALL_ARRAY` numbers."""
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
            return RowsInPlace(self._row_kernels, rows)
        return PlainRows(rows)

    def change_pool(self, pool: GpuPool, change: PoolChange) -> GpuPool:
        pool.change(change)
        return pool

    def view_pool(self, pool: GpuPool, spec: LayerSpec, num_parts: int) -> GpuPool:
        """If kernels cannot write for such layers, MLX writes for all layers that share the pool. So the first views of
        a pool must be made before anything is written."""
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
        """One object for all equal specs, because two objects would be compared for each layer of each step."""
        return self._kernels.of_pool(spec).spec

    def _layer(self, spec: LayerSpec, num_query_heads: int, scores: Scores) -> _Layer:
        shape = DecodeShape.of(spec, num_query_heads)
        kernels, variant = self._kernels, self.variant(shape)
        if variant is None:
            return _Layer(kernels.of_pool(spec), None, None, None, scores)
        shared_variant = self._shared_variant(shape)
        decodes, shared = DecodeKernels(kernels, shape, variant, scores), None
        if shared_variant is not None:
            shared = DecodeKernels(kernels, shape, shared_variant, scores, is_shared=True)
        return _Layer(kernels.of_pool(spec), Cut(shape, variant, shared_variant), decodes, shared, scores)

    def _shared_variant(self, shape: DecodeShape) -> KernelVariant | None:
        """None if rows cannot share reads."""
        if shape in self._shared_failures or self.variant(shape) is None:
            return None
        return self._shared_variants.setdefault(shape, shared_variant(shape))

    def _refuse(self, shape: DecodeShape, reason: str) -> None:
        self._refusals[shape] = reason
        logger.warning("%s decodes gather K/V instead of reading it in place: %s", self.name, reason)

    def _writes(self, spec: LayerSpec) -> bool:
        """Whether kernels write for such layers, as found by a test at the first call. Raises as `make_pool` does."""
        if spec not in self._write_failures:
            failure = write_failure(self._kernels, spec)
            if failure is not None and spec.bits is not None:
                raise RuntimeError(f"K/V of {spec.bits.words} cannot be written in place: {failure}")
            self._write_failures[spec] = failure
            if failure is not None:
                logger.warning("%s cannot write K/V in place, so steps are not submitted ahead: %s", self.name, failure)
        return self._write_failures[spec] is None


_Part = tuple[int, mx.array]
"""A row of the step, and the attention of some consecutive rows from it on."""


def _attend_decodes(
    layer: _Layer, pool: GpuPool, queries: mx.array, launches: Launches, sinks: mx.array | None
) -> list[_Part]:
    """Attention of the requests with few tokens."""
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
    """Attention of longer prompt chunks, and of decodes if no kernel supports them."""
    parts: list[_Part] = []
    num_kv_heads = pool.spec.num_kv_heads
    scores = dataclasses.replace(layer.scores, sinks=sinks)
    if metadata.step.num_decodes and layer.decodes is None:
        (rows,) = read_rows(layer.pool, pool, metadata.decodes_gather(num_kv_heads, window))
        parts.append((0, attend_rows(queries[rows.seen.queries], rows, scores)))
    for gather in metadata.chunk_gathers(num_kv_heads, window, longer_than=longer_than):
        for rows in read_rows(layer.pool, pool, gather):
            out = attend_rows(queries[rows.seen.queries].transpose(2, 1, 0, 3), rows, scores)
            parts.append((rows.seen.queries.start, out.transpose(2, 1, 0, 3)))
    return parts


def _joined(parts: list[_Part]) -> mx.array:
    """Concatenates the parts in the order of their rows."""
    if len(parts) == 1:
        return parts[0][1]
    return mx.concatenate([out for _, out in sorted(parts, key=itemgetter(0))], axis=0)


_CORES = {"p": 6, "g": 20, "s": 40, "d": 80}
"""The most GPU cores of each class of chip, by the last letter of its architecture: phone, base and Pro, Max, Ultra."""


class MetalBackend(GpuBackend):
    """The backend for Apple's GPUs."""

    name = "metal"

    def _most_cores(self) -> int:
        return most_metal_cores()


def most_metal_cores() -> int:
    """The most cores that a GPU of this machine's class has."""
    architecture = str(mx.device_info()["architecture"]) if mx.metal.is_available() else ""
    return _CORES.get(architecture[-1:], _CORES["g"])


PRELUDE = "cuda_prelude.h"


class CudaBackend(GpuBackend):
    """The backend for NVIDIA's GPUs."""

    name = "cuda"
    prelude = PRELUDE
