"""The `cpu` backend: attention in C++ over pools in host memory, float32 or quantised, written and read in place.

The pools are anonymous memory maps: page-aligned, zero, never moved, and without cost until a block is first
written. So a pool is mapped as large as it may become; growing it is a larger bound, and cutting it gives the
pages of its end back. Nothing is copied across the border to MLX but the output.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import sys
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_server import config
from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ConfigError
from mlx_server.outputs import PoolChange
from mlx_server.runtime.attention import LayerSpec, StepPlan
from mlx_server.runtime.kernels.cpu.build import load_library
from mlx_server.runtime.kernels.cpu.rows import HostRows, WaitingWrites
from mlx_server.runtime.row_pool import PlainRows, RowsShape, group_size_of, row_bytes

MAX_DEFAULT_THREADS = 16
THREADS_VARIABLE = "MLX_SERVE_CPU_THREADS"

_SOURCE = Path(__file__).with_name("attention.cpp")
_SLACK_BYTES = 64
"""What the widest vector load may read past the last row of V."""

# `struct Call` of attention.cpp: queries, keys and values with 2 strides each, sinks and output, the pool's 8 fields,
# heads and window, the scale, 4 index arrays, 3 counts.
_CALL = struct.Struct("=21qd7q")


@dataclass(frozen=True, slots=True)
class CpuPool:
    """K and V of one layer as flat memory in the native code's layout, float32 or the bytes of fewer bits, of which
    the first `num_blocks` may be used. `fields` are those of `struct Pool`."""

    spec: LayerSpec
    num_blocks: int
    max_blocks: int
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    fields: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CpuMetadata:
    """A step's plan as the native code reads it. `arrays` keeps alive what `packed` points to."""

    arrays: tuple[npt.NDArray[Any], ...]
    packed: tuple[int, ...]
    num_tokens: int
    num_blocks: int
    """The pool must hold at least this many blocks: one more than the largest id in the plan."""


class CpuBackend:
    """Attention in C++, with its own threads. Raises `NativeBuildError` when it cannot be compiled here.

    `threads` counts the caller too; by default `MLX_SERVE_CPU_THREADS`, or the CPUs that this process may use.
    """

    name = "cpu"
    is_eager = True
    takes_padding = True
    needs_synchronous_steps = False

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or default_threads()
        self._library = load_library(_SOURCE, config.home() / "kernels")
        self._library.cpu_attention_start.restype = ctypes.c_void_p
        self._engine = ctypes.c_void_p(self._library.cpu_attention_start(self.threads))
        if not self._engine:
            raise MemoryError(f"cannot start {self.threads} attention threads")
        # Not at exit: the MLX thread may be inside a call, and the process takes its threads along.
        weakref.finalize(self, self._library.cpu_attention_stop, self._engine).atexit = False
        self._output = np.empty(0, np.float32)  # kept from call to call: MLX copies it
        self._output_address = 0
        self._writes = WaitingWrites()

    def make_pool(self, spec: LayerSpec, num_blocks: int, max_blocks: int | None = None) -> CpuPool:
        """Raises `ValueError` unless the layer is float32, and `OSError` when the system refuses the memory."""
        if spec.dtype != mx.float32:
            raise ValueError(f"the cpu backend stores float32, not {spec.dtype}")
        max_blocks = max_blocks or num_blocks
        rows = max_blocks * spec.num_kv_heads * BLOCK_SIZE
        dtype = np.float32 if spec.bits is None else np.uint8
        keys, values = (
            _host_memory(rows * row_bytes(dim, spec.dtype, spec.bits), dtype) for dim in (spec.key_dim, spec.value_dim)
        )
        return CpuPool(spec, num_blocks, max_blocks, keys, values, _fields(spec, keys, values))

    def make_rows(self, shape: RowsShape, dtype: mx.Dtype) -> PlainRows:
        """Not in host memory: a model of which all is read by group then has nothing that evaluates itself."""
        return PlainRows.zeros(shape, dtype)

    def make_states(self, shape: RowsShape, dtype: mx.Dtype) -> HostRows:
        return HostRows(mx.zeros(shape, dtype), self._writes)

    def change_pool(self, pool: CpuPool, change: PoolChange) -> CpuPool:
        """Raises `ValueError` beyond the size that the pool was made for."""
        if change.num_blocks > pool.max_blocks:
            raise ValueError(f"a pool for {pool.max_blocks} blocks cannot grow to {change.num_blocks}")
        for array in (pool.keys, pool.values):
            blocks = array.reshape(pool.max_blocks, -1)
            for move in change.moves:
                blocks[move.destination] = blocks[move.source]
            if change.num_blocks < pool.num_blocks:
                _give_back(array, change.num_blocks * blocks[0].nbytes)
        return replace(pool, num_blocks=change.num_blocks)

    def view_pool(self, pool: CpuPool, spec: LayerSpec, num_parts: int) -> CpuPool:
        return replace(
            pool,
            spec=spec,
            num_blocks=num_parts * pool.num_blocks,
            max_blocks=num_parts * pool.max_blocks,
            fields=_fields(spec, pool.keys, pool.values),
        )

    def warm_up(self, spec: LayerSpec, num_query_heads: int, *, sinks: mx.array | None = None) -> None:
        """There is nothing to do: one compilation serves every shape."""

    def plan(self, step: StepPlan) -> CpuMetadata:
        """Raises `ValueError` for blocks that cannot be: the native code trusts what it is given."""
        slots = np.ascontiguousarray(step.slot_mapping, np.int64)
        starts = np.ascontiguousarray(step.query_starts, np.int32)
        lengths = np.ascontiguousarray(step.context_lens, np.int32)
        tables = np.ascontiguousarray(step.block_tables, np.int32)
        largest = max(int(tables.max(initial=0)), int(slots.max(initial=0)) // BLOCK_SIZE)
        if int(lengths.max(initial=0)) > tables.shape[1] * BLOCK_SIZE:
            raise ValueError(f"a context of {lengths.max()} tokens is longer than its {tables.shape[1]} blocks")
        if min(int(tables.min(initial=0)), int(slots.min(initial=0))) < 0:
            raise ValueError("the plan names a negative block or slot")
        arrays = (slots, starts, lengths, tables)
        addresses = tuple(_address(array) for array in arrays)
        counts = (step.num_tokens, step.num_requests, tables.shape[1])
        return CpuMetadata(arrays, addresses + counts, step.num_tokens, largest + 1)

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
        rows, heads = queries.shape[:2]
        value_dim = pool.spec.value_dim
        given = [array if array is None else array.astype(mx.float32) for array in (queries, keys, values, sinks)]
        self._writes.settle(*given)
        q, k, v = _locate(given[0]), _locate(given[1]), _locate(given[2])
        count = rows * heads * value_dim
        if count > self._output.size:
            self._output = np.empty(count, np.float32)
            self._output_address = _address(self._output)
        sinks_address = 0 if given[3] is None else _address(np.asarray(given[3]))
        call = _CALL.pack(
            *q[:3],
            *k[:3],
            *v[:3],
            sinks_address,
            self._output_address,
            *pool.fields,
            heads,
            window or 0,
            scale,
            *metadata.packed,
        )
        if self._library.cpu_attention_run(self._engine, call):
            raise MemoryError("no memory for the scratch of attention")
        self._output[metadata.num_tokens * heads * value_dim : count] = 0.0
        return mx.array(self._output[:count].reshape(rows, heads, 1, value_dim)).astype(queries.dtype)

    def state(self, pool: CpuPool) -> list[mx.array]:
        return []


class _Rows(NamedTuple):
    """Where an evaluated array `[tokens, heads, 1, dim]` lies. Strides are in floats; `owner` keeps it there."""

    address: int
    token_stride: int
    head_stride: int
    owner: object


def _locate(array: mx.array | None) -> _Rows:
    """Views the array where it lies; copies it only if its last axis is strided."""
    if array is None:
        return _Rows(0, 0, 0, None)
    try:
        buffer: Any = array
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, BufferError):  # not contiguous
        view = np.asarray(array)
        if view.strides[-1] != view.itemsize:
            view = np.ascontiguousarray(view)
        return _Rows(_address(view), view.strides[0] // view.itemsize, view.strides[1] // view.itemsize, view)
    _, heads, _, dim = array.shape
    return _Rows(address, heads * dim, dim, array)


def default_threads() -> int:
    """`MLX_SERVE_CPU_THREADS`, else the CPUs that this process may use, 16 at most. Raises `ConfigError`."""
    configured = os.environ.get(THREADS_VARIABLE)
    if configured is not None:
        if not configured.isdecimal() or int(configured) < 1:
            raise ConfigError(f"{THREADS_VARIABLE} is {configured!r}; it must be a whole number from 1.")
        return int(configured)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MAX_DEFAULT_THREADS)


