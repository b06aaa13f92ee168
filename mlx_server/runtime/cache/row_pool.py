"""Arrays with one row for each slot, plain or quantised, and the slots that a step reads or writes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ConfigError

SMALL_ARRAY = 8
"""MLX passes smaller inputs to kernels in another address space, which would need another kernel."""


@dataclass(frozen=True)
class Slots:
    """Slot numbers in an array of any shape on the host, copied to the device at first use there."""

    numbers: npt.NDArray[np.integer]

    @cached_property
    def array(self) -> mx.array:
        """The numbers for MLX's own operations."""
        return mx.array(self.numbers)

    @cached_property
    def padded(self) -> mx.array:
        """The numbers for kernels, `[N]`, int32, padded to at least `SMALL_ARRAY`."""
        flat = self.numbers.reshape(-1).astype(np.int32)
        return mx.array(np.pad(flat, (0, max(0, SMALL_ARRAY - flat.size))))


KV_GROUP_SIZE = 32
"""How many numbers of a quantised row share a scale and a bias."""


class KvBits(NamedTuple):
    """Bits of K and of V. As text in the form of `--kv-bits`: `8`, `k8v4`."""

    keys: int
    values: int

    @classmethod
    def of(cls, text: str) -> KvBits:
        """Raises `ValueError` for other texts."""
        keys, _, values = text.removeprefix("k").partition("v")
        return cls(int(keys), int(values or keys))

    def __str__(self) -> str:
        return str(self.keys) if self.keys == self.values else f"k{self.keys}v{self.values}"

    @property
    def words(self) -> str:
        """For people: `8 bits`, `8 and 4 bits`."""
        return f"{' and '.join(map(str, dict.fromkeys(self)))} bits"


def side_bits(bits: KvBits | None) -> tuple[int | None, int | None]:
    """The bits of K and of V; None for unquantised ones."""
    return bits or (None, None)


RowsShape = tuple[int, ...]
"""The number of slots and the shape of each: for K/V heads and dimensions."""


class Rows(ABC):
    """Logically an array `[num_slots, ...]` that is read and written by rows; `QuantizedRows` consist of several.

    With `needs_synchronous_steps`, a step may be built but not submitted while another one runs, because its writes
    would copy all slots.
    """

    needs_synchronous_steps = False
    _shape: RowsShape

    @abstractmethod
    def write(self, slots: Slots, rows: mx.array) -> None:
        """Stores rows `[N, ...]` at slots `[N]`."""

    @abstractmethod
    def read(self, slots: Slots) -> mx.array:
        """The rows at slots `[...]`: `[..., ...]`."""

    @abstractmethod
    def take(self, slots: Slots) -> Rows:
        """A copy with the rows at `slots` `[N]` only, evaluated."""

    def view(self, shape: RowsShape) -> Rows:
        """The same memory in another shape; both share their content."""
        view = copy(self)
        view._shape = shape
        return view

    def parts(self) -> Sequence[Rows]:
        """The rows that these consist of; they return exactly the bytes that were written."""
        return [self]

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate so that the rows hold what was written."""

    def tokens(self) -> list[mx.array]:
        """Small arrays that depend on the writes; empty if this kind of rows has none."""
        return []


MakeRows = Callable[[RowsShape, mx.Dtype], Rows]
"""Makes rows of zeros."""


@dataclass(slots=True)
class _Memory:
    """The array of rows in one or several shapes, and what this step has read from it. A write replaces the array, in
    the shape of the writer."""

    array: mx.array
    readings: list[mx.array] = field(default_factory=list)


class PlainRows(Rows):
    """Unquantised rows, written by scatter. MLX copies the array unless nothing else refers to it; so what the same
    step has read is computed first, and steps must be synchronous."""

    def __init__(self, array: mx.array) -> None:
        self._memory = _Memory(array)
        self._shape = array.shape
        self._dtype = array.dtype
        self.needs_synchronous_steps = array.size > 0
        mx.eval(array)

    @classmethod
    def zeros(cls, shape: RowsShape, dtype: mx.Dtype) -> PlainRows:
        return cls(mx.zeros(shape, dtype))

    def write(self, slots: Slots, rows: mx.array) -> None:
        if self._memory.readings:
            mx.synchronize()  # a running step refers to the array, too
            mx.eval(self._memory.readings)
            self._memory.readings.clear()
        array = self._array()
        array[slots.array] = rows.astype(self._dtype)
        self._memory.array = array

    def read(self, slots: Slots) -> mx.array:
        rows = self._array()[slots.array]
        self._memory.readings.append(rows)
        return rows

    def take(self, slots: Slots) -> PlainRows:
        return PlainRows(self._array()[slots.array])

    def arrays(self) -> list[mx.array]:
        self._memory.readings.clear()  # the step ends; its reads are done when the next one writes
        return [self._memory.array]

    def _array(self) -> mx.array:
        array = self._memory.array
        return array if array.shape == self._shape else array.reshape(self._shape)


class RowOperations(Protocol):
    """Read and write rows of an array where it lies. `pool` is the beginning of that array, and `token` is the one of
    the use before. MLX cannot see what they write."""

    def read(self, pool: mx.array, slots: Slots, row: RowsShape, token: mx.array) -> tuple[mx.array, mx.array]:
        """Rows `[..., *row]` at slots `[...]`, and the token of this use."""

    def write(self, pool: mx.array, slots: Slots, rows: mx.array, token: mx.array) -> mx.array:
        """Writes rows `[N, ...]` of the array's type to its slots `[N]`; returns the token of this use."""


