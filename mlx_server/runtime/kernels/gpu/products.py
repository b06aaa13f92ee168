"""Products of few rows as MLX calls, for weights in MLX's layout, quantised or not.

There are two forms. Both read a weight once for many rows, and a row has the same bits at any place among any number of
rows; the two forms differ in their bits. A kernel is made once for its constants, a launch once for each form, shape
and number of rows. Constants are in the kernel text, because MLX hashes template arguments at each call.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from mlx_server.runtime.cache.row_pool import SMALL_ARRAY
from mlx_server.runtime.kernels.gpu.choice_files import dtype_name
from mlx_server.runtime.kernels.gpu.kernels import Kernel, KernelText, MakeKernel, read_code
from mlx_server.runtime.kernels.gpu.variants import DTYPES, SIMD_WIDTH
from mlx_server.runtime.layers.products import MakeProduct, Product, RowProduct

Weights = tuple[mx.array, ...]
"""Codes, scales and biases; or the weight alone if it is not quantised."""

_QUANTIZED, _DENSE = ("w", "scales", "biases"), ("w",)
_SIMDGROUPS = 4
_MAX_SLICES = 8
_STEP = 256
"""Elements of K that a simdgroup processes at a time."""

_ENOUGH_SIMDGROUPS = 2048
"""With fewer simdgroups, cores of a large GPU would be idle, so K is cut into slices."""


class Form(enum.StrEnum):
    """VECTOR: the lanes of a simdgroup split K. MATRIX: they fill 8 x 8 matrices, which the GPU multiplies."""

    VECTOR = "vector"
    MATRIX = "matrix"


@dataclass(frozen=True, slots=True)
class _Shared:
    """The constants of a form: the columns of a simdgroup, and the numbers of rows that can share a weight."""

    columns: int
    rows: tuple[int, ...]


_FORMS = {Form.VECTOR: _Shared(4, (1, 4, 6, 8, 12, 16)), Form.MATRIX: _Shared(16, (8, 16, 32))}
PRODUCT_FILES = (
    *(f"product_{form}.{kind}" for form in Form for kind in ("msl", "h")),
    "product_quantized.h",
    "product_dense.h",
)
_DENSE_GROUP = 32
"""What the depth of a weight that is not quantised must be a multiple of."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """A weight `[num_columns, depth]` of `bits` for activations of `dtype`. If it is not quantised, it has the bits of
    `dtype` and groups of 32."""

    num_columns: int
    depth: int
    bits: int
    group_size: int
    dtype: mx.Dtype

    def __post_init__(self) -> None:
        """Raises `ValueError` if no kernel supports it."""
        groups = self.num_columns * self.depth // self.group_size
        if (
            self.dtype not in DTYPES
            or self.bits not in (4, 8, 8 * self.dtype.size)
            or self.group_size not in ((32, 64, 128) if self.is_quantized else (_DENSE_GROUP,))
            or self.depth % self.group_size
            or groups < SMALL_ARRAY  # MLX passes smaller inputs in another address space
            or self.num_columns * self.depth * self.bits // 32 >= 2**32
        ):
            raise ValueError(f"no kernel for {self}")

    @classmethod
    def of(cls, layer: Any) -> ProductShape | None:
        """The shape of the weight of a linear layer or a tied head; None if no kernel supports it."""
        try:
            if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
                if layer.weight.ndim != 2 or getattr(layer, "mode", "affine") != "affine":
                    return None
                columns, groups = layer.scales.shape
                return cls(columns, groups * layer.group_size, layer.bits, layer.group_size, layer.scales.dtype)
            if isinstance(layer, nn.Linear | nn.Embedding) and layer.weight.ndim == 2:
                (columns, depth), dtype = layer.weight.shape, layer.weight.dtype
                return cls(columns, depth, 8 * dtype.size, _DENSE_GROUP, dtype)
        except ValueError:
            pass
        return None

    @property
    def is_quantized(self) -> bool:
        return self.bits < 16

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weight, with scales and biases if it is quantised."""
        size = self.num_columns * self.depth
        return size * self.bits // 8 + (2 * size // self.group_size * self.dtype.size if self.is_quantized else 0)

    def __str__(self) -> str:
        bits = f"{self.bits} bits in groups of {self.group_size}, " if self.is_quantized else ""
        return f"{self.num_columns} x {self.depth}, {bits}{dtype_name(self.dtype)}"