def _host_memory(num_bytes: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that take memory only where they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, num_bytes + _SLACK_BYTES, flags=flags)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # kernels without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype, num_bytes // np.dtype(dtype).itemsize)


def _fields(spec: LayerSpec, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> tuple[int, ...]:
    dims = spec.key_dim, spec.value_dim
    groups = (0, 0) if spec.bits is None else tuple(group_size_of(dim) for dim in dims)
    return (_address(keys), _address(values), spec.num_kv_heads, *dims, spec.bits or 0, *groups)


def _give_back(array: npt.NDArray[Any], start: int) -> None:
    """Gives the pages of `_host_memory` from byte `start` on back to the system. What they held is undefined."""
    view: Any = array.base
    memory: mmap.mmap = view.obj
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if start < len(memory):
        advice = mmap.MADV_DONTNEED if sys.platform == "linux" else mmap.MADV_FREE
        memory.madvise(advice, start, len(memory) - start)


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _check(
    pool: CpuPool, queries: mx.array, keys: mx.array | None, values: mx.array | None, metadata: CpuMetadata
) -> None:
    """Raises `ValueError` for a wrong shape or a block that the pool does not have."""
    spec, tokens = pool.spec, metadata.num_tokens
    rows, heads = queries.shape[:2]
    if rows < tokens or queries.shape[1:] != (heads, 1, spec.key_dim) or heads % spec.num_kv_heads:
        raise ValueError(f"queries are {queries.shape}; the plan has {tokens} tokens and the pool {spec}")
    if (values is None) != (keys is None):
        raise ValueError("keys and values are stored together or not at all")
    for name, array, dim in (("keys", keys, spec.key_dim), ("values", values, spec.value_dim)):
        if array is not None and array.shape != (rows, spec.num_kv_heads, 1, dim):
            raise ValueError(f"{name} are {array.shape}; there are {rows} rows and the pool is {spec}")
    if metadata.num_blocks > pool.num_blocks:
        raise ValueError(f"the plan names block {metadata.num_blocks - 1}; the pool has {pool.num_blocks}")
