"""Products by MLX with the same bits for any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.layers import fixed_rows
from mlx_server.runtime.layers.fixed_rows import FixedRows
from mlx_server.runtime.layers.products import install_products


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (576, 192), (96, 1000)])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_row_of_a_product_has_the_same_bits_among_any_number(shape: tuple[int, int], bits: int | None) -> None:
    layer: Any = nn.Linear(*shape, bias=True)
    layer = layer if bits is None else nn.QuantizedLinear.from_linear(layer, 32, bits)
    x = mx.random.normal((200, 1, shape[0]))
    close = layer(x)
    install_products(layer, FixedRows())
    wanted = mx.concatenate([layer(x[i : i + 1]) for i in range(len(x))])
    for first, last in ((0, 2), (3, 10), (5, 37), (100, 117), (0, 200)):
        assert mx.array_equal(layer(x[first:last]), wanted[first:last]).item(), f"rows {first} to {last}"
    assert mx.allclose(close, wanted, atol=1e-4).item()


def _product(change: Callable[[mx.array], mx.array], calls: list[int]) -> Callable[[mx.array], mx.array]:
    def product(x: mx.array) -> mx.array:
        calls.append(len(x))
        return change(x)

    return product


@pytest.mark.parametrize(
    ("change", "computed"),
    [
        (lambda x: x, None),
        (lambda x: x + (len(x) < 16), [48]),
        (lambda x: x + len(x), [16, 16, 16]),
        (lambda x: x + (mx.arange(len(x)) % 16 >= 6)[:, None] * (len(x) > 8), [8] * 5),
    ],
)
def test_rows_are_padded_or_cut_only_where_the_product_needs_it(
    change: Callable[[mx.array], mx.array], computed: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    own = _product(change, calls)
    monkeypatch.setattr(fixed_rows, "own_product", lambda layer: own)
    product = FixedRows()(nn.Linear(8, 8))
    calls.clear()
    y = product(mx.zeros((40, 1, 8)))
    assert (y is None) == (computed is None)  # None: left to MLX
    assert y is None or y.shape == (40, 1, 8)
    assert calls == (computed or [])


def test_rows_of_a_type_that_was_not_tried_are_computed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    own = _product(lambda x: x, calls)
    monkeypatch.setattr(fixed_rows, "own_product", lambda layer: own)
    product = FixedRows()(nn.Linear(8, 8))
    calls.clear()
    assert product(mx.zeros((40, 8))) is None
    y = product(mx.zeros((40, 8), mx.float16))
    assert y is not None
    assert (y.shape, y.dtype, calls) == ((40, 8), mx.float16, [16, 16, 16])


def test_a_product_that_gives_another_place_other_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = _product(lambda x: x + mx.arange(len(x))[:, None], [])
    monkeypatch.setattr(fixed_rows, "own_product", lambda layer: own)
    with pytest.raises(ModelLoadError, match=r"in products of 8 x 8 numbers a row.s bits depend on its position"):
        FixedRows()(nn.Linear(8, 8))
