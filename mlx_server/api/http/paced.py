"""Answers that take long to compute on the event loop's thread, so that polling them cannot slow down streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mlx_server.engine.fair_slots import shielded

_PAUSE = 19
"""Pauses between two computations, in times that the last one took: computing takes a twentieth of the time at most."""
_MAX_PAUSE_S = 5.0
"""After a computation that a busy machine has held up: scrapers give up after 10 s."""


class Paced:
    """Computes an answer for all who wait for it at once, and pauses before it computes the next. No answer is older
    than its request. Event-loop thread only."""

    def __init__(self) -> None:
        self._next: asyncio.Task[bytes] | None = None
        self._rested_s = 0.0

    async def answer(self, compute: Callable[[], bytes]) -> bytes:
        """What `compute` returns, called now or after the pause by whoever asked first. Raises what it raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._compute(compute))
        return await shielded(self._next)

    async def _compute(self, compute: Callable[[], bytes]) -> bytes:
        await asyncio.sleep(self._rested_s - time.monotonic())
        self._next = None  # who asks from now on may need what happens from now on
        began_s = time.monotonic()
        try:
            return compute()
        finally:
            ended_s = time.monotonic()
            self._rested_s = ended_s + min(_PAUSE * (ended_s - began_s), _MAX_PAUSE_S)
