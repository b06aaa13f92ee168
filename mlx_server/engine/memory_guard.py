"""What one model does when the machine runs short of memory, whoever has taken it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
from dataclasses import dataclass

from mlx_server.batching.request_table import Rank
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.engine.kv_memory import KvMemory
from mlx_server.runtime.memory import MIN_BLOCKS

_RETRY_S = 0.005
_HYSTERESIS = 0.03
"""A level is left only when the pressure is so much lower than where it began."""


class PressureLevel(enum.IntEnum):
    """How short memory is; each level does what those before it do, too.

    EVICT    the pool gives half of its idle blocks back at each sample, cached ones included, and grows only by what
             requests need
    HOLD     the pool does not grow, and nobody starts beside those who run
    PREEMPT  at each sample, the running request of the lowest priority of all models waits again, unless it is the
             only one of its model, and all idle blocks go
    """

    NONE = 0
    EVICT = 85
    HOLD = 92
    PREEMPT = 97

    def after(self, pressure: float) -> PressureLevel:
        """The level at the next reading."""
        reached = max(level for level in PressureLevel if pressure * 100 >= level)
        if reached >= self:
            return reached
        kept = [level for level in PressureLevel if pressure >= level / 100 - _HYSTERESIS and level <= self]
        return max(kept)


@dataclass(slots=True)
class GuardCounters:
    """Totals since start; `EngineStats` says what each means."""

    num_pressure_cuts: int = 0
    num_pressure_holds: int = 0
    num_pressure_preemptions: int = 0


class MemoryGuard:
    """One model's part in what `MemoryWatch` does, between its steps. Event-loop thread only."""

    def __init__(self, scheduler: ContinuousBatchingScheduler, kv_memory: KvMemory) -> None:
        self.level = PressureLevel.NONE
        self.counters = GuardCounters()
        self._scheduler = scheduler
        self._kv_memory = kv_memory
        self._num_cut = 0

    def act(self, level: PressureLevel) -> None:
        """Does what `level` asks of every model."""
        self.counters.num_pressure_holds += level >= PressureLevel.HOLD > self.level
        self.level = level
        self._scheduler.hold_admission(level >= PressureLevel.HOLD)
        if level >= PressureLevel.EVICT:
            num_blocks = self._num_idle_blocks if level >= PressureLevel.PREEMPT else -(-self._num_idle_blocks // 2)
            self.counters.num_pressure_cuts += self._shrink(num_blocks) > 0

    def lowest_rank(self) -> Rank | None:
        """That of the request that `preempt_lowest` would make wait; None where there is none: a model's only running
        request goes on."""
        return self._scheduler.lowest_rank()

    def preempt_lowest(self) -> None:
        """Makes that request wait."""
        self.counters.num_pressure_preemptions += self._scheduler.preempt_lowest()

    async def give_memory(self, num_bytes: int, timeout_s: float) -> int:
        """Gives idle blocks back, cached ones included, up to that many bytes, and waits until they are free for
        others; how many bytes are."""
        wanted = -(-num_bytes // self._kv_memory.block_bytes)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while num_blocks := min(wanted, self._num_idle_blocks):
                    num_cut = self._shrink(num_blocks)
                    if num_cut:
                        await self._kv_memory.given_back(self._num_cut)
                        return num_cut * self._kv_memory.block_bytes
                    await asyncio.sleep(_RETRY_S)  # the pool is being changed already
        return 0

    def _shrink(self, num_blocks: int) -> int:
        num_cut = self._scheduler.shrink(num_blocks)
        self._num_cut += num_cut
        return num_cut

    @property
    def num_idle_bytes(self) -> int:
        """What `give_memory` could give."""
        return self._num_idle_blocks * self._kv_memory.block_bytes

    @property
    def _num_idle_blocks(self) -> int:
        """Those that can go and leave a pool that is of use."""
        blocks = self._scheduler.blocks
        return max(0, min(blocks.num_free_blocks, blocks.num_blocks - MIN_BLOCKS * len(blocks.groups)))
