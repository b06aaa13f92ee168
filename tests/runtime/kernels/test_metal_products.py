"""Products of few rows against float64 and against themselves, from the source that a Mac compiles: on the
GPU, or emulated on the host."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import mlx.core as mx
import numpy as np
import pytest
from emulator.errors import EmulatorError
from emulator.kernel import Emulator
from emulator.lint import lint
from emulator.worlds import gpu, kernel_maker, toolchain

from mlx_server.runtime.kernels.gpu.kernels import read_text
from mlx_server.runtime.kernels.gpu.products import PRODUCT_FILES, Cut, Form, ProductKernels, ProductShape, Weights

TOLERANCE = {mx.float32: 2e-6, mx.float16: 6e-4, mx.bfloat16: 4.5e-3}
DENSE = [(form, 8 * dtype.size, 32, dtype) for form in Form for dtype in TOLERANCE]
KINDS = [*itertools.product(Form, (4, 8), (32, 64, 128), TOLERANCE), *DENSE]
FEW = [
    (Form.VECTOR, 4, 64, mx.bfloat16),
    (Form.MATRIX, 8, 128, mx.bfloat16),
    (Form.VECTOR, 16, 32, mx.bfloat16),
    (Form.MATRIX, 16, 32, mx.float16),
]
SOME = [*FEW, (Form.VECTOR, 8, 32, mx.float32), (Form.MATRIX, 4, 32, mx.float16), (Form.VECTOR, 32, 32, mx.float32)]


def kinds(chosen: list[tuple[Form, int, int, mx.Dtype]]) -> pytest.MarkDecorator:
    """These by default, all with `-m full`: each is several texts to compile."""
    marked = [pytest.param(*kind, marks=() if kind in chosen else pytest.mark.full) for kind in KINDS]
    return pytest.mark.parametrize(("form", "bits", "group", "dtype"), marked)


@functools.cache
def shared_kernels() -> ProductKernels:
    if gpu() == "cuda":
        pytest.skip("products of few rows have no CUDA twin")
    return ProductKernels(kernel_maker())


def weights_like(shape: ProductShape) -> Weights:
    dense = np.random.default_rng(0).standard_normal((shape.num_columns, shape.depth)).astype(np.float32)
    if not shape.is_quantized:
        return (mx.array(dense).astype(shape.dtype),)
    codes, scales, biases = mx.quantize(mx.array(dense), shape.group_size, shape.bits)
    return codes, scales.astype(shape.dtype), biases.astype(shape.dtype)


def rows_like(shape: ProductShape, num_rows: int) -> mx.array:
    rows = np.random.default_rng(1).standard_normal((num_rows, shape.depth)).astype(np.float32)
    return mx.array(rows).astype(shape.dtype)


def float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def bits_of(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint32 if array.dtype == mx.float32 else mx.uint16))


def dequantised(shape: ProductShape, weights: Weights) -> np.ndarray:
    """The weight in float64."""
    if not shape.is_quantized:
        return float64(weights[0])
    words = np.array(weights[0])[:, :, None] >> (np.arange(32 // shape.bits) * shape.bits).astype(np.uint32)
    integers = (words & (2**shape.bits - 1)).reshape(shape.num_columns, shape.depth)
    scale, bias = (np.repeat(float64(part), shape.group_size, 1) for part in weights[1:])
    return integers * scale + bias


def check_values(kernels: ProductKernels, form: Form, shape: ProductShape, num_rows: int) -> None:
    """Within what rounding of the result and of sums in float32 allows."""
    x, weights = rows_like(shape, num_rows), weights_like(shape)
    dense, wide = dequantised(shape, weights), float64(x)
    out = float64(kernels.of(form, shape)(x, num_rows, weights))
    allowed = TOLERANCE[shape.dtype] * np.abs(wide @ dense.T) + 3e-7 * (np.abs(wide) @ np.abs(dense).T)
    assert out.shape == (num_rows, shape.num_columns)
    assert (np.abs(out - wide @ dense.T) <= allowed).all()


def check_bits(kernels: ProductKernels, form: Form, shape: ProductShape, counts: Sequence[int]) -> None:
    """The rows of the last count, alone, in any number, in another order, and beside rows of NaN."""
    product, weights, x = kernels.of(form, shape), weights_like(shape), rows_like(shape, counts[-1])
    whole = bits_of(product(x, len(x), weights))
    for count in counts:
        assert (bits_of(product(x[:count], count, weights)) == whole[:count]).all(), count
    assert (bits_of(product(x[::-1], len(x), weights)) == whole[::-1]).all()
    beside = mx.concatenate([mx.full((3, shape.depth), mx.nan, shape.dtype), x[2:3], 100 * x[:1]])
    assert (bits_of(product(beside, 5, weights))[3] == whole[2]).all()


@kinds(SOME)
def test_is_the_product_with_the_dequantised_weight(form: Form, bits: int, group: int, dtype: mx.Dtype) -> None:
    """Columns and steps of K that do not come out even, one group alone, and rows of several tiles."""
    for num_rows, columns, depth in ((1, 37, group), (4, 11, 5 * group), (35, 45, 1152)):
        check_values(shared_kernels(), form, ProductShape(columns, depth, bits, group, dtype), num_rows)


@kinds(FEW)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(form: Form, bits: int, group: int, dtype: mx.Dtype) -> None:
    """1 to 17 rows and 31 to 33: every tile, and several of the largest. K is cut into four slices."""
    shape = ProductShape(19, 2176, bits, group, dtype)
    assert Cut.of(shape, form).slices == 4
    check_bits(shared_kernels(), form, shape, [*range(1, 18), 31, 32, 33])


@pytest.mark.parametrize("form", Form)
def test_many_slices_and_none_are_right(form: Form) -> None:
    """A weight of many columns needs fewer slices of K."""
    shapes = [ProductShape(8, depth, 4, 128, mx.float16) for depth in (256, 4096)]
    assert [Cut.of(shape, form).slices for shape in shapes] == [1, 8]
    assert Cut.of(ProductShape(2**15, 4096, 4, 128, mx.float16), form).slices == 1
    for shape in shapes:
        check_values(shared_kernels(), form, shape, 3)


@pytest.mark.parametrize("form", Form)
def test_has_no_race(form: Form) -> None:
    kernels = ProductKernels(Emulator(toolchain(), check_races=True).metal_kernel)
    check_values(kernels, form, ProductShape(21, 2048, 4, 64, mx.float16), 3)


VECTOR_FAULTS = {
    "a row past the last": ("min(first_row + r, M - 1)", "(first_row + r)"),
    "a column past the last": ("min(first_column + c, N - 1)", "(first_column + c)"),
    "the next tile's rows stored": ("if (r < ROWS && first_row", "if (first_row"),
    "weights past K": ("if (k < K) {", "if (true) {"),
    "another group's scale": ("scales[k / GROUP]", "scales[k / (2 * GROUP)]"),
    "a slice left out": ("s < SLICES; ++s", "s < SLICES - 1; ++s"),
    "no barrier before slices meet": ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
}
MATRIX_FAULTS = {
    "columns exchanged": ("values[d][0][i]", "values[d][1][i]"),
    "a run misplaced": ("e * 32 + run", "e * 32 + (run ^ 4)"),
    "values past K": ("if (k_of_x + e * 32 < K) {", "if (true) {"),
    "a column past the last": ("min(first_column + a * 8 + q + e, N - 1)", "(first_column + a * 8 + q + e)"),
    "no barrier before slices meet": ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
}
DENSE_FAULTS = {
    "the next four numbers": ("(numbers + i)", "(numbers + (i ^ 4))"),
    "one number four times": ("four[i % 4]", "four[0]"),
    "another column": ("w + column * K", "w + (column ^ 1) * K"),
}
FAULTS = [
    pytest.param(form, bits, *fault, id=f"{form}, {bits} bits: {name}")
    for form, bits, faults in (
        (Form.VECTOR, 4, VECTOR_FAULTS),
        (Form.MATRIX, 4, MATRIX_FAULTS),
        (Form.VECTOR, 16, DENSE_FAULTS),
        (Form.MATRIX, 16, DENSE_FAULTS | {"numbers past K": ("if (is_inside) four", "four")}),
    )
    for name, fault in faults.items()
]


def faulty_kernels(form: Form, old: str, new: str, *, check_races: bool = False) -> ProductKernels:
    mutations: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType({f"product_{form}": ((old, new),)})
    return ProductKernels(Emulator(toolchain(), mutations=mutations, check_races=check_races).metal_kernel)


@pytest.mark.parametrize(("form", "bits", "old", "new"), FAULTS)
def test_a_planted_fault_is_found(form: Form, bits: int, old: str, new: str) -> None:
    kernels = faulty_kernels(form, old, new, check_races=not new)
    # Two tiles of 12 or 16 rows where it is rows that go wrong, else one of 4 or 8.
    shape, num_rows = ProductShape(21, 2336, bits, 32, mx.float16), 17 if "first_row" in old else 3

    def check_twice() -> None:  # buffers end at an inaccessible page in every other launch
        for _ in range(2):
            check_values(kernels, form, shape, num_rows)

    with pytest.raises((EmulatorError, AssertionError)):
        check_twice()


@pytest.mark.parametrize(
    ("form", "old", "new"),
    [
        (Form.VECTOR, "slice_steps = (", "slice_steps = ROWS / 8 + ("),  # tiles of 4 and of 12
        (Form.MATRIX, "slice_steps = (", "slice_steps = ROWS / 16 + ("),  # tiles of 8 and of 16
    ],
)
def test_an_order_that_depends_on_the_rows_is_found(form: Form, old: str, new: str) -> None:
    kernels, shape = faulty_kernels(form, old, new), ProductShape(19, 3072, 4, 32, mx.float32)
    check_values(kernels, form, shape, 12)
    with pytest.raises(AssertionError):
        check_bits(kernels, form, shape, range(4, 13, 8))


@pytest.mark.parametrize("form", Form)
def test_rows_may_lie_in_any_number_of_dimensions(form: Form) -> None:
    shape = ProductShape(24, 256, 4, 64, mx.float16)
    product, weights, x = shared_kernels().of(form, shape), weights_like(shape), rows_like(shape, 6)
    flat = product(x, 6, weights)
    assert (bits_of(product(x[1], 1, weights)) == bits_of(flat)[1]).all()
    for places in ((6, 1), (1, 6), (2, 3)):
        out = product(x.reshape(*places, 256), 6, weights)
        assert out.shape == (*places, 24)
        assert (bits_of(out.reshape(6, 24)) == bits_of(flat)).all()


def test_kernels_are_made_once_and_without_a_templates_arguments() -> None:
    """MLX hashes those at each call; and two shapes of the same cut share all texts."""
    made: list[str] = []
    launches: list[set[str]] = []

    def make(**definition: object) -> object:
        made.append(str(definition["name"]))

        def call(**launch: object) -> list[mx.array]:
            launches.append(set(launch))
            return [mx.zeros((1,))]

        return call

    kernels = ProductKernels(make)  # type: ignore[arg-type]
    for _ in range(2):
        for columns, depth in ((4096, 4096), (5120, 5120)):
            shape = ProductShape(columns, depth, 4, 64, mx.bfloat16)
            for num_rows in range(1, 33):
                kernels.of(Form.VECTOR, shape)(mx.zeros((num_rows, 8)), num_rows, ())
    assert [name.split("__")[4] for name in made] == ["1", "4", "6", "8", "12", "16"]
    assert len(launches) == 128
    assert not any("template" in launch for launch in launches)


@pytest.mark.parametrize(
    "changes",
    [
        *({"bits": 3}, {"group_size": 16}, {"depth": 96}, {"dtype": mx.int32}, {"num_columns": 3}),
        *({"bits": 16}, {"bits": 32, "group_size": 32}),  # not quantised: in groups of 32, and of the type's own bits
    ],
)
def test_other_weights_are_refused(changes: dict[str, int]) -> None:
    shape = ProductShape(64, 128, 4, 64, mx.float16)
    with pytest.raises(ValueError, match="no kernel for"):
        dataclasses.replace(shape, **changes)


def test_texts_keep_to_the_dialect() -> None:
    for name in PRODUCT_FILES:
        assert lint(read_text(name)) == []
