"""Replaces the matrix products of linear layers in an unchanged mlx-lm model.

An instance gets a subclass of its class: its parameters, names and `isinstance` stay the same. `mx.quantized_matmul`
itself is not wrapped, since mlx-lm also calls it for quantised K/V and with weights of three dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Product = Callable[[mx.array], mx.array]
"""From `[..., K]` to `[..., N]`, without a layer's bias."""

RowProduct = Callable[[mx.array], mx.array | None]
"""From `[..., K]` to `[..., N]`, without the layer's bias; None if MLX's own product should be used for these rows."""

MakeProduct = Callable[[Any], RowProduct | None]
"""The product of a layer with `weight` (and `scales`, `biases`, `bits`, `group_size`); None to leave it to MLX."""


class _LinearProduct:
    _product: RowProduct

    def __call__(self, x: mx.array) -> mx.array:
        layer: Any = self
        y = self._product(x)
        if y is None:
            y = super().__call__(x)  # type: ignore[misc]
        elif "bias" in layer:
            y = y + layer.bias
        return y


class _EmbeddingProduct:
    _product: RowProduct
    _rows_dtype: mx.Dtype | None = None

    def __call__(self, ids: mx.array) -> mx.array:
        rows: mx.array = super().__call__(ids)  # type: ignore[misc]
        return rows if self._rows_dtype is None else rows.astype(self._rows_dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        y = self._product(x)
        return super().as_linear(x) if y is None else y  # type: ignore[misc]


_MIXINS: dict[type[Any], type[Any]] = {
    nn.Linear: _LinearProduct,
    nn.QuantizedLinear: _LinearProduct,
    nn.Embedding: _EmbeddingProduct,
    nn.QuantizedEmbedding: _EmbeddingProduct,
}
"""By exact types: subclasses may compute something else."""


@lru_cache(maxsize=64)
def _mixed(mixin: type[Any], kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


def mix_in(module: Any, mixin: Any) -> None:
    """Gives a module, or another object, a subclass of its class in which the methods of the class `mixin` come
    first."""
    module.__class__ = _mixed(mixin, module.__class__)


def takes_product(module: Any) -> bool:
    """Whether `install_products` may give the module a product."""
    return type(module) in _MIXINS


def install_products(model: Any, make: MakeProduct) -> int:
    """Gives each layer the product that `make` returns for it, and returns how many layers have one. Call it after
    adapters are installed, before the first forward pass. MLX thread."""
    taken = 0
    for module in model.modules():
        product = make(module) if takes_product(module) else None
        if product is not None:
            mix_in(module, _MIXINS[type(module)])
            object.__setattr__(module, "_product", product)  # no parameter and no child of the module
            taken += 1
    return taken


def own_product(layer: Any) -> Product:
    """MLX's own product of a linear layer or a tied head."""
    if "scales" not in layer:
        return lambda x: x @ layer.weight.T
    group_size, bits, mode = layer.group_size, layer.bits, layer.mode

    def product(x: mx.array) -> mx.array:
        scales, biases = layer.scales, layer.get("biases")
        return mx.quantized_matmul(
            x, layer.weight, scales, biases, transpose=True, group_size=group_size, bits=bits, mode=mode
        )

    return product


def with_own(layer: Any, product: RowProduct) -> Product:
    """A layer's `product`, and MLX's own for rows that it leaves to MLX."""
    own = own_product(layer)

    def whole(x: mx.array) -> mx.array:
        y = product(x)
        return own(x) if y is None else y

    return whole


def keep_rows_in(embedding: Any, dtype: mx.Dtype) -> None:
    """Has an embedding that was given a product return rows of `dtype` instead of the type of its weight."""
    object.__setattr__(embedding, "_rows_dtype", dtype)
