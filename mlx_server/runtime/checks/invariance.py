"""Batch invariance: a request's logits have the same bits alone and in any batch, and however its tokens are split into
chunks, hence also after a prefix hit and after a preemption.

Everything is computed so that the bits of a row depend on this row only: sampler and norms always do, attention does
with some backends, and `FixedRows` makes matrix products do so. Because the rest of a model's code is unknown, the
model must give the same bits in two ways of computing the same tokens before it is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from mlx_server.runtime.layers.products import RowProduct, install_products
from mlx_server.runtime.model_runner import ModelRunner

_BLOCKS = (16, 8, 4)
"""Possible numbers of rows to compute at a time, the best first. Fewer rows are padded."""

_FEW = (*range(1, 16), 17, 24, 31, 33)
_WHOLE = (32, 48, 80, 256)
"""Numbers of rows to try; those in `_WHOLE` are multiples of a block."""

_MOST = max(_WHOLE)

_REMEDY = "serve it without --batch-invariant"

Product = Callable[[mx.array], mx.array]


class FixedRows:
    """A `MakeProduct` that finds, for each linear layer with MLX's own product, a product whose rows have the same bits
    for any number of rows.

    MLX and the BLAS library use different kernels for few and for many rows, which sum in different orders. For a fixed
    number of rows, the bits do not depend on a row's position, unless several kernels share the rows. So rows are
    computed in blocks, the last one padded, if necessary one block at a time. Example: for a layer of 576 x 192 on
    OpenBLAS with AVX-512, 16 and 512 rows give the same bits but 1 to 6 rows do not; 5 rows are computed as 16, and 40
    as 48 in one product. OpenBLAS's kernels for Zen split 16 rows between two kernels, but not 8; so 40 rows are
    computed as 5 products.

    Each shape is tried once. Raises `ModelLoadError` if even blocks are not enough.
    """

    def __init__(self) -> None:
        self._rules: dict[Any, _Rule] = {}

    def __call__(self, layer: Any) -> RowProduct | None:
        own, kind = _own_product(layer)
        if kind not in self._rules:
            self._rules[kind] = _find_rule(own, kind)
        return partial(_by_rule, self._rules[kind], own)


class _Rule(NamedTuple):
    """The number of rows is padded to a `multiple`; at most `most` are computed at a time."""

    multiple: int
    most: int


def _own_product(layer: Any) -> tuple[Product, tuple[Any, ...]]:
    """MLX's own product of a layer, without bias; and the properties that determine its kernel, the number of inputs
    first."""
    weight = layer.weight
    if "scales" not in layer:
        return (lambda x: x @ layer.weight.T), (weight.shape[1], weight.shape[0], weight.dtype)
    group_size, bits, mode = layer.group_size, layer.bits, layer.mode

    def product(x: mx.array) -> mx.array:
        scales, biases = layer.scales, layer.get("biases")
        return mx.quantized_matmul(
            x, layer.weight, scales, biases, transpose=True, group_size=group_size, bits=bits, mode=mode
        )

    inputs = weight.shape[1] * 32 // bits
    return product, (inputs, weight.shape[0], layer.scales.dtype, group_size, bits, mode)


def _by_rule(rule: _Rule, own: Product, x: mx.array) -> mx.array | None:
    """The product by a rule, in pieces of at most as many rows as were tried; None leaves it to MLX."""
    rows = x.reshape(-1, x.shape[-1])
    if rule.multiple == 1 and len(rows) <= rule.most:
        return None
    missing = -len(rows) % rule.multiple
    y = _in_pieces(own, mx.pad(rows, [(0, missing), (0, 0)]) if missing else rows, rule.most)[: len(rows)]
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _in_pieces(own: Product, x: mx.array, most: int) -> mx.array:
    pieces = [own(x[first : first + most]) for first in range(0, len(x), most)]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)


def _find_rule(own: Product, kind: tuple[Any, ...]) -> _Rule:
    """The cheapest rule with the same bits as padded blocks."""
    inputs, _, dtype = kind[:3]
    if not mx.issubdtype(dtype, mx.floating):  # only affine scales are floats
        dtype = mx.bfloat16
    x = mx.random.normal((_MOST, inputs), key=mx.random.key(0)).astype(dtype)
    block = next((block for block in _BLOCKS if _is_the_same_at_all_places(own, x[:block])), None)
    if block is None:
        raise ModelLoadError(
            f"--batch-invariant is impossible here: in products of {inputs} x {kind[1]} numbers a row's bits depend on "
            f"its position; {_REMEDY}."
        )
    expected = _in_pieces(own, x, block)
    if not all(_equal(own(x[:count]), expected[:count]) for count in _WHOLE):
        return _Rule(block, block)
    return _Rule(1 if all(_equal(own(x[:count]), expected[:count]) for count in _FEW) else block, _MOST)


def _is_the_same_at_all_places(own: Product, x: mx.array) -> bool:
    y = own(x)
    return all(_equal(own(mx.roll(x, by, 0)), mx.roll(y, by, 0)) for by in range(1, len(x)))


def _equal(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b).item())


class _OneByOne:
    """Experts that multiply each row separately. MLX's own experts group tokens that are sorted by expert, which
    happens from 64 indices on, and the bits of a group's product depend on its size."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        layer: Any = super()
        rows = mx.broadcast_to(x, (*indices.shape, 1, x.shape[-1])).reshape(-1, 1, x.shape[-1])
        products: mx.array = layer.__call__(rows, indices.flatten(), sorted_indices=False)
        return products.reshape(*indices.shape, *products.shape[1:])


