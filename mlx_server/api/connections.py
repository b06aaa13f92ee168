"""How many connections there may be, and which go first when there are too many.

A connection that waits for its client is closed for one that is needed, the most silent first. A request that finds
all connections busy is refused, unless it is a probe. File descriptors for both are kept back, and if the process
runs out of them all the same, who connects is sent away at once instead of being left to wait.

HTTP connections that hold the event loop for a moment only, however the bytes of a request are cut up.

HTTP connections that can be given up: slow clients', who never finish a request or take no answer, and silent ones
when there are too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import re
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_server.api.auth.authentication import FREE_PATHS
from mlx_server.api.errors import error_info
from mlx_server.api.middleware import RequestIdMiddleware
from mlx_server.errors import OverloadedError

logger = logging.getLogger(__name__)

_WANTED_FILES = 10_240
"""What the process asks for; macOS grants no more where its hard limit is none."""

_MOST_KEPT_FILES = 256
_USUAL_KEPT_FILES = 128
"""For weights, logs, the key file, probes, and connections that are about to be closed: a quarter, between the two, and
at most half."""

_NUM_EXTRA = 32
"""Connections above the limit, for probes and for refusals."""

_SILENT_S = 1.0
"""Who has just connected gets so much time to ask, unless the extra connections are used up, too."""

_MOST_AT_ONCE = 16
"""Connections accepted in one turn of the event loop, so that others can be closed meanwhile."""

_RETRY_S = 5.0
_LOG_EVERY_S = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def room_for_connections() -> int:
    """How many connections the limit of open files allows, which is raised first as far as may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            logger.debug("The limit of open files stays at %d", soft)
        else:
            soft = wanted
    num_files = _WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    kept = min(max(num_files // 4, _USUAL_KEPT_FILES), _MOST_KEPT_FILES, num_files // 2)
    return max(1, num_files - kept)


class Connection(Protocol):
    """What the gate knows of one."""

    def abort(self) -> None:
        """Closes it at once."""


class ConnectionGate:
    """The connections of one server. Event-loop thread only."""

    def __init__(self, max_num: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_num = max_num
        self._clock = clock
        self._open: set[Connection] = set()
        self._silent: OrderedDict[Connection, float] = OrderedDict()  # since when, the longest first
        self._num_refused = 0
        self._told_s = -math.inf

    def enter(self, connection: Connection) -> bool:
        """A new connection, for which a silent one may have to go. Whether it is one too many all the same."""
        self._open.add(connection)
        num_extra = len(self._open) - self.max_num
        is_extra = num_extra > 0 and not self._make_room(_SILENT_S if num_extra <= _NUM_EXTRA else 0.0)
        self.wait_for(connection)
        if is_extra and num_extra > _NUM_EXTRA:
            self._close(connection)
        return is_extra

    def leave(self, connection: Connection) -> None:
        """It is closed, whoever closed it."""
        self._open.discard(connection)
        self._silent.pop(connection, None)

    def wait_for(self, connection: Connection) -> None:
        """It is the client's turn from now on."""
        self._silent[connection] = self._clock()
        self._silent.move_to_end(connection)

    def work_for(self, connection: Connection) -> None:
        """It is the server's turn."""
        self._silent.pop(connection, None)

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """`app` for a connection that was one too many: it answers if it still is."""

        async def guarded_app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] in FREE_PATHS:
                return await app(scope, receive, send)
            if len(self._open) - len(self._silent) <= self.max_num:
                if len(self._open) > self.max_num:
                    self._make_room(0.0)
                return await app(scope, receive, send)
            return await refuse(scope, receive, send)

        refuse = RequestIdMiddleware(self._refuse)
        return guarded_app

    def shed(self) -> None:
        """The process had no file descriptor for a connection, which was sent away."""
        self._make_room(_SILENT_S)
        self._count_refusal()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._count_refusal()
        error = OverloadedError(
            f"{self.max_num} connections are open and busy, which is the limit (--max-connections). Try again later.",
            _RETRY_S,
        )
        response = error_info(error).response(scope["path"])
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    def _make_room(self, silent_s: float) -> bool:
        """Closes the connection that has been silent for the longest, if it is for `silent_s`."""
        connection, since_s = next(iter(self._silent.items()), (None, 0.0))
        if connection is None or self._clock() - since_s < silent_s:
            return False
        self._close(connection)
        return True

    def _close(self, connection: Connection) -> None:
        self.leave(connection)
        self._count_refusal()
        connection.abort()

    def _count_refusal(self) -> None:
        self._num_refused += 1
        now = self._clock()
        if now - self._told_s >= _LOG_EVERY_S:
            logger.warning(
                "%d connections closed or refused: more come than the %d there may be (--max-connections)",
                self._num_refused,
                self.max_num,
            )
            self._num_refused, self._told_s = 0, now


class GuardedListener(socket.socket):
    """A listening socket that never leaves a client waiting for a file descriptor. For asyncio, which accepts as many
    connections in a row as there are until it is told that there is none."""

    def __init__(self, listener: socket.socket, gate: ConnectionGate, call_soon: Callable[..., Any]) -> None:
        """Takes `listener`'s descriptor over. `call_soon` is the event loop's."""
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self._gate = gate
        self._call_soon = call_soon
        self._num_at_once = 0
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        if self._num_at_once == _MOST_AT_ONCE:
            raise BlockingIOError
        try:
            accepted = super().accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._shed()
            raise BlockingIOError from error
        if self._num_at_once == 0:
            self._call_soon(self._begin_again)
        self._num_at_once += 1
        return accepted

    def close(self) -> None:
        super().close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _begin_again(self) -> None:
        self._num_at_once = 0

    def _shed(self) -> None:
        """Accepts with the spare descriptor, to close at once."""
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)
        try:
            super().accept()[0].close()
        except OSError:
            logger.debug("No connection to send away")
        with contextlib.suppress(OSError):  # another thread may have taken it; the next accept tries again
            self._spare = os.open(os.devnull, os.O_RDONLY)
        self._gate.shed()


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
