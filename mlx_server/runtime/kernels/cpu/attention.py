"""The `cpu` backend: attention in C++ over pools in host memory, float32 or quantised, written and read in place; and
rows that native operations write in place.

Attention is a lazy node of MLX's graph, so that a step is built and submitted without waiting. The pools are anonymous
memory maps: page-aligned, zero, never moved, and without cost until a block is first written. So a pool is mapped at
its largest size; growing it raises a bound, and shrinking it returns the pages at its end to the system.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention.interface import IntArray, LayerSpec, StepPlan
from mlx_server.runtime.cache.row_pool import Rows, RowsInPlace, RowsShape, Slots, side_bits
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.kernels.cpu.build import NativeBuildError
from mlx_server.runtime.kernels.sharing import Readers, find_runs

_SLACK_BYTES = 64
"""What the widest vector load may read past the last row of V."""

_POOL = struct.Struct("=7q")
"""`struct Pool` of engine.h."""


@dataclass(slots=True)
class _LastUse:
    """The token of a pool's last use, which the next one waits for. Its value is 0."""

    token: mx.array = field(default_factory=lambda: mx.array([0]))


@dataclass(frozen=True, slots=True)
class CpuPool:
    """K and V of one layer as flat memory in the native code's layout, float32 or quantised. The first `num_blocks`
    blocks may be used. `fields` is `struct Pool` as bytes."""

    spec: LayerSpec
    num_blocks: int
    max_blocks: int
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    fields: bytes
    memory: tuple[Any, ...]
    """The library's `Memory` of K and of V, which nodes keep, too."""
    last_use: _LastUse = field(default_factory=_LastUse)


@dataclass(frozen=True, slots=True)
class CpuMetadata:
    """A step's plan in the native code's form."""

    plan: Any
    num_tokens: int
    num_blocks: int
    """The pool must have at least this many blocks: the largest id in the plan, plus one."""


