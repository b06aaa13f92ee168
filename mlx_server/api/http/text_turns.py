"""The order in which requests have their text processed: bodies parsed, prompts rendered and tokenized, by tier and by
key in turn.

    body received -> TextTurn.begin() -> parsed, tokenized in a thread, submitted -> TextTurn.end()

Waiting requests cost the event loop nothing, so a burst of a thousand does not delay the streams of others.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import to_json

from mlx_server.engine.fair_slots import FairSlots, Requester, Slot, in_executor

T = TypeVar("T")

LARGE_BYTES = 256 * 1024
"""Larger bodies may take a tenth of a second to parse, which smaller ones, like those of agents, need not wait for."""

_PIECE = 64
"""Entries of a list that are encoded at once."""

_IDLE_S = 0.25
"""A turn ends by itself when its request waits this long for something else, like a model that is loading."""


class TextWorkers:
    """The threads that process text, and the order in which requests get them."""

    def __init__(self, max_num_waiting: int) -> None:
        """`max_num_waiting` is the limit of one key's requests that wait for their first turn."""
        num_threads = max(3, (os.cpu_count() or 1) // 2 + 1)
        self.slots = FairSlots(num_threads, max_num_waiting)
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._parser_slots = {is_large: FairSlots(1) for is_large in (False, True)}
        self._parser = ThreadPoolExecutor(2, thread_name_prefix="bodies")

    async def parse(self, requester: Requester, num_bytes: int, work: Callable[[], T]) -> T:
        """Runs `work` on so many bytes off the event loop, at the requester's turn. For work that holds the GIL: one of
        the large and one of the others at a time, with a pause as long as the work after each, in which streams go
        on."""
        slot = await self._parser_slots[num_bytes > LARGE_BYTES].acquire(requester)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        return await in_executor(self._parser, work, lambda: loop.call_later(loop.time() - start_s, slot.release))


class TextTurn:
    """The turn of one request, which may take several. Event-loop thread only."""

    def __init__(self, workers: TextWorkers, requester: Requester) -> None:
        self.requester = requester
        self._workers = workers
        self._slot: Slot | None = None
        self._had_slot = False
        self._is_working = False
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None

    async def begin(self) -> None:
        """Waits for the turn. Raises `QuotaExceededError` if it is the first turn and too many requests of the key are
        waiting."""
        self._is_over = False
        if self._slot is None:
            self._slot = await self._workers.slots.acquire(self.requester, is_later=self._had_slot)
            self._had_slot = True
            self._watch()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs `work` in a thread. If the caller is cancelled, the work goes on and holds its slot until it is done."""
        await self.begin()
        self._is_working = True
        context = contextvars.copy_context()
        return await in_executor(self._workers.threads, partial(context.run, work), self._on_done)

    def end(self) -> None:
        """Gives the slot back as soon as no work runs in it. Idempotent."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._slot is not None and not self._is_working:
            self._slot.release()
            self._slot = None

    def _on_done(self) -> None:
        self._is_working = False
        if self._is_over:
            self.end()
        else:
            self._watch()

    def _watch(self) -> None:
        if self._slot is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_IDLE_S, self._on_idle)

    def _on_idle(self) -> None:
        self._timer = None
        if not self._is_working:
            self.end()


def turn_of(request: Request) -> TextTurn:
    """The turn of a request to a `TurnRoute`."""
    turn: TextTurn = request.state.turn
    return turn


def encode_in_pieces(value: Any, nested: str | None = None) -> bytes:
    """Encodes JSON in UTF-8, with null for NaN and infinities, for `TextTurn.in_thread`. An encoder holds the GIL, and
    stalls all streams, until it is done; so each call of it gets a part of a list, or an entry's part where entries are
    large: those of the member `nested`, which may be an iterator. Any thread."""
    if isinstance(value, dict):
        parts = [
            (name, _encode_entries(part) if name == nested else encode_in_pieces(part)) for name, part in value.items()
        ]
        return b"{%b}" % b",".join([b"%b:%b" % (to_json(name), part) for name, part in parts])
    if isinstance(value, list):
        pieces = (value[start : start + _PIECE] for start in range(0, len(value), _PIECE))
        return b"[%b]" % b",".join([to_json(piece, inf_nan_mode="null")[1:-1] for piece in pieces])
    return to_json(value, inf_nan_mode="null")


def _encode_entries(entries: Iterable[Any]) -> bytes:
    return b"[%b]" % b",".join(map(encode_in_pieces, entries))
