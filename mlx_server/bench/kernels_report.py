"""Tables and JSON of the kernels' bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_server.bench.kernels_cases import Case
from mlx_server.bench.kernels_sweep import Timed, moved_bytes
from mlx_server.bench.kernels_timing import Copy
from mlx_server.bench.tables import format_rate, render_table
from mlx_server.runtime.kernels.gpu.plan import DecodeShape, KernelVariant, default_variant

_NUM_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Result:
    """One case: seconds of one layer's attention by the backend and by MLX, medians of measurements in turns.

    moved_bytes     what the kernel's variant moves; None where no variant is at work
    max_difference  of the results after all layers
    """

    case: Case
    num_layers: int
    backend: str
    time_s: float
    mlx_time_s: float
    moved_bytes: int | None
    max_difference: float

    @property
    def bytes_per_s(self) -> float:
        return self.case.required_bytes / self.time_s

    @property
    def speedup(self) -> float:
        """Above 1 where the backend is faster than MLX."""
        return self.mlx_time_s / self.time_s


@dataclass(frozen=True, slots=True)
class Sweep:
    """All variants that ran for one shape, fastest first, over the same decode cases."""

    cases: tuple[Case, ...]
    num_cores: int
    timed: tuple[Timed, ...]

    @property
    def shape(self) -> DecodeShape:
        return self.cases[0].shape

    @property
    def best(self) -> KernelVariant:
        return self.timed[0].variant

    def moved(self, variant: KernelVariant) -> list[int]:
        """Bytes of one layer in each case."""
        return [moved_bytes(case, variant, self.num_cores) for case in self.cases]


def describe_shape(shape: DecodeShape) -> str:
    """Like `16 heads on 8 of 128, float16`, or `..., float16 in 8 bits`."""
    dims = f"{shape.key_dim}" if shape.key_dim == shape.value_dim else f"{shape.key_dim}/{shape.value_dim}"
    stored = "" if shape.bits is None else f" in {shape.bits} bits"
    return f"{shape.num_query_heads} heads on {shape.num_kv_heads} of {dims}, {dtype_name(shape)}{stored}"


def describe_case(case: Case) -> str:
    """Like `decode 16 x 1,024`: sequences by context."""
    if case.is_decode:
        return f"decode {case.num_sequences} x {case.context:,}"
    return f"prefill {case.num_queries:,} of {case.context:,}"


def dtype_name(shape: DecodeShape) -> str:
    return str(shape.dtype).rpartition(".")[2]


def render_results(results: Sequence[Result], copy: Copy) -> str:
    """A row a case. MB must move: K/V once, queries and results; GB/s and share are of those."""
    backends = " and ".join(sorted({result.backend for result in results}))
    dtypes = " and ".join(sorted({dtype_name(result.case.shape) for result in results}))
    header = ("case", "heads", "K/V bits", "ms", "MLX ms", "vs MLX", "MB must move", "MB moved", "GB/s", "of copy")
    rows = [_row(result, copy) for result in results]
    return f"{backends} backend, {dtypes}. {_describe_copy(copy)}\n\n{render_table(header, rows)}"


def render_sweep(sweep: Sweep) -> str:
    """The fastest variants and the default one, and what each moves over all cases."""
    default = default_variant(sweep.shape)
    times = {one.variant: one.mean_s for one in sweep.timed}
    shown = [one for rank, one in enumerate(sweep.timed) if rank < _NUM_SHOWN or one.variant == default]
    header = ("heads/simdgroup", "simdgroups", "lanes/row", "rows ahead", "partition", "MB moved", "GB/s", "vs default")
    rows = []
    for one in shown:
        variant, moved = one.variant, sum(sweep.moved(one.variant))
        rows.append(
            (
                str(variant.heads_per_simdgroup),
                str(variant.simdgroups),
                str(variant.lanes_per_row),
                str(variant.rows_ahead),
                "by length" if variant.partition_tokens is None else f"{variant.partition_tokens:,}",
                _megabytes(moved),
                format_rate(moved / sum(one.times_s) / 1e9),
                f"{times[default] / one.mean_s:.2f}x" if default in times else "-",
            )
        )
    required = sum(case.required_bytes for case in sweep.cases)
    title = (
        f"{describe_shape(sweep.shape)}: {len(sweep.timed)} variants over {len(sweep.cases)} decodes, "
        f"{_megabytes(required)} MB must move"
    )
    return f"{title}\n\n{render_table(header, rows)}"


def as_document(results: Sequence[Result], sweeps: Sequence[Sweep], copy: Copy) -> dict[str, Any]:
    """All figures, JSON-ready."""
    return {
        "copy": asdict(copy),
        "results": [_result_document(result, copy) for result in results],
        "sweeps": [_sweep_document(sweep) for sweep in sweeps],
    }


def _describe_copy(copy: Copy) -> str:
    return (
        f"Copy bandwidth: {copy.bytes_per_s / 1e9:,.1f} GB/s, read and written ({copy.how}, "
        f"{copy.num_bytes / 1e6:,.0f} MB; best of 3)."
    )


def _row(result: Result, copy: Copy) -> tuple[str, ...]:
    case = result.case
    return (
        describe_case(case),
        f"{case.shape.num_query_heads}x{case.shape.num_kv_heads}x{case.shape.key_dim}",
        str(case.shape.bits or "full"),
        f"{1e3 * result.time_s:,.3f}",
        f"{1e3 * result.mlx_time_s:,.3f}",
        f"{result.speedup:.2f}x",
        _megabytes(case.required_bytes),
        "-" if result.moved_bytes is None else _megabytes(result.moved_bytes),
        format_rate(result.bytes_per_s / 1e9),
        f"{result.bytes_per_s / copy.bytes_per_s:.0%}",
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f}"


def _case_document(case: Case) -> dict[str, Any]:
    shape = case.shape
    return {
        "num_query_heads": shape.num_query_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.key_dim,
        "dtype": dtype_name(shape),
        "kv_bits": shape.bits,
        "num_sequences": case.num_sequences,
        "num_queries": case.num_queries,
        "context": case.context,
        "required_bytes": case.required_bytes,
    }


def _result_document(result: Result, copy: Copy) -> Mapping[str, Any]:
    return {
        **_case_document(result.case),
        "num_layers": result.num_layers,
        "backend": result.backend,
        "time_s": result.time_s,
        "mlx_time_s": result.mlx_time_s,
        "speedup": result.speedup,
        "moved_bytes": result.moved_bytes,
        "bytes_per_s": result.bytes_per_s,
        "share_of_copy": result.bytes_per_s / copy.bytes_per_s,
        "max_difference": result.max_difference,
    }


def _sweep_document(sweep: Sweep) -> Mapping[str, Any]:
    return {
        "cases": [_case_document(case) for case in sweep.cases],
        "variants": [
            {**asdict(one.variant), "times_s": one.times_s, "moved_bytes": sweep.moved(one.variant)}
            for one in sweep.timed
        ],
    }
