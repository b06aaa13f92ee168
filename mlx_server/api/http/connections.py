"""Bounds the number of connections and how slow a client may be, and chooses which connections to close when there are
too many.

A connection on which the server waits for the client is silent. If the limit is reached, a new connection replaces the
one that has been silent longest. If all connections are busy, a request on a new one is refused, unless it is a probe.
File descriptors are reserved for probes and refusals. If the process runs out of descriptors nevertheless, new
connections are closed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import selectors
import socket
import time
from asyncio import sslproto
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Protocol

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlx_server.api.auth.authentication import FREE_PATHS
from mlx_server.api.errors import error_info
from mlx_server.api.http.middleware import name_request, request_id
from mlx_server.api.http.parser import RequestParser
from mlx_server.api.http.sse import PIECE_WRITER
from mlx_server.environment import raise_file_limit
from mlx_server.errors import OverloadedError

logger = logging.getLogger(__name__)

_WANTED_FILES = 10_240
"""The limit of open files to ask for. macOS does not grant more if the hard limit is infinite."""

_MAX_KEPT_FILES = 256
_USUAL_KEPT_FILES = 128
"""Descriptors kept for weights, logs, the key file, probes, and connections that are being closed: a quarter of all, at
least the usual and at most the larger number, but never more than half. Of 512 files 128 are kept, of 3,000 files
256."""

_NUM_EXTRA = 32
"""Connections above the limit, for probes and for refusals."""

_SILENT_S = 1.0
"""A connection must have been silent this long before it is closed for another one, unless all extra connections are in
use."""

ACCEPTED_AT_ONCE = 16
"""The connections accepted in one iteration of the event loop, so that others can be closed in between. This is
uvicorn's `backlog`."""

EVENTS_AT_ONCE = 4
"""The sockets that are served in one iteration, so that streams are written and steps prepared in between."""

READ_BYTES = 8 * 1024
"""The bytes that are read and parsed at a time, so that other connections are served in between."""

MIN_BYTES_PER_S = 4096
"""A request may take longer than the timeout while its bytes arrive at least this fast."""

_LOOKS = 8
"""How many times a connection is checked within the timeout."""

