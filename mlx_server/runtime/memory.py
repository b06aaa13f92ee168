"""The memory for models: readings, MLX's limits, the share for KV blocks, and the size of Metal's command buffers.

MLX keeps the arrays that an operation reads until the operation's command buffer has ended, and lets the host run 10
buffers ahead. So long buffers cost memory, at worst 12 times the memory of one, and short ones leave the host less time
to prepare the next step. MLX ends a buffer after a number of operations or of array elements (which it calls MB).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx
import psutil

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import InsufficientMemoryError
from mlx_server.runtime.machine import available_memory, read_group_memory
from mlx_server.setting import parse_size

logger = logging.getLogger(__name__)

_STATE_SHARE = 0.2
_CHECKPOINTS_PER_SLOT = 4
_MAX_SPARES = 8
_GPU_SHARE = 0.9
_CPU_SHARE = 0.25
_CACHE_LIMIT_BYTES = 2**30
"""Limit for freed buffers that MLX keeps for reuse. While prompts are computed, a later command buffer reuses most of
them at once. Mapping new ones sometimes takes up to a tenth of a chunk's time; steps of many shapes would fill a larger
cache with buffers of sizes that are never needed again."""

_FIRST_BLOCKS = 64
MIN_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The memory for models: the machine's, or a container's share of it, or a discrete GPU's own.

    total_bytes, available_bytes     all of it, and what can be allocated without paging
    device_bytes, device_used_bytes  the recommended maximum for the GPU, and what MLX uses of it now
    active_bytes                     what MLX's arrays use now; None if models use other memory as well
    """

    total_bytes: int
    available_bytes: int
    device_bytes: int
    device_used_bytes: int
    active_bytes: int | None = None

    def with_steps(self, kept_bytes: int, step_bytes: int) -> MemoryReading:
        """The reading as if a running step used all of the `step_bytes` reserved for it, besides `kept_bytes` that
        stay. So readings between steps and within a step are equal, and the reserve counts as used.

        Example: of 10 GiB active, 8 are kept and 3 are reserved for a step: the step uses 2, so 1 more counts as used.
        """
        if self.active_bytes is None:
            return self
        taken = min(max(0, self.active_bytes - kept_bytes), step_bytes)
        missing = step_bytes - taken
        return replace(
            self,
            available_bytes=max(0, self.available_bytes - missing),
            device_used_bytes=self.device_used_bytes + missing,
        )

    @property
    def pressure(self) -> float:
        """The share of the memory that all processes use, or of the device's memory if that is more; 0 to 1."""
        return max(1 - self.available_bytes / self.total_bytes, self.device_used_bytes / self.device_bytes)

    def room_below(self, pressure: float) -> int:
        """How many bytes can be allocated before the pressure reaches this value."""
        of_system = self.available_bytes - (1 - pressure) * self.total_bytes
        of_device = pressure * self.device_bytes - self.device_used_bytes
        return max(0, int(min(of_system, of_device)))


def return_freed_memory() -> None:
    """Returns what the process has freed to the system. glibc keeps it in each thread's arena; MLX ends no thread of a
    stream, so an arena may never be used again. Other libraries, such as macOS's, need no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def read_memory() -> MemoryReading:
    """Asks the system and MLX; cheap enough to call every second. Any thread.

    Buffers that MLX keeps for reuse count as available, because MLX frees them when it needs memory.
    """
    info = mx.device_info() if mx.default_device() != mx.cpu else {}
    if "free_memory" in info:  # CUDA
        total = int(info["total_memory"])
        available = int(info["free_memory"]) + int(mx.get_cache_memory())
        active = int(mx.get_active_memory())
        available = max(0, min(available, total - active))
        return MemoryReading(total, available, total, total - available, active)
    total, free = int(psutil.virtual_memory().total), available_memory()
    group = read_group_memory()
    if group is not None and group.limit_bytes < total:
        total, free = group.limit_bytes, min(free, group.available_bytes)
    available = min(total, free + int(mx.get_cache_memory()))
    active = int(mx.get_active_memory())
    if not info:
        return MemoryReading(total, available, total, active)
    return MemoryReading(total, available, int(info["max_recommended_working_set_size"]), active, active)


class _Limit:
    """One of MLX's limits, which apply to the process. While several callers hold it, it is the highest of their
    values; the last one restores the previous limit. Any thread."""

    def __init__(self, change: Callable[[int], int | None]) -> None:
        """`change` sets the limit and returns the previous one, or None if it cannot be set."""
        self._change = change
        self._lock = threading.Lock()
        self._wanted: list[int] = []
        self._before: int | None = None

    @contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        with self._lock:
            before = self._change(max([*self._wanted, num_bytes]))
            if not self._wanted:
                self._before = before
            self._wanted.append(num_bytes)
        try:
            yield
        finally:
            with self._lock:
                self._wanted.remove(num_bytes)
                if self._before is not None:
                    self._change(max(self._wanted, default=self._before))


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """On a GPU, while it is entered: before MLX allocates more than `num_bytes`, it waits for running work and frees
    buffers that it keeps for reuse. The last of several callers restores MLX's own limit. Any thread."""
    if mx.default_device() == mx.cpu:
        yield
        return
    with _MEMORY.held(num_bytes):
        yield


@contextmanager
def resident_memory(*, wire: bool) -> Iterator[None]:
    """On Metal, while it is entered: limits the buffers that MLX keeps for reuse, which would otherwise grow without
    end with ragged steps; and with `wire`, wires weights and KV pools, which macOS would otherwise unwire when idle.
    The last of several callers restores both limits. MLX thread.

    A wired working set under concurrent requests reproducibly caused kernel panics of macOS (mlx#3186).
    """
    if not mx.metal.is_available():
        yield
        return
    with ExitStack() as held:
        if wire:
            held.enter_context(_WIRED.held(int(mx.device_info()["max_recommended_working_set_size"])))
        held.enter_context(_CACHED.held(_CACHE_LIMIT_BYTES))
        yield


