"""Server-sent events, and other lines that are streamed: framing, and keep-alives on silent streams."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from json.encoder import encode_basestring
from typing import Any, Protocol, cast

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
KEEP_ALIVE = ServerSentEvent(comment="keep-alive", sep="\n").encode()
EVENT_STREAM = "text/event-stream"
PIECE_WRITER = "piece_writer"
"""Where a request's state has the shortest way for a chunked body's bytes, a `PieceWriter`, if there is one: below the
middlewares, which look at an answer's head and end only."""

_BLANK = f"blank-{uuid.uuid4().hex}"
"""Stands for the text in a template; no client knows it."""


class PieceWriter(Protocol):
    """Takes a stream's pieces without waiting, as `asyncio.StreamWriter` does; `written_s` is when it got the last one,
    by `time.monotonic`, and `num_bytes` what all had."""

    num_bytes: int
    written_s: float

    @property
    def is_full(self) -> bool:
        """Whether the client takes too little, and `drain` is to be waited for before the next piece."""
        ...

    def write(self, piece: bytes) -> bool:
        """Sends a piece; whether there is room for more."""
        ...

    async def drain(self) -> None: ...


class _MessageWriter:
    """The long way, by one ASGI message a piece."""

    def __init__(self, send: Send) -> None:
        self.num_bytes = 0
        self.written_s = 0.0
        self._send = send
        self._held = b""

    @property
    def is_full(self) -> bool:
        return bool(self._held)

    def write(self, piece: bytes) -> bool:
        self._held += piece
        return False

    async def drain(self) -> None:
        if self._held:
            await self._send({"type": "http.response.body", "body": self._held, "more_body": True})
            self.num_bytes += len(self._held)
            self._held, self.written_s = b"", time.monotonic()


Tell = Callable[[PieceWriter], Awaitable[None]]
"""Writes a stream from its beginning to its end."""


def data(body: Mapping[str, Any]) -> bytes:
    """An unnamed event with `body` as JSON."""
    return b"data: %b\n\n" % encode(body)


def named(event: str, body: Mapping[str, Any]) -> bytes:
    """An event with an `event:` line, which Anthropic's and the Responses protocol demand."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), encode(body))


def encode(body: Mapping[str, Any]) -> bytes:
    """Compact JSON in UTF-8. JSON leaves line ends inside strings escaped, so one line is one event."""
    return _ENCODER.encode(body).encode()


class Template:
    """An event that comes again and again with another text: all that stays is encoded once.

    For example, of `lambda text: data({"delta": text, "logprobs": None})` the template keeps `data: {"delta":` and
    `,"logprobs":null}`, and `fill("Hi")` puts `"Hi"` between."""

    __slots__ = ("_parts",)

    def __init__(self, event: Callable[[str], bytes]) -> None:
        """`event(text)` is the event as it would be made without a template; all of the text is in it, or none."""
        self._parts = event(_BLANK).split(_ENCODER.encode(_BLANK).encode())

    def fill(self, text: str) -> bytes:
        """The event with that text."""
        return encode_basestring(text).encode().join(self._parts)


def whole_or_streamed(*fields: str, media_type: str = EVENT_STREAM) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document: what a generating route answers. `fields` are those of every whole answer."""
    whole = {"schema": {"type": "object", "required": fields}}
    return {
        200: {
            "description": "The answer; streamed, its events or lines",
            "content": {"application/json": whole, media_type: {}},
        }
    }


class _EventStream(EventSourceResponse):
    """sse-starlette's response, with its keep-alives and its eye on the client, but a way of our own for the events:
    theirs costs a task's turn, a timer, a lock and all middlewares for each.

    Calls `on_close` however the response ends. Keep-alives are for silence: none is sent while an event is on its way
    or has just been sent, so none comes behind the last."""

    def __init__(self, tell: Tell, on_close: Callable[[], None], keep_alive: bytes, **more: Any) -> None:
        super().__init__(iter(()), ping_message_factory=cast(Any, lambda: keep_alive), **more)  # bytes go as they are
        self._tell = tell
        self._on_close = on_close
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer: PieceWriter = scope.get("state", {}).get(PIECE_WRITER) or _MessageWriter(send)
        self._writer, pause_s = writer, min(1.0, self.ping_interval / 2)

        async def send_in_order(message: Message) -> None:
            """A keep-alive that waits for the client beside an event, or for its turn, might come behind the last."""
            is_keep_alive = message.get("body") == self._keep_alive
            if not (is_keep_alive and (writer.is_full or time.monotonic() - writer.written_s < pause_s)):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_order)
        finally:
            self._on_close()

    async def _stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._tell(self._writer)
        self.active = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def told_by(pieces: AsyncGenerator[bytes, None]) -> Tell:
    """What writes pieces that come seldom, by a task's turn for each."""

    async def tell(out: PieceWriter) -> None:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                out.write(piece)
                await out.drain()

    return tell


def event_stream(
    tell: Tell,
    keep_alive_s: float,
    on_close: Callable[[], None] = lambda: None,
    headers: Mapping[str, str] | None = None,
    keep_alive: bytes = KEEP_ALIVE,
    media_type: str = EVENT_STREAM,
) -> Response:
    """A stream that `tell` writes, until its end or the client's; then `on_close` is called. A `keep_alive` every
    `keep_alive_s` keeps proxies and clients from giving up on a long prefill (0: never)."""
    return _EventStream(
        tell,
        on_close,
        keep_alive,
        headers=headers,
        media_type=media_type,
        ping=keep_alive_s,
        sep="\n",
    )
