"""One layer's K and V blocks on a GPU: two arrays that are made once, and the token that orders their use."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention import LayerSpec, block_sources
from mlx_server.runtime.row_pool import row_bytes


@dataclass(slots=True)
class _Memory:
    """What a pool and its views share. `is_scattered`: MLX writes here, since kernels could not."""

    keys: mx.array
    values: mx.array
    token: mx.array
    is_scattered: bool = False


class GpuPool:
    """K and V `[num_blocks, num_kv_heads, 32, dim]`; quantised ones `[num_blocks, num_kv_heads, words]`, a run of
    codes, scales and biases for each block and head, as `kv_write_quantized.msl` has it.

    MLX cannot see that a kernel writes into `keys` and `values`, so whatever reads or writes them takes `token`
    as an input and replaces it: the tokens are a chain through all uses of the pool and its views, across steps. Its
    value is 0.
    """

    def __init__(self, spec: LayerSpec, memory: _Memory, num_blocks: int) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.num_moves = 0
        self.num_copies = 0
        self._memory = memory
        self._addresses: tuple[int, int] | None = None

    @classmethod
    def make(cls, spec: LayerSpec, num_blocks: int) -> GpuPool:
        """Allocates and zeroes; the arrays exist when it returns."""
        keys, values = (_zeros(spec, num_blocks, dim) for dim in (spec.key_dim, spec.value_dim))
        token = mx.zeros((1,), mx.int32)
        mx.eval(keys, values, token)
        return cls(spec, _Memory(keys, values, token), num_blocks)

    def view(self, spec: LayerSpec, num_parts: int) -> GpuPool:
        """The same memory, and the same chain of tokens, as `num_parts` times as many blocks of layers like `spec`."""
        return GpuPool(spec, self._memory, num_parts * self.num_blocks)

    @property
    def keys(self) -> mx.array:
        return self._shaped(self._memory.keys, self.spec.key_dim)

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._memory.keys = keys

    @property
    def values(self) -> mx.array:
        return self._shaped(self._memory.values, self.spec.value_dim)

    @values.setter
    def values(self, values: mx.array) -> None:
        self._memory.values = values

    @property
    def token(self) -> mx.array:
        return self._memory.token

    @token.setter
    def token(self, token: mx.array) -> None:
        self._memory.token = token

    @property
    def is_scattered(self) -> bool:
        """Whether rows are written by MLX's scatter, here and in all views."""
        return self._memory.is_scattered

    def scatter(self) -> None:
        """From now on, rows are. Nothing may have been written yet."""
        self._memory.is_scattered = True

    def change(self, change: PoolChange) -> None:
        """Moves, cuts or grows: one copy of what stays, counted in `num_copies`. The memory of the old arrays is
        free when it returns. All work that uses them must have finished."""
        sources = mx.array(block_sources(self.num_blocks, change))
        memory = self._memory
        memory.keys = self.keys[sources]
        mx.eval(memory.keys)  # before values, so that not both are there twice
        memory.values = self.values[sources]
        mx.eval(memory.values)
        self.num_blocks = change.num_blocks
        self._addresses = None
        self.num_copies += 1

    def arrays(self) -> list[mx.array]:
        """What must be evaluated for all writes to have happened."""
        return [self.keys, self.values, self.token]

    def check_moves(self) -> int:
        """Counts in `num_moves` each K or V buffer found elsewhere than at the last check, that is: copied.

        Waits for the pool to be evaluated. Returns the count so far; it stays 0 unless MLX copied a pool. MLX may
        move a buffer of a CUDA device to memory that the host can see when it is asked where that is.
        """
        now = (buffer_address(self.keys), buffer_address(self.values))
        if self._addresses is not None:
            self.num_moves += sum(a != b for a, b in zip(now, self._addresses))
        self._addresses = now
        return self.num_moves

    def _shaped(self, array: mx.array, dim: int) -> mx.array:
        """The array of the memory in this pool's shape: no copy, since it is contiguous."""
        shape = _shape(self.spec, self.num_blocks, dim)
        return array if array.shape == shape else array.reshape(shape)


def _shape(spec: LayerSpec, num_blocks: int, dim: int) -> tuple[int, ...]:
    if spec.bits is None:
        return num_blocks, spec.num_kv_heads, BLOCK_SIZE, dim
    return num_blocks, spec.num_kv_heads, BLOCK_SIZE * row_bytes(dim, spec.dtype, spec.bits) // mx.uint32.size


def _zeros(spec: LayerSpec, num_blocks: int, dim: int) -> mx.array:
    return mx.zeros(_shape(spec, num_blocks, dim), spec.dtype if spec.bits is None else mx.uint32)


def buffer_address(array: mx.array) -> int:
    """Where an array's data lies. Evaluates it; the array shares its memory with the host."""
    return int(host_view(array).__array_interface__["data"][0])


def host_view(array: mx.array) -> np.ndarray:
    """A writable NumPy view of an evaluated array's own memory, bfloat16 as uint16. Not while work uses it."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)