class CpuBackend:
    """Attention in C++, with its own threads. Raises `NativeBuildError` without the native library.

    `threads` counts the caller too; by default `MLX_SERVE_CPU_THREADS`, or the CPUs that this process may use.
    """

    name = "cpu"
    needs_synchronous_steps = False

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or native.default_threads()
        library = native.library()
        if library is None:
            raise NativeBuildError(native.why_missing())
        self._native: Any = library
        self._engine = native.engine(self.threads)
        self._row_operations = NativeRowOperations(library)

    def make_pool(self, spec: LayerSpec, num_blocks: int, max_blocks: int | None = None) -> CpuPool:
        """Raises `ValueError` unless the layer is float32, and `OSError` when the system refuses the memory."""
        if spec.dtype != mx.float32:
            raise ValueError(f"the cpu backend stores float32, not {spec.dtype}")
        max_blocks = max_blocks or num_blocks
        rows = max_blocks * spec.num_kv_heads * BLOCK_SIZE
        dtype = np.float32 if spec.bits is None else np.uint8
        sizes = [rows * num_bytes for num_bytes in spec.row_bytes]
        memory = tuple(self._native.Memory(size + _SLACK_BYTES) for size in sizes)
        keys, values = (
            np.frombuffer(_buffer(one, size), dtype, size // np.dtype(dtype).itemsize)
            for one, size in zip(memory, sizes)
        )
        return CpuPool(spec, num_blocks, max_blocks, keys, values, _fields(spec, keys, values), memory)

    def make_rows(self, shape: RowsShape, dtype: mx.Dtype) -> Rows:
        return RowsInPlace(self._row_operations, mx.zeros(shape, dtype))

    def change_pool(self, pool: CpuPool, change: PoolChange) -> CpuPool:
        """Raises `ValueError` beyond the size that the pool was made for."""
        if change.num_blocks > pool.max_blocks:
            raise ValueError(f"a pool for {pool.max_blocks} blocks cannot grow to {change.num_blocks}")
        for array, memory in zip((pool.keys, pool.values), pool.memory):
            blocks = array.reshape(pool.max_blocks, -1)
            for move in change.moves:
                blocks[move.destination] = blocks[move.source]
            if change.num_blocks < pool.num_blocks:
                memory.give_back(change.num_blocks * blocks[0].nbytes)
        return replace(pool, num_blocks=change.num_blocks)

    def view_pool(self, pool: CpuPool, spec: LayerSpec, num_parts: int) -> CpuPool:
        return replace(
            pool,
            spec=spec,
            num_blocks=num_parts * pool.num_blocks,
            max_blocks=num_parts * pool.max_blocks,
            fields=_fields(spec, pool.keys, pool.values),
        )

    def warm_up(
        self, spec: LayerSpec, num_query_heads: int, *, sinks: mx.array | None = None
    ) -> Generator[float, None, None]:
        """Nothing to do: one compilation is for all shapes."""
        yield from ()

    def plan(self, step: StepPlan) -> CpuMetadata:
        """Raises `ValueError` for impossible blocks, which the native code does not check."""
        slots = np.ascontiguousarray(step.slot_mapping, np.int64)
        starts = np.ascontiguousarray(step.query_starts, np.int32)
        lengths = np.ascontiguousarray(step.context_lens, np.int32)
        tables = np.ascontiguousarray(step.block_tables, np.int32)
        largest = max(int(tables.max(initial=0)), int(slots.max(initial=0)) // BLOCK_SIZE)
        if int(lengths.max(initial=0)) > tables.shape[1] * BLOCK_SIZE:
            raise ValueError(f"a context of {lengths.max()} tokens is longer than its {tables.shape[1]} blocks")
        if min(int(tables.min(initial=0)), int(slots.min(initial=0))) < 0:
            raise ValueError("the plan names a negative block or slot")
        both_ways = np.ascontiguousarray(step.both_ways, np.int32)
        arrays = (slots, starts, lengths, tables, _sharing(starts, lengths, tables), both_ways)
        return CpuMetadata(self._native.Plan(*(array.tobytes() for array in arrays)), step.num_tokens, largest + 1)

    def attend(
        self,
        pool: CpuPool,
        queries: mx.array,
        keys: mx.array | None,
        values: mx.array | None,
        metadata: CpuMetadata,
        *,
        scale: float,
        window: int | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        _check(pool, queries, keys, values, metadata)
        given = [array if array is None else array.astype(mx.float32) for array in (queries, keys, values, sinks)]
        last = pool.last_use
        out: mx.array
        out, last.token = self._native.attention(
            self._engine, pool.memory, pool.fields, metadata.plan, last.token, *given, scale, window or 0
        )
        return out.astype(queries.dtype)

    def run_layer(
        self, pool: CpuPool, parts: Any, x: mx.array, offset: mx.array, metadata: CpuMetadata, window: int | None
    ) -> mx.array | None:
        """A whole transformer layer with its attention, for x `[T, 1, D]` at positions `offset` `[T]`. `parts` is a
        `Layer` of the library; None if it cannot compute these rows."""
        _check_blocks(pool, metadata)
        last = pool.last_use
        result = self._native.run_layer(
            self._engine, parts, pool.memory, pool.fields, metadata.plan, last.token, x, offset, window or 0
        )
        if result is None:
            return None
        out: mx.array
        out, last.token = result
        return out

    def state(self, pool: CpuPool) -> list[mx.array]:
        return [pool.last_use.token]


class NativeRowOperations:
    """The `RowOperations` of a CPU: nodes of the native library."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def read(self, pool: mx.array, slots: Slots, row: RowsShape, token: mx.array) -> tuple[mx.array, mx.array]:
        shape, count = [*slots.numbers.shape, *row], slots.numbers.size
        result: tuple[mx.array, mx.array] = self._library.read_rows(pool, slots.padded, shape, token, count)
        return result

    def write(self, pool: mx.array, slots: Slots, rows: mx.array, token: mx.array) -> mx.array:
        after: mx.array = self._library.write_rows(rows, pool, slots.padded, token)
        return after


def _buffer(memory: Any, num_bytes: int) -> Any:
    """A buffer for NumPy that keeps the memory alive."""
    buffer: Any = (ctypes.c_char * num_bytes).from_address(memory.address)
    buffer.memory = memory
    return buffer


def _sharing(starts: IntArray, lengths: IntArray, tables: IntArray) -> IntArray:
    """`[R, 2]`: the first request with the same leading blocks (maybe itself) or -1, and how many blocks. Of nested
    runs (see `sharing.py`), only those at the start of the tables are used."""
    sharing = np.zeros((len(lengths), 2), np.int32)
    sharing[:, 0] = -1
    for run in find_runs(Readers(tables, starts[:-1], np.diff(starts), lengths)):
        if run.first == 0:
            sharing[run.members] = run.members[0], run.end
    return sharing


def _fields(spec: LayerSpec, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> bytes:
    bits = [count or 0 for count in side_bits(spec.bits)]
    return _POOL.pack(_address(keys), _address(values), spec.num_kv_heads, spec.key_dim, spec.value_dim, *bits)


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _check(
    pool: CpuPool, queries: mx.array, keys: mx.array | None, values: mx.array | None, metadata: CpuMetadata
) -> None:
    """Raises `ValueError` for a wrong shape or a block that the pool does not have."""
    spec, tokens = pool.spec, metadata.num_tokens
    rows, heads = queries.shape[:2]
    if rows != tokens or queries.shape[1:] != (heads, 1, spec.key_dim) or heads % spec.num_kv_heads:
        raise ValueError(f"queries are {queries.shape}; the plan has {tokens} tokens and the pool {spec}")
    if (values is None) != (keys is None):
        raise ValueError("keys and values are stored together or not at all")
    for name, array, dim in (("keys", keys, spec.key_dim), ("values", values, spec.value_dim)):
        if array is not None and array.shape != (rows, spec.num_kv_heads, 1, dim):
            raise ValueError(f"{name} are {array.shape}; there are {rows} rows and the pool is {spec}")
    _check_blocks(pool, metadata)


def _check_blocks(pool: CpuPool, metadata: CpuMetadata) -> None:
    if metadata.num_blocks > pool.num_blocks:
        raise ValueError(f"the plan names block {metadata.num_blocks - 1}; the pool has {pool.num_blocks}")
