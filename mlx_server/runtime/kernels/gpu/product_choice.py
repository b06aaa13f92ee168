"""Chooses the product of few rows for each quantised layer of a model: a kernel of this project if it passes its test
on this GPU, at each load, and for the numbers of rows at which it was measured to be faster than MLX's product.

Times are measured with the model's own weights, one layer after the other, each on the result of the one before. So, as
in a step, weights are read from memory and products do not overlap. Times are stored in a file, by chip and shape, and
are valid for one version of MLX and of the kernels.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_server.runtime.kernels.gpu.choice_files import StoredChoices, digest, dtype_name, whole_number
from mlx_server.runtime.kernels.gpu.kernels import read_text
from mlx_server.runtime.kernels.gpu.products import (
    PRODUCT_FILES,
    Form,
    FormProduct,
    Product,
    ProductKernels,
    ProductShape,
    form_product,
    weights_of,
)
from mlx_server.runtime.kernels.gpu.variants import DTYPES
from mlx_server.runtime.kernels.trials import KERNEL_TOLERANCES, median_times
from mlx_server.runtime.layers.products import RowProduct, install_products

logger = logging.getLogger(__name__)

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The row counts that are measured; a count in between uses the choice of the next larger one. With more rows than the
last, a product is no longer limited by reading weights, and MLX's product is used."""

_MAX_ROWS = ROW_COUNTS[-1]
_GAIN = 1.1
_NUM_REPEATS = 5
_CHAIN_BYTES = 256 * 2**20
"""The bytes of weights in a measurement: more than fit in caches."""

_MAX_LAYERS = 32


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """The seconds of a product for each of `ROW_COUNTS`, by MLX (None) and by each measured form."""

    seconds: Mapping[Form | None, tuple[float, ...]]

    def fastest(self, forms: Sequence[Form]) -> tuple[Form | None, ...]:
        """The fastest of `forms` for each of `ROW_COUNTS`; None unless it is at least a tenth faster than MLX."""

        def of_count(index: int) -> Form | None:
            best = min(forms, key=lambda form: self.seconds[form][index], default=None)
            is_faster = best is not None and self.seconds[best][index] * _GAIN <= self.seconds[None][index]
            return best if is_faster else None

        return tuple(of_count(index) for index in range(len(ROW_COUNTS)))

    def evenly_fastest(self, forms: Sequence[Form]) -> Form | None:
        """The one of `forms` with the lowest geometric mean of times over all counts; None if there are no forms."""
        return min(forms, key=lambda form: math.prod(self.seconds[form]), default=None)


Measure = Callable[[ProductShape, Sequence[Any], Sequence[FormProduct]], ProductTimes]
"""Measures the times of a shape, with its layers and its correct forms."""


def gpu_products(
    model: Any, kernels: ProductKernels, *, exact: bool = False, measure: Measure | None = None
) -> Iterator[None]:
    """Gives the quantised layers of an evaluated model this project's kernels, where these are faster.

    With `exact`, a layer has one form for any number of rows, even where it is slower, so that a row's bits do not
    depend on the number of rows. Layers without a kernel that works keep MLX's product, whose bits do depend on it.
    Yields after each shape, so that other models' steps can run in between. MLX thread.
    """
    layers: dict[ProductShape, list[Any]] = defaultdict(list)
    for module in model.modules():
        shape = ProductShape.of(module)
        if shape is not None:
            layers[shape].append(module)
    stored = stored_times()
    known = stored.load()
    tables: dict[ProductShape, _Table] = {}
    for shape, alike in layers.items():
        chooser = _Chooser(shape, alike, kernels, measure or measure_products)
        times = known.get(shape) or _measured(chooser, stored)
        tables[shape] = chooser.table(times, exact=exact)
        yield

    def make(layer: Any) -> RowProduct | None:
        shape = ProductShape.of(layer)
        table = None if shape is None else tables[shape]
        return None if shape is None or table is None or table.is_empty else _row_product(layer, shape, table)

    taken = install_products(model, make)
    num_quantised = sum(isinstance(module, nn.QuantizedLinear) for module in model.modules())
    if num_quantised:
        logger.info("%d products of few rows are this project's own; %d layers are quantised.", taken, num_quantised)


def _measured(chooser: _Chooser, stored: StoredChoices[ProductShape, ProductTimes]) -> ProductTimes:
    times = chooser.measured()
    try:
        stored.store({chooser.shape: times})
    except OSError as error:
        logger.warning("Times of products cannot be kept, so each start measures anew: %s", error)
    return times


@dataclass(frozen=True, slots=True)
class _Table:
    """The product for each number of rows from 0 on, and for all larger numbers; None stands for MLX's product."""

    few: tuple[FormProduct | None, ...]
    beyond: FormProduct | None

    @property
    def is_empty(self) -> bool:
        return not any(self.few)


class _Chooser:
    """Tests and measures the forms of one shape on the layers that have it."""

    def __init__(self, shape: ProductShape, layers: Sequence[Any], kernels: ProductKernels, measure: Measure) -> None:
        self.shape = shape
        self._layers = layers
        self._measure = measure
        self._products = {form: kernels.of(form, shape) for form in Form}
        self._failures: dict[Form, str | None] = {}

    def measured(self) -> ProductTimes:
        """Measures the forms that pass their test."""
        products = [product for form, product in self._products.items() if self._is_right(form)]
        return self._measure(self.shape, self._layers, products)

    def table(self, times: ProductTimes, *, exact: bool) -> _Table:
        """The table by these times, of forms that pass their test."""
        forms = [form for form in self._products if form in times.seconds and form not in self._wrong()]
        if exact:
            chosen: tuple[Form | None, ...] = (times.evenly_fastest(forms),) * len(ROW_COUNTS)
        else:
            chosen = times.fastest(forms)
        if any(not self._is_right(form) for form in set(chosen) if form is not None):
            return self.table(times, exact=exact)
        few: list[FormProduct | None] = [None]
        for count, form in zip(ROW_COUNTS, chosen):
            few += [None if form is None else self._products[form]] * (count + 1 - len(few))
        return _Table(tuple(few), few[-1] if exact else None)

    def _wrong(self) -> set[Form]:
        return {form for form, failure in self._failures.items() if failure is not None}

    def _is_right(self, form: Form) -> bool:
        if form not in self._failures:
            self._failures[form] = failure = product_failure(self._products[form], self.shape, self._layers[0])
            if failure is not None:
                logger.warning("The %s form of products with %s is not used: %s.", form, self.shape, failure)
        return self._failures[form] is None


