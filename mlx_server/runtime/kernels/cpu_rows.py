"""Recurrent states that the host writes in place."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.runtime.kernels.gpu_pool import host_view
from mlx_server.runtime.row_pool import RowsShape
from mlx_server.runtime.slots import Slots

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

    def settle(self, *others: mx.array) -> None:
        """Computes `others` and all that waits, and writes the latter."""
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
