"""Batch invariance: a request's logits have the same bits alone and in any batch, and however its tokens are split into
chunks, hence also after a prefix hit and after a preemption.

Everything is computed so that the bits of a row depend on this row only: sampler and norms always do, attention does
with some backends, and `FixedRows` makes matrix products do so. Because the rest of a model's code is unknown, the
model must give the same bits in two ways of computing the same tokens before it is served.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.attention.interface import AttentionBackend
from mlx_server.runtime.attention.regroup import Scope
from mlx_server.runtime.checks.probe import TrialRequests
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.kernels.gpu.backend import GpuBackend
from mlx_server.runtime.layers.fixed_rows import REMEDY, FixedRows, same_values
from mlx_server.runtime.layers.products import install_products, mix_in, takes_product
from mlx_server.runtime.model_runner import ModelRunner


class _OneByOne:
    """Experts that multiply each row separately. MLX's own experts group tokens that are sorted by expert, which
    happens from 64 indices on, and the bits of a group's product depend on its size."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        layer: Any = super()
        rows = mx.broadcast_to(x, (*indices.shape, 1, x.shape[-1])).reshape(-1, 1, x.shape[-1])
        products: mx.array = layer.__call__(rows, indices.flatten(), sorted_indices=False)
        return products.reshape(*indices.shape, *products.shape[1:])


def compute_by_row(model: Any, backend: AttentionBackend, adapters: Sequence[str]) -> Generator[float, None, None]:
    """Makes a model's products and its attention independent of the batch, permanently. Call it before the first step.
    Raises `ModelLoadError` if there are adapters or if the attention backend cannot do it. MLX thread; yields after
    each product that is tried."""
    if isinstance(backend, GpuBackend):
        backend.by_row = True
    elif not isinstance(backend, CpuBackend):
        why = native.why_missing()
        remedy = (
            "use --attention-backend auto" if why is None else f"install the native library, which is missing ({why})"
        )
        raise ModelLoadError(
            f"--batch-invariant is impossible with the {backend.name} attention backend, whose bits depend on the "
            f"batch; {remedy}, or {REMEDY}."
        )
    if adapters:
        raise ModelLoadError(
            f"--batch-invariant is impossible with adapters ({', '.join(adapters)}), whose products depend on the "
            f"batch: fuse one into the model with `mlx_lm.fuse`, or {REMEDY}."
        )
    fixed = FixedRows()
    for module in model.modules():
        if takes_product(module):
            for _ in fixed.tries(module):
                yield 1.0
    install_products(model, fixed)
    for module in model.modules():
        if type(module) in (SwitchLinear, QuantizedSwitchLinear):
            mix_in(module, _OneByOne)


_LENGTHS = {"long": 300, "short": 20}
"""Tokens of the two requests that are computed in two ways; the long one has more than any number of rows above."""

_DECODES = 6
"""How many of the tokens are decoded."""


def check_invariance(runner: ModelRunner, vocab_size: int) -> Generator[float, None, None]:
    """Computes two requests, each alone in one chunk and then together in chunks and decodes, and raises
    `ModelLoadError` unless all logits have the same bits. Leaves no pools. MLX thread; yields after each step."""
    if runner.forward.level.scope is not Scope.NOTHING:
        raise ModelLoadError(
            f"--batch-invariant is impossible: this model is computed group by group ({runner.forward.level}), so its "
            f"bits depend on the batch; {REMEDY}."
        )
    backend = runner.cache.backend
    if isinstance(backend, GpuBackend) and backend.refusals:
        raise ModelLoadError(
            f"--batch-invariant is impossible: attention of this model gathers its rows ({backend.refusals[0]}), and "
            f"the bits of gathered rows depend on the batch; {REMEDY}."
        )
    rng = np.random.default_rng(0)
    sequences = {name: rng.integers(1, vocab_size, size=size).tolist() for name, size in _LENGTHS.items()}
    try:
        trial = TrialRequests(runner, sequences)
        alone: dict[str, mx.array] = {}
        for name, size in _LENGTHS.items():
            alone |= yield from _last_logits(trial, {name: (0, size)})
        together = yield from _computed_together(TrialRequests(runner, sequences))
    finally:
        runner.cache.release()
    for name, expected in alone.items():
        if not same_values(mx.concatenate(together[name]), expected):
            raise ModelLoadError(
                "--batch-invariant is impossible: this model's bits depend on the batch with the "
                f"{runner.cache.backend.name} attention backend; {REMEDY}."
            )


def _computed_together(trial: TrialRequests) -> Generator[float, None, dict[str, list[mx.array]]]:
    """Logits of the last `_DECODES` tokens of both requests: prompts in chunks side by side, then decodes."""
    long, short = (size - _DECODES for size in _LENGTHS.values())
    cut = BLOCK_SIZE + 5
    yield from _last_logits(trial, {"short": (0, short), "long": (0, cut)})
    first = yield from _last_logits(trial, {"short": (short, short + 1), "long": (cut, long)})
    found: dict[str, list[mx.array]] = {"long": [], "short": [first["short"]]}
    for turn in range(_DECODES):
        parts = {"long": (long + turn, long + turn + 1)}
        if turn + 1 < _DECODES:
            parts["short"] = short + turn + 1, short + turn + 2
        logits_of = yield from _last_logits(trial, parts)
        for name, logits in logits_of.items():
            found[name].append(logits)
    return found


def _last_logits(
    trial: TrialRequests, parts: Mapping[str, tuple[int, int]]
) -> Generator[float, None, dict[str, mx.array]]:
    """Computes tokens [start, end) of the named requests in one step; the logits of the last `_DECODES` of each."""
    chunks = sorted([trial.chunk(name, *part) for name, part in parts.items()], key=lambda chunk: chunk.num_tokens != 1)
    counts = [min(chunk.num_tokens, _DECODES) for chunk in chunks]
    ends = np.cumsum([chunk.num_tokens for chunk in chunks]).tolist()
    rows = [row for count, end in zip(counts, ends, strict=True) for row in range(end - count, end)]
    own = mx.split(trial.run(chunks, rows), np.cumsum(counts)[:-1].tolist())
    yield 1.0
    return {chunk.request_id: part for chunk, part in zip(chunks, own, strict=True)}
