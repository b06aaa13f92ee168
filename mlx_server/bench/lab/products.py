"""Measures matrix products alone: each kernel of this machine compared with MLX's, for different numbers of rows.
Layers run one after the other, as in a step. Also checks whether a row has the same bits in any number of rows."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.bench.arguments import crossed_numbers, from_1
from mlx_server.bench.lab.attention import Copy
from mlx_server.bench.tables import document_of, format_rate, print_progress, render_items
from mlx_server.runtime.kernels.gpu.choice_files import dtype_name
from mlx_server.runtime.kernels.gpu.product_choice import chain
from mlx_server.runtime.kernels.gpu.products import Form, ProductKernels, form_maker
from mlx_server.runtime.kernels.trials import median_times
from mlx_server.runtime.layers.cpu import native_product
from mlx_server.runtime.layers.products import MakeProduct, Product, with_own

MLX = "MLX"
_GROUP_SIZE = 64
_BITS = {"4": 4, "8": 8, "full": None}
_CHAIN_BYTES = 128 * 2**20
"""Bytes of a chain's weights: more than caches hold, so that each product reads its weights from memory."""

_MAX_LAYERS = 256


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight `[num_columns, depth]` for activations of `dtype`: of 4 or 8 `bits` in groups of 64, or unquantised."""

    num_columns: int
    depth: int
    bits: int | None
    dtype: mx.Dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of the weight; for a quantised one, with a scale and a bias for each group."""
        size = self.num_columns * self.depth
        if self.bits is None:
            return size * self.dtype.size
        return size * self.bits // 8 + 2 * size // _GROUP_SIZE * self.dtype.size

    @property
    def cold_layers(self) -> int:
        """How many such weights are too large for caches."""
        return min(-(-_CHAIN_BYTES // self.num_bytes), _MAX_LAYERS)

    def make_layer(self) -> Any:
        """A layer with a random weight, evaluated."""
        if self.bits is None:
            layer: Any = nn.Linear(self.depth, self.num_columns, False)
        else:
            layer = nn.QuantizedLinear(self.depth, self.num_columns, False, _GROUP_SIZE, self.bits)
        layer.set_dtype(self.dtype)
        mx.eval(layer.parameters())
        return layer

    def __str__(self) -> str:
        bits = "" if self.bits is None else f"{self.bits} bits in groups of {_GROUP_SIZE}, "
        return f"{self.num_columns} x {self.depth}, {bits}{dtype_name(self.dtype)}"


@dataclass(frozen=True, slots=True)
class ProductResult:
    """A product of `num_rows` rows: median seconds of `product` and of MLX, measured alternately. `has_same_bits`: each
    row has the same bits as in the product of the most rows measured."""

    weight: Weight
    num_rows: int
    product: str
    time_s: float
    mlx_time_s: float
    has_same_bits: bool

    @property
    def required_bytes(self) -> int:
        """The bytes of the weight once, and of the rows in and out."""
        return (
            self.weight.num_bytes
            + self.num_rows * (self.weight.depth + self.weight.num_columns) * self.weight.dtype.size
        )

    @property
    def bytes_per_s(self) -> float:
        return self.required_bytes / self.time_s

    @property
    def speedup(self) -> float:
        """Above 1 if `product` is faster than MLX."""
        return self.mlx_time_s / self.time_s


def add_product_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options for products."""
    add = parser.add_argument
    weights = "weights of N columns and depth K; default: 1024x1024"
    add("--products", nargs="*", type=_weight, default=[(1024, 1024)], metavar="NxK", help=weights)
    add("--rows", nargs="+", type=from_1, metavar="N", help="rows of a product; default: 1 2 4 8 16 32 64")
    bits = "bits of a weight; full: not quantised; default: 4"
    add("--product-bits", nargs="+", choices=tuple(_BITS), default=["4"], help=bits)
    layers = "products in a row; default: so many that no cache holds their weights"
    add("--product-layers", type=from_1, metavar="N", help=layers)


def _weight(text: str) -> tuple[int, int]:
    columns, depth = crossed_numbers(text, 2)
    least = 8 * _GROUP_SIZE
    if depth % _GROUP_SIZE or columns * depth < least:
        raise argparse.ArgumentTypeError(f"{text!r}: K must be a multiple of {_GROUP_SIZE}, and N x K at least {least}")
    return columns, depth


def measure_all(args: argparse.Namespace, dtype: mx.Dtype) -> list[ProductResult]:
    """Measures every weight that the options name. Progress goes to stderr."""
    results: list[ProductResult] = []
    for columns, depth in args.products:
        for bits in args.product_bits:
            weight = Weight(columns, depth, _BITS[bits], dtype)
            print_progress(f"{weight}: products of {', '.join(map(str, args.rows))} rows")
            num_layers = args.product_layers or weight.cold_layers
            results += measure_products(weight, args.rows, own_products(), num_layers, args.repeat)
            mx.clear_cache()
    return results


def own_products() -> dict[str, MakeProduct]:
    """This project's products for MLX's default device, by name."""
    if mx.default_device() == mx.cpu:
        native = native_product()
        return {} if native is None else {"native": native}
    if not mx.metal.is_available():
        return {}
    kernels = ProductKernels.of_metal()
    return {str(form): form_maker(kernels, form) for form in Form}


def measure_products(
    weight: Weight, counts: Sequence[int], products: Mapping[str, MakeProduct], num_layers: int, num_repeats: int
) -> list[ProductResult]:
    """Measures MLX's product and each of `products` for each number of rows."""
    layers = [weight.make_layer() for _ in range(num_layers)]
    named: dict[str, list[Product]] = {MLX: list(layers)}
    for name, make in products.items():
        own = [with_own(layer, product) for layer in layers if (product := make(layer)) is not None]
        named |= {name: own} if len(own) == len(layers) else {}
    most = mx.random.normal((max(counts), weight.depth), weight.dtype, key=mx.random.key(0))
    mx.eval(most, [layer.parameters() for layer in layers])  # some products make their weights contiguous
    wholes = {name: made[0](most) for name, made in named.items()}
    mx.eval(wholes)
    results = []
    for count in counts:
        x = mx.contiguous(most[:count])
        mx.eval(x)
        times = median_times([chain(made, x) for made in named.values()], num_repeats)
        for (name, made), seconds in zip(named.items(), times):
            alike = bool(mx.array_equal(made[0](x), wholes[name][:count]).item())
            results.append(ProductResult(weight, count, name, seconds / num_layers, times[0] / num_layers, alike))
    return results


def render_products(results: Sequence[ProductResult], copy: Copy) -> str:
    """A table with a row for each product and number of rows; "GB/s" and "of copy" count the bytes that must move."""
    return render_items(
        results,
        {
            "weight": lambda one: str(one.weight),
            "rows": lambda one: str(one.num_rows),
            "product": lambda one: one.product,
            "ms": lambda one: f"{1e3 * one.time_s:,.3f}",
            "vs MLX": lambda one: f"{one.speedup:.2f}x",
            "GB/s": lambda one: format_rate(one.bytes_per_s / 1e9),
            "of copy": lambda one: f"{one.bytes_per_s / copy.bytes_per_s:.0%}",
            "bits": lambda one: "same" if one.has_same_bits else "differ",
        },
    )


def product_document(result: ProductResult, copy: Copy) -> dict[str, Any]:
    """All figures, for JSON."""
    names = ("num_rows", "product", "time_s", "mlx_time_s", "speedup", "required_bytes", "bytes_per_s", "has_same_bits")
    sizes = document_of(result.weight, "num_columns", "depth", "bits")
    dtype = {"dtype": dtype_name(result.weight.dtype)}
    return {
        **sizes,
        **dtype,
        **document_of(result, *names),
        "share_of_copy": result.bytes_per_s / copy.bytes_per_s,
    }
