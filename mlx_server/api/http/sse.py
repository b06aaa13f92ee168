"""Server-sent events and other streamed lines: their framing, and keep-alives on silent streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from json.encoder import encode_basestring
from typing import Any, Protocol, cast

from pydantic_core import to_json
from sse_starlette import EventSourceResponse
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in "\x85\u2028\u2029"}
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_STREAM = "text/event-stream"
PIECE_WRITER = "piece_writer"
"""The key of a request's state for its `PieceWriter`, if it has one. That writes a chunked body's bytes directly to the
connection, past the middlewares, which use only the head and the end of a response."""

_BLANK = f"blank-{uuid.uuid4().hex}"
"""Marks the place of the text in a template. It is random, so that no client can send it."""


class PieceWriter(Protocol):
    """Writes the pieces of a stream without waiting, like `asyncio.StreamWriter`. `written_s` is the time of the last
    write by `time.monotonic`, `num_bytes` the size of all pieces so far."""

    num_bytes: int
    written_s: float

    @property
    def is_full(self) -> bool:
        """Whether the client reads too slowly: await `drain` before the next piece."""
        ...

    def write(self, piece: bytes) -> bool:
        """Sends a piece. Returns whether there is room for more."""
        ...

    async def drain(self) -> None: ...


class _MessageWriter:
    """Sends each piece as an ASGI message, for requests without a `PIECE_WRITER`."""

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


WriteStream = Callable[[PieceWriter], Awaitable[None]]
"""Writes a stream from its beginning to its end."""


def data(body: Mapping[str, Any]) -> bytes:
    """An unnamed event with `body` as JSON."""
    return b"data: %b\n\n" % encode(body)


def named(event: str, body: Mapping[str, Any]) -> bytes:
    """An event with an `event:` line, which Anthropic's protocol and the Responses API require."""
    return named_json(event, to_json(body, inf_nan_mode="null"))


def named_json(event: str, encoded: bytes) -> bytes:
    """The same for a body that is JSON already."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), _one_line(encoded))


def encode(body: Mapping[str, Any]) -> bytes:
    """Encodes compact JSON in UTF-8, as one line."""
    return _one_line(to_json(body, inf_nan_mode="null"))


def _one_line(encoded: bytes) -> bytes:
    """JSON, which escapes the other ends of lines, as one line for Python's clients, too: httpx ends lines where
    Unicode does."""
    if not encoded.isascii():
        for end, escaped in _LINE_ENDS.items():
            encoded = encoded.replace(end, escaped)
    return encoded


class Template:
    """An event that is sent many times with different texts: everything but the text is encoded once.

    For example, of `lambda text: data({"delta": text, "logprobs": None})` the template keeps `data: {"delta":` and
    `,"logprobs":null}`, and `fill("Hi")` puts `"Hi"` between them.
    """

    __slots__ = ("_parts",)

    def __init__(self, event: Callable[[str], bytes]) -> None:
        """`event(text)` makes the event without a template. All of the text must be in it, or none of it."""
        self._parts = event(_BLANK).split(to_json(_BLANK))

    def fill(self, text: str) -> bytes:
        return _one_line(encode_basestring(text).encode()).join(self._parts)


def openapi_responses(*fields: str, media_type: str = EVENT_STREAM) -> dict[int | str, dict[str, Any]]:
    """The responses of a generating route, for the OpenAPI document. `fields` are required in every answer that is not
    streamed."""
    full = {"schema": {"type": "object", "required": fields}}
    return {
        200: {
            "description": "The answer; streamed, its events or lines",
            "content": {"application/json": full, media_type: {}},
        }
    }


class EventStream(EventSourceResponse):
    """A response that `write_stream` writes, until it returns or the client disconnects; then `on_close` is called,
    however it ends. Without events, a `keep_alive` is sent every `keep_alive_s` seconds (0: never), so that proxies and
    clients do not give up during a long prefill. It is not sent while an event is being sent or was just sent, so none
    follows the last event.

    Keep-alives and disconnects are sse-starlette's. Events bypass its iterator, which would cost a task switch, a
    timer, a lock and all middlewares for each of them: `write_stream` writes them to a `PieceWriter`.
    """

    def __init__(
        self,
        write_stream: WriteStream,
        keep_alive_s: float,
        on_close: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
        keep_alive: bytes = KEEP_ALIVE,
        media_type: str = EVENT_STREAM,
    ) -> None:
        as_it_is = cast(Any, lambda: keep_alive)  # bytes are not encoded again
        super().__init__(iter(()), 200, headers, media_type, ping=keep_alive_s, ping_message_factory=as_it_is)
        self._write_stream = write_stream
        self._on_close = on_close
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer: PieceWriter = scope.get("state", {}).get(PIECE_WRITER) or _MessageWriter(send)
        self._writer, pause_s = writer, min(1.0, self.ping_interval / 2)

        async def send_in_order(message: Message) -> None:
            """Drops a keep-alive that would wait for the client together with an event, and might be sent after the
            last event."""
            is_keep_alive = message.get("body") == self._keep_alive
            if not (is_keep_alive and (writer.is_full or time.monotonic() - writer.written_s < pause_s)):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_order)
        finally:
            self._on_close()

    async def _stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self._write_stream(self._writer)
        self.active = False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
