"""Where strangers' grammars are compiled: off the event loop, and apart from whatever else is done in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from mlx_server.engine.background import in_daemon_thread
from mlx_server.errors import InvalidRequestError, OverloadedError

T = TypeVar("T")

_STACK_BYTES = 256 * 2**20
"""Three times what `MAX_SOURCE_CHARS` of the deepest grammars take; at the end of its stack, native code ends the
process. It is address space: memory is taken as far as the recursion goes."""


class GrammarThreads:
    """A few threads, so that hostile grammars leave the machine its cores and do not hold up the tokenizing of prompts.
    Event-loop thread only, but for the work itself."""

    def __init__(self, num_threads: int = 2, timeout_s: float = 10.0) -> None:
        """`timeout_s` bounds the wait for a thread, and then the work."""
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(num_threads)

    async def run(self, work: Callable[[], T], param: str) -> T:
        """What `work` returns or raises. Raises `OverloadedError` if no thread is free in time, and
        `InvalidRequestError` with the request's field if the work takes too long; it goes on then, and keeps its
        thread until it is done."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise OverloadedError(
                f"Other requests' grammars have been compiled for {self._timeout_s:g} s; try again."
            ) from None
        working = asyncio.ensure_future(in_daemon_thread(work, stack_bytes=_STACK_BYTES))
        working.add_done_callback(self._on_done)
        done, _ = await asyncio.wait((working,), timeout=self._timeout_s)
        if not done:
            raise InvalidRequestError(
                f"{param} takes longer than {self._timeout_s:g} s to compile; make it simpler.", param
            )
        return working.result()

    def _on_done(self, working: asyncio.Future[T]) -> None:
        self._free.release()
        if not working.cancelled():
            working.exception()  # nobody may be there to take it
