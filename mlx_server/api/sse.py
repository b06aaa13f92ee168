"""Server-sent events: framing, and keep-alives on silent streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep="\n")


def data(body: Mapping[str, Any]) -> bytes:
    """An unnamed event with `body` as JSON."""
    return b"data: %b\n\n" % encode(body)


def named(event: str, body: Mapping[str, Any]) -> bytes:
    """An event with an `event:` line, which Anthropic's and the Responses protocol demand."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), encode(body))


def encode(body: Mapping[str, Any]) -> bytes:
    """Compact JSON in UTF-8. JSON leaves line ends inside strings escaped, so one line is one event."""
    return _ENCODER.encode(body).encode()


def whole_or_streamed(*fields: str) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document: what a generating route answers. `fields` are those of every whole answer."""
    whole = {"schema": {"type": "object", "required": fields}}
    return {
        200: {
            "description": "The answer; with `stream: true`, its events",
            "content": {"application/json": whole, "text/event-stream": {}},
        }
    }


class _EventStream(EventSourceResponse):
    """Calls `on_close` however the response ends: a generator that was never started cleans nothing up. Keep-alives are
    for silence: none is sent while an event is on its way or has just been sent, so none comes
    behind the last."""

    def __init__(
        self, events: AsyncIterator[bytes], on_close: Callable[[], None], keep_alive: ServerSentEvent, **options: Any
    ) -> None:
        super().__init__(events, ping_message_factory=lambda: keep_alive, **options)
        self._on_close = on_close
        self._keep_alive = keep_alive.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_sending, sent_s = 0, 0.0
        loop, pause_s = asyncio.get_running_loop(), min(1.0, self.ping_interval / 2)

        async def send_in_order(message: Message) -> None:
            """A keep-alive that waits for the client beside an event, or for its turn, might come behind the last."""
            nonlocal num_sending, sent_s
            is_keep_alive = message.get("body") == self._keep_alive
            if is_keep_alive and (num_sending or loop.time() - sent_s < pause_s):
                return
            num_sending += 1
            try:
                await send(message)
            finally:
                num_sending, sent_s = num_sending - 1, loop.time()

        try:
            await super().__call__(scope, receive, send_in_order)
        finally:
            self._on_close()


def event_stream(
    events: AsyncIterator[bytes],
    keep_alive_s: float,
    on_close: Callable[[], None],
    headers: Mapping[str, str] | None = None,
    keep_alive: ServerSentEvent = KEEP_ALIVE,
) -> Response:
    """Streams `events` until they or the client end; then `on_close` is called. A `keep_alive` every `keep_alive_s`
    keeps proxies and clients from giving up on a long prefill (0: never)."""
    return _EventStream(
        events,
        on_close,
        keep_alive,
        headers=headers,
        media_type="text/event-stream",
        ping=keep_alive_s,
        sep="\n",
    )
