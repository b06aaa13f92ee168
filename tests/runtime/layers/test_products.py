"""The hook behind linear layers: which layers it takes, and what it leaves."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_server.runtime.layers.products import RowProduct, install_products


class _Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.linear = nn.Linear(64, 64)
        self.layers = [nn.QuantizedLinear(64, 32, bias=bias, group_size=32, bits=4) for bias in (True, False)]


def _own(layer: Any, calls: list[int]) -> RowProduct:
    """What MLX would give, counted, for up to two rows."""

    def product(x: mx.array) -> mx.array | None:
        rows = x.size // x.shape[-1]
        calls.append(rows)
        weight = layer.weight
        if "scales" in layer:
            weight = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
        return x @ weight.T if rows <= 2 else None

    return product


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_layer_asks_its_product_first_and_adds_its_bias(rows: int) -> None:
    model, calls = _Model(), list[int]()
    x = mx.random.normal((rows, 1, 64))
    names = [name for name, _ in tree_flatten(model.parameters())]
    layers = [model.linear, *model.layers, model.embedding.as_linear]
    wanted = [np.array(layer(x)) for layer in layers]

    assert install_products(model, lambda layer: _own(layer, calls)) == 4

    for layer, expected in zip([model.linear, *model.layers, model.embedding.as_linear], wanted, strict=True):
        np.testing.assert_allclose(np.array(layer(x)), expected, atol=1e-5)
    assert calls == [rows] * 4
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    assert isinstance(model.layers[0], nn.QuantizedLinear)


def test_layers_without_a_product_are_mlx_s_own() -> None:
    model, calls = _Model(), list[int]()
    install_products(model, lambda layer: _own(layer, calls) if layer is model.linear else None)
    assert type(model.embedding) is nn.Embedding
    assert type(model.linear) is not nn.Linear
