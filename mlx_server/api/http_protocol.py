"""HTTP connections that hold the event loop for a moment only, however the bytes of a request are cut up."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADERS = 128
"""Header fields of a request; those that clients and proxies send are a tenth."""

MAX_SMALL_CHUNKS = 4096
"""Chunks of a body whose chunks have less than a kibibyte on average."""

READ_BYTES = 8 * 1024
"""What is read and parsed at a time: other connections have their turn between."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
"""As h11 sees it."""


class _Connection(h11.Connection):
    """Refuses a body in crumbs: each costs as much as a large chunk."""

    _num_chunks = 0
    _num_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks, self._num_bytes = 0, 0
        elif isinstance(event, h11.Data):
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_chunks > MAX_SMALL_CHUNKS + self._num_bytes // 1024:
                raise h11.RemoteProtocolError(f"more than {MAX_SMALL_CHUNKS} small chunks")
        return event


class BoundedReading(H11Protocol):
    """uvicorn's protocol with these bounds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        most = self.config.h11_max_incomplete_event_size
        assert most is not None
        self.conn = _Connection(h11.SERVER, most)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own, of the bytes that it reads at a time
            transport.max_size = READ_BYTES
        elif hasattr(transport, "_ssl_protocol"):  # reads into a buffer that was made before this is called
            tls = transport._ssl_protocol
            tls.max_size = READ_BYTES
            tls._ssl_buffer = bytearray(READ_BYTES)
            tls._ssl_buffer_view = memoryview(tls._ssl_buffer)

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE and _num_headers(self.conn.trailing_data[0]) > MAX_HEADERS:
            self.send_400_response(f"The request has more than {MAX_HEADERS} header fields.")
        else:
            super().handle_events()


def _num_headers(received: bytes) -> int:
    """Of the head at the beginning; its first line is none."""
    end = _END_OF_HEAD.search(received)
    return received.count(b"\n", 0, end.start()) if end else received.count(b"\n") - 1