@dataclass(slots=True)
class _Chained:
    """An array that is never replaced, its first rows in the same memory, and the token of its last use.

    Kernels get the first rows, because MLX ends a command buffer after a number of elements of inputs.
    """

    array: mx.array
    handle: mx.array
    token: mx.array


class RowsInPlace(Rows):
    """Unquantised rows that kernels of a GPU, or nodes of the native library, read and write where they lie.

    MLX cannot see that they write into the array. So each of them takes the token of the last use as an input and
    returns a new one: the tokens are a chain through all uses of the memory, in any shape, across steps.
    """

    def __init__(self, operations: RowOperations, array: mx.array) -> None:
        """`array` has at least one row, and at least `SMALL_ARRAY` numbers if kernels get it."""
        token = mx.zeros((1,), mx.int32)
        mx.eval(array, token)
        handle = array[: -(-SMALL_ARRAY // max(1, math.prod(array.shape[1:])))]
        mx.eval(handle)
        self._operations = operations
        self._memory = _Chained(array, handle, token)
        self._shape = array.shape

    def write(self, slots: Slots, rows: mx.array) -> None:
        memory = self._memory
        rows = rows.astype(memory.array.dtype)
        memory.token = self._operations.write(memory.handle, slots, rows, memory.token)

    def read(self, slots: Slots) -> mx.array:
        memory = self._memory
        rows, memory.token = self._operations.read(memory.handle, slots, self._shape[1:], memory.token)
        return rows

    def take(self, slots: Slots) -> RowsInPlace:
        mx.eval(self._memory.token)  # what was written is there
        return RowsInPlace(self._operations, self._memory.array.reshape(self._shape)[slots.array])

    def arrays(self) -> list[mx.array]:
        return [self._memory.array, self._memory.token]

    def tokens(self) -> list[mx.array]:
        return [self._memory.token]


class QuantizedRows(Rows):
    """Rows with `bits` for each number, and a scale and a bias for each group of numbers."""

    def __init__(self, parts: Sequence[Rows], bits: int, dtype: mx.Dtype) -> None:
        """`parts` are codes, scales and biases."""
        self._parts = tuple(parts)
        self._bits = bits
        self._dtype = dtype
        self.needs_synchronous_steps = any(part.needs_synchronous_steps for part in parts)

    @classmethod
    def zeros(cls, shape: RowsShape, dtype: mx.Dtype, bits: int, make: MakeRows = PlainRows.zeros) -> QuantizedRows:
        """`make` creates the rows for codes, scales and biases."""
        *places, dim = shape
        dtypes = (mx.uint32, dtype, dtype)
        parts = [make((*places, size), kind) for size, kind in zip(_part_sizes(dim, bits), dtypes)]
        return cls(parts, bits, dtype)

    def write(self, slots: Slots, rows: mx.array) -> None:
        rows = rows.astype(self._dtype)
        quantised = mx.quantize(rows, group_size=KV_GROUP_SIZE, bits=self._bits)
        for part, values in zip(self._parts, quantised, strict=True):
            part.write(slots, values)

    def read(self, slots: Slots) -> mx.array:
        packed, scales, biases = (part.read(slots) for part in self._parts)
        return mx.dequantize(packed, scales, biases, group_size=KV_GROUP_SIZE, bits=self._bits)

    def take(self, slots: Slots) -> QuantizedRows:
        return QuantizedRows([part.take(slots) for part in self._parts], self._bits, self._dtype)

    def parts(self) -> Sequence[Rows]:
        return self._parts

    def view(self, shape: RowsShape) -> QuantizedRows:
        num_slots, num_heads, dim = shape
        sizes = _part_sizes(dim, self._bits)
        parts = [part.view((num_slots, num_heads, size)) for part, size in zip(self._parts, sizes, strict=True)]
        return QuantizedRows(parts, self._bits, self._dtype)

    def arrays(self) -> list[mx.array]:
        return [array for part in self._parts for array in part.arrays()]

    def tokens(self) -> list[mx.array]:
        return [token for part in self._parts for token in part.tokens()]


@dataclass(slots=True)
class RowPool:
    """`num_blocks` blocks of K and V of one layer."""

    keys: Rows
    values: Rows
    num_blocks: int

    def take(self, slots: Slots) -> RowPool:
        """A new pool with the rows at `slots`, which make whole blocks."""
        return RowPool(self.keys.take(slots), self.values.take(slots), slots.numbers.size // BLOCK_SIZE)

    def view(self, num_parts: int, num_heads: int, dims: tuple[int, int]) -> RowPool:
        """The same memory as `num_parts` times as many blocks, with these dimensions of K and V."""
        num_blocks = num_parts * self.num_blocks
        keys = self.keys.view((num_blocks * BLOCK_SIZE, num_heads, dims[0]))
        values = self.values.view((num_blocks * BLOCK_SIZE, num_heads, dims[1]))
        return RowPool(keys, values, num_blocks)

    def arrays(self) -> list[mx.array]:
        return [*self.keys.arrays(), *self.values.arrays()]


def make_side(shape: RowsShape, dtype: mx.Dtype, bits: int | None, make: MakeRows) -> Rows:
    """Zeros for K or V, unquantised or in `bits`, in rows that `make` creates."""
    if not shape[-1]:  # some caches have keys only
        return PlainRows.zeros(shape, dtype)
    return make(shape, dtype) if bits is None else QuantizedRows.zeros(shape, dtype, bits, make)


def _part_sizes(dim: int, bits: int) -> tuple[int, int, int]:
    """The numbers of code words, scales and biases of one quantised row."""
    return dim * bits // 32, dim // KV_GROUP_SIZE, dim // KV_GROUP_SIZE


def rotate(rows: mx.array) -> mx.array:
    """Multiplies each row `[..., dim]` by a fixed Hadamard matrix, in parts whose length is the largest power of two
    that divides `dim`: each number becomes a sum of all numbers of its part with signs, divided by the root of their
    count.

    Scalar products do not change, so K may be stored rotated if queries are rotated, too. A large number is spread over
    all numbers of its part, so quantisation loses less: (8, 0, 0, 0) becomes (4, 4, 4, 4). (QuaRot, arXiv:2404.00456.)
    """
    dim = rows.shape[-1]
    part = dim & -dim
    return mx.hadamard_transform(rows.reshape(*rows.shape[:-1], dim // part, part)).reshape(rows.shape)


def row_bytes(dim: int, dtype: mx.Dtype, bits: int | None) -> int:
    """Bytes of one row of one head. Raises `ConfigError` for dimensions that cannot be quantised."""
    if bits is None:
        return dim * dtype.size
    if dim % KV_GROUP_SIZE:
        raise ConfigError(f"--kv-bits needs head dimensions that are multiples of {KV_GROUP_SIZE}; one is {dim}.")
    return dim * bits // 8 + 2 * dtype.size * (dim // KV_GROUP_SIZE)
