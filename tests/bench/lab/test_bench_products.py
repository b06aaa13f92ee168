"""The products' part of `mlx-serve bench kernels`: what it counts, and that it tells bits that depend on neighbours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.bench.lab.attention import Copy
from mlx_server.bench.lab.products import MLX, ProductResult, Weight, measure_products, render_products
from mlx_server.cli.main import main
from mlx_server.runtime.layers.cpu import native_library
from mlx_server.runtime.layers.products import RowProduct

WEIGHT = Weight(num_columns=48, depth=128, bits=4, dtype=mx.float16)


def wobbling(layer: Any) -> RowProduct:
    """Its bits depend on the number of rows; of more than 4 it leaves them to MLX."""

    def product(x: mx.array) -> mx.array | None:
        weights = layer.weight, layer.scales, layer.biases
        return None if len(x) > 4 else (1 + 0.01 * len(x)) * mx.quantized_matmul(x, *weights, True, 64, 4)

    return product


def test_each_product_is_measured_at_each_number_of_rows_beside_mlx() -> None:
    products = {"wobbling": wobbling, "of nothing": lambda layer: None}
    results = measure_products(WEIGHT, [1, 4, 8], products, num_layers=2, num_repeats=1)
    found = [(result.num_rows, result.product, result.has_same_bits) for result in results if result.product != MLX]
    assert found == [(1, "wobbling", False), (4, "wobbling", False), (8, "wobbling", True)]
    assert [result.num_rows for result in results if result.product == MLX] == [1, 4, 8]
    assert all(result.speedup == 1 for result in results if result.product == MLX)


def test_a_row_of_the_table() -> None:
    """Half a byte a weight, a scale and a bias of two bytes a group of 64, rows in and out."""
    result = ProductResult(WEIGHT, 4, "vector", time_s=1e-6, mlx_time_s=2.5e-6, has_same_bits=True)
    assert result.required_bytes == 48 * 128 // 2 + 2 * (48 * 128 // 64) * 2 + 4 * (48 + 128) * 2 == 4864
    text = render_products([result], Copy("MLX on the GPU", 2**28, 9.728e9))
    cells = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    weight = "48 x 128, 4 bits in groups of 64, float16"
    assert cells == [weight, "4", "vector", "0.001", "2.50x", "4.9", "50%", "same"]


def test_weights_of_a_chain_are_read_from_memory() -> None:
    assert Weight(4096, 4096, 4, mx.float16).cold_layers == 15  # of 9 MiB each: 128 MiB in all
    assert Weight(64, 64, 4, mx.float16).cold_layers == 256


def test_the_command_measures_products(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    attention = ["--heads", "2x1x32", "--dtype", "float32", "--batch", "1", "--context", "33", "--prefill"]
    products = [
        "--products",
        "64x128",
        "32x64",
        "--product-bits",
        "4",
        "8",
        "full",
        "--rows",
        "1",
        "3",
        "--product-layers",
        "2",
    ]
    quick = ["--quick", "--backend", "reference", "--copy-mib", "1", "--json", str(path)]
    assert main(["bench", "kernels", *attention, *products, *quick]) == 0
    table = capsys.readouterr().out.split("\n\n")[-1]
    weights = [line.strip("|").split("|")[0].strip() for line in table.splitlines()[2:]]
    sizes = [(n, k, bits) for n, k in ((64, 128), (32, 64)) for bits in (4, 8, None)]
    kinds = {4: "4 bits in groups of 64, ", 8: "8 bits in groups of 64, ", None: ""}
    wanted = [f"{n} x {k}, {kinds[bits]}float32" for n, k, bits in sizes]
    products = json.loads(path.read_text())["products"]
    found = [result for result in products if result["product"] == MLX]
    assert [(one["num_columns"], one["depth"], one["bits"]) for one in found] == [size for size in sizes for _ in "13"]
    assert list(dict.fromkeys(weights)) == wanted
    assert [one["num_rows"] for one in found] == [1, 3] * 6
    assert all(one["bytes_per_s"] == pytest.approx(one["required_bytes"] / one["time_s"]) for one in found)
    if native_library() is not None:
        own = [result for result in products if result["product"] == "native"]
        assert len(own) == len(found)
        assert all(one["has_same_bits"] for one in own)