_RETRY_S = 5.0
_LOG_EVERY_S = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def room_for_connections(max_connections: int | None = None) -> int:
    """Raises the limit of open files as far as possible, and returns how many connections there may be: as many as are
    asked for, with a warning if there is no room for them, or as there is room for."""
    num_files = raise_file_limit(_WANTED_FILES)
    kept = min(max(num_files // 4, _USUAL_KEPT_FILES), _MAX_KEPT_FILES, num_files // 2)
    room = max(1, num_files - kept)
    if max_connections is not None and max_connections > room:
        warning = "--max-connections is %d, and the limit of %d open files allows %d: raise it (`ulimit -n`)."
        logger.warning(warning, max_connections, num_files, room)
    return max_connections or room


class Connection(Protocol):
    """A connection as the gate uses it. `abort` closes it at once."""

    def abort(self) -> None: ...


class ConnectionGate:
    """The connections of one server. Event-loop thread only."""

    def __init__(self, max_num: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_num = max_num
        self._clock = clock
        self._open: set[Connection] = set()
        self._accepted: dict[int, Connection] = {}  # by descriptor
        self._silent: OrderedDict[Connection, float] = OrderedDict()  # since when; the longest first
        self._num_refused = 0
        self._logged_s = -math.inf

    def accept(self, descriptor: int, connection: Connection) -> None:
        """Adds a connection that has no protocol yet: TLS comes first, and a client may take its time with that."""
        self._accepted[descriptor] = connection
        self.enter(connection)

    def hand_over(self, descriptor: int) -> None:
        """Removes such a connection: its protocol enters in its place, or it is closed."""
        connection = self._accepted.pop(descriptor, None)
        if connection is not None:
            self.leave(connection)

    def enter(self, connection: Connection) -> bool:
        """Adds a new connection, and closes a silent one for it if the limit is reached. Returns True if the new one is
        above the limit because none could be closed; if the extra connections are used up, too, the new one is
        closed."""
        self._open.add(connection)
        num_extra = len(self._open) - self.max_num
        is_extra = num_extra > 0 and not self._make_room(_SILENT_S if num_extra <= _NUM_EXTRA else 0.0)
        self.wait_for(connection)
        if is_extra and num_extra > _NUM_EXTRA:
            self._close(connection)
        return is_extra

    def leave(self, connection: Connection) -> None:
        """Removes a connection that the client or the server has closed."""
        self._open.discard(connection)
        self._silent.pop(connection, None)

    def wait_for(self, connection: Connection) -> None:
        """The server waits for the client from now on: the connection is silent."""
        self._silent[connection] = self._clock()
        self._silent.move_to_end(connection)

    def work_for(self, connection: Connection) -> None:
        """The server works on a request: the connection is busy."""
        self._silent.pop(connection, None)

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Returns `app` for a connection that was above the limit: it refuses requests if the limit is still
        exceeded."""

        async def guarded_app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] in FREE_PATHS:
                return await app(scope, receive, send)
            if len(self._open) - len(self._silent) <= self.max_num:
                if len(self._open) > self.max_num:
                    self._make_room(0.0)
                return await app(scope, receive, send)
            return await self._refuse(scope, receive, send)

        return guarded_app

    def shed(self) -> None:
        """Counts a connection that was closed for want of a file descriptor, and closes the one that has been silent
        longest."""
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
        name_request(scope, response.headers, request_id(scope))
        await response(scope, receive, send)

    def _make_room(self, silent_s: float) -> bool:
        """Closes the connection that has been silent longest, if that is at least `silent_s`. Returns whether one was
        closed."""
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
        if now - self._logged_s >= _LOG_EVERY_S:
            logger.warning(
                "%d connections closed or refused: more come than the %d there may be (--max-connections)",
                self._num_refused,
                self.max_num,
            )
            self._num_refused, self._logged_s = 0, now


class FairSelector(selectors.DefaultSelector):
    """Has the event loop serve `EVENTS_AT_ONCE` sockets in one turn. asyncio would serve all that are ready, thousands
    perhaps, before it runs anything else, the writers of streams among it. The others have their turns, in order,
    before the system is asked again."""

    def __init__(self) -> None:
        super().__init__()
        self._ready: deque[tuple[selectors.SelectorKey, int]] = deque()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._ready:
            self._ready.extend(super().select(timeout))
        turn = [self._ready.popleft() for _ in range(min(len(self._ready), EVENTS_AT_ONCE))]
        return [(key, mask & self._unchanged(key)) for key, mask in turn]

    def _unchanged(self, key: selectors.SelectorKey) -> int:
        """The events whose callbacks are those of `key` still: the socket may be closed, and its number a new one's."""
        now = self.get_map().get(key.fd)
        reads, writes = (None, None) if now is None else now.data  # asyncio registers a callback for each
        return selectors.EVENT_READ * (key.data[0] is reads) | selectors.EVENT_WRITE * (key.data[1] is writes)


class _Accepted(socket.socket):
    """A connection that the gate counts from its acceptance on."""

    def __init__(self, accepted: socket.socket, gate: ConnectionGate) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self._gate = gate
        gate.accept(self.fileno(), self)

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # the client has closed it
            self.shutdown(socket.SHUT_RDWR)  # asyncio notices, and closes it

    def close(self) -> None:
        self._gate.hand_over(self.fileno())
        super().close()


class GuardedListener(socket.socket):
    """A listening socket that closes new connections at once if the process has no file descriptor for them. asyncio
    would try to accept thousands of times instead, and log a traceback each time."""

    def __init__(self, listener: socket.socket, gate: ConnectionGate) -> None:
        """Takes over the descriptor of `listener`."""
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self._gate = gate
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def listen(self, backlog: int = 0) -> None:
        """Does nothing, since the socket listens already. asyncio calls this with the number of connections to accept
        at once."""

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            accepted, address = super().accept()
            return _Accepted(accepted, self._gate), address
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._shed()
            raise BlockingIOError from error

    def close(self) -> None:
        super().close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _shed(self) -> None:
        """Frees the spare descriptor, accepts a connection with it, and closes that at once."""
        spare, self._spare = self._spare, -1
        if spare >= 0:
            os.close(spare)
        try:
            super().accept()[0].close()
        except OSError:
            logger.debug("No connection to send away")
        with contextlib.suppress(OSError):  # another thread may have taken the descriptor; the next call tries again
            self._spare = os.open(os.devnull, os.O_RDONLY)
        self._gate.shed()


class _ChunkWriter:
    """Writes the pieces of a chunked body, framed, directly to the transport. h11's state does not change with them,
    and h11 takes longer for a piece than everything else together."""

    __slots__ = ("_flow", "_transport", "drain", "num_bytes", "written_s")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self.num_bytes = 0
        self.written_s = 0.0
        self._transport = transport
        self._flow = flow
        self.drain = flow.drain

    @property
    def is_full(self) -> bool:
        return self._flow.write_paused

    def write(self, piece: bytes) -> bool:
        num_bytes = len(piece)
        self.num_bytes += num_bytes
        self.written_s = time.monotonic()
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (num_bytes, piece))
        return not self._flow.write_paused


def _with_writer(app: ASGIApp, transport: asyncio.Transport, flow: FlowControl) -> ASGIApp:
    """Returns `app` with a `PIECE_WRITER` for its requests, for HTTP/1.1 only: other versions have no chunked
    bodies."""

    async def app_with_writer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1":
            scope["state"][PIECE_WRITER] = _ChunkWriter(transport, flow)
        await app(scope, receive, send)

    return app_with_writer


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol for one connection, with limits for the client. It tells `gate` when the connection is silent
    or busy. It closes the connection if the rest of a request (or the first request) is late, or if the client has not
    read any of the written data for `timeout_s`. With `timeout_s` 0 there is no time limit."""

    gate: ConnectionGate
    timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = self._parser = RequestParser()
        self._timer: asyncio.TimerHandle | None = None
        self._has_request = False
        self._waiting_since_s: float | None = None
        self._num_bytes = 0  # received since `_waiting_since_s`
        self._last_byte_s = 0.0
        self._untaken_since_s: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # without TLS
            transport.max_size = READ_BYTES
        self.gate.hand_over(transport.get_extra_info("socket").fileno())
        if self.gate.enter(self):
            self.app = self.gate.guarded(self.app)
        self.app = _with_writer(self.app, transport, self.flow)
        self._waiting_since_s = self.loop.time()
        if self.timeout_s:
            self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.gate.leave(self)
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()  # uvicorn does not after a reset, and it would hold all this

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        self._last_byte_s = self.loop.time()
        super().data_received(data)
        self._note_turn()

    def handle_events(self) -> None:
        excess = self._parser.excess_of_head()
        if excess is None:
            return super().handle_events()
        return self.send_400_response(f"The request's head has more than {excess}.")

    def send_400_response(self, msg: str) -> None:
        """Says in the parser's words what is wrong with the request. If its answer has begun, only closes."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self._parser.refusal or msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_turn()
        if self.conn.our_state is self.conn.their_state is h11.IDLE:  # a connection may stay open without a request
            self.scope = self.headers = self.cycle = None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._untaken_since_s = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._untaken_since_s = None

    def abort(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        """The server ends: it does not wait for the rest of a request's body."""
        super().shutdown()
        if self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused:
            cycle, num_unsent = self.cycle, self.transport.get_write_buffer_size()
            is_sending = num_unsent > 0 or (cycle.response_started and not cycle.response_complete)
            (self.transport.close if is_sending else self.abort)()  # over TLS, `close` waits for the client

    def _note_turn(self) -> None:
        state = self.conn.their_state
        self._has_request = self._has_request or state is not h11.IDLE
        # Between requests uvicorn's keep-alive timeout applies. A partial head is in the parser's buffer.
        is_between = state is h11.IDLE and self._has_request and not self.conn.trailing_data[0]
        is_clients = state in (h11.IDLE, h11.SEND_BODY)
        if is_between or not is_clients:
            self._waiting_since_s = None
        elif self._waiting_since_s is None:
            self._waiting_since_s, self._num_bytes = self.loop.time(), 0
        if self.transport.is_closing():
            return
        if is_clients and not self.flow.read_paused:
            self.gate.wait_for(self)
        else:
            self.gate.work_for(self)

    def _look_later(self) -> None:
        self._timer = self.loop.call_later(self.timeout_s / _LOOKS, self._look)

    def _look(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused:  # the client waits for the server
            self._last_byte_s = now
            if self._waiting_since_s is not None:
                self._waiting_since_s, self._num_bytes = now, 0
        if self._untaken_since_s is not None and now - self._untaken_since_s >= self.timeout_s:
            return self.transport.abort()
        if self._waiting_since_s is not None and now >= self._deadline_s(self._waiting_since_s):
            self.transport.close()
        return self._look_later()

    def _deadline_s(self, waiting_since_s: float) -> float:
        """When the rest of a request is due. Bytes that arrived extend the time, but not the time of silence. With a
        timeout of 30 s, 8 KiB in the first second allow 32 s in total, and 31 s if nothing follows."""
        deadline_s = waiting_since_s + self.timeout_s + self._num_bytes / MIN_BYTES_PER_S
        return min(deadline_s, self._last_byte_s + self.timeout_s) if self._num_bytes else deadline_s


def bounded_protocol(timeout_s: float, gate: ConnectionGate) -> type[BoundedProtocol]:
    """A protocol class for uvicorn, which makes one object for each connection. TLS connections read `READ_BYTES` at a
    time, too: asyncio would take 256 KiB of memory for each, before its client has said anything."""
    sslproto.SSLProtocol.max_size = READ_BYTES
    return type("BoundedProtocol", (BoundedProtocol,), {"gate": gate, "timeout_s": timeout_s})
