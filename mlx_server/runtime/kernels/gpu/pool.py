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
class GpuPool:
    """K and V `[num_blocks, num_kv_heads, 32, dim]`; quantised ones `[num_blocks, num_kv_heads, words]`, a run of
    codes, scales and biases for each block and head, as `kv_write_quantized.msl` has it.

    MLX cannot see that a kernel writes into `keys` and `values`, so whatever reads or writes them takes `token`
    as an input and replaces it: the tokens are a chain through all uses of the pool and its views, across steps. Its
    value is 0. If it `is_scattered`, MLX writes here, since kernels could not for some layer that uses it.

    Kernels get `handles`: the first blocks of K and V, in the same memory. MLX ends a command buffer by the number of
    elements that its inputs have, and a whole pool's would end one at every kernel; of what a kernel reaches from
    there, MLX keeps no count.
    """

    spec: LayerSpec
    keys: mx.array
    values: mx.array
    token: mx.array
    handles: tuple[mx.array, mx.array]
    is_scattered: bool = False
    num_moves: int = 0
    num_copies: int = 0
    _addresses: tuple[int, int] | None = None

    @classmethod
    def make(cls, spec: LayerSpec, num_blocks: int) -> GpuPool:
        """Allocates and zeroes; the arrays exist when it returns."""
        return cls.of(spec, *(_zeros(spec, num_blocks, dim) for dim in (spec.key_dim, spec.value_dim)))

    @classmethod
    def of(cls, spec: LayerSpec, keys: mx.array, values: mx.array) -> GpuPool:
        """A pool of these blocks."""
        token = mx.zeros((1,), mx.int32)
        mx.eval(keys, values, token)
        return cls(spec, keys, values, token, (_head(keys), _head(values)))

    def scatter(self) -> None:
        """From now on MLX writes here. It writes in place only where nobody else has the memory, so kernels get the
        arrays themselves, which are others after each write."""
        self.is_scattered = True
        self.keep(self.keys, self.values)

    def keep(self, keys: mx.array, values: mx.array) -> None:
        """Takes what MLX has made of the arrays by writing into them."""
        self.keys, self.values = self.handles = keys, values

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[0]

    def change(self, change: PoolChange) -> None:
        """Moves, cuts or grows: one copy of what stays, counted in `num_copies`. The memory of the old arrays is
        free when it returns. All work that uses them must have finished."""
        sources = mx.array(block_sources(self.num_blocks, change))
        del self.handles  # which hold the memory
        self.keys = self.keys[sources]
        mx.eval(self.keys)  # before values, so that not both are there twice
        self.values = self.values[sources]
        mx.eval(self.values)
        self.handles = (self.keys, self.values) if self.is_scattered else (_head(self.keys), _head(self.values))
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


@dataclass(slots=True)
class GpuPoolView:
    """A pool as that of layers like `spec`, of which `num_parts` fill one of its blocks: the same memory, in their
    shape, and the same chain of tokens."""

    spec: LayerSpec
    pool: GpuPool
    num_parts: int

    @property
    def keys(self) -> mx.array:
        return self._shaped(self.pool.keys, self.spec.key_dim)

    @property
    def values(self) -> mx.array:
        return self._shaped(self.pool.values, self.spec.value_dim)

    def keep(self, keys: mx.array, values: mx.array) -> None:
        """As `GpuPool.keep`."""
        self.pool.keep(keys.reshape(self.pool.keys.shape), values.reshape(self.pool.values.shape))

    @property
    def token(self) -> mx.array:
        return self.pool.token

    @token.setter
    def token(self, token: mx.array) -> None:
        self.pool.token = token

    @property
    def is_scattered(self) -> bool:
        return self.pool.is_scattered

    @property
    def handles(self) -> tuple[mx.array, mx.array]:
        """The pool's: a kernel takes shapes from its template."""
        return self.pool.handles

    def _shaped(self, array: mx.array, dim: int) -> mx.array:
        """No copy: the arrays of a pool are contiguous."""
        return array.reshape(_shape(self.spec, self.num_parts * self.pool.num_blocks, dim))


AnyGpuPool = GpuPool | GpuPoolView


def _shape(spec: LayerSpec, num_blocks: int, dim: int) -> tuple[int, ...]:
    if spec.bits is None:
        return num_blocks, spec.num_kv_heads, BLOCK_SIZE, dim
    return num_blocks, spec.num_kv_heads, BLOCK_SIZE * row_bytes(dim, spec.dtype, spec.bits) // mx.uint32.size


def _zeros(spec: LayerSpec, num_blocks: int, dim: int) -> mx.array:
    return mx.zeros(_shape(spec, num_blocks, dim), spec.dtype if spec.bits is None else mx.uint32)


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
