"""The parser of requests: h11's, with limits for the head and for bodies in chunks."""

from __future__ import annotations

import re
from typing import Any

import h11

MAX_HEAD_BYTES, MAX_HEADERS = 16 * 1024, 128
"""The most bytes and header fields of a request's head; of fields about ten times what clients and proxies send."""

MAX_SMALL_CHUNKS = 4096
"""The most chunks of a body whose chunks have less than 1 KiB on average."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
"""The end of a request's head, by h11's rule."""
_ORIGIN = re.compile(rb"(?i)\Ahttps?://[^/?]*/?")
"""What a proxy writes before the path (RFC 9112, 3.2.2)."""


class RequestParser(h11.Connection):
    """Refuses a body in many tiny chunks: each takes as much time as a large chunk. Reads whole URLs as paths.
    `refusal` is the reason for its last error, if that is a limit of its own."""

    refusal: str | None = None
    _num_chunks = 0
    _num_bytes = 0

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            object.__setattr__(event, "target", _ORIGIN.sub(b"/", event.target))
            self._num_chunks, self._num_bytes = 0, 0
        elif isinstance(event, h11.Data):
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_chunks > MAX_SMALL_CHUNKS + self._num_bytes // 1024:
                self.refusal = (
                    f"The body has more than {MAX_SMALL_CHUNKS} small chunks; send chunks of 1 KiB or more, or the "
                    "body's length."
                )
                raise h11.RemoteProtocolError(self.refusal)
        return event

    def excess_of_head(self) -> str | None:
        """The limit that the head that is being received exceeds, if any. The head may be incomplete."""
        if self.their_state is not h11.IDLE:
            return None
        received = self.trailing_data[0]
        end = _END_OF_HEAD.search(received)
        if (end.end() if end else len(received)) > MAX_HEAD_BYTES:
            return f"{MAX_HEAD_BYTES} bytes"
        num_headers = received.count(b"\n", 0, end.start()) if end else received.count(b"\n") - 1
        return f"{MAX_HEADERS} header fields" if num_headers > MAX_HEADERS else None
