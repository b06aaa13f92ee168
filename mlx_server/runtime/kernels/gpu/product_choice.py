"""Chooses the product of few rows for each linear layer of a model: a kernel of this project if it passes its test on
this GPU, at each load, and for the numbers of rows at which it was measured to be faster than MLX's product.

Times are measured with the model's own weights, one layer after the other, each on the result of the one before. So, as
in a step, weights are read from memory and products do not overlap. Times are stored in a file, by chip and shape, and
are valid for one version of MLX and of the kernels.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.kernels.gpu.choice_files import StoredChoices, digest, dtype_name, whole_number
from mlx_server.runtime.kernels.gpu.kernels import read_text
from mlx_server.runtime.kernels.gpu.products import (
    PRODUCT_FILES,
    Form,
    FormProduct,
    ProductKernels,
    ProductShape,
    form_product,
    weights_of,
)
from mlx_server.runtime.kernels.gpu.variants import DTYPES
from mlx_server.runtime.kernels.trials import KERNEL_TOLERANCES, median_times_in_pieces
from mlx_server.runtime.layers.fixed_rows import FixedRows
from mlx_server.runtime.layers.products import (
    Product,
    RowProduct,
    install_products,
    own_product,
    takes_product,
    with_own,
)

logger = logging.getLogger(__name__)

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The row counts that are measured; a count in between uses the choice of the next larger one. With more rows than the
last, a product is no longer limited by reading weights, and MLX's product is used."""

_MAX_ROWS = ROW_COUNTS[-1]
EXACT_COUNTS = (*ROW_COUNTS, 256)
"""What is measured where one product is for any number of rows: prompts, too."""

_GAIN = 1.1
_NUM_REPEATS = 5
_CHAIN_BYTES = 256 * 2**20
"""The bytes of weights in a measurement: more than fit in caches."""

_MAX_LAYERS = 32


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """The seconds of a product for each of `ROW_COUNTS` or `EXACT_COUNTS`, by each measured form and by MLX (None)."""

    seconds: Mapping[Form | None, tuple[float, ...]]

    def fastest(self, forms: Sequence[Form]) -> tuple[Form | None, ...]:
        """The fastest of `forms` for each of `ROW_COUNTS`; None unless it is at least a tenth faster than MLX."""

        def of_count(index: int) -> Form | None:
            best = min(forms, key=lambda form: self.seconds[form][index], default=None)
            is_faster = best is not None and self.seconds[best][index] * _GAIN <= self.seconds[None][index]
            return best if is_faster else None

        return tuple(of_count(index) for index in range(len(ROW_COUNTS)))

    def evenly_fastest(self, forms: Sequence[Form]) -> Form | None:
        """The one of `forms` that takes the least time for few rows and prompts together: the geometric mean of the
        times for `ROW_COUNTS`, times that for a prompt. None if MLX takes less. Example: 9 % less time than
        MLX with few rows does not make up for a prompt that takes 2.5 times as long."""

        def time_of(form: Form | None) -> float:
            *few, prompt = self.seconds[form]
            return float(math.prod(few) ** (1 / len(few)) * prompt)

        candidates: list[Form | None] = [*forms]
        if None in self.seconds:
            candidates.append(None)
        return min(candidates, key=time_of, default=None)


MakeForm = Callable[[Any], Product]
"""A layer's product in one form, or by MLX."""

Pieces = Generator[None, None, ProductTimes]
"""Work that yields wherever other models' steps may run in between, and returns times."""

Measure = Callable[[ProductShape, Sequence[Any], Mapping[Form | None, MakeForm], Sequence[int]], Pieces]
"""Measures the times of a shape, with its layers, for numbers of rows."""


