"""Which layers get a product of their own: by proof and by time, kept from one load to the next."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama

from mlx_server.config import ModelConfig
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.kernels.gpu import product_choice
from mlx_server.runtime.kernels.gpu.product_choice import (
    EXACT_COUNTS,
    ROW_COUNTS,
    MakeForm,
    ProductTimes,
    gpu_products,
    measure_products,
    stored_times,
)
from mlx_server.runtime.kernels.gpu.products import Form, ProductKernels, ProductShape, form_product
from mlx_server.runtime.kernels.trials import exhaust, median_times_in_pieces
from mlx_server.runtime.layers import fixed_rows
from mlx_server.runtime.layers.fixed_rows import FixedRows
from mlx_server.runtime.layers.products import own_product
from mlx_server.runtime.models import loader, random_models
from tests.runtime.kernels.test_graph_cost import CallCounter, counts_calls

SHAPE = ProductShape(num_columns=64, depth=128, bits=4, group_size=32, dtype=mx.float32)
SHAPES = [(96, 32), (96, 8), (64, 4)]
"""Columns and bits of the weights of `Model`, in the order in which they are measured."""

Pieces = Generator[None, None, ProductTimes]

MLX_TIMES = tuple(float(count) for count in ROW_COUNTS)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path))
    return tmp_path


class HostKernels:
    """Stands in for MLX: computes on the host, row for row, and notes the rows of each launch by form. `fault` is
    called with a form and its result. A `result` is given as it is."""

    def __init__(self, fault: Callable[[str, mx.array], mx.array] = lambda form, y: y) -> None:
        self.launches: list[tuple[str, int]] = []
        self.result: list[mx.array] | None = None
        self._fault = fault

    def __call__(self, *, name: str, **definition: Any) -> Callable[..., list[mx.array]]:
        text, _, bits, group, *_ = name.split("__")
        form = text.removeprefix("product_")

        def call(*, inputs: list[mx.array], output_shapes: list[tuple[int, ...]], **launch: Any) -> list[mx.array]:
            if self.result is not None:
                return self.result
            x, *weights = inputs
            self.launches.append((form, x.shape[0]))
            if len(weights) == 1:
                rows = [row[None] @ weights[0].T for row in x]
            else:
                rows = [mx.quantized_matmul(row[None], *weights, True, int(group), int(bits)) for row in x]
            return [self._fault(form, mx.concatenate(rows)).reshape(output_shapes[0])]

        return call


class Model(nn.Module):  # type: ignore[misc]
    """Two layers of SHAPE, a tied head, a layer that is not quantised, and layers that no kernel is for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.QuantizedLinear(128, 64, bias=bias, group_size=32, bits=4) for bias in (True, False)]
        self.head = nn.QuantizedEmbedding(96, 128, group_size=32, bits=8)
        self.dense = nn.Linear(128, 96)
        self.others = [nn.QuantizedLinear(128, 64, group_size=32, bits=3), nn.Linear(24, 64)]


def times(vector: float, matrix: float, mlx: Sequence[float] = MLX_TIMES) -> product_choice.Measure:
    """MLX's times are the row counts, or `mlx`; a form's are the same at every count."""

    def measure(
        shape: ProductShape, layers: Sequence[Any], candidates: Mapping[Form | None, MakeForm], counts: Sequence[int]
    ) -> Pieces:
        yield
        columns = {Form.VECTOR: (vector,) * len(counts), Form.MATRIX: (matrix,) * len(counts), None: tuple(mlx)}
        return ProductTimes({form: columns[form] for form in candidates})

    return measure


def installed(kernels: HostKernels, measure: product_choice.Measure, *, exact: bool = False) -> Model:
    model = Model()
    for _ in gpu_products(model, ProductKernels(kernels), exact=exact, measure=measure):
        pass
    kernels.launches.clear()
    return model


def launched(kernels: HostKernels, layer: Any, counts: Sequence[int]) -> list[str | None]:
    """Which form ran for each number of rows; None for MLX's own."""
    found: list[str | None] = []
    for count in counts:
        kernels.launches.clear()
        layer(mx.zeros((count, 128)))
        found.append(kernels.launches[0][0] if kernels.launches else None)
    return found


