"""Which variant of the decode kernel is fastest here, for one attention shape over all decode cases of a bench."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_server.bench.kernels_cases import Case, World
from mlx_server.bench.kernels_timing import median_times
from mlx_server.runtime.kernels.gpu.backend import CudaBackend, GpuBackend, MetalBackend
from mlx_server.runtime.kernels.gpu.plan import DecodeShape, KernelVariant, check_variant, decode_bytes, default_variant

_SIMDGROUPS = (8, 4, 2, 1)
_LANES = (32, 16, 8)
_ROWS_AHEAD = (4, 2)
_PARTITIONS = (256, 512, 1024, 2048)

MakeBackend = Callable[[KernelVariant], GpuBackend]
Measure = Callable[[KernelVariant], tuple[float, ...] | None]
"""Seconds of a layer in each case, or None if the variant cannot run here or is wrong."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A variant with its seconds a layer in each case."""

    variant: KernelVariant
    times_s: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """Geometric, so that a long case does not outweigh the others."""
        return math.exp(sum(map(math.log, self.times_s)) / len(self.times_s))


def kernel_variants(shape: DecodeShape) -> list[KernelVariant]:
    """The default, then every other cut of the kernel that can be launched, without partitions. None twice: what
    comes to the same kernel is measured once."""
    heads = sorted({-(-shape.group_size // 2**halvings) for halvings in range(shape.group_size.bit_length())})
    variants = [
        KernelVariant(heads_per_simdgroup, simdgroups, lanes, rows)
        for heads_per_simdgroup in heads
        for simdgroups in _SIMDGROUPS
        for lanes in _LANES
        for rows in _ROWS_AHEAD
    ]
    distinct: dict[tuple[int, ...], KernelVariant] = {}
    for variant in [default_variant(shape), *(variant for variant in variants if _is_allowed(shape, variant))]:
        distinct.setdefault(_cut(shape, variant), variant)
    return list(distinct.values())


def sweep(shape: DecodeShape, measure: Measure) -> list[Timed]:
    """All variants that run, fastest first: every cut, then lengths of partitions for the fastest of them."""
    timed = _timed(kernel_variants(shape), measure)
    if timed:
        best = min(timed, key=lambda one: one.mean_s).variant
        timed += _timed([dataclasses.replace(best, partition_tokens=tokens) for tokens in _PARTITIONS], measure)
    return sorted(timed, key=lambda one: one.mean_s)


def make_measure(worlds: Sequence[World], make_backend: MakeBackend, num_repeats: int) -> Measure:
    """Measures variants in `worlds`, which are decodes of one shape. A variant must first pass its backend's own
    test; one that the GPU would run with fewer simdgroups is left to its own turn."""
    shape = worlds[0].case.shape
    spec = shape.spec

    def measure(variant: KernelVariant) -> tuple[float, ...] | None:
        backend = make_backend(variant)
        backend.warm_up(spec, shape.num_query_heads)
        if backend.variant(spec, shape.num_query_heads) != variant:
            return None
        times = (median_times([world.paged(backend)], num_repeats)[0] / world.num_layers for world in worlds)
        return tuple(times)

    return measure


def backend_with(name: str) -> MakeBackend:
    """Makes GPU backends called `name` with one variant for all shapes."""
    kind = {"metal": MetalBackend, "cuda": CudaBackend}[name]
    return lambda variant: kind(choose_variant=lambda shape: variant)


def moved_bytes(case: Case, variant: KernelVariant, num_cores: int) -> int:
    """What the variant's loads and stores add up to in one layer of a decode case."""
    contexts = [case.context] * case.num_sequences
    return decode_bytes(case.shape, contexts, variant, num_cores=num_cores).moved


def _timed(variants: Sequence[KernelVariant], measure: Measure) -> list[Timed]:
    timed = []
    for variant in variants:
        times_s = measure(variant)
        if times_s is not None:
            timed.append(Timed(variant, times_s))
    return timed


def _is_allowed(shape: DecodeShape, variant: KernelVariant) -> bool:
    try:
        check_variant(shape, variant)
    except ValueError:
        return False
    return True


def _cut(shape: DecodeShape, variant: KernelVariant) -> tuple[int, ...]:
    """What a kernel is compiled for."""
    return (
        variant.heads_per_simdgroup,
        variant.head_simdgroups(shape),
        variant.streams(shape),
        variant.lanes_per_row,
        variant.rows_ahead,
    )
