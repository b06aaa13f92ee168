"""Measures attention and matrix products alone: the server's kernels, compared with those of MLX.

`mx.fast.scaled_dot_product_attention` gets the same K/V, contiguous; both are measured alternately, in one process. As
in a model, a measurement runs several layers, each with its own K/V and on the result of the one before. K/V are stored
beforehand, so times are those of attention alone. On a GPU, the variants of the decode kernel are tried first and the
fastest for each shape of heads is stored; the server uses it from its next start on. Products are not chosen here: the
server measures them itself when it loads a model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mlx_server.bench.arguments import add_json_argument, crossed_numbers, from_1
from mlx_server.bench.instruments import write_figures
from mlx_server.bench.lab.attention import (
    Case,
    Copy,
    MakeBackend,
    Timed,
    World,
    backend_with,
    kernel_variants,
    make_measure,
    measure_copy,
    sweep,
)
from mlx_server.bench.lab.products import add_product_arguments, measure_all, product_document, render_products
from mlx_server.bench.tables import document_of, format_rate, print_progress, render_items
from mlx_server.config import FEWER_KV, FULL_KV
from mlx_server.errors import ServeError
from mlx_server.runtime.attention.backends import choose_backend
from mlx_server.runtime.attention.interface import AttentionBackend
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.gpu.backend import GpuBackend
from mlx_server.runtime.kernels.gpu.choice_files import dtype_name
from mlx_server.runtime.kernels.gpu.variant_choice import store_choices
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, KernelVariant, default_variant
from mlx_server.runtime.kernels.trials import exhaust, median_times
from mlx_server.runtime.models.blueprint import DTYPES

_TOLERANCES = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}
_KV_BITS = {FULL_KV: None} | {bits: KvBits.of(bits) for bits in FEWER_KV}
_DEFAULTS = {"batch": [1, 16], "context": [1024, 4096], "rows": [1, 2, 4, 8, 16, 32, 64], "repeat": 10}
_QUICK_DEFAULTS = {"batch": [4], "context": [512], "rows": [1, 8], "repeat": 3}
_NUM_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench kernels`."""
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "metal", "cuda", "cpu", "reference"), help="what is measured")
    add(
        "--heads",
        nargs="+",
        type=_heads,
        default=[(16, 8, 128)],
        metavar="QxKVxDIM",
        help="query heads, KV heads, head_dim; default: 16x8x128",
    )
    add("--batch", nargs="+", type=from_1, metavar="N", help="sequences of a decode; default: 1 16")
    add("--context", nargs="+", type=from_1, metavar="N", help="tokens of each; default: 1024 4096")
    add(
        "--prefill",
        nargs="*",
        type=_chunk,
        default=[(512, 2048)],
        metavar="CHUNKxCONTEXT",
        help="the last CHUNK tokens of a prompt of CONTEXT; default: 512x2048",
    )
    add_product_arguments(parser)
    add("--kv-bits", nargs="+", choices=tuple(_KV_BITS), default=["full"], help="bits of a number of K and V")
    add("--dtype", choices=tuple(DTYPES), help="default: float16 on a GPU, float32 on a CPU")
    add("--layers", type=from_1, default=8, metavar="N", help="most layers of a measurement; large K/V take fewer")
    add("--repeat", type=from_1, metavar="N", help="measurements, of which the median is shown; default: 10")
    add("--copy-mib", type=from_1, default=256, metavar="N", help="size of the copy that tells the memory's bandwidth")
    add("--no-sweep", action="store_true", help="on a GPU: try no variants, store nothing")
    add("--quick", action="store_true", help="no sweep; unless told otherwise one small decode, and 3 measurements")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Prints, on a GPU, a table of variants for each shape, then a table of all cases and one of products. Progress
    goes to stderr.

    Raises `ConfigError` for cases that cannot be measured, and `ServeError` if results differ from MLX's or the choice
    cannot be stored.
    """
    _set_defaults(args)
    copy = measure_copy(args.copy_mib * 2**20)
    results: list[Result] = []
    sweeps: list[Sweep] = []
    for shape in _shapes(args):
        decodes = [Case(shape, batch, 1, context) for batch in args.batch for context in args.context]
        prefills = [Case(shape, 1, chunk, context) for chunk, context in args.prefill]
        backend = _backend(args.backend, shape)
        if isinstance(backend, GpuBackend) and not args.no_sweep and backend.variant(shape) is not None:
            found = sweep_decodes(decodes, backend, backend_with(backend.name), args.layers, args.repeat)
            _store(found)
            sweeps.append(found)
            backend = _backend(args.backend, shape)
        for case in [*decodes, *prefills]:
            results.append(measure_case(case, backend, args.layers, args.repeat))
            mx.clear_cache()
            print_progress(f"{describe_case(case)}, {describe_shape(shape)}: {results[-1].speedup:.2f}x MLX")
    print(render_results(results, copy))
    products = measure_all(args, _dtype(args))
    if products:
        print(f"\n{render_products(products, copy)}")
    documents = [product_document(one, copy) for one in products]
    write_figures(args.json, "kernels", **as_document(results, sweeps, copy), products=documents)
    return 0


def measure_case(case: Case, backend: AttentionBackend, max_layers: int, num_repeats: int) -> Result:
    """Compares the results of the backend with those of MLX, then times both. Raises `ServeError` if they differ."""
    world = World(case, case.num_layers(max_layers), backend)
    paged, contiguous = world.paged(backend), world.contiguous()
    difference = float(mx.abs(paged().astype(mx.float32) - contiguous().astype(mx.float32)).max())
    if not difference <= _TOLERANCES[case.shape.dtype]:
        raise ServeError(
            f"The {backend.name} backend is off by {difference:.1e}: {describe_shape(case.shape)}, {case}."
        )
    time_s, mlx_time_s = (seconds / world.num_layers for seconds in median_times([paged, contiguous], num_repeats))
    return Result(case, world.num_layers, backend.name, time_s, mlx_time_s, difference)


def sweep_decodes(
    decodes: Sequence[Case], backend: GpuBackend, make_backend: MakeBackend, max_layers: int, num_repeats: int
) -> Sweep:
    """Tries all variants with decodes of one shape, whose K/V `backend` stores."""
    worlds = [World(case, case.num_layers(max_layers), backend) for case in decodes]
    shape = decodes[0].shape
    print_progress(f"{describe_shape(shape)}: trying {len(kernel_variants(shape))} variants")
    timed = sweep(shape, make_measure(worlds, make_backend, num_repeats))
    return Sweep(tuple(decodes), tuple(timed))


def _store(found: Sweep) -> None:
    """Prints the sweep and stores its fastest variant for the server. Raises `ServeError` if that cannot be written."""
    if not found.timed:
        print_progress(f"{describe_shape(found.shape)}: no variant runs here")
        return
    print(f"{render_sweep(found)}\n")
    try:
        path = store_choices({found.shape: found.best})
    except OSError as error:
        raise ServeError(f"The fastest variant cannot be stored: {error}.") from error
    print_progress(f"stored the fastest in {path}")


def _backend(name: str, shape: DecodeShape) -> AttentionBackend:
    """The backend as the server makes it: chosen by name, and warmed up with the stored variant."""
    spec = shape.spec
    backend = choose_backend(name, [spec])
    exhaust(backend.warm_up(spec, shape.num_query_heads))
    return backend


def _set_defaults(args: argparse.Namespace) -> None:
    for name, value in (_QUICK_DEFAULTS if args.quick else _DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.no_sweep = args.no_sweep or args.quick


def _shapes(args: argparse.Namespace) -> list[DecodeShape]:
    return [
        DecodeShape(heads, kv_heads, dim, dim, _dtype(args), _KV_BITS[bits])
        for heads, kv_heads, dim in args.heads
        for bits in args.kv_bits
    ]


def _dtype(args: argparse.Namespace) -> mx.Dtype:
    return DTYPES[args.dtype or ("float32" if mx.default_device() == mx.cpu else "float16")]


def _heads(text: str) -> tuple[int, int, int]:
    heads, kv_heads, dim = crossed_numbers(text, 3)
    if heads % kv_heads:
        raise argparse.ArgumentTypeError(f"{heads} query heads do not divide over {kv_heads} KV heads")
    return heads, kv_heads, dim


def _chunk(text: str) -> tuple[int, int]:
    chunk, context = crossed_numbers(text, 2)
    if not 1 < chunk <= context:
        raise argparse.ArgumentTypeError(f"a chunk of {chunk} is not 2 to {context} tokens")
    return chunk, context


@dataclass(frozen=True, slots=True)
class Result:
    """One case: median seconds of one layer's attention by the backend and by MLX, measured alternately.
    `max_difference` is the largest between the results after all layers."""

    case: Case
    num_layers: int
    backend: str
    time_s: float
    mlx_time_s: float
    max_difference: float

    @property
    def shape(self) -> DecodeShape:
        return self.case.shape

    @property
    def bytes_per_s(self) -> float:
        return self.case.required_bytes / self.time_s

    @property
    def speedup(self) -> float:
        """Above 1 if the backend is faster than MLX."""
        return self.mlx_time_s / self.time_s


@dataclass(frozen=True, slots=True)
class Sweep:
    """All variants that ran for one shape, the fastest first, in the same decode cases."""

    cases: tuple[Case, ...]
    timed: tuple[Timed, ...]

    @property
    def shape(self) -> DecodeShape:
        return self.cases[0].shape

    @property
    def best(self) -> KernelVariant:
        return self.timed[0].variant


def describe_shape(shape: DecodeShape) -> str:
    """For people: `16 heads on 8 of 128, float16`, or `..., float16 in 8 bits`."""
    dims = f"{shape.key_dim}" if shape.key_dim == shape.value_dim else f"{shape.key_dim}/{shape.value_dim}"
    stored = "" if shape.bits is None else f" in {shape.bits.words}"
    return f"{shape.num_query_heads} heads on {shape.num_kv_heads} of {dims}, {dtype_name(shape.dtype)}{stored}"


def describe_case(case: Case) -> str:
    """For people: `decode 16 x 1,024` (sequences x context), or `prefill 512 of 2,048`."""
    if case.is_decode:
        return f"decode {case.num_sequences} x {case.context:,}"
    return f"prefill {case.num_queries:,} of {case.context:,}"


def render_results(results: Sequence[Result], copy: Copy) -> str:
    """A table with a row for each case. "MB must move" counts K/V once, queries and results; "GB/s" and "of copy" are
    computed from it."""
    backends = " and ".join(sorted({result.backend for result in results}))
    dtypes = " and ".join(sorted({dtype_name(result.shape.dtype) for result in results}))
    table = render_items(
        results,
        {
            "case": lambda one: describe_case(one.case),
            "heads": lambda one: f"{one.shape.num_query_heads}x{one.shape.num_kv_heads}x{one.shape.key_dim}",
            "K/V bits": lambda one: str(one.shape.bits or "full"),
            "ms": lambda one: f"{1e3 * one.time_s:,.3f}",
            "MLX ms": lambda one: f"{1e3 * one.mlx_time_s:,.3f}",
            "vs MLX": lambda one: f"{one.speedup:.2f}x",
            "MB must move": lambda one: _megabytes(one.case.required_bytes),
            "GB/s": lambda one: format_rate(one.bytes_per_s / 1e9),
            "of copy": lambda one: f"{one.bytes_per_s / copy.bytes_per_s:.0%}",
        },
    )
    return (
        f"{backends} backend, {dtypes}. Copy bandwidth: {copy.bytes_per_s / 1e9:,.1f} GB/s, read and written "
        f"({copy.how}, {copy.num_bytes / 1e6:,.0f} MB; best of 3).\n\n{table}"
    )


def render_sweep(sweep: Sweep) -> str:
    """A table of the fastest variants and the default one, with the mean time of a case."""
    default = default_variant(sweep.shape)
    times = {one.variant: one.mean_s for one in sweep.timed}
    shown = [one for rank, one in enumerate(sweep.timed) if rank < _NUM_SHOWN or one.variant == default]

    def gained(one: Timed) -> str:
        return f"{times[default] / one.mean_s:.2f}x" if default in times else "-"

    table = render_items(
        shown,
        {
            "heads/simdgroup": lambda one: str(one.variant.heads_per_simdgroup),
            "simdgroups": lambda one: str(one.variant.simdgroups),
            "lanes/row": lambda one: str(one.variant.lanes_per_row),
            "rows ahead": lambda one: str(one.variant.rows_ahead),
            "partition": lambda one: (
                f"{one.variant.partition_tokens:,}" if one.variant.partition_tokens else "by length"
            ),
            "ms": lambda one: f"{1e3 * one.mean_s:,.3f}",
            "vs default": gained,
        },
    )
    required = sum(case.required_bytes for case in sweep.cases)
    title = (
        f"{describe_shape(sweep.shape)}: {len(sweep.timed)} variants over {len(sweep.cases)} decodes, "
        f"{_megabytes(required)} MB must move"
    )
    return f"{title}\n\n{table}"


def as_document(results: Sequence[Result], sweeps: Sequence[Sweep], copy: Copy) -> dict[str, Any]:
    """All figures, for JSON."""
    return {
        "copy": asdict(copy),
        "results": [_result_document(result, copy) for result in results],
        "sweeps": [_sweep_document(sweep) for sweep in sweeps],
    }


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f}"


def _case_document(case: Case) -> dict[str, Any]:
    shape = case.shape
    return {
        **document_of(shape, "num_query_heads", "num_kv_heads"),
        "head_dim": shape.key_dim,
        "dtype": dtype_name(shape.dtype),
        "kv_bits": None if shape.bits is None else str(shape.bits),
        **document_of(case, "num_sequences", "num_queries", "context", "required_bytes"),
    }


def _result_document(result: Result, copy: Copy) -> Mapping[str, Any]:
    names = ("num_layers", "backend", "time_s", "mlx_time_s", "speedup", "bytes_per_s", "max_difference")
    share = {"share_of_copy": result.bytes_per_s / copy.bytes_per_s}
    return _case_document(result.case) | document_of(result, *names) | share


def _sweep_document(sweep: Sweep) -> Mapping[str, Any]:
    return {
        "cases": [_case_document(case) for case in sweep.cases],
        "variants": [{**asdict(one.variant), "times_s": one.times_s} for one in sweep.timed],
    }
