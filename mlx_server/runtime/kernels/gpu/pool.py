"""One layer's K and V blocks on a GPU: two arrays that are made once, and the token that orders their use."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention.interface import LayerSpec, block_sources


@dataclass(slots=True)
class PoolMemory:
    """The arrays of K and of V that a pool and its views are in.

    MLX cannot see that a kernel writes into them, so whatever reads or writes them takes `token` as an input and
    replaces it: the tokens are a chain through all uses of the memory, across steps. Its value is 0. If it
    `is_scattered`, MLX writes here, since kernels could not for some layer that uses it.

    Kernels get `handles`: the first blocks of K and V, in the same memory. MLX ends a command buffer by the number of
    elements that its inputs have, and a whole pool's would end one at every kernel; of what a kernel reaches from
    there, MLX keeps no count.
    """

    keys: mx.array
    values: mx.array
    token: mx.array
    handles: tuple[mx.array, mx.array]
    is_scattered: bool = False

    def keep(self, keys: mx.array, values: mx.array) -> None:
        """Replaces the arrays after MLX has written into them. MLX writes in place only if there is no other reference
        to the memory, so kernels then get the arrays themselves."""
        self.keys, self.values = self.handles = keys, values


@dataclass(slots=True)
class GpuPool:
    """K and V `[num_blocks, num_kv_heads, 32, dim]` of layers like `spec`; quantised ones `[num_blocks, num_kv_heads,
    words]`, a run of codes, scales and biases for each block and head, as `kv_write_quantized.msl` has it.

    A view is another pool in the same memory: `num_parts` of its blocks fill one of the memory's.
    """

    spec: LayerSpec
    memory: PoolMemory
    num_parts: int = 1
    _num_moves: int = 0
    _addresses: tuple[int, int] | None = None

    @classmethod
    def make(cls, spec: LayerSpec, num_blocks: int) -> GpuPool:
        """Allocates and zeroes; the arrays exist when it returns."""
        dtype = spec.dtype if spec.bits is None else mx.uint32
        return cls.of(spec, *(mx.zeros(shape, dtype) for shape in _shapes(spec, num_blocks)))

    @classmethod
    def of(cls, spec: LayerSpec, keys: mx.array, values: mx.array) -> GpuPool:
        """A pool of these blocks."""
        token = mx.zeros((1,), mx.int32)
        mx.eval(keys, values, token)
        return cls(spec, PoolMemory(keys, values, token, (_head(keys), _head(values))))

    @property
    def keys(self) -> mx.array:
        return self._shaped(self.memory.keys, 0)

    @property
    def values(self) -> mx.array:
        return self._shaped(self.memory.values, 1)

    def scatter(self) -> None:
        """From now on MLX writes here."""
        self.memory.is_scattered = True
        self.memory.keep(self.memory.keys, self.memory.values)

    def write(self, blocks: mx.array, offsets: mx.array, keys: mx.array, values: mx.array) -> None:
        """MLX writes rows `[T, num_kv_heads, dim]` of whole numbers."""
        memory, stored = self.memory, (self.keys, self.values)
        for array, rows in zip(stored, (keys, values)):
            array[blocks, :, offsets] = rows
        memory.keep(stored[0].reshape(memory.keys.shape), stored[1].reshape(memory.values.shape))

    def change(self, change: PoolChange) -> None:
        """Moves, cuts or grows: one copy of what stays. The memory of the old arrays is free when it returns. All work
        that uses them must have finished."""
        memory = self.memory
        sources = mx.array(block_sources(memory.keys.shape[0], change))
        del memory.handles  # which hold the memory
        memory.keys = memory.keys[sources]
        mx.eval(memory.keys)  # before values, so that not both are there twice
        memory.values = memory.values[sources]
        mx.eval(memory.values)
        arrays = memory.keys, memory.values
        memory.handles = arrays if memory.is_scattered else (_head(memory.keys), _head(memory.values))
        self._addresses = None

    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate so that all writes have happened."""
        return [self.memory.keys, self.memory.values, self.memory.token]

    def check_moves(self) -> int:
        """Waits for the pool, and counts each K or V buffer found elsewhere than at the last check, that is: copied.

        Returns the count so far; it stays 0 unless MLX copied a pool. MLX may move a buffer of a CUDA device to memory
        that the host can see when it is asked where that is.
        """
        now = (buffer_address(self.memory.keys), buffer_address(self.memory.values))
        if self._addresses is not None:
            self._num_moves += sum(a != b for a, b in zip(now, self._addresses))
        self._addresses = now
        return self._num_moves

    def _shaped(self, array: mx.array, side: int) -> mx.array:
        """Of K, which is 0, or V, 1. No copy: the arrays of a pool are contiguous."""
        if self.num_parts == 1:
            return array
        return array.reshape(_shapes(self.spec, self.num_parts * array.shape[0])[side])


def _shapes(spec: LayerSpec, num_blocks: int) -> list[tuple[int, ...]]:
    """Of K and of V."""
    runs = num_blocks, spec.num_kv_heads
    if spec.bits is None:
        return [(*runs, BLOCK_SIZE, dim) for dim in (spec.key_dim, spec.value_dim)]
    return [(*runs, BLOCK_SIZE * num_bytes // mx.uint32.size) for num_bytes in spec.row_bytes]


def _head(array: mx.array) -> mx.array:
    """The first block of evaluated ones, in the same memory; nothing refers to what it was made of."""
    head = array[:1]
    mx.eval(head)
    return head


def buffer_address(array: mx.array) -> int:
    """Where an array's data lies. Evaluates it; the array shares its memory with the host."""
    return int(host_view(array).__array_interface__["data"][0])


def host_view(array: mx.array) -> np.ndarray:
    """A writable NumPy view of an evaluated array's own memory, bfloat16 as uint16. Not while work uses it."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)
