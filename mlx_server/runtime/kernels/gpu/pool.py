"""One layer's K and V blocks on a GPU: two arrays, allocated once, and the token that orders their uses."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention.interface import LayerSpec, block_sources


@dataclass(slots=True)
class PoolMemory:
    """The arrays of K and of V that a pool and its views share.

    MLX cannot see that a kernel writes into them. So each kernel that reads or writes them takes `token` as an input
    and replaces it: the tokens are a chain through all uses of the memory, across steps. The value of a token is 0. If
    the memory `is_scattered`, MLX writes into it, because kernels cannot write for some layer that uses it.

    Kernels get `handles`: the first blocks of K and V, in the same memory. MLX ends a command buffer after a number of
    elements of inputs, and a whole pool as an input would end one at every kernel. MLX does not count the memory that a
    kernel reads beyond a handle.
    """

    keys: mx.array
    values: mx.array
    token: mx.array
    handles: tuple[mx.array, mx.array]
    is_scattered: bool = False

    def keep(self, keys: mx.array, values: mx.array) -> None:
        """Sets the arrays after MLX has written into them. MLX writes in place only if nothing else refers to the
        memory, so the handles become the arrays themselves."""
        self.keys, self.values = self.handles = keys, values


@dataclass(slots=True)
class GpuPool:
    """K and V `[num_blocks, num_kv_heads, 32, dim]` of layers like `spec`. Quantised ones are `[num_blocks,
    num_kv_heads, words]`: the codes, scales and biases of each block and head, in the layout of
    `kv_write_quantized.msl`.

    A view is another pool in the same memory; `num_parts` of its blocks fill one block of the memory.
    """

    spec: LayerSpec
    memory: PoolMemory
    num_parts: int = 1
    _num_moves: int = 0
    _addresses: tuple[int, int] | None = None

    @classmethod
    def make(cls, spec: LayerSpec, num_blocks: int) -> GpuPool:
        """Allocates a pool of zeros; its memory is allocated when this returns."""
        dtype = spec.dtype if spec.bits is None else mx.uint32
        return cls.of(spec, *(mx.zeros(shape, dtype) for shape in _shapes(spec, num_blocks)))

    @classmethod
    def of(cls, spec: LayerSpec, keys: mx.array, values: mx.array) -> GpuPool:
        """A pool with these blocks."""
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
        """Lets MLX write into this memory from now on."""
        self.memory.is_scattered = True
        self.memory.keep(self.memory.keys, self.memory.values)

    def write(self, blocks: mx.array, offsets: mx.array, keys: mx.array, values: mx.array) -> None:
        """Writes unquantised rows `[T, num_kv_heads, dim]` by MLX's scatter, for a pool that is scattered."""
        memory, stored = self.memory, (self.keys, self.values)
        for array, rows in zip(stored, (keys, values)):
            array[blocks, :, offsets] = rows
        memory.keep(stored[0].reshape(memory.keys.shape), stored[1].reshape(memory.values.shape))

    def change(self, change: PoolChange) -> None:
        """Moves blocks, shrinks or grows the pool, by copying it once. The memory of the old arrays is free when this
        returns. All work that uses them must have finished."""
        memory = self.memory
        sources = mx.array(block_sources(memory.keys.shape[0], change))
        del memory.handles  # they keep the memory alive
        memory.keys = memory.keys[sources]
        mx.eval(memory.keys)  # before the values, so that only one of both exists twice at a time
        memory.values = memory.values[sources]
        mx.eval(memory.values)
        arrays = memory.keys, memory.values
        memory.handles = arrays if memory.is_scattered else (_head(memory.keys), _head(memory.values))
        self._addresses = None

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate so that the pool holds what was written."""
        return [self.memory.keys, self.memory.values, self.memory.token]

    def check_moves(self) -> int:
        """Waits for the pool, and counts the K and V buffers that MLX has copied elsewhere since the last check.

        Returns the count so far, which stays 0 unless MLX copied a pool. On a CUDA device, asking for an address may
        make MLX move the buffer to memory that the host can see.
        """
        now = (buffer_address(self.memory.keys), buffer_address(self.memory.values))
        if self._addresses is not None:
            self._num_moves += sum(a != b for a, b in zip(now, self._addresses))
        self._addresses = now
        return self._num_moves

    def _shaped(self, array: mx.array, side: int) -> mx.array:
        """The memory's array of K (`side` 0) or V (1) in this pool's shape. It is contiguous, so not copied."""
        if self.num_parts == 1:
            return array
        return array.reshape(_shapes(self.spec, self.num_parts * array.shape[0])[side])


def _shapes(spec: LayerSpec, num_blocks: int) -> list[tuple[int, ...]]:
    """The shapes of K and of V."""
    runs = num_blocks, spec.num_kv_heads
    if spec.bits is None:
        return [(*runs, BLOCK_SIZE, dim) for dim in (spec.key_dim, spec.value_dim)]
    return [(*runs, BLOCK_SIZE * num_bytes // mx.uint32.size) for num_bytes in spec.row_bytes]


def _head(array: mx.array) -> mx.array:
    """The first block of an evaluated array, in the same memory, without a reference to the array."""
    head = array[:1]
    mx.eval(head)
    return head


def buffer_address(array: mx.array) -> int:
    """The address of an array's data, in memory that the host shares. Evaluates the array."""
    return int(host_view(array).__array_interface__["data"][0])


def host_view(array: mx.array) -> np.ndarray:
    """A writable NumPy view of an evaluated array's memory, bfloat16 as uint16. No work may use it meanwhile."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)
