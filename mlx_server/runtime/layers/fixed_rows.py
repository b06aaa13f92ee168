"""Products by MLX whose rows have the same bits in any number of rows, for --batch-invariant."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.layers.products import Product, RowProduct, own_product

_BLOCKS = (16, 8, 4)
"""Possible numbers of rows to compute at a time, the best first. Fewer rows are padded."""

_FEW = (*range(1, 16), 17, 24, 31, 33)
_WHOLE = (32, 48, 80, 256)
"""Numbers of rows to try; those in `_WHOLE` are multiples of a block."""

_MOST = max(_WHOLE)

REMEDY = "serve it without --batch-invariant"


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
        self._rules: dict[Any, _Rule | None] = {}

    def tries(self, layer: Any) -> Generator[None, None, None]:
        """What a call does first for a layer of a new shape. Yields after each try."""
        kind = _kind(layer)
        if kind not in self._rules:
            self._rules[kind] = yield from _find_rule(own_product(layer), kind)

    def __call__(self, layer: Any) -> RowProduct:
        exhaust(self.tries(layer))
        inputs, columns, *_ = kind = _kind(layer)
        if (rule := self._rules[kind]) is None:
            raise ModelLoadError(
                f"--batch-invariant is impossible here: in products of {inputs} x {columns} numbers a row's bits "
                f"depend on its position; {REMEDY}."
            )
        return partial(_by_rule, rule, own_product(layer))


class _Rule(NamedTuple):
    """The number of rows is padded to a `multiple`; at most `most` are computed at a time. Rows of another type than
    `dtype`, for which nothing was tried, are computed block by block."""

    multiple: int
    most: int
    dtype: mx.Dtype


def _kind(layer: Any) -> tuple[Any, ...]:
    """What determines the kernel of a layer's own product, the number of inputs first."""
    columns, width = layer.weight.shape
    if "scales" not in layer:
        return width, columns, layer.weight.dtype
    return width * 32 // layer.bits, columns, layer.scales.dtype, layer.group_size, layer.bits, layer.mode


def _by_rule(rule: _Rule, own: Product, x: mx.array) -> mx.array | None:
    """The product by a rule, in pieces of at most as many rows as were tried; None leaves it to MLX."""
    rows = x.reshape(-1, x.shape[-1])
    if x.dtype != rule.dtype:
        rule = _Rule(_BLOCKS[0], _BLOCKS[0], x.dtype)
    if rule.multiple == 1 and len(rows) <= rule.most:
        return None
    missing = -len(rows) % rule.multiple
    y = _in_pieces(own, mx.pad(rows, [(0, missing), (0, 0)]) if missing else rows, rule.most)[: len(rows)]
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _in_pieces(own: Product, x: mx.array, most: int) -> mx.array:
    pieces = [own(x[first : first + most]) for first in range(0, len(x), most)]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)


def _find_rule(own: Product, kind: tuple[Any, ...]) -> Generator[None, None, _Rule | None]:
    """The cheapest rule with the same bits as padded blocks; None if those depend on a row's place."""
    inputs, _, dtype = kind[:3]
    if not mx.issubdtype(dtype, mx.floating):  # only affine scales are floats
        dtype = mx.bfloat16
    x = mx.random.normal((_MOST, inputs), key=mx.random.key(0)).astype(dtype)
    for block in _BLOCKS:
        if (yield from _is_the_same_at_all_places(own, x[:block])):
            break
    else:
        return None
    expected = _in_pieces(own, x, block)
    if not (yield from _are_equal((own(x[:count]), expected[:count]) for count in _WHOLE)):
        return _Rule(block, block, dtype)
    is_free = yield from _are_equal((own(x[:count]), expected[:count]) for count in _FEW)
    return _Rule(1 if is_free else block, _MOST, dtype)


def _is_the_same_at_all_places(own: Product, x: mx.array) -> Generator[None, None, bool]:
    y = own(x)
    return (yield from _are_equal((own(mx.roll(x, by, 0)), mx.roll(y, by, 0)) for by in range(1, len(x))))


def _are_equal(pairs: Iterable[tuple[mx.array, mx.array]]) -> Generator[None, None, bool]:
    """Whether the arrays of each pair are equal. Yields after each."""
    for one, other in pairs:
        is_equal = same_values(one, other)
        yield
        if not is_equal:
            return False
    return True


def same_values(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays are equal; NaN is not equal to NaN."""
    return bool(mx.array_equal(a, b).item())
