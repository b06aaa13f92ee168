"""Chooses the attention backend. Each must match MLX's own attention, as the reference backend calls it, in a self-test
before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ConfigError
from mlx_server.outputs import ScheduledChunk
from mlx_server.runtime.attention.interface import AttentionBackend, LayerSpec, ReferenceBackend
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.kernels.gpu.backend import CudaBackend, MetalBackend
from mlx_server.runtime.kernels.gpu.variant_choice import load_choice
from mlx_server.runtime.kernels.trials import exact_kv, exact_rows, exhaust

logger = logging.getLogger(__name__)

_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {
    "metal": lambda: MetalBackend(choose_variant=load_choice()),
    "cuda": lambda: CudaBackend(choose_variant=load_choice()),
    "cpu": CpuBackend,
    "reference": ReferenceBackend,
}

_TOLERANCES = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 4e-2}
_ENDS = (1, 33, 70, 90)
"""Context lengths of the requests in the self-test."""
_STARTS = (0, 32, 69, 50)
"""Where its second step starts: three decodes and a chunk of 40 tokens."""


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Whether a backend can be used on this machine; `reason` says why not."""

    name: str
    is_available: bool
    reason: str | None = None


def available_backends() -> list[BackendReport]:
    """All backends, best first, each tested on small layers. MLX thread."""
    spec = LayerSpec(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
    tried = {name: exhaust(_try(name, [spec])) for name in _FACTORIES}
    return [BackendReport(name, backend is not None, reason) for name, (backend, reason) in tried.items()]


def choose_backend(name: str, specs: Sequence[LayerSpec]) -> AttentionBackend:
    """`choose_in_pieces`, all at once."""
    return exhaust(choose_in_pieces(name, specs))


def choose_in_pieces(name: str, specs: Sequence[LayerSpec]) -> Generator[float, None, AttentionBackend]:
    """The backend called `name`, or for `auto` the first that passes its self-test on all kinds of layers in `specs`.
    Raises `ConfigError` if the named one does not pass. MLX thread; other models' steps may run at each yield, which is
    of 1."""
    kinds = list(dict.fromkeys(specs))
    for candidate in _FACTORIES if name == "auto" else (name,):
        backend, reason = yield from _try(candidate, kinds)
        if backend is not None:
            return backend
        if name != "auto":
            raise ConfigError(f"--attention-backend {name} cannot be used here: {reason}.")
        level = logging.DEBUG if _is_expected_absence(candidate) or _was_said(candidate) else logging.WARNING
        logger.log(level, "The %s attention backend is not used: %s.", candidate, reason)
    raise AssertionError("the reference backend passes everywhere")


def _is_expected_absence(name: str) -> bool:
    """Whether MLX does not compute on such a GPU: there is none, or the CPU was chosen."""
    kinds = {"metal": mx.metal, "cuda": mx.cuda}
    return name in kinds and (mx.default_device() == mx.cpu or not kinds[name].is_available())


def _was_said(name: str) -> bool:
    """Whether the native library is missing, which has its own warning."""
    return name == "cpu" and mx.default_device() == mx.cpu and native.why_missing() is not None


def _try(name: str, specs: Sequence[LayerSpec]) -> Generator[float, None, tuple[AttentionBackend | None, str | None]]:
    """A backend that has passed its self-test, or the reason why it cannot be used."""
    if _is_expected_absence(name):
        return None, f"MLX does not compute on a {name.capitalize()} GPU here"
    if name == "cpu" and mx.default_device() != mx.cpu:
        return None, "MLX computes on the GPU, this backend on the CPU"
    try:
        backend = _FACTORIES[name]()
        for spec in specs:
            error = yield from _self_test(backend, spec)
            if not error <= _TOLERANCES[spec.dtype]:
                return None, f"its self-test is off by {error:.1e} with {spec.key_dim} head dimensions"
    except Exception as error:  # whatever the error, the next backend may work
        return None, f"{type(error).__name__}: {error}"
    return backend, None


def _self_test(backend: AttentionBackend, spec: LayerSpec) -> Generator[float, None, float]:
    """The largest difference from the reference backend in two steps: whole prompts; then decodes and
    a prompt chunk over the K/V of the first step, with a window and sinks. The blocks are shuffled. Quantised rows hold
    numbers that quantisation keeps exactly, so the tolerance is the same."""
    rng = np.random.default_rng(0)
    requests = range(len(_ENDS))
    num_blocks = [-(-end // BLOCK_SIZE) for end in _ENDS]
    blocks = np.split(rng.permutation(sum(num_blocks)), np.cumsum(num_blocks)[:-1])
    tables = BlockTables()
    for r in requests:
        tables.add(str(r))
    reference = ReferenceBackend()
    pool, reference_pool = (each.make_pool(spec, sum(num_blocks)) for each in (backend, reference))
    num_heads = 2 * spec.num_kv_heads
    keys, values = zip(*[exact_kv(rng, (end, spec.num_kv_heads, 1), spec) for end in _ENDS])
    queries = [exact_rows(rng, (end, num_heads, 1, spec.key_dim), spec.dtype, None) for end in _ENDS]
    sinks = exact_rows(rng, (num_heads,), spec.dtype, None)
    yield from backend.warm_up(spec, num_heads, sinks=sinks)
    worst = 0.0
    for starts, window in (((0, 0, 0, 0), None), (_STARTS, 24)):
        yield 1.0
        parts = [slice(start, end) for start, end in zip(starts, _ENDS, strict=True)]
        order = sorted(requests, key=lambda r: parts[r].stop - parts[r].start != 1)
        chunks = [
            ScheduledChunk(
                str(r),
                parts[r].start,
                parts[r].stop - parts[r].start,
                None,
                () if parts[r].start else (tuple(blocks[r].tolist()),),
                True,
                0,
            )
            for r in order
        ]
        (step,) = tables.plan(chunks)
        q, k, v = (mx.concatenate([x[r][parts[r]] for r in order]) for x in (queries, keys, values))
        options: dict[str, Any] = {"scale": spec.key_dim**-0.5, "window": window, "sinks": sinks}
        got = backend.attend(pool, q, k, v, backend.plan(step), **options)
        expected = reference.attend(reference_pool, q, k, v, reference.plan(step), **options)
        mx.eval(got, expected, *backend.state(pool), *reference.state(reference_pool))
        difference = mx.abs(got.astype(mx.float32) - expected.astype(mx.float32)).max()
        worst = max(worst, float(np.array(difference)))
    return worst
