"""Batch invariance: a request's logits have the same bits alone, in any batch, and however its tokens are cut into
chunks, so after a prefix hit and after a preemption, too.

Everything is computed by rows whose bits depend on nothing but the row: the sampler and norms always, attention where
its backend can, and products by `FixedRows`. What a model does besides is not known, so that it must show the same
bits in two ways of computing the same tokens before it is served.
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
from mlx_server.outputs import ScheduledChunk
from mlx_server.runtime.attention.interface import AttentionBackend
from mlx_server.runtime.attention.regroup import Scope
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.kernels.gpu.backend import GpuBackend
from mlx_server.runtime.layers.products import RowProduct, install_products
from mlx_server.runtime.model_runner import ModelRunner

_BLOCKS = (16, 8, 4)
"""Numbers of rows that may be computed at a time, the best first. Fewer are padded to it."""

_FEW = (*range(1, 16), 17, 24, 31, 33)
_WHOLE = (32, 48, 80, 256)
"""Numbers of rows that are tried, some of whole blocks."""

_MOST = max(_WHOLE)

_REMEDY = "serve it without --batch-invariant"

Product = Callable[[mx.array], mx.array]


class FixedRows:
    """Finds for each linear layer that is still MLX's own a product whose rows have the same bits however many there
    are. A `MakeProduct`.

    MLX and the BLAS below it take other kernels for few rows than for many, which sum in other orders. With one number
    of rows, a row's bits do not depend on its place, unless several kernels share these rows. So rows are computed in
    blocks, the last one padded, where need be each block by itself: of a layer of 576 x 192 on OpenBLAS with AVX-512,
    16 and 512 rows have the same bits, and 1 to 6 have others, so that 5 rows are computed as 16, and 40 as 48 in one
    product. With its kernels for Zen, 16 rows are 6 of one kernel and 10 of another, and 8 are of one, so that 40 rows
    are computed as 5 products.

    Which of it a shape needs is tried once. Raises `ModelLoadError` where even blocks are not enough.
    """

    def __init__(self) -> None:
        self._rules: dict[Any, _Rule] = {}

    def __call__(self, layer: Any) -> RowProduct | None:
        own, kind = _own_product(layer)
        if kind not in self._rules:
            self._rules[kind] = _find_rule(own, kind)
        return partial(_by_rule, self._rules[kind], own)


class _Rule(NamedTuple):
    """How many rows are computed at a time."""

    multiple: int
    most: int


def _own_product(layer: Any) -> tuple[Product, tuple[Any, ...]]:
    """MLX's own product of a layer, without its bias; and what its kernels are chosen by, the number of inputs
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
    """In pieces of no more rows than were tried; None to leave them to MLX."""
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
    """The cheapest one that gives the bits of blocks."""
    inputs, _, dtype = kind[:3]
    if not mx.issubdtype(dtype, mx.floating):  # scales of other formats than the affine one are codes
        dtype = mx.bfloat16
    x = mx.random.normal((_MOST, inputs), key=mx.random.key(0)).astype(dtype)
    block = next((block for block in _BLOCKS if _is_the_same_at_all_places(own, x[:block])), None)
    if block is None:
        raise ModelLoadError(
            f"Products of {inputs} x {kind[1]} numbers give a row other bits at another place here, so that "
            f"--batch-invariant cannot be kept; {_REMEDY}."
        )
    wanted = _in_pieces(own, x, block)
    if not all(_equal(own(x[:count]), wanted[:count]) for count in _WHOLE):
        return _Rule(block, block)
    return _Rule(1 if all(_equal(own(x[:count]), wanted[:count]) for count in _FEW) else block, _MOST)


def _is_the_same_at_all_places(own: Product, x: mx.array) -> bool:
    y = own(x)
    return all(_equal(own(mx.roll(x, by, 0)), mx.roll(y, by, 0)) for by in range(1, len(x)))


def _equal(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b).item())


class _OneByOne:
    """Experts that multiply each row by itself, which always lies in memory alike. Those of MLX group tokens that come
    sorted by expert, as they do from 64 indices on, and a group's product depends on its size."""

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
    """Makes a model's products, and the attention of its tokens, such as do not depend on the batch. Before its first
    step; for good. Raises `ModelLoadError` if there are adapters, or where attention has no such way. MLX thread."""
    if isinstance(backend, GpuBackend):
        backend.by_row = True
    elif not isinstance(backend, CpuBackend):
        why = native.why_missing()
        remedy = "use --attention-backend auto" if why is None else f"have the native library, which is missing ({why})"
        raise ModelLoadError(
            f"The {backend.name} attention backend gives rows other bits in another batch, so that --batch-invariant "
            f"cannot be kept; {remedy}, or {_REMEDY}."
        )
    _refuse_adapters(adapters)
    install_products(model, FixedRows())
    for module in model.modules():
        module.__class__ = _EXPERTS.get(type(module), type(module))


