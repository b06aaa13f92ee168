"""The server's port, taken before anything that takes long is imported or loaded.

Whoever connects from then on waits in the system's queue until the server answers; a port in use is told at once.
"""

from __future__ import annotations

import errno
import socket

from mlx_server.config import ServerConfig
from mlx_server.errors import ServeError

_BACKLOG = 2048


def listen(server: ServerConfig) -> socket.socket:
    """A socket that listens at the configured address.

    It names its protocol: asyncio turns Nagle's algorithm off only then, and else each answer on a kept connection
    is 40 ms late. Raises `ServeError` with the remedy."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refusal(server, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # several may bind one port that nobody listens on yet
    except OSError as error:
        listener.close()
        raise _refusal(server, error) from error
    return listener


def _refusal(server: ServerConfig, error: OSError) -> ServeError:
    remedy = (
        "Stop what listens there, or choose another port with --port (0 takes a free one)"
        if error.errno == errno.EADDRINUSE
        else "Give an address of this machine with --host, like 127.0.0.1, and a port that you may use with --port"
    )
    return ServeError(f"Cannot listen on {server.host}:{server.port}: {error.strerror or error}. {remedy}.")
