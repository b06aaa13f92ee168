"""HTTP connections that can be given up: slow clients', who never finish a request or take no answer, and silent ones
when there are too many."""

from __future__ import annotations

import asyncio
from typing import Any

import h11

from mlx_server.api.connections import ConnectionGate
from mlx_server.api.http_protocol import BoundedReading

MIN_BYTES_PER_S = 4096
"""A request may take longer than the timeout for as long as its bytes come this fast."""


def bounded_protocol(timeout_s: float, gate: ConnectionGate) -> type[BoundedReading]:
    """uvicorn's protocol, whose connections pass `gate`, with an end to waiting; 0 waits for ever."""
    if timeout_s == 0:
        return type("GatedProtocol", (_GatedProtocol,), {"gate": gate})
    return type("BoundedProtocol", (_BoundedProtocol,), {"gate": gate, "timeout_s": timeout_s})


class _GatedProtocol(BoundedReading):
    """Tells its gate whose turn it is."""

    gate: ConnectionGate

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.gate.enter(self):
            self.app = self.gate.guarded(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gate.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._tell_gate()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._tell_gate()

    def abort(self) -> None:
        self.transport.abort()

    def _tell_gate(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.flow.read_paused:
            self.gate.wait_for(self)
        else:
            self.gate.work_for(self)


class _BoundedProtocol(_GatedProtocol):
    """Closes its connection when a client that owes the rest of a request (or a first one) is late, or has not taken
    what was written for `timeout_s`."""

    timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._request_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._owed_since_s = 0.0
        self._num_bytes = 0
        self._last_byte_s = 0.0
        self._has_asked = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        self._last_byte_s = self.loop.time()
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_request(self) -> None:
        """Starts the clock when the client begins to owe us bytes, and stops it when it does no longer."""
        if self._owes_bytes():
            if self._request_timer is None:
                self._owed_since_s, self._num_bytes = self.loop.time(), 0
                self._request_timer = self.loop.call_later(self.timeout_s, self._on_late)
        elif self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _owes_bytes(self) -> bool:
        state = self.conn.their_state
        self._has_asked = self._has_asked or state is not h11.IDLE
        # Between requests the keep-alive timeout counts; half a request's head lies in the parser's buffer.
        return state is h11.SEND_BODY or (
            state is h11.IDLE and not (self._has_asked and not self.conn.trailing_data[0])
        )

    def _on_late(self) -> None:
        deadline_s = self._owed_since_s + self.timeout_s + self._num_bytes / MIN_BYTES_PER_S
        if self._num_bytes:  # who has sent much may not be silent for the longer
            deadline_s = min(deadline_s, self._last_byte_s + self.timeout_s)
        if self.flow.read_paused:  # it is we who do not read
            deadline_s = self.loop.time() + self.timeout_s
        if self.loop.time() < deadline_s:
            self._request_timer = self.loop.call_at(deadline_s, self._on_late)
        else:
            self._request_timer = None
            self.transport.close()