def test_a_form_runs_where_it_is_faster_by_a_tenth() -> None:
    """Numbers between those measured take what the next larger one does."""
    kernels = HostKernels()
    model = installed(kernels, times(vector=3.7, matrix=11.0))
    counts = (1, 2, 3, 4, 5, 8, 12, 32, 33, 500)
    wanted = [None, None, None, None, "vector", "vector", "vector", "vector", None, None]
    assert launched(kernels, model.layers[0], counts) == wanted
    assert launched(kernels, model.head.as_linear, (3, 6, 33)) == [None, "vector", None]
    assert launched(kernels, model.dense, counts) == wanted
    assert {type(layer) for layer in model.others} == {nn.QuantizedLinear, nn.Linear}


def test_the_faster_form_runs_and_results_stay_what_they_were() -> None:
    kernels = HostKernels()
    model = installed(kernels, times(vector=20.0, matrix=10.0))
    assert launched(kernels, model.layers[1], (8, 9, 16, 24)) == [None, "matrix", "matrix", "matrix"]
    x = mx.random.normal((16, 1, 128))
    for layer in (*model.layers, model.dense):
        own = own_product(layer)(x) + (layer.bias if "bias" in layer else 0)
        np.testing.assert_allclose(np.array(layer(x)), np.array(own), atol=1e-5)


FIXED_TIMES = (100.0,) * len(EXACT_COUNTS)


def test_exact_layers_have_one_form_for_any_number_of_rows() -> None:
    """The fastest over all counts, even where MLX is faster."""
    kernels = HostKernels()
    mlx = (*(20.0,) * (len(EXACT_COUNTS) - 1), 1000.0)
    model = installed(kernels, times(vector=90.0, matrix=80.0, mlx=mlx), exact=True)
    counts = (1, 2, 7, 32, 33, 500)
    for layer in (model.layers[0], model.dense):
        assert launched(kernels, layer, counts) == ["matrix"] * len(counts)
    assert launched(kernels, installed(kernels, times(vector=90.0, matrix=80.0)).layers[0], counts) == [None] * 6


def test_exact_layers_are_left_to_fixed_rows_if_those_are_faster_over_all_counts() -> None:
    """A prompt counts as much as all numbers of few rows together."""
    kernels = HostKernels()
    few = FIXED_TIMES[:-1]
    for fixed, chosen in ((FIXED_TIMES, None), ((*few, 120.0), None), ((*few, 122.0), "vector")):
        for file in stored_times(exact=True).path.parent.glob("*.json"):
            file.unlink()
        model = installed(kernels, times(vector=110.0, matrix=120.0, mlx=fixed), exact=True)
        assert launched(kernels, model.layers[0], (1, 500)) == [chosen, chosen]


def test_exact_layers_whose_rows_cannot_be_fixed_have_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FixedRows, layer: Any) -> Any:
        raise ModelLoadError("bits depend on the position")

    monkeypatch.setattr(FixedRows, "__call__", fail)
    kernels = HostKernels()
    model = installed(kernels, times(vector=1e9, matrix=1e8, mlx=FIXED_TIMES), exact=True)
    assert launched(kernels, model.layers[0], (1, 500)) == ["matrix", "matrix"]
    stored = stored_times(exact=True).load()
    assert {frozenset(entry.seconds) for entry in stored.values()} == {frozenset(Form)}


def test_activations_of_another_type_are_left_to_mlx() -> None:
    kernels = HostKernels()
    model = installed(kernels, times(0.5, 0.6))
    model.layers[1](mx.zeros((2, 128), mx.float16))
    assert kernels.launches == []


