"""Reads bodies that are not small: beside the event loop, one at a time, and within a bound of bytes for each caller.

Parsing holds the interpreter, on whatever thread it runs. Between two bodies the streams have their turn.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mlx_server.api.caller import Caller
from mlx_server.errors import QuotaExceededError

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Room for a prompt of several million tokens; far below what could hurt the host."""

MAX_HELD_BYTES = 8 * MAX_BODY_BYTES
"""Of the bodies of one key that have not been read yet; all keys of a tier together have twice as much."""

_RETRY_S = 1.0

T = TypeVar("T")


class HeldBody:
    """The bytes of one request's body, from when they come until it is read."""

    def __init__(self, held: Counter[str], caller: Caller) -> None:
        self._held = held
        self._bounds = (
            (f"key {caller.identity}", MAX_HELD_BYTES),
            (f"tier {caller.tier.name}", 2 * MAX_HELD_BYTES),
        )
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises `QuotaExceededError` when the caller sends too much at a time."""
        for owner, limit in self._bounds:
            if self._held[owner] + num_bytes > limit:
                raise QuotaExceededError(
                    f"{self._held[owner]} bytes of bodies from the {owner} are still to be read; at most {limit} may "
                    "wait. Send fewer large requests at a time.",
                    _RETRY_S,
                )
        for owner, _ in self._bounds:
            self._held[owner] += num_bytes
        self._num_bytes += num_bytes

    def release(self) -> None:
        """They are read, or dropped. Idempotent."""
        for owner, _ in self._bounds:
            self._held[owner] -= self._num_bytes
            if not self._held[owner]:
                del self._held[owner]
        self._num_bytes = 0


class BodyReader:
    """One server's. On the event loop's thread."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        self._is_reading = False
        self._num_waiting: Counter[str] = Counter()
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def hold(self, caller: Caller) -> HeldBody:
        """Counts what is about to come."""
        return HeldBody(self._held, caller)

    async def read(self, caller: Caller, work: Callable[[], T]) -> T:
        """Runs `work` in the thread when it is the caller's turn: by priority, then by how many bodies of the same
        caller wait already, so that many of one key do not keep others out."""
        await self._turn(caller)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            return await loop.run_in_executor(self._thread, work)
        finally:
            # Half of the time is the streams', however many bodies wait.
            loop.call_later(loop.time() - start_s, self._pass_on)

    async def _turn(self, caller: Caller) -> None:
        if not self._is_reading:
            self._is_reading = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rank = (caller.tier.priority, self._num_waiting[caller.identity], next(self._numbers))
        heapq.heappush(self._waiting, (*rank, turn))
        self._num_waiting[caller.identity] += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise
        finally:
            self._num_waiting[caller.identity] -= 1

    def _pass_on(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[-1]
            if not turn.done():
                return turn.set_result(None)
        self._is_reading = False
        return None