def gpu_products(
    model: Any, kernels: ProductKernels, *, exact: bool = False, measure: Measure | None = None
) -> Iterator[None]:
    """Gives the linear layers of an evaluated model this project's kernels, where these are faster.

    With `exact`, a layer has one form for any number of rows, so that a row's bits do not depend on the number of rows:
    the form that takes the least time (`evenly_fastest`), unless MLX's products of fixed numbers of rows (`FixedRows`)
    take less. These, and layers without a kernel that works, are left to `compute_by_row`. Yields where other models'
    steps may run in between. MLX thread.
    """
    layers: dict[ProductShape, list[Any]] = defaultdict(list)
    for module in model.modules():
        shape = ProductShape.of(module) if takes_product(module) else None
        if shape is not None:
            if not shape.is_quantized:  # MLX would copy a transposed weight at each call of a kernel
                module.weight = mx.contiguous(module.weight)
                mx.eval(module.weight)
            layers[shape].append(module)
    stored = stored_times(exact=exact)
    known = stored.load()
    fixed = FixedRows() if exact else None
    tables: dict[ProductShape, _Table] = {}
    for shape, alike in layers.items():
        chooser = _Chooser(shape, alike, kernels, fixed, measure or measure_products)
        table = yield from chooser.table(known.get(shape) or (yield from _measured(chooser, stored)))
        if fixed is not None and not table.is_empty:
            yield from fixed.tries(alike[0])
        tables[shape] = table

    def make(layer: Any) -> RowProduct | None:
        shape = ProductShape.of(layer)
        table = None if shape is None else tables[shape]
        if shape is None or table is None or table.is_empty:
            return None
        return _row_product(layer, shape, table, None if fixed is None else _fixed_product(fixed, layer))

    taken = install_products(model, make)
    if layers:
        total = sum(len(alike) for alike in layers.values())
        logger.info("%d of %d products of few rows are computed by this project's kernels.", taken, total)


def _measured(chooser: _Chooser, stored: StoredChoices[ProductShape, ProductTimes]) -> Pieces:
    """The times, which are stored; none if the device reports an error, which may be of an earlier step of it. If it
    still cannot compute, the checks of the loaded model say so."""
    try:
        times = yield from chooser.measured()
    except (RuntimeError, ValueError) as error:
        logger.warning("Products with %s cannot be measured here, so MLX's are used: %s", chooser.shape, error)
        return ProductTimes({})
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
    """Tests and measures the forms of one shape on the layers that have it. With `fixed`, one product is chosen for all
    numbers of rows."""

    def __init__(
        self,
        shape: ProductShape,
        layers: Sequence[Any],
        kernels: ProductKernels,
        fixed: FixedRows | None,
        measure: Measure,
    ) -> None:
        self.shape = shape
        self._layers = layers
        self._fixed = fixed
        self._measure = measure
        self._products = {form: kernels.of(form, shape) for form in Form}
        self._failures: dict[Form, str | None] = {}

    def measured(self) -> Pieces:
        """Measures the forms that pass their test, and MLX's product."""
        candidates: dict[Form | None, MakeForm] = {None: own_product}
        if self._fixed is not None:
            yield from self._fixed.tries(self._layers[0])
            candidates = _in_fixed_rows(self._fixed, self._layers[0])
        for form, product in self._products.items():
            if (yield from self._is_right(form)):
                candidates[form] = partial(form_product, product)
        counts = ROW_COUNTS if self._fixed is None else EXACT_COUNTS
        return (yield from self._measure(self.shape, self._layers, candidates, counts))

    def table(self, times: ProductTimes) -> Generator[None, None, _Table]:
        """The table by these times, of forms that pass their test."""
        forms = [form for form in self._products if form in times.seconds and self._failures.get(form) is None]
        if self._fixed is not None:
            chosen: tuple[Form | None, ...] = (times.evenly_fastest(forms),) * len(ROW_COUNTS)
        else:
            chosen = times.fastest(forms)
        for form in dict.fromkeys(chosen):
            if form is not None and not (yield from self._is_right(form)):
                return (yield from self.table(times))
        few: list[FormProduct | None] = [None]
        for count, form in zip(ROW_COUNTS, chosen):
            few += [None if form is None else self._products[form]] * (count + 1 - len(few))
        return _Table(tuple(few), None if self._fixed is None else few[-1])

    def _is_right(self, form: Form) -> Generator[None, None, bool]:
        if form not in self._failures:
            self._failures[form] = failure = yield from product_failure(
                self._products[form], self.shape, self._layers[0]
            )
            if failure is not None:
                logger.warning("The %s form of products with %s is not used: %s.", form, self.shape, failure)
        return self._failures[form] is None


def _in_fixed_rows(fixed: FixedRows, layer: Any) -> dict[Form | None, MakeForm]:
    """MLX's product of fixed numbers of rows; nothing if none has the same bits for each row."""
    if _fixed_product(fixed, layer) is None:
        return {}
    return {None: lambda layer: with_own(layer, fixed(layer))}