def test_activations_of_another_type_are_left_to_fixed_rows_if_bits_must_be_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As MiniMax's gate has them, whose weight is bfloat16 and whose rows are float32."""
    fixed: list[int] = []

    def by_rule(rule: Any, own: Any, x: mx.array) -> mx.array:
        fixed.append(len(x))
        return original(rule, own, x)

    original = fixed_rows._by_rule
    monkeypatch.setattr(fixed_rows, "_by_rule", by_rule)
    kernels = HostKernels()
    model = Model()
    model.dense.weight = model.dense.weight.astype(mx.float16)
    for _ in gpu_products(model, ProductKernels(kernels), exact=True, measure=times(0.5, 0.6, FIXED_TIMES)):
        pass
    kernels.launches.clear()
    fixed.clear()
    x = mx.random.normal((40, 128))
    whole = model.dense(x)
    for count in (1, 5, 17, 33):
        assert mx.array_equal(model.dense(x[:count]), whole[:count]).item()
    assert (kernels.launches, fixed) == ([], [40, 1, 5, 17, 33])
    model.dense(x.astype(mx.float16))
    assert kernels.launches == [("vector", 40)]


def test_a_transposed_weight_is_laid_out_in_rows_once() -> None:
    """MLX would copy it at each launch."""
    model = Model()
    transposed = mx.random.normal((128, 96)).T
    model.dense.weight = transposed
    for _ in gpu_products(model, ProductKernels(HostKernels()), measure=times(0.5, 0.6)):
        pass
    assert memoryview(transposed).strides == (4, 4 * 96)
    assert memoryview(model.dense.weight).strides == (4 * 128, 4)
    assert mx.array_equal(model.dense.weight, transposed).item()


