"""Reads and writes the bytes of whole blocks and of recurrent states, for the tier on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import STATES, CopyPlace
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.cache.row_pool import KV_GROUP_SIZE, RowPool, Rows, Slots
from mlx_server.runtime.kernels.cpu.attention import CpuPool
from mlx_server.runtime.kernels.gpu.pool import GpuPool, host_view

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _HostSide:
    """K or V of a pool in memory that the host can read: `[blocks, bytes]`."""

    blocks: Bytes

    @property
    def num_bytes(self) -> int:
        return int(self.blocks.shape[1])

    def read(self, number: int) -> Bytes:
        row: Bytes = self.blocks[number]
        return row

    def write(self, number: int, data: Bytes) -> None:
        self.blocks[number] = data


@dataclass(frozen=True, slots=True)
class _RowSide:
    """Rows that MLX reads and writes. Each content has `num_rows` rows; they begin with content number `first`."""

    rows: Rows
    num_rows: int
    shape: tuple[int, ...]
    dtype: mx.Dtype
    first: int

    @classmethod
    def of(cls, rows: Rows, num_rows: int, first: int = 0) -> _RowSide:
        one = rows.read(Slots(np.zeros(1, np.int32)))
        return cls(rows, num_rows, (num_rows, *one.shape[1:]), one.dtype, first)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def read(self, number: int) -> mx.array:
        """The content's bytes, lazily."""
        return self.rows.read(self._slots(number)).reshape(-1).view(mx.uint8)

    def write(self, number: int, data: Bytes) -> None:
        """Lazy, until `rows.arrays()` are evaluated."""
        self.rows.write(self._slots(number), mx.array(data).view(self.dtype).reshape(self.shape))

    def _slots(self, number: int) -> Slots:
        start = (self.first + number) * self.num_rows
        return Slots(np.arange(start, start + self.num_rows, dtype=np.int32))


_Side = _HostSide | _RowSide


class BlockContents:
    """The contents of blocks as they are in the pools: the bytes of K and then of V of each pool, with zeros for the
    pools that a layer group does not have. The contents of states: those of each layer. MLX thread.

    If all layers see everything, nothing waits for the device. This is safe because no step in flight uses these
    blocks: they are cached and not referenced, or were just taken. Otherwise a step in flight may use them
    (`may_be_in_use`): blocks are freed and taken while steps still read them, and a state is known before the step that
    writes it has run. Rows that MLX writes exist only when the steps in flight have ended.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._sides: list[list[_Side]] = []
        self._states: list[_RowSide] | None = None

    @property
    def may_be_in_use(self) -> bool:
        """Whether the steps in flight must end before anything is read or written."""
        cache = self._cache
        is_by_rows = any(pool.is_viewed or isinstance(pool.contents[0], RowPool) for pool in cache.pools)
        return bool(cache.recurrent) or cache.windows != (None,) or is_by_rows

    def state_bytes(self) -> int:
        """The size of one content of states."""
        return sum([side.num_bytes for side in self._find_states()])

    def refusal(self) -> str | None:
        """The reason why blocks cannot be copied, None if they can."""
        pools = [pool.contents[0] for pool in self._cache.pools if isinstance(pool.contents[0], GpuPool)]
        if any(pool.memory.is_scattered for pool in pools):
            return f"the {self._cache.backend.name} attention backend does not write K/V in place"
        # Without unified memory, MLX moves a buffer when the host reads it.
        if pools and not mx.metal.is_available():
            return f"the {self._cache.backend.name} backend's memory is not the host's"
        return None

    def dtype(self) -> str | None:
        """The type of all numbers in blocks; None if they are quantised, or of several types."""
        kinds = {(pool.spec.dtype, pool.spec.bits) for pool in self._cache.pools}
        dtype, bits = kinds.pop() if len(kinds) == 1 else (None, None)
        return None if dtype is None or bits is not None else str(dtype).removeprefix("mlx.core.")

    def layout(self) -> list[str]:
        """Everything besides weights and code that determines the K/V and states that a content stands for."""
        rotated = f" rotated, by {KV_GROUP_SIZE}"
        specs = [
            f"{pool.spec.num_kv_heads}x{pool.spec.key_dim}+{pool.spec.value_dim} {pool.spec.dtype} {pool.spec.bits}"
            + (rotated if pool.spec.bits else "")
            + (" rows" if isinstance(pool.contents[0], RowPool) else "")
            for pool in self._cache.pools
        ]
        groups = [] if self._cache.windows == (None,) else [str(group) for group in self._cache.groups]
        states = [f"state {side.shape} {side.dtype}" for side in self._find_states()]
        return [self._cache.backend.name, str(mx.default_device().type), *specs, *groups, *states]

    def read(self, places: Sequence[CopyPlace]) -> tuple[memoryview, ...]:
        """Copies of contents. Waits for MLX once: each wait is a round trip to the device."""
        parts = [[side.read(place.number) for side in self._sides_of(place)] for place in places]
        mx.eval([part for of_one in parts for part in of_one if isinstance(part, mx.array)])
        block_bytes = self._cache.block_bytes
        return tuple([_joined(of_one, 0 if p.group == STATES else block_bytes) for p, of_one in zip(places, parts)])

    def write(self, contents: Sequence[tuple[CopyPlace, memoryview]]) -> None:
        """Fills blocks and slots of states with contents. Waits for MLX once."""
        written: dict[int, Rows] = {}
        for place, content in contents:
            data, first = np.frombuffer(content, np.uint8), 0
            for side in self._sides_of(place):
                side.write(place.number, data[first : first + side.num_bytes])
                first += side.num_bytes
                if isinstance(side, _RowSide):
                    written[id(side.rows)] = side.rows
        if written:
            mx.eval([array for rows in written.values() for array in rows.arrays()])

    def forget(self) -> None:
        """Call before the pools change: drops all references to their memory."""
        self._sides.clear()
        self._states = None

    def _sides_of(self, place: CopyPlace) -> list[_Side]:
        if place.group == STATES:
            return list(self._find_states())
        if not self._sides:
            self._sides = [list(_sides_of(pool.contents[0])) for pool in self._cache.pools]
        num_pools = len(self._cache.groups[place.group].pools)
        return [side for sides in self._sides[:num_pools] for side in sides]

    def _find_states(self) -> list[_RowSide]:
        if self._states is None:
            first = self._cache.checkpoint_slot(0)
            self._states = [
                _RowSide.of(part, 1, first)
                for layer in self._cache.recurrent
                for entry in layer.entries
                if entry is not None
                for part in entry.parts()
            ]
        return self._states


def _sides_of(content: Any) -> Iterator[_Side]:
    if isinstance(content, RowPool):
        for rows in (content.keys, content.values):
            sides = [_RowSide.of(part, BLOCK_SIZE) for part in rows.parts()]
            yield from [side for side in sides if side.num_bytes]  # some caches have keys only
    elif isinstance(content, CpuPool):
        for array in (content.keys, content.values):
            yield _HostSide(array.view(np.uint8).reshape(content.max_blocks, -1))
    else:
        for array in (content.memory.keys, content.memory.values):
            yield _HostSide(host_view(array).view(np.uint8).reshape(array.shape[0], -1))


def _joined(parts: Sequence[Bytes | mx.array], least: int) -> memoryview:
    """The bytes of one content, with zeros up to `least`."""
    arrays = [np.array(part) if isinstance(part, mx.array) else part for part in parts]
    missing = max(0, least - sum([array.size for array in arrays]))
    return np.concatenate([*arrays, np.zeros(missing, np.uint8)]).data