def _refuse_adapters(names: Sequence[str]) -> None:
    """A row's products with adapters depend on which others are in its batch."""
    if names:
        raise ModelLoadError(
            f"--batch-invariant cannot be kept with adapters ({', '.join(names)}), whose products depend on the "
            f"batch: fuse one into the model with `mlx_lm.fuse`, or {_REMEDY}."
        )


_LONG, _SHORT = 300, 20
"""Tokens of the two requests that are computed in two ways: of one, more than any number of rows above."""

_DECODES = 6
"""Of the tokens, how many are decoded."""


def check_invariance(runner: ModelRunner, vocab_size: int) -> None:
    """Computes two requests each alone in one chunk, and together in chunks and decodes; raises `ModelLoadError` unless
    all logits have the same bits. Leaves no pools. MLX thread."""
    if runner.forward.level.scope is not Scope.NOTHING:
        raise ModelLoadError(
            f"This model is computed group by group ({runner.forward.level}), so that its bits depend on the batch and "
            f"--batch-invariant cannot be kept; {_REMEDY}."
        )
    backend = runner.cache.backend
    if isinstance(backend, GpuBackend) and backend.refusals:
        raise ModelLoadError(
            f"Attention of this model gathers its rows ({backend.refusals[0]}), and gathered rows have other bits in "
            f"another batch, so that --batch-invariant cannot be kept; {_REMEDY}."
        )
    rng = np.random.default_rng(0)
    world = _World(runner, [rng.integers(1, vocab_size, size=size).tolist() for size in (_LONG, _SHORT)])
    try:
        alone = [world.run(**{name: (0, size)})[name] for name, size in (("0", _LONG), ("1", _SHORT))]
        long, short = _LONG - _DECODES, _SHORT - _DECODES
        world.restart()
        world.run(**{"1": (0, short), "0": (0, BLOCK_SIZE + 5)})
        together: dict[str, list[mx.array]] = {"0": [], "1": []}
        first = world.run(**{"1": (short, short + 1), "0": (BLOCK_SIZE + 5, long)})
        together["1"].append(first["1"])
        for turn in range(_DECODES):
            parts = {"0": (long + turn, long + turn + 1)}
            if turn + 1 < _DECODES:
                parts["1"] = (short + turn + 1, short + turn + 2)
            for name, logits in world.run(**parts).items():
                together[name].append(logits)
    finally:
        runner.cache.release()
    for name, wanted in zip(together, alone, strict=True):
        if not _equal(mx.concatenate(together[name]), wanted):
            raise ModelLoadError(
                "This model's logits have other bits in another batch, so that --batch-invariant cannot be kept with "
                f"the {runner.cache.backend.name} attention backend; {_REMEDY}."
            )


class _World:
    """Requests with blocks of their own, named by their numbers, of which parts are computed in one step."""

    def __init__(self, runner: ModelRunner, sequences: Sequence[list[int]]) -> None:
        self._runner = runner
        self._sequences = sequences
        self._num_each = -(-max(map(len, sequences)) // BLOCK_SIZE)
        self._windows = runner.cache.windows
        self._num_blocks = len(self._windows) * len(sequences) * self._num_each
        self.restart()

    def restart(self) -> None:
        """Forgets what was computed."""
        self._runner.cache.release()
        self._runner.cache.allocate(self._num_blocks, num_slots=len(self._sequences))
        self._tables = BlockTables(self._windows)
        for index in range(len(self._sequences)):
            self._tables.add(str(index))

    def run(self, **parts: tuple[int, int]) -> dict[str, mx.array]:
        """Logits of the last of these tokens of the named requests, at most `_DECODES`."""
        chunks = [self._chunk(int(name), *part) for name, part in parts.items()]
        chunks.sort(key=lambda chunk: chunk.num_tokens != 1)
        ids = [token_id for chunk in chunks for token_id in chunk.token_ids or ()]
        counts = [min(chunk.num_tokens, _DECODES) for chunk in chunks]
        ends = np.cumsum([chunk.num_tokens for chunk in chunks]).tolist()
        rows = [row for count, end in zip(counts, ends, strict=True) for row in range(end - count, end)]
        logits = self._runner.forward(self._tables.plan(chunks), mx.array(ids), rows)
        mx.eval(logits, *self._runner.cache.state())
        own = mx.split(logits, np.cumsum(counts)[:-1].tolist())
        return {chunk.request_id: part for chunk, part in zip(chunks, own, strict=True)}

    def _chunk(self, index: int, start: int, end: int) -> ScheduledChunk:
        """All blocks come with a request's first chunk."""
        blocks = tuple(
            tuple(range(first + index * self._num_each, first + (index + 1) * self._num_each))
            for first in range(0, self._num_blocks, len(self._sequences) * self._num_each)
        )
        ids = tuple(self._sequences[index][start:end])
        return ScheduledChunk(str(index), start, end - start, ids, blocks if start == 0 else (), True, 0)
