"""Where strangers' grammars are compiled: off the event loop, and apart from whatever else is done in threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from mlx_server.engine.background import in_daemon_thread
from mlx_server.engine.fair_slots import ANYONE, Asker, FairSlots, Slot
from mlx_server.engine.thread_time import own_clock
from mlx_server.errors import InvalidRequestError, OverloadedError

T = TypeVar("T")

_RETRY_S = 5.0

_STACK_BYTES = 256 * 2**20
"""Three times what `MAX_SOURCE_CHARS` of the deepest grammars take; at the end of its stack, native code ends the
process. It is address space: memory is taken as far as the recursion goes."""


_TOLERANCE_S = 0.01
"""Less of its time than this is not waited for."""


class GrammarThreads:
    """A few threads, so that hostile grammars leave the machine its cores and do not hold up the tokenizing of prompts.
    Better tiers come first, and the keys of a tier in turn. Event-loop thread only, but for the work itself.

    What a grammar costs is the processor time that its thread uses: that is the grammar's fault, and its client's to
    mend. How long the clock on the wall runs meanwhile is the machine's, and may be better soon.
    """

    def __init__(self, num_threads: int = 3, cpu_limit_s: float = 10.0, patience_s: float = 30.0) -> None:
        """`patience_s` bounds the wait for a thread, and again for the work."""
        self._cpu_limit_s = cpu_limit_s
        self._patience_s = patience_s
        self._slots = FairSlots(num_threads)

    async def run(self, work: Callable[[], T], param: str, asker: Asker = ANYONE) -> T:
        """What `work` returns or raises. Raises `InvalidRequestError` with the request's field if the work takes too
        much processor time, and `OverloadedError` if it got too little of it, or no thread was free in time. What is
        given up goes on, and keeps its thread until it is done."""
        try:
            async with asyncio.timeout(self._patience_s):
                slot = await self._slots.acquire(asker)
        except TimeoutError:
            raise OverloadedError(
                f"Other requests' grammars have been compiled for {self._patience_s:g} s; try again.", _RETRY_S
            ) from None
        timed = _Timed(work)
        working = asyncio.ensure_future(in_daemon_thread(timed, stack_bytes=_STACK_BYTES))
        working.add_done_callback(partial(_on_done, slot))
        await self._wait(working, timed, param)
        return working.result()

    async def _wait(self, working: asyncio.Future[T], timed: _Timed[T], param: str) -> None:
        deadline_s = time.monotonic() + self._patience_s
        while not working.done():
            cpu_left_s = self._cpu_limit_s - timed.cpu_s()
            time_left_s = deadline_s - time.monotonic()
            if cpu_left_s <= 0:
                raise InvalidRequestError(
                    f"{param} takes more than {self._cpu_limit_s:g} s of processor time to compile; make it simpler.",
                    param,
                )
            if time_left_s <= 0:
                raise OverloadedError(
                    f"{param} could not be compiled in {self._patience_s:g} s, of which the machine gave it "
                    f"{timed.cpu_s():.1f} s: it is busy with other things. Try again.",
                    _RETRY_S,
                )
            # A thread cannot use its time faster than time goes by.
            await asyncio.wait((working,), timeout=max(_TOLERANCE_S, min(cpu_left_s, time_left_s)))


class _Timed(Generic[T]):
    """Work whose processor time others can read."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._clock: Callable[[], float] = float

    def __call__(self) -> T:
        self._clock = own_clock()
        return self._work()

    def cpu_s(self) -> float:
        """So far; 0 before it has begun, and meaningless once it is done."""
        try:
            return self._clock()
        except OSError:  # it has just ended
            return 0.0


def _on_done(slot: Slot, working: asyncio.Future[T]) -> None:
    slot.release()
    if not working.cancelled():
        working.exception()  # nobody may be there to take it