class _SwitchLinear(_OneByOne, SwitchLinear):  # type: ignore[misc]
    pass


class _QuantizedSwitchLinear(_OneByOne, QuantizedSwitchLinear):  # type: ignore[misc]
    pass


_EXPERTS = {SwitchLinear: _SwitchLinear, QuantizedSwitchLinear: _QuantizedSwitchLinear}


def compute_by_row(model: Any, backend: AttentionBackend, adapters: Sequence[str]) -> None:
    """Makes a model's products and its attention independent of the batch, permanently. Call it before the first step.
    Raises `ModelLoadError` if there are adapters or if the attention backend cannot do it. MLX thread."""
    if isinstance(backend, GpuBackend):
        backend.by_row = True
    elif not isinstance(backend, CpuBackend):
        why = native.why_missing()
        remedy = (
            "use --attention-backend auto" if why is None else f"install the native library, which is missing ({why})"
        )
        raise ModelLoadError(
            f"--batch-invariant is impossible with the {backend.name} attention backend, whose bits depend on the "
            f"batch; {remedy}, or {_REMEDY}."
        )
    if adapters:
        raise ModelLoadError(
            f"--batch-invariant is impossible with adapters ({', '.join(adapters)}), whose products depend on the "
            f"batch: fuse one into the model with `mlx_lm.fuse`, or {_REMEDY}."
        )
    install_products(model, FixedRows())
    for module in model.modules():
        module.__class__ = _EXPERTS.get(type(module), type(module))


_LENGTHS = {"long": 300, "short": 20}
"""Tokens of the two requests that are computed in two ways; the long one has more than any number of rows above."""

_DECODES = 6
"""How many of the tokens are decoded."""


def check_invariance(runner: ModelRunner, vocab_size: int) -> None:
    """Computes two requests, each alone in one chunk and then together in chunks and decodes, and raises
    `ModelLoadError` unless all logits have the same bits. Leaves no pools. MLX thread."""
    if runner.forward.level.scope is not Scope.NOTHING:
        raise ModelLoadError(
            f"--batch-invariant is impossible: this model is computed group by group ({runner.forward.level}), so its "
            f"bits depend on the batch; {_REMEDY}."
        )
    backend = runner.cache.backend
    if isinstance(backend, GpuBackend) and backend.refusals:
        raise ModelLoadError(
            f"--batch-invariant is impossible: attention of this model gathers its rows ({backend.refusals[0]}), and "
            f"the bits of gathered rows depend on the batch; {_REMEDY}."
        )
    rng = np.random.default_rng(0)
    sequences = {name: rng.integers(1, vocab_size, size=size).tolist() for name, size in _LENGTHS.items()}
    try:
        trial = TrialRequests(runner, sequences)
        alone = {name: _last_logits(trial, {name: (0, size)})[name] for name, size in _LENGTHS.items()}
        together = _computed_together(TrialRequests(runner, sequences))
    finally:
        runner.cache.release()
    for name, expected in alone.items():
        if not _equal(mx.concatenate(together[name]), expected):
            raise ModelLoadError(
                "--batch-invariant is impossible: this model's bits depend on the batch with the "
                f"{runner.cache.backend.name} attention backend; {_REMEDY}."
            )


def _computed_together(trial: TrialRequests) -> dict[str, list[mx.array]]:
    """Logits of the last `_DECODES` tokens of both requests: prompts in chunks side by side, then decodes."""
    long, short = (size - _DECODES for size in _LENGTHS.values())
    cut = BLOCK_SIZE + 5
    _last_logits(trial, {"short": (0, short), "long": (0, cut)})
    first = _last_logits(trial, {"short": (short, short + 1), "long": (cut, long)})
    found: dict[str, list[mx.array]] = {"long": [], "short": [first["short"]]}
    for turn in range(_DECODES):
        parts = {"long": (long + turn, long + turn + 1)}
        if turn + 1 < _DECODES:
            parts["short"] = short + turn + 1, short + turn + 2
        for name, logits in _last_logits(trial, parts).items():
            found[name].append(logits)
    return found


def _last_logits(trial: TrialRequests, parts: dict[str, tuple[int, int]]) -> dict[str, mx.array]:
    """Computes tokens [start, end) of the named requests in one step; the logits of the last `_DECODES` of each."""
    chunks = sorted([trial.chunk(name, *part) for name, part in parts.items()], key=lambda chunk: chunk.num_tokens != 1)
    counts = [min(chunk.num_tokens, _DECODES) for chunk in chunks]
    ends = np.cumsum([chunk.num_tokens for chunk in chunks]).tolist()
    rows = [row for count, end in zip(counts, ends, strict=True) for row in range(end - count, end)]
    own = mx.split(trial.run(chunks, rows), np.cumsum(counts)[:-1].tolist())
    return {chunk.request_id: part for chunk, part in zip(chunks, own, strict=True)}
