"""Recurrent states that the host writes in place, and random K/V that pools give back as they were written, in fewer
bits too: so that a self-test knows what it must read.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.runtime.kernels.gpu.pool import host_view
from mlx_server.runtime.row_pool import RowsShape, Slots, group_size_of

MAX_WAITING_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class _Write:
    target: HostRows
    slots: Slots
    rows: mx.array


class WaitingWrites:
    """Rows that are to be written once they are computed, which is when something else must be, too: so writes alone
    make nobody wait. What waits takes no more than `MAX_WAITING_BYTES`."""

    def __init__(self) -> None:
        self._writes: list[_Write] = []
        self._num_bytes = 0

    def add(self, target: HostRows, slots: Slots, rows: mx.array) -> None:
        self._writes.append(_Write(target, slots, rows))
        self._num_bytes += rows.nbytes
        if self._num_bytes > MAX_WAITING_BYTES:
            self.settle()

    def concern(self, target: HostRows, slots: Slots) -> bool:
        """Whether one may change what stands at these slots."""
        return any(
            write.target.host.shape != target.host.shape or np.isin(write.slots.numbers, slots.numbers).any()
            for write in self._writes
            if write.target.array is target.array
        )

    def settle(self, *others: mx.array | None) -> None:
        """Computes `others`, as far as they are arrays, and all that waits, and writes the latter."""
        mx.eval(*others, *(write.rows for write in self._writes))
        for write in self._writes:
            write.target.host[write.slots.places] = host_view(write.rows)
        self._writes.clear()
        self._num_bytes = 0


class HostRows:
    """Rows `[num_slots, ...]` in memory of MLX's that nothing of MLX's ever uses, so that it never copies them.

    What is read is a copy that is there at once, with all that was written before.
    """

    needs_synchronous_steps = False

    def __init__(self, array: mx.array, writes: WaitingWrites) -> None:
        mx.eval(array)
        self.array = array
        self.host = host_view(array)
        self._writes = writes

    def write(self, slots: Slots, rows: mx.array) -> None:
        self._writes.add(self, slots, rows.astype(self.array.dtype))

    def read(self, slots: Slots) -> mx.array:
        if self._writes.concern(self, slots):
            self._writes.settle()
        rows = mx.array(self.host[slots.places])
        return rows if rows.dtype == self.array.dtype else rows.view(self.array.dtype)

    def take(self, slots: Slots) -> HostRows:
        return HostRows(self.read(slots), self._writes)

    def view(self, shape: RowsShape) -> HostRows:
        view = copy(self)
        view.host = self.host.reshape(shape)
        return view

    def arrays(self) -> list[mx.array]:
        self._writes.settle()
        return [self.array]

    def tokens(self) -> list[mx.array]:
        return []


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
