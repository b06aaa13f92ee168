"""What models do as the machine runs short of memory: `KvMemory` says by how much one model's KV pool may grow,
`MemoryGuard` gives some of it back, and `MemoryWatch` tells the guards of all models when to."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.request_table import Rank
from mlx_server.engine.memory.budget import MemoryShare
from mlx_server.runtime.memory import MIN_BLOCKS, MemoryReading

logger = logging.getLogger(__name__)

_SAMPLE_S = 1.0
_RETRY_S = 0.005
_SAVING_S = 0.05
_PATIENT_SHARE = 0.5
"""Of the time that memory may take to be given, for how long cached prefixes may be saved on disk first."""

_MOST_PUT_OFF = 2
"""Samples at which a cut under pressure may wait for that."""

_HYSTERESIS = 0.03
"""A level is left only when the pressure is so much lower than where it began."""

_REFUSAL_S = 0.2
"""How long a refusal stands, unless the model has given memory back, before the system is asked again: a full pool asks
for every block."""

_ROOMY_BELOW = 0.8
"""Pressure to which a pool doubles and keeps what is cached: well under the one at which it gives that back."""

_NEEDED_BELOW = 0.89
"""Pressure to which it gets what a request needs: under the one at which nobody is admitted any more."""


class KvMemory:
    """Lets a pool of blocks grow within its model's share of the budget; a `BlockSupply`. Event-loop thread only."""

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
        """Returns when so many blocks have been given back in all."""
        while self._num_given_back < num_blocks:
            self._given_back.clear()
            await self._given_back.wait()


class PressureLevel(enum.IntEnum):
    """How short memory is; each level does what those before it do, too.

    EVICT    the pool gives half of its idle blocks back at each sample, cached ones included, and grows only by what
             requests need; for two samples at most, what is worth keeping on disk is saved first
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


class PoolPolicy(Protocol):
    """Who decides about a pool of blocks, as `ContinuousBatchingScheduler` does, whose docstrings hold."""

    @property
    def blocks(self) -> PagedBlockManager: ...

    def shrink(self, num_blocks: int, *, saves_first: bool = False) -> int: ...

    def hold_admission(self, is_held: bool) -> None: ...

    def lowest_rank(self) -> Rank | None: ...

    def preempt_lowest(self) -> bool: ...


class MemoryGuard:
    """One pool's part in what `MemoryWatch` does, between its steps. Event-loop thread only."""

    def __init__(self, scheduler: PoolPolicy, kv_memory: KvMemory) -> None:
        self.level = PressureLevel.NONE
        self.counters = GuardCounters()
        self._scheduler = scheduler
        self._kv_memory = kv_memory
        self._num_cut = 0
        self._num_put_off = 0

    def act(self, level: PressureLevel) -> None:
        """Does what `level` asks of every model."""
        self.counters.num_pressure_holds += level >= PressureLevel.HOLD > self.level
        self.level = level
        self._scheduler.hold_admission(level >= PressureLevel.HOLD)
        if level < PressureLevel.EVICT:
            if self._num_put_off:
                self._scheduler.shrink(0)  # nobody waits for what is being saved
            self._num_put_off = 0
        else:
            is_urgent = level >= PressureLevel.PREEMPT
            num_blocks = self._num_idle_blocks if is_urgent else -(-self._num_idle_blocks // 2)
            saves_first = not is_urgent and self._num_put_off < _MOST_PUT_OFF
            is_cut = self._shrink(num_blocks, saves_first=saves_first) > 0
            self.counters.num_pressure_cuts += is_cut
            self._num_put_off = 0 if is_cut or not num_blocks else self._num_put_off + 1

    def lowest_rank(self) -> Rank | None:
        """That of the request that `preempt_lowest` would make wait; None where there is none: a model's only running
        request goes on."""
        return self._scheduler.lowest_rank()

    def preempt_lowest(self) -> None:
        """Makes that request wait."""
        self.counters.num_pressure_preemptions += self._scheduler.preempt_lowest()

    async def give_memory(self, num_bytes: int, timeout_s: float) -> int:
        """Gives idle blocks back, cached ones included, up to that many bytes, and waits until they are free for
        others; how many bytes are. For half of the time at most, what is worth keeping on disk is saved first."""
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
                    is_changed = self._scheduler.blocks.is_changed  # already; else what would be lost is being saved
                    await asyncio.sleep(_RETRY_S if is_changed else _SAVING_S)
        except TimeoutError:
            self._scheduler.shrink(0)  # what is being saved for this cut need not be saved in a hurry any more
        return 0

    def _shrink(self, num_blocks: int, *, saves_first: bool) -> int:
        num_cut = self._scheduler.shrink(num_blocks, saves_first=saves_first)
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


class MemoryWatch:
    """Reads the memory once a second while there are models, and has each of them do what the level asks for; at
    `PREEMPT`, one request of one of them waits, whichever ranks lowest. Event-loop thread only."""

    def __init__(self, read: Callable[[], MemoryReading]) -> None:
        self.level = PressureLevel.NONE
        self._read = read
        self._guards: list[MemoryGuard] = []
        self._sampling: asyncio.Task[None] | None = None

    def join(self, *guards: MemoryGuard) -> None:
        """A model is loaded, and its pools are watched from now on."""
        self._guards += guards
        if self._sampling is None:
            self._sampling = asyncio.create_task(self._sample_forever(), name="memory")

    def leave(self, *guards: MemoryGuard) -> None:
        """A model goes. Does nothing for one that is not watched."""
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
            except Exception:  # of any kind: without a watch, the machine could run out of memory
                logger.exception("Acting on the memory has failed; trying again in %g s", _SAMPLE_S)
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
    PressureLevel.EVICT: "the KV pools give idle and cached blocks back",
    PressureLevel.HOLD: "no request starts beside those that run",
    PressureLevel.PREEMPT: "requests of the lowest priority wait",
}
