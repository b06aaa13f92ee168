"""Responses in the background: they go on without their client, which asks for them or reads their events later.

Everything runs on the event loop's thread. Runs end with the server's drain: each holds its model until then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from mlx_server.api.http import sse
from mlx_server.errors import InvalidRequestError, QuotaExceededError

if TYPE_CHECKING:
    from mlx_server.api.answers.generation import Plan
    from mlx_server.api.openai.exchange import Exchange
    from mlx_server.api.openai.responses.output import ResponseWriter

MAX_EVENT_BYTES = 16 * 2**20
"""Of one response's events; the first ones are dropped. The opening repeats up to 8 MiB of the request, the end 4."""

MAX_RUNNING_BYTES = 256 * 2**20
"""At which no more begin: of the responses in progress with their events, for all keys."""

MAX_ENDED = 8
"""A key's responses whose events can still be read after their end."""

MAX_ENDED_BYTES = 64 * 2**20
"""Of the events of all keys' responses that have ended."""

_RETRY_S = 5.0

_AT_ONCE = 64
"""Events that are written to a client at a time, so that one that reads slowly takes little memory."""

_END = b"\n\n"
"""Of an event."""


class BackgroundRun:
    """The events of one response, a `PieceWriter` for what generates it. Any number of clients may read them at a
    time. Unless it `keeps_events`, nobody does."""

    written_s = 0.0
    is_full = False

    def __init__(self, owner: str, num_held: int, *, keeps_events: bool) -> None:
        """`num_held` are the bytes of the response beside its events."""
        self.owner = owner
        self.num_held = num_held
        self.num_bytes = 0
        self.is_over = False
        self.keeps_events = keeps_events
        self._events: list[bytes] = []
        self._num_dropped = 0
        self._news = asyncio.Event()

    def write(self, piece: bytes) -> bool:
        if not self.keeps_events:
            return True
        self._events += [event + _END for event in piece.split(_END)[:-1]]
        self.num_bytes += len(piece)
        while self.num_bytes > MAX_EVENT_BYTES:
            self.num_bytes -= len(self._events.pop(0))
            self._num_dropped += 1
        self._tell()
        return True

    async def drain(self) -> None:
        """Clients do not hold it up."""

    def end(self) -> None:
        self.is_over = True
        self._tell()

    def events(self, start: int, keep_alive_s: float) -> sse.EventStream:
        """The events from number `start` on, until the last. Raises `InvalidRequestError` for dropped ones."""
        if start < self._num_dropped:
            raise InvalidRequestError(
                f"The events before number {self._num_dropped} are no longer kept; {MAX_EVENT_BYTES} bytes are. Set "
                f"starting_after to {self._num_dropped - 1} or more, or leave stream out.",
                "starting_after",
            )
        return sse.EventStream(partial(self._write, start), keep_alive_s)

    async def _write(self, start: int, out: sse.PieceWriter) -> None:
        """A client that reads too slowly is cut off when its next event is dropped."""
        while start >= self._num_dropped:
            news, first = self._news, start - self._num_dropped
            events = self._events[first : first + _AT_ONCE]
            if events:
                out.write(b"".join(events))
                await out.drain()
                await asyncio.sleep(0)
                start += len(events)
            elif self.is_over:
                return
            else:
                await news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class BackgroundRuns:
    """Those of one server, by response id."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, BackgroundRun] = {}
        self._ended: dict[str, BackgroundRun] = {}

    async def start(self, exchange: Exchange, plan: Plan, writer: ResponseWriter) -> BackgroundRun:
        """Raises the `ServeError` that refuses the request. Events can be read later if its `stream` is true."""
        response_id = writer.response_id
        run = BackgroundRun(exchange.caller.identity, writer.num_bytes, keeps_events=bool(exchange.body.stream))
        self._check_room(run)
        write = await exchange.begin_alone(plan, writer)
        self._running[response_id] = run
        task = self._tasks[response_id] = asyncio.create_task(write(run))
        task.add_done_callback(lambda _: self._on_end(response_id))
        return run

    def is_running(self, response_id: str) -> bool:
        return response_id in self._running

    def find(self, response_id: str) -> BackgroundRun:
        """Raises `InvalidRequestError` for a response whose events are not kept."""
        run = self._running.get(response_id) or self._ended.get(response_id)
        if run is None or not run.keeps_events:
            raise InvalidRequestError(
                "Only responses with background: true and stream: true can be streamed again, while they are in "
                f"progress, and the last {MAX_ENDED} that have ended. Leave stream out.",
                "stream",
            )
        return run

    def _check_room(self, run: BackgroundRun) -> None:
        """Raises `QuotaExceededError` if there is no room for one more. A key that stays within an equal share is never
        refused."""
        held = Counter({run.owner: run.num_held})
        for other in self._running.values():
            held[other.owner] += other.num_held + other.num_bytes
        if held.total() > MAX_RUNNING_BYTES < held[run.owner] * len(held):
            raise QuotaExceededError(
                f"This key's responses in the background would hold {held[run.owner]} bytes, and those of all keys "
                f"{held.total()}; there is room for {MAX_RUNNING_BYTES}. Wait for one to end.",
                _RETRY_S,
            )

    def _on_end(self, response_id: str) -> None:
        del self._tasks[response_id]
        run = self._running.pop(response_id)
        run.end()
        if run.keeps_events:
            self._ended[response_id] = run
        self._forget_ended(run.owner)

    def _forget_ended(self, owner: str) -> None:
        """Drops the first ended ones: of the `owner`, who has one more, and then of whoever has most bytes."""
        while sum(run.owner == owner for run in self._ended.values()) > MAX_ENDED:
            self._drop_first(owner)
        while sum(run.num_bytes for run in self._ended.values()) > MAX_ENDED_BYTES:
            held = Counter[str]()
            for run in self._ended.values():
                held[run.owner] += run.num_bytes
            self._drop_first(held.most_common(1)[0][0])

    def _drop_first(self, owner: str) -> None:
        del self._ended[next(response_id for response_id, run in self._ended.items() if run.owner == owner)]
