"""Rows that native operations write in place, and random K/V that pools give back as they were written, in fewer bits
too: so that a self-test knows what it must read.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_server.runtime.attention.interface import LayerSpec
from mlx_server.runtime.cache.row_pool import Rows, RowsShape, Slots, group_size_of, side_bits


@dataclass(slots=True)
class _Memory:
    """An array that is never replaced, and the token of its last use."""

    array: mx.array
    token: mx.array


class NativeRows:
    """Rows `[num_slots, ...]` that nodes of the native library read and write where they lie.

    MLX cannot see that a node writes into the array, so whatever reads or writes it takes the token of the use before
    and leaves one of its own: a chain through all uses of the memory, in whichever shape, across steps.
    """

    needs_synchronous_steps = False

    def __init__(self, library: Any, array: mx.array) -> None:
        mx.eval(array)
        self._library = library
        self._memory = _Memory(array, mx.array([0]))
        self._shape = array.shape

    def write(self, slots: Slots, rows: mx.array) -> None:
        memory = self._memory
        memory.token = self._library.write_rows(
            rows.astype(memory.array.dtype), memory.array, slots.padded, memory.token
        )

    def read(self, slots: Slots) -> mx.array:
        memory, numbers = self._memory, slots.numbers
        shape = [*numbers.shape, *self._shape[1:]]
        rows: mx.array
        rows, memory.token = self._library.read_rows(memory.array, slots.padded, shape, memory.token, numbers.size)
        return rows

    def take(self, slots: Slots) -> NativeRows:
        return NativeRows(self._library, self.read(slots))

    def parts(self) -> Sequence[Rows]:
        return [self]

    def view(self, shape: RowsShape) -> NativeRows:
        view = copy(self)
        view._shape = shape
        return view

    def arrays(self) -> list[mx.array]:
        return [self._memory.array, self._memory.token]

    def tokens(self) -> list[mx.array]:
        return [self._memory.token]


def exact_kv(rng: np.random.Generator, places: tuple[int, ...], spec: LayerSpec) -> tuple[mx.array, mx.array]:
    """K and V `[*places, dim]` as `exact_rows` are, for layers like `spec`."""
    keys, values = side_bits(spec.bits)
    return (
        exact_rows(rng, (*places, spec.key_dim), spec.dtype, keys),
        exact_rows(rng, (*places, spec.value_dim), spec.dtype, values),
    )


def exact_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, bits: int | None) -> mx.array:
    """Rows of `shape`: normal ones, or for `bits` such as lose nothing when they are quantised.

    Each group of such a row has all that `bits` can count from, its steps are a power of two, and 0 is one of them.
    """
    if bits is None:
        return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
    group_size = group_size_of(shape[-1])
    groups = (*shape[:-1], shape[-1] // group_size)
    num_codes = 2**bits
    codes = rng.integers(0, num_codes, size=(*groups, group_size), dtype=np.uint8).astype(np.float32)
    codes[..., 0], codes[..., 1] = 0, num_codes - 1
    steps = rng.choice(np.array([-2, -1, 1, 2], np.float32), size=(*groups, 1)) * 2 / num_codes
    return mx.array(((codes - num_codes // 2) * steps).reshape(shape)).astype(dtype)
