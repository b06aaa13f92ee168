"""Makes room for a model to be loaded: which models are unloaded for it, and in which order requests wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable

from mlx_server.config import PoolConfig
from mlx_server.engine.memory.budget import MemoryBudget
from mlx_server.engine.memory.need import MemoryNeed
from mlx_server.errors import OverloadedError
from mlx_server.pool.pooled_model import PooledModel

_BUSY_RETRY_S = 5.0


class Changes:
    """Wakes tasks that wait for a change of the pool's models."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns at the next change, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes together with the event.
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


class UnwantedError(Exception):
    """Nobody waits for the model any more, so no room is made for it."""


class RoomMaker:
    """Makes room within the budget: cuts unused KV blocks, or else unloads idle models, least recently used first.

    Models in use are never unloaded for another. With `when_full = wait`, a model that has been ready for `residency_s`
    yields, and the one that was loaded earliest yields first: its open requests go on. When the last of them has ended,
    or one as long as its longest would not end before `room_timeout_s`, new requests for it wait until it has been
    unloaded and its turn to be loaded comes again. So every request is served, under any load on any number of models,
    unless one in use takes longer than that, or than those before it. Example: beside a stream with 42 s to go, a
    request for another model comes. Short requests for the first one are served in these 42 s as before, since the
    other model could not be loaded without them either.

    A model that fits without a model in use being unloaded does not wait for another that is making room
    (`make_at_once`). Models that yield stay reserved for the one they yield to, and models that were unloaded for it
    wait until it has its room: so no more loads can overtake it than there are models. Event-loop thread only;
    one call of `make` at a time.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        settings: PoolConfig,
        models: Callable[[], Iterable[PooledModel]],
        unload: Callable[[PooledModel], Awaitable[None]],
        changes: Changes,
        clock: Callable[[], float],
    ) -> None:
        self._budget = budget
        self._settings = settings
        self._models = models
        self._unload = unload
        self._changes = changes
        self._clock = clock
        self._gave_way: set[str] = set()

    async def make_at_once(self, model: PooledModel, need: MemoryNeed) -> bool:
        """Makes room without waiting for models in use. Returns whether `need` fits now. Raises `UnwantedError`."""
        while model.name not in self._gave_way and self._is_missing(model, need):
            if await self._cut_pools(need):
                continue
            idle = [model for model in self._idle() if not model.is_yielding]  # read again: a cut takes time
            if not idle or not self._is_enough(idle, need):
                return False
            await self._unload(min(idle, key=lambda model: model.last_used_s))
        return model.name not in self._gave_way

    async def make(self, model: PooledModel, need: MemoryNeed, deadline_s: float) -> None:
        """Returns when `need` fits, or when waiting cannot make it fit: the budget then says why. Raises
        `OverloadedError` when the models in use leave no room, at once or at `deadline_s`, and `UnwantedError`."""
        try:
            while self._is_missing(model, need) and self._can_fit_ever(need):
                if await self._cut_pools(need):
                    continue
                idle = self._idle()
                if idle and self._is_enough(idle, need):
                    oldest = min(idle, key=lambda model: model.last_used_s)
                    self._gave_way.add(oldest.name)
                    await self._unload(oldest)
                    continue
                if not self._in_use():
                    return
                now = self._clock()
                if self._settings.when_full == "fail" or now >= deadline_s:
                    raise OverloadedError(self._refusal(model.name, need), _BUSY_RETRY_S)
                await self._changes.wait(self._next_turn_s(now, deadline_s) - now)
        finally:
            self._gave_way.clear()
            for other in self._loaded():
                other.end_yield()
            self._changes.notify()

    def _is_missing(self, model: PooledModel, need: MemoryNeed) -> bool:
        if not model.is_wanted:
            raise UnwantedError
        return self._budget.missing_bytes(need) > 0

    async def _cut_pools(self, need: MemoryNeed) -> bool:
        """Cuts idle blocks if they are enough. Otherwise a model must be unloaded, and the others keep their cached
        prefixes. Returns whether memory was freed."""
        if sum(map(_idle_kv_bytes, self._loaded())) < self._budget.missing_bytes(need):
            return False
        given_bytes = 0
        for model in sorted(self._loaded(), key=lambda model: model.last_used_s):
            missing_bytes = self._budget.missing_bytes(need)
            if missing_bytes and model.is_ready and model.engine is not None:
                given_bytes += await model.engine.give_memory(missing_bytes)
        return given_bytes > 0

    def _is_enough(self, idle: Collection[PooledModel], need: MemoryNeed) -> bool:
        """Whether `need` fits once these models are unloaded and the idle blocks of the others are cut."""
        others = [model for model in self._loaded() if model not in idle]
        gain = sum(model.held_bytes for model in idle) + sum(map(_idle_kv_bytes, others))
        return gain >= self._budget.missing_bytes(need)

    def _loaded(self) -> list[PooledModel]:
        return [model for model in self._models() if model.is_loaded]

    def _idle(self) -> list[PooledModel]:
        return [model for model in self._loaded() if model.is_idle and not model.spec.is_pinned]

    def _in_use(self) -> list[PooledModel]:
        """Models in use that may become idle, including those that are loading."""
        holders = (model for model in self._models() if model.share is not None)
        return [model for model in holders if not model.spec.is_pinned and not model.is_idle]

    def _can_fit_ever(self, need: MemoryNeed) -> bool:
        pinned = [model for model in self._loaded() if model.spec.is_pinned]
        pinned_bytes = sum(model.held_bytes - _idle_kv_bytes(model) for model in pinned)
        return need.total_bytes + pinned_bytes <= self._budget.limit_bytes

    def _next_turn_s(self, now: float, deadline_s: float) -> float:
        """Makes a model yield once its time is over, if none yields yet. Returns when to check again."""
        in_use = [model for model in self._in_use() if model.is_ready]
        if not in_use or any(model.is_yielding for model in in_use):
            return deadline_s
        first = min(in_use, key=lambda model: model.ready_s)
        turn_s = first.ready_s + self._settings.residency_s
        if turn_s > now:
            return min(turn_s, deadline_s)
        first.begin_yield(now, deadline_s)
        return deadline_s

    def _refusal(self, name: str, need: MemoryNeed) -> str:
        holders = ", ".join(f"{model.name} ({model.held_bytes / 2**20:.0f} MiB)" for model in self._in_use())
        return (
            f"The model `{name}` needs {need.total_bytes / 2**20:.0f} MiB, {self._budget.free_bytes / 2**20:.0f} MiB "
            f"are free, and the models that hold the rest are in use: {holders}. Try again, or unload one."
        )


def _idle_kv_bytes(model: PooledModel) -> int:
    return model.engine.idle_kv_bytes if model.is_ready and model.engine is not None else 0
