"""What happens under memory pressure: `KvMemory` decides how much one model's KV pool may grow, `MemoryGuard` frees
parts of the pool, and `MemoryWatch` watches the memory and calls the guards of all models."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

from mlx_server.batching.request_table import Rank
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.batching.speculation.draft_model import DraftModel
from mlx_server.engine.memory.budget import MemoryShare
from mlx_server.outputs import EngineCounters
from mlx_server.runtime.memory import MIN_BLOCKS, MemoryReading

logger = logging.getLogger(__name__)

_SAMPLE_S = 1.0
_RETRY_S = 0.005
_SAVING_S = 0.05
_PATIENT_SHARE = 0.5
"""The part of the time for freeing memory in which cached prefixes may be saved on disk first."""

_MAX_PUT_OFF = 2
"""The number of samples for which a cut under pressure may wait for that."""

_HYSTERESIS = 0.03
"""A level ends when the pressure is this much below the level's threshold."""

_REFUSAL_S = 0.2
"""How long a refusal is valid, unless the model frees memory: a full pool asks for every block, and reading the
system's memory each time would be slow."""

_ROOMY_BELOW = 0.8
"""Up to this pressure a pool doubles and keeps what is cached. Well below the pressure at which it frees that."""

_NEEDED_BELOW = 0.89
"""Up to this pressure a pool gets what a request needs. Below the pressure at which no request is admitted."""


class KvMemory:
    """A `BlockSupply` that lets a pool grow within its model's share of the budget. Event-loop thread only."""

    def __init__(self, share: MemoryShare, block_bytes: int, clock: Callable[[], float]) -> None:
        self.block_bytes = block_bytes
        self._share = share
        self._clock = clock
        self._refused_blocks: dict[bool, int] = {}
        self._refused_until_s = 0.0
        self._refused_need = share.need
        self._num_given_back = 0
        self._given_back = asyncio.Event()

    def take(self, least: int, most: int, *, is_needed: bool) -> int:
        now = self._clock()
        if now >= self._refused_until_s or self._share.need is not self._refused_need:
            self._refused_blocks.clear()
        elif least >= self._refused_blocks.get(is_needed, least + 1):
            return 0
        num_blocks = min(most, self._growable_blocks(_ROOMY_BELOW))
        if num_blocks < least and is_needed:
            num_blocks = min(least, self._growable_blocks(_NEEDED_BELOW))
        if num_blocks < least or not self._share.grow(num_blocks * self.block_bytes):
            self._refused_blocks[is_needed] = least
            self._refused_until_s, self._refused_need = now + _REFUSAL_S, self._share.need
            return 0
        return num_blocks

    def _growable_blocks(self, pressure: float) -> int:
        return self._share.growable_bytes(pressure) // self.block_bytes

    def give_back(self, num_blocks: int) -> None:
        self._share.shrink(num_blocks * self.block_bytes)
        self._num_given_back += num_blocks
        self._given_back.set()

    async def given_back(self, num_blocks: int) -> None:
        """Waits until `num_blocks` blocks were freed in all."""
        while self._num_given_back < num_blocks:
            self._given_back.clear()
            await self._given_back.wait()


class PressureLevel(enum.IntEnum):
    """How short memory is. Each level includes the actions of the lower ones.

    EVICT    at each sample, the pool frees half of its idle blocks, including cached ones, and grows only by what
             requests need; for up to two samples, prefixes that are worth it are saved on disk first
    HOLD     the pool does not grow, and no request starts
    PREEMPT  at each sample, the running request with the lowest priority among all models is preempted, unless it is
             the only one of its model, and all idle blocks are freed
    """

    NONE = 0
    EVICT = 85
    HOLD = 92
    PREEMPT = 97

    def after(self, pressure: float) -> PressureLevel:
        """The level after a reading of the pressure, 0 to 1 and more."""
        return max(level for level in PressureLevel if pressure >= level / 100 - _HYSTERESIS * (level <= self))


