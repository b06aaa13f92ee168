"""Which attention backends work here: each must match MLX's own attention before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ConfigError
from mlx_server.runtime.attention.interface import (
    AttentionBackend,
    IntArray,
    LayerSpec,
    ReferenceBackend,
    StepPlan,
    causal_mask,
)
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.kernels.gpu.backend import CudaBackend, MetalBackend
from mlx_server.runtime.kernels.gpu.choice import load_choice
from mlx_server.runtime.kernels.trials import exact_kv, exact_rows

logger = logging.getLogger(__name__)

_FACTORIES: dict[str, Callable[[], AttentionBackend]] = {
    "metal": lambda: MetalBackend(choose_variant=load_choice()),
    "cuda": lambda: CudaBackend(choose_variant=load_choice()),
    "cpu": CpuBackend,
    "reference": ReferenceBackend,
}

_TOLERANCES = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 4e-2}
_CONTEXTS = (1, 33, 70)  # one-token requests of the self-test; a chunk of 40 after 50 tokens follows them
_CHUNK = (50, 40)


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Whether a backend may be used here; `reason` says why not."""

    name: str
    is_available: bool
    reason: str | None = None


def available_backends() -> list[BackendReport]:
    """All backends, best first, each tried on small layers. MLX thread."""
    spec = LayerSpec(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
    tried = {name: _try(name, [spec]) for name in _FACTORIES}
    return [BackendReport(name, backend is not None, reason) for name, (backend, reason) in tried.items()]


def choose_backend(name: str, specs: Sequence[LayerSpec]) -> AttentionBackend:
    """The backend called `name`, or with `auto` the first that passes its self-test on all kinds of layers
    in `specs`. Raises `ConfigError` when the one asked for does not. MLX thread."""
    kinds = list(dict.fromkeys(specs))
    for candidate in _FACTORIES if name == "auto" else (name,):
        backend, reason = _try(candidate, kinds)
        if backend is not None:
            return backend
        if name != "auto":
            raise ConfigError(f"--attention-backend {name} cannot be used here: {reason}.")
        level = logging.DEBUG if _is_expected_absence(candidate) else logging.WARNING
        logger.log(level, "The %s attention backend is not used: %s.", candidate, reason)
    raise AssertionError("the reference backend passes everywhere")


def _is_expected_absence(name: str) -> bool:
    """Whether MLX computes elsewhere: there is no such GPU, or the CPU was chosen."""
    kinds = {"metal": mx.metal, "cuda": mx.cuda}
    return name in kinds and (mx.default_device() == mx.cpu or not kinds[name].is_available())


def _try(name: str, specs: Sequence[LayerSpec]) -> tuple[AttentionBackend | None, str | None]:
    """A backend that has passed, or the reason why it is not to be used."""
    if _is_expected_absence(name):
        return None, f"MLX does not compute on a {name.capitalize()} GPU here"
    if name == "cpu" and mx.default_device() != mx.cpu:
        return None, "MLX computes on the GPU, and this backend on the CPU"
    try:
        backend = _FACTORIES[name]()
        for spec in specs:
            error = _self_test(backend, spec)
            if not error <= _TOLERANCES[spec.dtype]:
                return None, f"its self-test is off by {error:.1e} with {spec.key_dim} head dimensions"
    except Exception as error:  # whatever it is, this backend is not usable and the next one may be
        return None, f"{type(error).__name__}: {error}"
    return backend, None


def _self_test(backend: AttentionBackend, spec: LayerSpec) -> float:
    """Worst difference to `mx.fast.scaled_dot_product_attention` on a mixed step: K/V written by earlier
    steps, decodes and a prompt chunk, blocks in no order, with a window and sinks. Quantised rows are such as lose
    nothing, so that they differ no more than whole ones."""
    rng = np.random.default_rng(0)
    ends = [*_CONTEXTS, sum(_CHUNK)]
    tables = _shuffled_tables(ends, rng)
    pool = backend.make_pool(spec, int(tables.max()) + 1)
    num_heads = 2 * spec.num_kv_heads
    keys, values = zip(*[exact_kv(rng, (end, spec.num_kv_heads, 1), spec) for end in ends])
    queries = [exact_rows(rng, (end, num_heads, 1, spec.key_dim), spec.dtype, None) for end in ends]
    sinks = exact_rows(rng, (num_heads,), spec.dtype, None)
    scale = spec.key_dim**-0.5
    worst = 0.0
    for starts, window in (([0] * len(ends), None), ([end - 1 for end in _CONTEXTS] + [_CHUNK[0]], 24)):
        parts = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        order = sorted(range(len(ends)), key=lambda r: parts[r].stop - parts[r].start != 1)
        step = _plan([parts[r] for r in order], tables[order])
        got = backend.attend(
            pool,
            mx.concatenate([queries[r][parts[r]] for r in order]),
            mx.concatenate([keys[r][parts[r]] for r in order]),
            mx.concatenate([values[r][parts[r]] for r in order]),
            backend.plan(step),
            scale=scale,
            window=window,
            sinks=sinks,
        )
        mx.eval(got, *backend.state(pool))
        wanted = mx.concatenate(
            [_expected(queries[r], keys[r], values[r], parts[r], scale, window, sinks) for r in order]
        )
        difference = mx.abs(got.astype(mx.float32) - wanted.astype(mx.float32)).max()
        worst = max(worst, float(np.array(difference)))
    return worst


def _shuffled_tables(ends: Sequence[int], rng: np.random.Generator) -> IntArray:
    counts = [-(-end // BLOCK_SIZE) for end in ends]
    ids = rng.permutation(sum(counts)).astype(np.int32)
    tables = np.zeros((len(ends), max(counts)), dtype=np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = ids[sum(counts[:row]) :][:count]
    return tables


def _plan(parts: Sequence[slice], tables: IntArray) -> StepPlan:
    lengths = [part.stop - part.start for part in parts]
    positions = np.concatenate([np.arange(part.start, part.stop, dtype=np.int32) for part in parts])
    blocks = np.concatenate(
        [tables[row, np.arange(part.start, part.stop) // BLOCK_SIZE] for row, part in enumerate(parts)]
    )
    return StepPlan(
        num_decodes=lengths.count(1),
        positions=positions,
        slot_mapping=blocks.astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=np.cumsum([0, *lengths], dtype=np.int32),
        context_lens=np.array([part.stop for part in parts], dtype=np.int32),
        block_tables=tables,
    )


def _expected(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    part: slice,
    scale: float,
    window: int | None,
    sinks: mx.array,
) -> mx.array:
    """MLX's own attention of one request's positions `part` over its whole context."""
    out = mx.fast.scaled_dot_product_attention(
        queries[part].transpose(2, 1, 0, 3),
        keys[: part.stop].transpose(2, 1, 0, 3),
        values[: part.stop].transpose(2, 1, 0, 3),
        scale=scale,
        mask=causal_mask(mx.arange(part.start, part.stop)[:, None], mx.arange(part.stop), window),
        sinks=sinks,
    )
    return out.transpose(2, 1, 0, 3)