def test_layers_of_other_classes_are_neither_tested_nor_measured() -> None:
    """A subclass may compute something else."""
    model = Model()
    model.dense.__class__ = type("Scaled", (nn.Linear,), {})
    kernels, seen = HostKernels(), []

    def measure(shape: ProductShape, *arguments: Any) -> Pieces:
        seen.append((shape.num_columns, shape.bits))
        return times(0.5, 0.6)(shape, *arguments)

    for _ in gpu_products(model, ProductKernels(kernels), measure=measure):
        pass
    assert seen == [size for size in SHAPES if size != (96, 32)]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda form, y: 1.3 * y, "off by"),
        (lambda form, y: y + (1e-6 * mx.abs(y).max() if len(y) == 7 else 0), "a row among 7 has other bits"),
        (lambda form, y: y * (1 + 1e-6 * mx.arange(len(y))[:, None]), "a row has other bits in another place"),
    ],
)
def test_a_form_that_fails_its_proof_is_not_used(
    fault: Callable[[str, mx.array], mx.array], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line a shape says so, and the other form takes its place."""
    kernels = HostKernels(lambda form, y: fault(form, y) if form == "vector" else y)
    with caplog.at_level(logging.WARNING):
        model = installed(kernels, times(vector=0.1, matrix=0.5))
    assert launched(kernels, model.layers[0], (1, 8)) == ["matrix", "matrix"]
    assert [reason in record.message for record in caplog.records] == [True] * len(SHAPES)


def test_a_kernel_that_does_not_compile_leaves_all_to_mlx(caplog: pytest.LogCaptureFixture) -> None:
    def fail(form: str, y: mx.array) -> mx.array:
        raise RuntimeError(f"no {form} here")

    model = installed(HostKernels(fail), times(0.1, 0.1))
    assert {type(layer) for layer in model.layers} == {nn.QuantizedLinear}
    assert "no vector here" in caplog.text
    assert "no matrix here" in caplog.text


@pytest.mark.parametrize("exact", [False, True])
def test_an_error_while_products_are_measured_leaves_the_shape_to_mlx(
    home: Path, caplog: pytest.LogCaptureFixture, exact: bool
) -> None:
    """One line has the device's words; the next load measures again."""

    def measure(shape: ProductShape, *arguments: Any) -> Pieces:
        if (shape.num_columns, shape.bits) == SHAPES[0]:
            raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error")
        return times(0.5, 0.6, FIXED_TIMES if exact else MLX_TIMES)(shape, *arguments)

    kernels = HostKernels()
    with caplog.at_level(logging.WARNING):
        model = installed(kernels, measure, exact=exact)
    assert [record.message.partition(" cannot be ")[2] for record in caplog.records] == [
        "measured here, so MLX's are used: [METAL] Command buffer execution failed: Caused GPU Timeout Error"
    ]
    assert launched(kernels, model.dense, (1, 8)) == [None, None]
    assert launched(kernels, model.layers[0], (1, 8)) == ["vector", "vector"]
    document = json.loads((home / "kernels" / ("exact_products.json" if exact else "products.json")).read_text())
    assert [(entry["shape"]["num_columns"], entry["shape"]["bits"]) for entry in document["choices"]] == SHAPES[1:]


def test_times_are_measured_once_for_a_shape_and_proved_at_each_load(home: Path) -> None:
    seen: list[ProductShape] = []

    def measure(shape: ProductShape, *arguments: Any) -> Pieces:
        seen.append(shape)
        return times(0.5, 0.6)(shape, *arguments)

    installed(HostKernels(), measure)
    assert [(shape.num_columns, shape.bits) for shape in seen] == SHAPES
    document = json.loads((home / "kernels" / "products.json").read_text())
    assert [(entry["shape"]["num_columns"], entry["shape"]["bits"]) for entry in document["choices"]] == SHAPES

    kernels = HostKernels(lambda form, y: 2 * y if form == "vector" else y)
    model = installed(kernels, measure)
    assert len(seen) == len(SHAPES)
    assert launched(kernels, model.layers[0], (1, 8)) == ["matrix", "matrix"]


def test_other_models_run_between_the_products_of_a_load() -> None:
    """At most three between two of them: a proof's last one, and the first two of the next. A load that knows the
    times proves the chosen form only."""
    for num_proofs in (2 * 33, 32):
        kernels, counts = HostKernels(), []
        for _ in gpu_products(Model(), ProductKernels(kernels), measure=times(0.5, 0.6)):
            counts.append(len(kernels.launches))
            kernels.launches.clear()
        assert max(counts) == 3
        assert sum(counts) >= num_proofs * len(SHAPES)


def test_other_models_run_between_the_tries_of_fixed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a load that knows the times."""
    tried: list[mx.array] = []
    plain = fixed_rows.same_values
    monkeypatch.setattr(fixed_rows, "same_values", lambda *pair: tried.append(pair[0]) or plain(*pair))
    for _ in range(2):
        counts = []
        for _ in gpu_products(Model(), ProductKernels(HostKernels()), exact=True, measure=times(0.5, 0.6, FIXED_TIMES)):
            counts.append(len(tried))
            tried.clear()
        assert max(counts) == 1
        assert sum(counts) > 20 * len(SHAPES)


def test_another_mlx_measures_anew(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stored_times().store({SHAPE: ProductTimes({None: MLX_TIMES})})
    assert stored_times().load().keys() == {SHAPE}
    monkeypatch.setattr(product_choice, "version", lambda name: "0.99")
    assert stored_times().load() == {}
    assert "measured with other kernels" in caplog.text


@pytest.mark.parametrize(
    "seconds", [{"vector": [1.0] * 10}, {"mlx": [1.0] * 9}, {"mlx": [-1.0] * 10}, {"mlx": [1] * 10}]
)
def test_times_that_are_none_are_ignored(seconds: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    path = stored_times().store({SHAPE: ProductTimes({None: MLX_TIMES})})
    document = json.loads(path.read_text())
    document["choices"][0]["seconds"] = seconds
    path.write_text(json.dumps(document))
    assert stored_times().load() == {}
    assert "is ignored" in caplog.text


def test_a_measurement_chains_layers_until_caches_are_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer's weights once a turn, MLX's and the form's alike, for each number of rows."""
    kernels = HostKernels()
    layers = [nn.QuantizedLinear(128, 64, bias=False, group_size=32, bits=4) for _ in range(5)]
    monkeypatch.setattr(product_choice, "_CHAIN_BYTES", 3 * SHAPE.weight_bytes)
    product = ProductKernels(kernels).of(Form.VECTOR, SHAPE)
    candidates = {None: own_product, Form.VECTOR: partial(form_product, product)}
    measured = exhaust(measure_products(SHAPE, layers, candidates, ROW_COUNTS))
    assert list(measured.seconds) == [None, Form.VECTOR]
    assert all(seconds > 0 for column in measured.seconds.values() for seconds in column)
    turns = 2 + 5
    assert [rows for _, rows in kernels.launches] == [rows for rows in ROW_COUNTS for _ in range(3 * turns)]
    pieces = measure_products(SHAPE, layers, candidates, ROW_COUNTS)
    assert len(list(pieces)) == len(ROW_COUNTS) * len(candidates) * turns, "others' steps run after each chain"


def test_a_run_is_timed_when_the_device_has_done_what_others_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their steps are launched between two runs."""
    events: list[str] = []

    def clock() -> float:
        events.append("clock")
        return 0.0

    monkeypatch.setattr(mx, "synchronize", lambda: events.append("wait"))
    exhaust(median_times_in_pieces([lambda: events.append("run")], 2, clock))
    assert events[-8:] == ["wait", "clock", "run", "clock"] * 2


@counts_calls
def test_building_a_product_is_one_launch_and_few_calls() -> None:
    """Beside MLX's own layer, for rows as the server has them, `[T, 1, K]`, which need no other shape."""
    kernels = HostKernels()
    layer, own, x = installed(kernels, times(0.5, 0.6)).layers[1], Model().layers[1], mx.zeros((8, 1, 128))
    layer(x)
    assert kernels.launches == [("vector", 8)]
    kernels.result = [mx.zeros((8, 1, 64))]
    counted = CallCounter()
    calls, own_calls = counted.of(lambda: layer(x)), counted.of(lambda: own(x))
    assert (calls, own_calls) == (5, 3)


def test_a_whole_model_computes_the_same_with_its_products() -> None:
    arguments = llama.ModelArgs("llama", 128, 2, 256, 4, 1e-5, 96, tie_word_embeddings=True)
    model = llama.Model(arguments)
    nn.quantize(model, group_size=32, bits=4)
    tokens = mx.array([[5, 7, 11, 13, 17, 19]])
    wanted = np.array(model(tokens))
    kernels = HostKernels()
    for _ in gpu_products(model, ProductKernels(kernels), measure=times(0.5, 0.6)):
        pass
    kernels.launches.clear()
    np.testing.assert_allclose(np.array(model(tokens)), wanted, atol=1e-4)
    assert len(kernels.launches) == 2 * 7 + 1


@pytest.fixture
def loaded_on_metal(monkeypatch: pytest.MonkeyPatch) -> HostKernels:
    """Models are loaded as on a Mac, whose kernels these are; the vector form is the fastest."""
    kernels = HostKernels()
    monkeypatch.setattr(loader, "is_metal", lambda: True)
    monkeypatch.setattr(loader, "install_native", lambda model, kept: None)  # a CPU's, which is not there then
    monkeypatch.setattr(ProductKernels, "of_metal", classmethod(lambda cls: cls(kernels)))
    monkeypatch.setattr(product_choice, "measure_products", times(0.5, 0.6))
    return kernels


def test_a_model_that_is_loaded_on_metal_gets_them(
    loaded_on_metal: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its adapters and when its weights are there, in pieces."""
    model = Model()
    monkeypatch.setattr(random_models, "build", lambda name: (model, {}))
    shares = list(loader.load_in_pieces(ModelConfig(model="random:any", dtype="float32"), None))
    assert shares[-3:] == [1.0, 1.0, 1.0]
    assert launched(loaded_on_metal, model.layers[0], (1, 8)) == ["vector", "vector"]


def test_ranks_of_a_model_keep_mlx_s_products(loaded_on_metal: HostKernels) -> None:
    """What each measured to be faster could differ, and so could the experts that each chooses."""
    model = Model()
    list(loader.prepare_weights(model, "float32", is_alone=False))
    assert launched(loaded_on_metal, model.dense, (1,)) == [None]


def test_an_image_encoder_keeps_mlx_s_products(loaded_on_metal: HostKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nn.Module()
    whole.language_model, whole.vision_tower = Model(), Model()
    monkeypatch.setattr(random_models, "build", lambda name: (whole, {}))
    list(loader.load_in_pieces(ModelConfig(model="random:any", dtype="float32"), None))
    assert launched(loaded_on_metal, whole.language_model.dense, (1,)) == ["vector"]
    assert launched(loaded_on_metal, whole.vision_tower.dense, (1,)) == [None]