def _row_product(layer: Any, shape: ProductShape, table: _Table) -> RowProduct:
    few, beyond, depth, dtype, weights = table.few, table.beyond, shape.depth, shape.dtype, weights_of(layer)

    def product(x: mx.array) -> mx.array | None:
        num_rows = x.size // depth
        form = few[num_rows] if num_rows <= _MAX_ROWS else beyond
        return None if form is None or x.dtype != dtype else form(x, num_rows, weights)

    return product


def product_failure(product: FormProduct, shape: ProductShape, layer: Any) -> str | None:
    """The reason why a form is wrong on this GPU, or None. Compares its results with MLX's, and the bits of rows
    between products with 1 to 32 rows and in reverse order."""
    x = mx.random.normal((_MAX_ROWS, shape.depth), shape.dtype, key=mx.random.key(0))
    weights = weights_of(layer)
    try:
        whole = product(x, _MAX_ROWS, weights)
        wanted = mlx_product(shape, layer)(x).astype(mx.float32)
        error = float(mx.abs(whole.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())
        if not error <= KERNEL_TOLERANCES[shape.dtype]:
            return f"it is off by {error:.2g} of the largest result"
        for count in range(1, _MAX_ROWS):
            if not _same_bits(product(x[:count], count, weights), whole[:count]):
                return f"a row among {count} has other bits than among {_MAX_ROWS}"
        if not _same_bits(product(x[::-1], _MAX_ROWS, weights), whole[::-1]):
            return "a row has other bits in another place"
    except (RuntimeError, ValueError) as fault:
        return str(fault)
    return None


def _same_bits(one: mx.array, other: mx.array) -> bool:
    word = mx.uint32 if one.dtype == mx.float32 else mx.uint16
    return bool(mx.array_equal(one.view(word), mx.contiguous(other).view(word)).item())


def measure_products(shape: ProductShape, layers: Sequence[Any], products: Sequence[FormProduct]) -> ProductTimes:
    """Measures products in a chain of so many layers that caches cannot hold their weights. The time to build the graph
    is included, because the thread that runs a step also builds it."""
    enough = -(-_CHAIN_BYTES // shape.weight_bytes)
    chained = layers[: min(enough, _MAX_LAYERS)]
    columns: dict[Form | None, list[float]] = {form: [] for form in (None, *(product.form for product in products))}
    for num_rows in ROW_COUNTS:
        x = mx.random.normal((num_rows, shape.depth), shape.dtype, key=mx.random.key(num_rows))
        mx.eval(x)
        links = [[mlx_product(shape, layer) for layer in chained]]
        links += [[form_product(product, layer) for layer in chained] for product in products]
        times = median_times([chain(link, x) for link in links], _NUM_REPEATS)
        for column, seconds in zip(columns.values(), times):
            column.append(seconds / len(chained))
    return ProductTimes({form: tuple(column) for form, column in columns.items()})


def chain(products: Sequence[Product], x: mx.array) -> Callable[[], None]:
    """Returns a function that runs products one after the other, each on rows that depend on the result before."""

    def run() -> None:
        rows = x
        for product in products:
            rows = x + product(rows)[..., :1]
        mx.eval(rows)

    return run


def mlx_product(shape: ProductShape, layer: Any) -> Product:
    """MLX's product for one layer."""
    codes, scales, biases = weights_of(layer)
    return lambda x: mx.quantized_matmul(x, codes, scales, biases, True, shape.group_size, shape.bits)


def stored_times() -> StoredChoices[ProductShape, ProductTimes]:
    """The file with all measured times."""
    measured_with = digest(version("mlx"), *(read_text(name) for name in PRODUCT_FILES))
    return StoredChoices("products.json", measured_with, _parse, _document, "the next start")


_SIZES = ("num_columns", "depth", "bits", "group_size")
_MLX = "mlx"


def _parse(entry: Mapping[str, Any]) -> tuple[ProductShape, ProductTimes]:
    dtypes = {dtype_name(dtype): dtype for dtype in DTYPES}
    sizes = {name: whole_number(entry["shape"][name]) for name in _SIZES}
    seconds = {
        None if name == _MLX else Form(name): tuple(_seconds(value) for value in times)
        for name, times in entry["seconds"].items()
    }
    if None not in seconds or any(len(times) != len(ROW_COUNTS) for times in seconds.values()):
        raise ValueError(f"times are not of {len(ROW_COUNTS)} numbers of rows")
    return ProductShape(**sizes, dtype=dtypes[entry["dtype"]]), ProductTimes(seconds)


def _seconds(value: Any) -> float:
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a time")
    return value


def _document(shape: ProductShape, times: ProductTimes) -> dict[str, Any]:
    return {
        "shape": {name: getattr(shape, name) for name in _SIZES},
        "dtype": dtype_name(shape.dtype),
        "seconds": {form or _MLX: list(column) for form, column in times.seconds.items()},
    }
