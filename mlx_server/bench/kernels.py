"""The attention kernels alone: each case through the server's own backend, beside MLX's own attention.

`mx.fast.scaled_dot_product_attention` gets the same K/V, contiguous; both are measured in turns, in one process.
A measurement runs several layers, each on the result of the one before and on its own K/V, as a model does. K/V
are stored beforehand, so times are of attention alone. On a GPU the variants of the decode kernel are tried
first, and the fastest for each shape of heads is stored; the server takes it from its next start on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from mlx_server.bench.arguments import from_1
from mlx_server.bench.environment import describe_environment
from mlx_server.bench.kernels_cases import Case, World
from mlx_server.bench.kernels_report import (
    Result,
    Sweep,
    as_document,
    describe_case,
    describe_shape,
    render_results,
    render_sweep,
)
from mlx_server.bench.kernels_sweep import MakeBackend, backend_with, kernel_variants, make_measure, moved_bytes, sweep
from mlx_server.bench.kernels_timing import measure_copy, median_times
from mlx_server.errors import ServeError
from mlx_server.runtime.attention import AttentionBackend
from mlx_server.runtime.backends import choose_backend
from mlx_server.runtime.kernels.gpu.backend import GpuBackend
from mlx_server.runtime.kernels.gpu.choice import store_choices
from mlx_server.runtime.kernels.gpu.plan import DecodeShape, KernelVariant

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_TOLERANCES = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}
_KV_BITS = {"full": None, "8": 8, "4": 4}
_DEFAULTS = {"batch": [1, 16], "context": [1024, 4096], "repeat": 10}
_QUICK_DEFAULTS = {"batch": [4], "context": [512], "repeat": 3}


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
    add("--kv-bits", nargs="+", choices=tuple(_KV_BITS), default=["full"], help="bits of a number of K and V")
    add("--dtype", choices=tuple(_DTYPES), help="default: float16 on a GPU, float32 on a CPU")
    add("--layers", type=from_1, default=8, metavar="N", help="most layers of a measurement; large K/V take fewer")
    add("--repeat", type=from_1, metavar="N", help="measurements, of which the median is shown; default: 10")
    add("--copy-mib", type=from_1, default=256, metavar="N", help="size of the copy that tells the memory's bandwidth")
    add("--no-sweep", action="store_true", help="on a GPU: try no variants, store nothing")
    add("--quick", action="store_true", help="no sweep; unless told otherwise one small decode, and 3 measurements")
    add("--json", type=_writable, metavar="FILE", help="write all figures there too")


def run(args: argparse.Namespace) -> int:
    """Prints a table of variants for each shape on a GPU, then one of all cases; progress goes to stderr.

    Raises `ConfigError` for what cannot be measured, and `ServeError` if results differ from MLX's or the
    choice cannot be stored.
    """
    _set_defaults(args)
    copy = measure_copy(args.copy_mib * 2**20)
    results: list[Result] = []
    sweeps: list[Sweep] = []
    for shape in _shapes(args):
        decodes = [Case(shape, batch, 1, context) for batch in args.batch for context in args.context]
        prefills = [Case(shape, 1, chunk, context) for chunk, context in args.prefill]
        backend = _backend(args.backend, shape)
        if isinstance(backend, GpuBackend) and not args.no_sweep and _variant(backend, shape) is not None:
            found = sweep_decodes(decodes, backend, backend_with(backend.name), args.layers, args.repeat)
            _store(found)
            sweeps.append(found)
            backend = _backend(args.backend, shape)
        results += [_measured(case, backend, args) for case in [*decodes, *prefills]]
    print(render_results(results, copy))
    if args.json is not None:
        environment = describe_environment()
        document = {"benchmark": "kernels", "environment": environment, **as_document(results, sweeps, copy)}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def measure_case(case: Case, backend: AttentionBackend, most_layers: int, num_repeats: int) -> Result:
    """The backend beside MLX, once their results agree; raises `ServeError` if they do not."""
    world = World(case, case.num_layers(most_layers), backend)
    paged, contiguous = world.paged(backend), world.contiguous()
    difference = float(mx.abs(paged().astype(mx.float32) - contiguous().astype(mx.float32)).max())
    if not difference <= _TOLERANCES[case.shape.dtype]:
        raise ServeError(
            f"The {backend.name} backend is off by {difference:.1e}: {describe_shape(case.shape)}, {case}."
        )
    time_s, mlx_time_s = (seconds / world.num_layers for seconds in median_times([paged, contiguous], num_repeats))
    moved = None
    if isinstance(backend, GpuBackend) and case.is_decode:
        variant = _variant(backend, case.shape)
        moved = None if variant is None else moved_bytes(case, variant, backend.plan(world.step).num_cores)
    return Result(case, world.num_layers, backend.name, time_s, mlx_time_s, moved, difference)


def sweep_decodes(
    decodes: Sequence[Case], backend: GpuBackend, make_backend: MakeBackend, most_layers: int, num_repeats: int
) -> Sweep:
    """Tries all variants over decodes of one shape, whose K/V `backend` stores."""
    worlds = [World(case, case.num_layers(most_layers), backend) for case in decodes]
    shape = decodes[0].shape
    print(f"{describe_shape(shape)}: trying {len(kernel_variants(shape))} variants", file=sys.stderr, flush=True)
    timed = sweep(shape, make_measure(worlds, make_backend, num_repeats))
    return Sweep(tuple(decodes), backend.plan(worlds[0].step).num_cores, tuple(timed))


def _store(found: Sweep) -> None:
    """Prints the sweep, and keeps its best for the server. Raises `ServeError` where that cannot be written."""
    if not found.timed:
        print(f"{describe_shape(found.shape)}: no variant runs here", file=sys.stderr)
        return
    print(f"{render_sweep(found)}\n")
    try:
        path = store_choices({found.shape: found.best})
    except OSError as error:
        raise ServeError(f"The fastest variant cannot be stored: {error}.") from error
    print(f"stored the fastest in {path}", file=sys.stderr, flush=True)


def _measured(case: Case, backend: AttentionBackend, args: argparse.Namespace) -> Result:
    result = measure_case(case, backend, args.layers, args.repeat)
    mx.clear_cache()
    print(
        f"{describe_case(case)}, {describe_shape(case.shape)}: {result.speedup:.2f}x MLX", file=sys.stderr, flush=True
    )
    return result


def _backend(name: str, shape: DecodeShape) -> AttentionBackend:
    """As the server makes it: chosen, and warmed up with the choice that is stored."""
    spec = shape.spec
    backend = choose_backend(name, [spec])
    backend.warm_up(spec, shape.num_query_heads)
    return backend


def _variant(backend: GpuBackend, shape: DecodeShape) -> KernelVariant | None:
    return backend.variant(shape.spec, shape.num_query_heads)


def _set_defaults(args: argparse.Namespace) -> None:
    for name, value in (_QUICK_DEFAULTS if args.quick else _DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.no_sweep = args.no_sweep or args.quick


def _shapes(args: argparse.Namespace) -> list[DecodeShape]:
    is_cpu = mx.default_device() == mx.cpu
    dtype = _DTYPES[args.dtype or ("float32" if is_cpu else "float16")]
    return [
        DecodeShape(heads, kv_heads, dim, dim, dtype, _KV_BITS[bits])
        for heads, kv_heads, dim in args.heads
        for bits in args.kv_bits
    ]


def _heads(text: str) -> tuple[int, int, int]:
    heads, kv_heads, dim = _numbers(text, 3)
    if heads % kv_heads:
        raise argparse.ArgumentTypeError(f"{heads} query heads do not divide over {kv_heads} KV heads")
    return heads, kv_heads, dim


def _chunk(text: str) -> tuple[int, int]:
    chunk, context = _numbers(text, 2)
    if not 1 < chunk <= context:
        raise argparse.ArgumentTypeError(f"a chunk of {chunk} is not 2 to {context} tokens")
    return chunk, context


def _numbers(text: str, count: int) -> list[int]:
    parts = text.split("x")
    if len(parts) != count or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not {count} positive whole numbers with x between")
    return [int(part) for part in parts]


def _writable(text: str) -> Path:
    """Before the measuring, which may take minutes."""
    path = Path(text)
    try:
        path.touch()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from error
    return path