def _fixed_product(fixed: FixedRows, layer: Any) -> RowProduct | None:
    try:
        return fixed(layer)
    except ModelLoadError:
        return None


def _row_product(layer: Any, shape: ProductShape, table: _Table, fixed: RowProduct | None) -> RowProduct:
    """Rows of another type than the weight's are left to `fixed`, or to MLX."""
    few, beyond, depth, dtype, weights = table.few, table.beyond, shape.depth, shape.dtype, weights_of(layer)

    def product(x: mx.array) -> mx.array | None:
        num_rows = x.size // depth
        form = few[num_rows] if num_rows <= _MAX_ROWS else beyond
        if x.dtype != dtype:
            return None if fixed is None else fixed(x)
        return None if form is None else form(x, num_rows, weights)

    return product


def product_failure(product: FormProduct, shape: ProductShape, layer: Any) -> Generator[None, None, str | None]:
    """Returns the reason why a form is wrong on this GPU, or None. Compares its results with MLX's, and the bits of
    rows between products with 1 to 32 rows and in reverse order. Yields after each number of rows."""
    x = mx.random.normal((_MAX_ROWS, shape.depth), shape.dtype, key=mx.random.key(0))
    weights = weights_of(layer)
    try:
        whole = product(x, _MAX_ROWS, weights)
        wanted = own_product(layer)(x).astype(mx.float32)
        error = float(mx.abs(whole.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())
        if not error <= KERNEL_TOLERANCES[shape.dtype]:
            return f"it is off by {error:.2g} of the largest result"
        for count in range(1, _MAX_ROWS):
            if not _same_bits(product(x[:count], count, weights), whole[:count]):
                return f"a row among {count} has other bits than among {_MAX_ROWS}"
            yield
        if not _same_bits(product(x[::-1], _MAX_ROWS, weights), whole[::-1]):
            return "a row has other bits in another place"
    except (RuntimeError, ValueError) as fault:
        return str(fault)
    return None


def _same_bits(one: mx.array, other: mx.array) -> bool:
    word = mx.uint32 if one.dtype == mx.float32 else mx.uint16
    return bool(mx.array_equal(one.view(word), mx.contiguous(other).view(word)).item())


def measure_products(
    shape: ProductShape, layers: Sequence[Any], candidates: Mapping[Form | None, MakeForm], counts: Sequence[int]
) -> Pieces:
    """Measures products in a chain of so many layers that caches cannot hold their weights. The time to build the graph
    is included, because the thread that runs a step also builds it. Yields after each run of a chain."""
    enough = -(-_CHAIN_BYTES // shape.weight_bytes)
    chained = layers[: min(enough, _MAX_LAYERS)]
    links = [[make(layer) for layer in chained] for make in candidates.values()]
    columns: dict[Form | None, list[float]] = {form: [] for form in candidates}
    for num_rows in counts:
        x = mx.random.normal((num_rows, shape.depth), shape.dtype, key=mx.random.key(num_rows))
        mx.eval(x)
        times = yield from median_times_in_pieces([chain(link, x) for link in links], _NUM_REPEATS)
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


def stored_times(*, exact: bool = False) -> StoredChoices[ProductShape, ProductTimes]:
    """The file with all measured times; with `exact`, with those of products for any number of rows."""
    measured_with = digest(version("mlx"), *(read_text(name) for name in PRODUCT_FILES))
    name = "exact_products.json" if exact else "products.json"
    return StoredChoices(name, measured_with, partial(_parse, exact), _document, "the next start")


_SIZES = ("num_columns", "depth", "bits", "group_size")
_MLX = "mlx"


def _parse(exact: bool, entry: Mapping[str, Any]) -> tuple[ProductShape, ProductTimes]:
    dtypes = {dtype_name(dtype): dtype for dtype in DTYPES}
    sizes = {name: whole_number(entry["shape"][name]) for name in _SIZES}
    seconds = {
        None if name == _MLX else Form(name): tuple(_seconds(value) for value in times)
        for name, times in entry["seconds"].items()
    }
    counts = EXACT_COUNTS if exact else ROW_COUNTS
    if (not exact and None not in seconds) or any(len(times) != len(counts) for times in seconds.values()):
        raise ValueError(f"times are not of {len(counts)} numbers of rows")
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
