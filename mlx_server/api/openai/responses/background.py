"""Responses in the background: they go on without their client, which asks for them or reads their events later.

Everything runs on the event loop's thread. Runs end with the server's drain: each holds its model until then.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from mlx_server.api.http import sse
from mlx_server.errors import InvalidRequestError

if TYPE_CHECKING:
    from mlx_server.api.answers.generation import Plan
    from mlx_server.api.openai.exchange import Exchange, Writer

MAX_EVENT_BYTES = 16 * 2**20
"""Of one response's events; the first ones are dropped. The opening repeats up to 8 MiB of the request, the end 4."""

MAX_ENDED = 8
"""Responses whose events can still be read after their end."""

_END = b"\n\n"
"""Of an event."""


class BackgroundRun:
    """The events of one response, a `PieceWriter` for what generates it. Any number of clients may read them at a
    time."""

    written_s = 0.0
    is_full = False

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_over = False
        self._events: list[bytes] = []
        self._num_dropped = 0
        self._news = asyncio.Event()

    def write(self, piece: bytes) -> bool:
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
            news, events = self._news, self._events[start - self._num_dropped :]
            if events:
                out.write(b"".join(events))
                await out.drain()
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
        self._runs: dict[str, BackgroundRun] = {}

    async def start(self, exchange: Exchange, plan: Plan, writer: Writer) -> BackgroundRun:
        """Raises the `ServeError` that refuses the request. Events can be read later if its `stream` is true."""
        run = BackgroundRun()
        write = await exchange.begin_alone(plan, writer)
        task = self._tasks[writer.response_id] = asyncio.create_task(write(run))
        if exchange.body.stream:
            self._runs[writer.response_id] = run

        def end(_: asyncio.Task[None]) -> None:
            del self._tasks[writer.response_id]
            run.end()
            ended = [response_id for response_id, known in self._runs.items() if known.is_over]
            for response_id in ended[:-MAX_ENDED]:
                del self._runs[response_id]

        task.add_done_callback(end)
        return run

    def is_running(self, response_id: str) -> bool:
        return response_id in self._tasks

    def find(self, response_id: str) -> BackgroundRun:
        """Raises `InvalidRequestError` for a response whose events are not kept."""
        if response_id not in self._runs:
            raise InvalidRequestError(
                "Only responses with background: true and stream: true can be streamed again, while they are in "
                f"progress, and the last {MAX_ENDED} that have ended. Leave stream out.",
                "stream",
            )
        return self._runs[response_id]
