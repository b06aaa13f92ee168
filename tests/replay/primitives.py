"""What each operation does on Metal: the memory of its outputs, and its dispatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from replay.encoder import Array, Buffer, Encoder
from replay.graph import Graph, Op, Spec

_DONATION_EXTRA = 16384


@dataclass(frozen=True, slots=True)
class PoolCopy:
    """An operation that updates a part of an array and copied all of it first."""

    op: str
    num_bytes: int


def dense(name: str, spec: Spec, buffer: Buffer) -> Array:
    return Array(name, spec, buffer, dense_strides(spec.shape), spec.size, True, True)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Primitives:
    """One operation: `run` encodes it and returns its outputs with their memory."""

    def __init__(
        self, graph: Graph, encoder: Encoder, pool_copies: list[PoolCopy], op: Op, inputs: Sequence[Array]
    ) -> None:
        """Adds to `pool_copies`."""
        self._encoder = encoder
        self._pool_copies = pool_copies
        self._op = op
        self._inputs = inputs
        self._specs = [graph.specs[name] for name in op.outputs]

    def run(self) -> Iterator[Array]:
        name = self._op.name
        if not self._specs[0].size:
            yield self._fresh()
            return
        if name.startswith("kernel "):
            yield from self._kernel()
        elif name.startswith("Compiled_") or name in _BINARY | _TERNARY:
            yield self._elementwise()
        elif name in _UNARY:
            yield self._unary()
        elif name in _NEW:
            yield self._computed()
        elif name == "Split":
            yield from self._split()
        elif name == "Depends":
            yield from (
                self._shared(self._inputs[index], self._inputs[index].strides, None, index)
                for index in range(len(self._specs))
            )
        else:
            yield _OTHERS[name](self)

    # ---- memory of outputs

    def _fresh(self, index: int = 0) -> Array:
        spec = self._specs[index]
        return self._owned(dense(self._op.outputs[index], spec, self._encoder.allocate(spec.num_bytes)))

    def _owned(self, array: Array) -> Array:
        array.buffer.num_arrays += 1
        return array

    def _shared(self, source: Array, strides: tuple[int, ...], data_size: int | None = None, index: int = 0) -> Array:
        """A view of `source`'s memory."""
        spec = self._specs[index]
        size = source.data_size if data_size is None else data_size
        is_row = is_row_contiguous(spec.shape, strides) and size == spec.size
        is_whole = source.is_whole and size == spec.size if data_size is None else no_gaps(spec.shape, strides) == size
        return self._owned(Array(self._op.outputs[index], spec, source.buffer, strides, size, is_row, is_whole))

    def _temporary(self, spec: Spec) -> Array:
        """Memory that only the command buffer holds."""
        array = dense("", spec, self._encoder.allocate(spec.num_bytes))
        self._encoder.hold({array.buffer})
        return array

    def _can_take(self, array: Array) -> bool:
        """utils.h: is_donatable."""
        out = self._specs[0]
        fits = array.spec.itemsize == out.itemsize and array.buffer.num_bytes <= out.num_bytes + _DONATION_EXTRA
        return array.is_donatable and fits

    def _taken(self, array: Array) -> Array:
        return self._shared(array, array.strides)

    # ---- encoding

    def _dispatch(self, inputs: Sequence[Array], outputs: Sequence[Array], *, is_concurrent: bool = False) -> None:
        self._encoder.dispatch(self._op.name, inputs, outputs, is_concurrent=is_concurrent)

    def _rows(self, array: Array, is_fine: bool) -> Array:
        """`array`, or a row contiguous copy that the command buffer holds."""
        if is_fine:
            return array
        copy = self._temporary(array.spec)
        self._dispatch([array], [copy])
        return copy

    # ---- kinds of operations

    def _computed(self) -> Array:
        out = self._fresh()
        self._dispatch(self._inputs, [out])
        return out

    def _unary(self) -> Array:
        """unary.h: set_unary_output_data."""
        source = self._inputs[0]
        out = self._taken(source) if source.is_whole and self._can_take(source) else self._fresh()
        self._dispatch(self._inputs[:1], [out])
        return out

    def _elementwise(self) -> Array:
        """binary.h, ternary.h and compiled.cpp: an input of the output's size and type may be donated to it."""
        size = self._specs[0].size
        takers = (x for x in self._inputs if x.is_row and x.spec.size == size and self._can_take(x))
        taken = next(takers, None)
        out = self._fresh() if taken is None else self._taken(taken)
        self._dispatch(self._inputs, [out])
        return out

    def _normalised(self) -> Array:
        """normalization.cpp: RMSNorm; softmax.cpp."""
        source = self._inputs[0]
        shape, strides = source.spec.shape, source.strides
        is_fine = source.is_whole and strides[-1] == 1
        if self._op.name != "Softmax" and len(shape) > 1:
            is_fine = is_fine and (strides[-2] in (0, shape[-1]) or shape[-2] == 1)
        if not is_fine:
            out = self._fresh()
            self._dispatch([source], [out])
            self._dispatch([out, *self._inputs[1:]], [out])
            return out
        out = self._taken(source) if source.is_donatable and source.data_size == source.spec.size else self._fresh()
        self._dispatch(self._inputs, [out])
        return out

    def _rotated(self) -> Array:
        """hadamard.cpp for a power of two: one kernel, in place if the input can be donated."""
        source = self._inputs[0]
        if source.is_row:
            out = self._taken(source) if source.is_donatable else self._fresh()
            self._dispatch([source], [out])
            return out
        out = self._fresh()
        self._dispatch([source], [out])
        self._dispatch([out], [out])
        return out

    def _rope(self) -> Array:
        """rope.cpp: RoPE."""
        source, *others = self._inputs
        shape, strides = source.spec.shape, source.strides
        if self._op.name == "RoPE" and source.is_row:
            out = self._taken(source) if source.is_donatable else self._fresh()
            self._dispatch([out if out.buffer is source.buffer else source, *others], [out])
            return out
        is_seen = len(shape) == 4 and strides[:3] == (shape[1] * shape[2] * shape[3], shape[3], shape[1] * shape[3])
        out = self._fresh()
        if self._op.name == "RoPE" and (is_seen or math.prod(shape[:-3]) == 1):
            self._dispatch([source, *others], [out])
        else:
            self._dispatch([source], [out])
            self._dispatch([out, *others], [out])
        return out

    def _attention(self) -> Array:
        """scaled_dot_product_attention.cpp: eval_gpu."""
        query, *others = self._inputs
        rows = [self._rows(array, array.strides[-1] == 1) for array in (query, *others)]
        _, heads, length, dim = self._specs[0].shape
        if length <= 8:
            can_take = query.is_donatable and query.is_row and query.spec.size == self._specs[0].size
            out = self._taken(query) if can_take else self._fresh()
        else:
            out = self._fresh()
            out.strides = (length * heads * dim, dim, heads * dim, 1)
            out.is_row = is_row_contiguous(out.spec.shape, out.strides)
        self._dispatch(rows, [out])
        return out

    def _matmul(self) -> Array:
        """matmul.cpp: check_transpose."""
        out = self._fresh()
        rows = [self._rows(array, _is_matrix(array)) for array in self._inputs[:2]]
        self._dispatch([*rows, *self._inputs[2:]], [out])
        return out

    def _quantized_matmul(self) -> Array:
        """quantized.cpp: QuantizedMatmul and GatherQMM."""
        out = self._fresh()
        num_matrices = 4 if self._op.name == "QuantizedMatmul" else len(self._inputs) - 2
        rows = [self._rows(array, _is_row_matrix(array)) for array in self._inputs[:num_matrices]]
        self._dispatch([*rows, *self._inputs[num_matrices:]], [out])
        return out

    def _sorted(self) -> Array:
        """sort.cpp: gpu_merge_sort, along the last axis."""
        source = self._inputs[0]
        out = self._fresh()
        length = source.spec.shape[-1]
        num_blocks = -(-length // (4 * min(512, max(32, 1 << (-(-length // 4) - 1).bit_length()))))
        if num_blocks == 1:
            self._dispatch([source], [out])
            return out
        size = source.spec.size
        values = [self._temporary(Spec((size,), source.spec.itemsize)) for _ in range(2)]
        indices = [self._temporary(Spec((size,), 4)) for _ in range(2)]
        parts = self._temporary(Spec((size // length * (num_blocks + 1),), 4))
        self._dispatch([source], [values[0], indices[0]])
        for merge in range((num_blocks - 1).bit_length()):
            here, there = merge % 2, 1 - merge % 2
            self._dispatch([values[here], indices[here]], [parts])
            self._dispatch([parts, values[here], indices[here]], [values[there], indices[there]])
        self._dispatch([indices[there]], [out])
        return out

    def _updated(self) -> Array:
        """indexing.cpp: Scatter, ScatterAxis and SliceUpdate; copy.h: set_copy_output_data."""
        source = self._inputs[0]
        if source.is_whole and self._can_take(source):
            out = self._taken(source)
        else:
            out = self._fresh()
            self._dispatch([source], [out])
            if source.spec.num_bytes > 2**20:
                self._pool_copies.append(PoolCopy(self._op.name, source.spec.num_bytes))
        self._dispatch(self._inputs[1:], [out])
        return out

    def _concatenated(self) -> Array:
        """slicing.cpp: concatenate_gpu."""
        out = self._fresh()
        for source in self._inputs:
            if source.spec.size:
                self._dispatch([source], [out], is_concurrent=True)
        self._encoder.end_concurrent([out])
        return out

    def _padded(self) -> Array:
        """slicing.cpp: pad_gpu."""
        out = self._fresh()
        self._dispatch(self._inputs[1:], [out])
        self._dispatch(self._inputs[:1], [out])
        return out

    def _kernel(self) -> Iterator[Array]:
        """custom_kernel.cpp: eval_gpu."""
        is_contiguous = bool(self._op.arguments[0])
        outputs = [self._fresh(index) for index in range(len(self._specs))]
        inputs = [self._rows(array, array.is_row or not is_contiguous) for array in self._inputs]
        self._dispatch(inputs, outputs)
        yield from outputs

    # ---- views

    def _contiguous(self) -> Array:
        """gpu/primitives.cpp: Contiguous."""
        source = self._inputs[0]
        if source.is_row and source.buffer.num_bytes <= self._specs[0].num_bytes + _DONATION_EXTRA:
            return self._taken(source)
        return self._computed()

    def _reshaped(self) -> Array:
        """common.cpp: prepare_reshape."""
        source = self._inputs[0]
        strides = reshaped_strides(source, self._specs[0].shape)
        return self._computed() if strides is None else self._shared(source, strides)

    def _transposed(self) -> Array:
        source = self._inputs[0]
        return self._shared(source, tuple(source.strides[axis] for axis in self._op.arguments[0]))

    def _broadcast(self) -> Array:
        source = self._inputs[0]
        shape, strides = source.spec.shape, source.strides
        own = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides))
        return self._shared(source, (0,) * (len(self._specs[0].shape) - len(shape)) + own)

    def _sliced(self) -> Array:
        source = self._inputs[0]
        steps = self._op.arguments[2]
        strides = tuple(stride * step for stride, step in zip(source.strides, steps))
        last = sum(abs(stride) * (size - 1) for stride, size in zip(strides, self._specs[0].shape))
        return self._shared(source, strides, last + 1)

    def _split(self) -> Iterator[Array]:
        source = self._inputs[0]
        for index, spec in enumerate(self._specs):
            last = sum(stride * (size - 1) for stride, size in zip(source.strides, spec.shape))
            yield self._shared(source, source.strides, last + 1, index)

    def _expanded(self) -> Array:
        source = self._inputs[0]
        strides = list(source.strides)
        for axis in self._op.arguments[0]:
            strides.insert(axis, 1)
        return self._shared(source, tuple(strides))

    def _squeezed(self) -> Array:
        source = self._inputs[0]
        gone = {axis % len(source.strides) for axis in self._op.arguments[0]}
        return self._shared(source, tuple(stride for axis, stride in enumerate(source.strides) if axis not in gone))

    def _same(self) -> Array:
        return self._shared(self._inputs[0], self._inputs[0].strides)

    def _viewed(self) -> Array:
        source = self._inputs[0]
        if source.spec.itemsize == self._specs[0].itemsize:
            return self._same()
        ratio = source.spec.itemsize / self._specs[0].itemsize
        return self._shared(source, dense_strides(self._specs[0].shape), int(source.data_size * ratio))


def is_row_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return all(size == 1 or stride == right for size, stride, right in zip(shape, strides, dense_strides(shape)))


def no_gaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """utils.h: check_contiguity, the elements that are not repeated."""
    return math.prod(size for size, stride in zip(shape, strides) if stride)


def reshaped_strides(source: Array, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a view of `source` in another shape; None if it must be copied."""
    if source.is_row:
        return dense_strides(shape)
    sizes: list[int] = []
    steps: list[int] = []
    for size, stride in zip(source.spec.shape, source.strides):  # collapse_contiguous_dims
        if size == 1:
            continue
        if sizes and steps[-1] == stride * size:
            sizes[-1] *= size
            steps[-1] = stride
        else:
            sizes.append(size)
            steps.append(stride)
    found: list[int] = []
    for size in shape:
        if sizes and sizes[0] % size == 0:
            sizes[0] //= size
            found.append(sizes[0] * steps[0])
            if sizes[0] == 1:
                sizes.pop(0)
                steps.pop(0)
        elif size == 1:
            found.append(found[-1] if found else 1)
        else:
            return None
    return tuple(found)


def _is_matrix(array: Array) -> bool:
    """Whether the last two axes are a matrix or its transpose without gaps."""
    rows, columns = array.spec.shape[-2:]
    down, right = array.strides[-2:]
    return (right == 1 and (down == columns or rows == 1)) or (down == 1 and (right == rows or columns == 1))


def _is_row_matrix(array: Array) -> bool:
    if len(array.spec.shape) < 2:
        return array.strides[0] == 1
    return array.strides[-2:] == (array.spec.shape[-1], 1)


_BINARY = {
    *("Add", "Subtract", "Multiply", "Divide", "FloorDivide", "Remainder", "Maximum", "Minimum", "Power", "Equal"),
    *("NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "BitwiseBinary"),
}
_TERNARY = {"Select"}
_UNARY = {
    *("Abs", "Ceil", "Cos", "Erf", "Exp", "Expm1", "Floor", "Log", "Log1p", "LogicalNot", "Negative", "Round"),
    *("Sigmoid", "Sign", "Sin", "Sqrt", "Rsqrt", "Square", "Tanh", "AsType"),
}
_NEW = {
    *(
        "Arange",
        "ArgReduce",
        "Reduce",
        "Scan",
        "Gather",
        "GatherAxis",
        "RandomBits",
        "Full",
        "Convolution",
        "LogSumExp",
    ),
}
_OTHERS: dict[str, Callable[[Primitives], Array]] = {
    "RMSNorm": Primitives._normalised,
    "LayerNorm": Primitives._normalised,
    "Softmax": Primitives._normalised,
    "Hadamard": Primitives._rotated,
    "RoPE": Primitives._rope,
    "PartialRoPE": Primitives._rope,
    "Attention": Primitives._attention,
    "Matmul": Primitives._matmul,
    "AddMM": Primitives._matmul,
    "QuantizedMatmul": Primitives._quantized_matmul,
    "GatherQMM": Primitives._quantized_matmul,
    "Sort": Primitives._sorted,
    "ArgSort": Primitives._sorted,
    "ArgPartition": Primitives._sorted,
    "Scatter": Primitives._updated,
    "ScatterAxis": Primitives._updated,
    "SliceUpdate": Primitives._updated,
    "Concatenate": Primitives._concatenated,
    "Pad": Primitives._padded,
    "Contiguous": Primitives._contiguous,
    "Reshape": Primitives._reshaped,
    "Flatten": Primitives._reshaped,
    "Unflatten": Primitives._reshaped,
    "Transpose": Primitives._transposed,
    "Broadcast": Primitives._broadcast,
    "BroadcastAxes": Primitives._broadcast,
    "Slice": Primitives._sliced,
    "ExpandDims": Primitives._expanded,
    "Squeeze": Primitives._squeezed,
    "StopGradient": Primitives._same,
    "Copy": Primitives._same,
    "View": Primitives._viewed,
}
"""An unknown operation raises KeyError: its rules must be added first."""
