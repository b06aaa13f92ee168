"""How many connections there may be, and which go first when there are too many.

A connection that waits for its client is closed for one that is needed, the most silent first. A request that finds
all connections busy is refused, unless it is a probe. File descriptors for both are kept back, and if the process
runs out of them all the same, who connects is sent away at once instead of being left to wait.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_server.api.auth import FREE_PATHS
from mlx_server.api.errors import error_info
from mlx_server.api.request_ids import RequestIdMiddleware
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