def _set_wired_limit(num_bytes: int) -> int | None:
    """The previous limit; None if the system does not support it, or allows less."""
    try:
        return int(mx.set_wired_limit(num_bytes))
    except (RuntimeError, ValueError) as error:
        logger.warning("Memory cannot be kept resident, so there may be pauses after idle times: %s", error)
        return None


_MEMORY = _Limit(lambda num_bytes: mx.set_memory_limit(num_bytes))
_CACHED = _Limit(lambda num_bytes: mx.set_cache_limit(num_bytes))
_WIRED = _Limit(_set_wired_limit)


def first_kv_blocks(max_blocks: int) -> int:
    """The initial number of blocks of a pool that may grow to `max_blocks`."""
    return min(max_blocks, _FIRST_BLOCKS)


def state_slots(slot_bytes: int, wanted: int, free_bytes: int) -> int:
    """The number of requests with room for their recurrent state: `wanted`, or as many as fit into a fifth of the free
    memory. Raises `InsufficientMemoryError` if there is room for none."""
    if not slot_bytes:
        return wanted
    num_slots = min(wanted, int(free_bytes * _STATE_SHARE) // slot_bytes)
    if num_slots < 1:
        raise InsufficientMemoryError(
            f"The recurrent state of one request takes {slot_bytes / 2**20:.0f} MiB, and {free_bytes / 2**20:.0f} MiB "
            "are free beside the model. Close other programs, or use a smaller model."
        )
    if num_slots < wanted:
        logger.warning(
            "Each request keeps %.0f MiB of recurrent state, so at most %d run at a time instead of %d.",
            slot_bytes / 2**20,
            num_slots,
            wanted,
        )
    return num_slots


def kept_slots(slot_bytes: int, num_slots: int, free_bytes: int, *, drafts: bool, prefixes: bool) -> tuple[int, int]:
    """How many recurrent states are kept besides those of running requests, in a fifth of the free memory: behind
    drafts, up to eight but at most a quarter of what fits; and at block boundaries, up to four for each running
    request. Example: with 1 MiB for each state, 64 requests and 100 MiB free, 20 fit: 5 and 15."""
    if not slot_bytes:
        return 0, 0
    room = int(free_bytes * _STATE_SHARE) // slot_bytes
    num_spares = min(_MAX_SPARES, num_slots, -(-room // 4)) if drafts else 0
    return num_spares, min(_CHECKPOINTS_PER_SLOT * num_slots, room - num_spares) if prefixes else 0


def max_kv_blocks(setting: str, num_blocks: int | None, block_bytes: int, useful_blocks: int, free_bytes: int) -> int:
    """The blocks, of 32 tokens in all layers, that the pool may grow to: `num_blocks` if given, otherwise what fits
    into `setting` bytes (`auto`: 90 % of the memory that is free beside the model, 25 % on a CPU), at most
    `useful_blocks` or the minimum.

    Raises `InsufficientMemoryError` with the numbers for a pool that does not fit or has too few tokens.
    """
    if num_blocks is None:
        auto = int(free_bytes * (_CPU_SHARE if mx.default_device() == mx.cpu else _GPU_SHARE))
        wanted = auto if setting == "auto" else parse_size(setting)
        num_blocks = min(wanted // block_bytes, max(useful_blocks, MIN_BLOCKS))
    if num_blocks * block_bytes > free_bytes:
        raise InsufficientMemoryError(
            f"A KV pool of {num_blocks * block_bytes / 2**20:.0f} MiB does not fit: "
            f"{free_bytes / 2**20:.0f} MiB are free beside the model. Lower --kv-cache-memory, or "
            "close other programs."
        )
    if num_blocks < MIN_BLOCKS:
        raise InsufficientMemoryError(
            f"There is room for only {num_blocks * BLOCK_SIZE} tokens of KV cache; the minimum is "
            f"{MIN_BLOCKS * BLOCK_SIZE}, {MIN_BLOCKS * block_bytes / 2**20:.1f} MiB. Raise --kv-cache-memory, "
            "free memory, or use a smaller model."
        )
    return num_blocks


MAX_IN_FLIGHT = 12
"""Number of command buffers whose arrays are kept at a time: those that MLX lets run, the one that ends and the
next."""

_OPS, _ELEMENTS = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
_MAX_OPS = 1000
"""More than the steps of most models have, so the number of elements decides."""

_MILLIONS_PER_GIB = 6
_MIN_MILLIONS, _MAX_MILLIONS = 40, 400
"""MLX's own number, and one with which decode steps of the largest models have about ten command buffers."""


def set_limits(machine_bytes: int, *, is_metal: bool) -> None:
    """Sets the environment variables that MLX reads when it is loaded, unless the user has set them.

    96 x 2^20 elements on a Mac with 16 GiB, twice as many with 32 GiB, and 400 x 2^20 from 67 GiB on: all buffers in
    flight keep at most a seventh of the memory, at 16 bits per element. CUDA ends graphs by the same numbers. Each
    operation on a KV pool would end one, so there only the number of operations counts.
    """
    millions = 1_000_000
    if is_metal:
        os.environ.setdefault(_OPS, str(_MAX_OPS))
        millions = min(_MAX_MILLIONS, max(_MIN_MILLIONS, _MILLIONS_PER_GIB * machine_bytes >> 30))
    os.environ.setdefault(_ELEMENTS, str(millions))


def max_elements() -> int:
    """The number of elements at which a command buffer ends, limited to values that matter for memory."""
    return min(_MAX_MILLIONS, int(os.environ[_ELEMENTS])) << 20