class MemoryGuard:
    """Acts on one pool for `MemoryWatch`. Event-loop thread only."""

    def __init__(self, scheduler: ContinuousBatchingScheduler | DraftModel, kv_memory: KvMemory) -> None:
        self.level = PressureLevel.NONE
        self.counters = EngineCounters()
        self._scheduler = scheduler
        self._kv_memory = kv_memory
        self._num_cut = 0
        self._num_put_off = 0

    def act(self, level: PressureLevel) -> None:
        """Does what `level` demands of every model."""
        self.counters.num_pressure_holds += level >= PressureLevel.HOLD > self.level
        self.level = level
        self._scheduler.hold_admission(level >= PressureLevel.HOLD)
        if level < PressureLevel.EVICT:
            if self._num_put_off:
                self._scheduler.shrink(0)  # saving for the cut is no longer urgent
            self._num_put_off = 0
        else:
            is_urgent = level >= PressureLevel.PREEMPT
            num_blocks = self._num_idle_blocks if is_urgent else -(-self._num_idle_blocks // 2)
            saves_first = not is_urgent and self._num_put_off < _MAX_PUT_OFF
            is_cut = self._shrink(num_blocks, saves_first=saves_first) > 0
            self.counters.num_pressure_cuts += is_cut
            self._num_put_off = 0 if is_cut or not num_blocks else self._num_put_off + 1

    def lowest_rank(self) -> Rank | None:
        """The rank of the request that `preempt_lowest` would preempt; None if there is none. A model's only running
        request is never preempted."""
        return self._scheduler.lowest_rank()

    def preempt_lowest(self) -> None:
        """Preempts that request."""
        self.counters.num_pressure_preemptions += self._scheduler.preempt_lowest()

    async def give_memory(self, num_bytes: int, timeout_s: float) -> int:
        """Frees up to `num_bytes` of idle blocks, including cached ones, waits until others can use them, and returns
        the number of bytes. For up to half of the time, prefixes that are worth it are saved on disk first."""
        wanted = -(-num_bytes // self._kv_memory.block_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                clock = asyncio.get_running_loop().time
                patient_until_s = clock() + _PATIENT_SHARE * timeout_s
                while num_blocks := min(wanted, self._num_idle_blocks):
                    num_cut = self._shrink(num_blocks, saves_first=clock() < patient_until_s)
                    if num_cut:
                        await self._kv_memory.given_back(self._num_cut)
                        return num_cut * self._kv_memory.block_bytes
                    is_changed = self._scheduler.blocks.is_changed  # else prefixes are being saved
                    await asyncio.sleep(_RETRY_S if is_changed else _SAVING_S)
        except TimeoutError:
            self._scheduler.shrink(0)  # saving for the cut is no longer urgent
        return 0

    def _shrink(self, num_blocks: int, *, saves_first: bool) -> int:
        num_cut = self._scheduler.shrink(num_blocks, saves_first=saves_first)
        self._num_cut += num_cut
        return num_cut

    @property
    def num_idle_bytes(self) -> int:
        """What `give_memory` could free."""
        return self._num_idle_blocks * self._kv_memory.block_bytes

    @property
    def _num_idle_blocks(self) -> int:
        """The blocks that can be freed without making the pool too small to use."""
        blocks = self._scheduler.blocks
        return max(0, min(blocks.num_free_blocks, blocks.num_blocks - MIN_BLOCKS * len(blocks.groups)))


class MemoryWatch:
    """Reads the memory once a second while there are models, and calls each model's guard with the level. At `PREEMPT`,
    the lowest-ranking request of all models is preempted. Event-loop thread only."""

    def __init__(self, read: Callable[[], MemoryReading]) -> None:
        self.level = PressureLevel.NONE
        self._read = read
        self._guards: list[MemoryGuard] = []
        self._sampling: asyncio.Task[None] | None = None

    def join(self, *guards: MemoryGuard) -> None:
        """Watches the pools of a model from now on."""
        self._guards += guards
        if self._sampling is None:
            self._sampling = asyncio.create_task(self._sample_forever(), name="memory")

    def leave(self, *guards: MemoryGuard) -> None:
        """Stops watching a model's pools. Does nothing if they are not watched."""
        self._guards = [guard for guard in self._guards if guard not in guards]
        if not self._guards and self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None

    def sample(self) -> None:
        """Reads the memory once and acts."""
        pressure = self._read().pressure
        level = self.level.after(pressure)
        if level is not self.level:
            self._enter(level, pressure)
        if level >= PressureLevel.PREEMPT:
            self._preempt_lowest()
        for guard in self._guards:
            guard.act(level)

    async def _sample_forever(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:  # without a watch, the machine could run out of memory
                logger.exception("The memory watch has failed; it tries again in %g s", _SAMPLE_S)
            await asyncio.sleep(_SAMPLE_S)

    def _enter(self, level: PressureLevel, pressure: float) -> None:
        severity = logging.WARNING if level > self.level else logging.INFO
        self.level = level
        logger.log(severity, "Memory is %.0f %% full; %s", 100 * pressure, _ACTIONS[level])

    def _preempt_lowest(self) -> None:
        ranked = [(rank, guard) for guard in self._guards if (rank := guard.lowest_rank()) is not None]
        if ranked:
            max(ranked, key=lambda pair: pair[0])[1].preempt_lowest()


_ACTIONS = {
    PressureLevel.NONE: "back to normal",
    PressureLevel.EVICT: "the KV pools free idle and cached blocks",
    PressureLevel.HOLD: "no new request starts",
    PressureLevel.PREEMPT: "requests of the lowest priority are preempted",
}
