"""Slots that work is done in, given to better tiers first and to the keys of a tier in turn."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from mlx_server.errors import QuotaExceededError
from mlx_server.request import Priority

_SHARE = 8
"""Of so many slots that are given while a worse tier waits, it gets one."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Whose work it is. Keys of one priority take turns."""

    key: str = ""
    priority: Priority = Priority.NORMAL


ANYONE = Asker()


class Slot:
    """A slot that was given. `release` it on every path."""

    def __init__(self, slots: FairSlots, priority: Priority) -> None:
        self._slots: FairSlots | None = slots
        self._priority = priority

    def release(self) -> None:
        """Gives the slot to whoever is next. Idempotent."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.take_back(self._priority)


class FairSlots:
    """A bounded number of slots. Event-loop thread only.

    One slot is out of reach of normal priority and worse, and two of low priority, as far as there are so many, so
    that work which cannot be interrupted never holds all of them against a better tier. Beside that a better tier is
    first, but for a share.
    """

    def __init__(self, num_slots: int, max_num_waiting: int | None = None) -> None:
        """`max_num_waiting` bounds the new work of one key that waits; None is no bound."""
        self.num_slots = num_slots
        self.max_num_waiting = max_num_waiting
        self._held: Counter[Priority] = Counter()
        self._waiting: dict[Priority, OrderedDict[str, deque[asyncio.Future[Slot]]]] = {
            priority: OrderedDict() for priority in Priority
        }
        self._num_passed: Counter[Priority] = Counter()

    @property
    def num_held(self) -> int:
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for keys in self._waiting.values() for queue in keys.values())

    def try_acquire(self, asker: Asker) -> Slot | None:
        """A slot, if one is free and nobody of this priority waits for it."""
        if self._waiting[asker.priority] or not self._has_room(asker.priority):
            return None
        return self._give(asker.priority)

    async def acquire(self, asker: Asker, *, is_later: bool = False) -> Slot:
        """Waits for a slot. Raises `QuotaExceededError` if too much of the key's work waits already, unless this
        `is_later` work of one that had a slot before: what was done for it would be lost."""
        slot = self.try_acquire(asker)
        if slot is not None:
            return slot
        queue = self._waiting[asker.priority].setdefault(asker.key, deque())
        if not is_later and self.max_num_waiting is not None and len(queue) >= self.max_num_waiting:
            raise QuotaExceededError(
                f"{len(queue)} requests of this key wait to be read; the limit is {self.max_num_waiting}. "
                "Send fewer at a time."
            )
        coming: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        queue.append(coming)
        try:
            return await coming
        except asyncio.CancelledError:
            if coming.done() and not coming.cancelled():
                coming.result().release()
            else:
                self._forget(asker, coming)
            raise

    def take_back(self, priority: Priority) -> None:
        """For `Slot.release`."""
        self._held[priority] -= 1
        while (following := self._next_priority()) is not None:
            keys = self._waiting[following]
            key, queue = next(iter(keys.items()))
            coming = queue.popleft()
            if queue:
                keys.move_to_end(key)
            else:
                del keys[key]
            if not coming.done():
                coming.set_result(self._give(following))

    def _give(self, priority: Priority) -> Slot:
        self._held[priority] += 1
        return Slot(self, priority)

    def _has_room(self, priority: Priority) -> bool:
        num_held = sum(self._held[other] for other in Priority if other >= priority)
        return num_held < max(1, self.num_slots - priority) and self.num_held < self.num_slots

    def _next_priority(self) -> Priority | None:
        """Who gets the next slot: the best who wait, or the worst who have been passed over often enough."""
        able = [priority for priority in Priority if self._waiting[priority] and self._has_room(priority)]
        if not able:
            return None
        due = [priority for priority in able if self._num_passed[priority] >= _SHARE - 1]
        chosen = max(due) if due else able[0]
        self._num_passed[chosen] = 0
        self._num_passed.update(priority for priority in able if priority > chosen)
        return chosen

    def _forget(self, asker: Asker, coming: asyncio.Future[Slot]) -> None:
        keys = self._waiting[asker.priority]
        queue = keys.get(asker.key)
        if queue is not None and coming in queue:
            queue.remove(coming)
            if not queue:
                del keys[asker.key]
