"""The watch over the memory that all models of a process live in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from mlx_server.engine.memory_guard import MemoryGuard, PressureLevel
from mlx_server.runtime.memory import MemoryReading

logger = logging.getLogger(__name__)

_SAMPLE_S = 1.0


class MemoryWatch:
    """Reads the memory once a second while there are models, and has each of them do what the level asks for; at
    `PREEMPT`, one request of one of them waits, whichever ranks lowest. Event-loop thread only."""

    def __init__(self, read: Callable[[], MemoryReading]) -> None:
        self.level = PressureLevel.NONE
        self._read = read
        self._guards: list[MemoryGuard] = []
        self._sampling: asyncio.Task[None] | None = None

    def join(self, guard: MemoryGuard) -> None:
        """A model is loaded, and is watched from now on."""
        self._guards.append(guard)
        if self._sampling is None:
            self._sampling = asyncio.create_task(self._sample_on(), name="memory")

    def leave(self, guard: MemoryGuard) -> None:
        """A model goes. Does nothing for one that is not watched."""
        if guard in self._guards:
            self._guards.remove(guard)
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

    async def _sample_on(self) -> None:
        while True:
            try:
                self.sample()
            except Exception:  # whatever it was, a machine without a watch is worse
                logger.exception("The memory was not looked after; trying again in %g s", _SAMPLE_S)
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