@dataclass(frozen=True, slots=True)
class Cut:
    """The simdgroups of a threadgroup: `across` over columns, times `slices` over K.

    It depends only on the weight and the form, because slices decide a row's bits. Example with a weight of 4,096 x
    4,096 and the vector form: 1,024 simdgroups of 4 columns are too few, so the 16 steps of K become 2 slices of 8.
    With 14,336 columns, K is not sliced.
    """

    across: int
    slices: int

    @classmethod
    def of(cls, shape: ProductShape, form: Form) -> Cut:
        simdgroups = -(-shape.num_columns // _FORMS[form].columns)
        steps = -(-shape.depth // _STEP)
        slices = 1
        while slices < _MAX_SLICES and simdgroups * slices < _ENOUGH_SIMDGROUPS and slices * 4 <= steps:
            slices *= 2
        return cls(max(1, _SIMDGROUPS // slices), slices)

    @property
    def threads(self) -> int:
        return SIMD_WIDTH * self.across * self.slices


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: Kernel
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


class FormProduct:
    """One form of the product with weights of one shape. MLX thread."""

    def __init__(self, kernels: ProductKernels, form: Form, shape: ProductShape) -> None:
        self.form = form
        self._kernels = kernels
        self._shape = shape
        self._cut = Cut.of(shape, form)
        self._dtypes = [shape.dtype]
        self._launches: dict[int, _Launch] = {}

    def __call__(self, x: mx.array, num_rows: int, weights: Weights) -> mx.array:
        """Returns `[..., num_columns]`. `x` is `[..., depth]` with `num_rows` rows, of the shape's dtype and aligned to
        four numbers, as MLX's results are."""
        launch = self._launches.get(num_rows) or self._launch(num_rows)
        places = x.shape[:-1]
        if places[:1] != (num_rows,):
            x = x.reshape(num_rows, -1)
        return launch.kernel(
            inputs=[x, *weights],
            output_shapes=[(*places, self._shape.num_columns)],
            output_dtypes=self._dtypes,
            grid=launch.grid,
            threadgroup=launch.threadgroup,
        )[0]

    def _launch(self, num_rows: int) -> _Launch:
        """Cuts the rows into as few tiles as possible, and makes these as small as possible."""
        sizes, columns = _FORMS[self.form].rows, _FORMS[self.form].columns * self._cut.across
        tiles = -(-num_rows // sizes[-1])
        rows = next(size for size in sizes if size * tiles >= num_rows)
        kernel = self._kernels.kernel(self.form, self._shape, self._cut, rows)
        grid = self._cut.threads * tiles, -(-self._shape.num_columns // columns), 1
        self._launches[num_rows] = _Launch(kernel, grid, (self._cut.threads, 1, 1))
        return self._launches[num_rows]


class ProductKernels:
    """Makes each kernel once, for all shapes with the same constants. MLX thread."""

    def __init__(self, make_kernel: MakeKernel) -> None:
        self._make_kernel = make_kernel
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._products: dict[tuple[Form, ProductShape], FormProduct] = {}

    @classmethod
    def of_metal(cls) -> ProductKernels:
        """The kernels of Apple's GPUs."""
        return cls(cast(MakeKernel, mx.fast.metal_kernel))

    def of(self, form: Form, shape: ProductShape) -> FormProduct:
        if (form, shape) not in self._products:
            self._products[form, shape] = FormProduct(self, form, shape)
        return self._products[form, shape]

    def kernel(self, form: Form, shape: ProductShape, cut: Cut, rows: int) -> Kernel:
        """The kernel for tiles of `rows` rows. The weight's sizes are no constants, so few kernels are compiled."""
        sizes = {
            "BITS": shape.bits,
            "GROUP": shape.group_size,
            "ROWS": rows,
            "COLUMNS": _FORMS[form].columns,
            "ACROSS": cut.across,
            "SLICES": cut.slices,
        }
        key = form, shape.dtype, *sizes.values()
        if key not in self._kernels:
            text = KernelText(f"product_{form}", ("x", *(_QUANTIZED if shape.is_quantized else _DENSE)), ("y",))
            column = read_code("product_quantized.h" if shape.is_quantized else "product_dense.h")
            header = read_code(f"product_{form}.h") + column
            self._kernels[key] = text.make(self._make_kernel, header, sizes, {"T": _TYPES[shape.dtype]})
        return self._kernels[key]


_TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t"}


def weights_of(layer: Any) -> Weights:
    """The arrays that a product of the layer reads."""
    return tuple(layer[name] for name in ("weight", "scales", "biases") if name in layer)


def form_maker(kernels: ProductKernels, form: Form) -> MakeProduct:
    """Returns a function that makes a layer's product in one form, for any number of rows, if a kernel supports it."""

    def make(layer: Any) -> RowProduct | None:
        shape = ProductShape.of(layer)
        return None if shape is None else form_product(kernels.of(form, shape), layer)

    return make


def form_product(product: FormProduct, layer: Any) -> Product:
    """The product of one layer in one form."""
    weights = weights_of(layer)
    return lambda x: product(x, x.size // x.shape[-1], weights)
