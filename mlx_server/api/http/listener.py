"""The port, and the certificate for HTTPS. This module is quick to import, so that the port is taken first."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from dataclasses import replace
from typing import Any

from mlx_server.config import ServerConfig
from mlx_server.environment import expanded, is_mac, read_file
from mlx_server.errors import ConfigError, ServeError

_BACKLOG = 2048
_CONNECT_S = 1.0
_MAX_PEM_BYTES = 1_000_000
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def listen_all(server: ServerConfig) -> list[socket.socket]:
    """Sockets that listen at the configured ports: the server's own, and Ollama's if that is set. Raises `ServeError`
    with the remedy."""
    own = listen(server)
    if server.ollama_port is None:
        return [own]
    try:
        return [own, listen(replace(server, port=server.ollama_port), port_flag="--ollama-port")]
    except ServeError:
        own.close()
        raise


def listen(server: ServerConfig, port_flag: str = "--port") -> socket.socket:
    """A socket that listens at the configured address; messages name `port_flag` as the source of the port.

    The socket has an explicit protocol: asyncio turns Nagle's algorithm off only then; otherwise each answer on a kept
    connection would be 40 ms late. Raises `ServeError` with the remedy.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refusal(server, error, port_flag) from error
    try:
        if is_mac() and _answers(family, address):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # several processes may bind a port until one listens
    except OSError as error:
        listener.close()
        raise _refusal(server, error, port_flag) from error
    return listener


def _answers(family: int, address: Any) -> bool:
    """Whether clients on this machine already reach somebody at this address. With SO_REUSEADDR, which a restart needs,
    macOS gives 127.0.0.1:8000 and *:8000 to two processes of a user, and local clients reach the first of them only."""
    host, *rest = address
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_S)
        return client.connect_ex((_LOOPBACK.get(host, host), *rest)) == 0


def _refusal(server: ServerConfig, error: OSError, port_flag: str) -> ServeError:
    if error.errno != errno.EADDRINUSE:
        remedy = (
            f"Give an address of this machine with --host, like 127.0.0.1, and a port that you may use, {port_flag}"
        )
    elif port_flag == "--port":
        remedy = "Stop what listens there, or choose another port with --port (0 takes a free one)"
    else:
        remedy = f"Stop what listens there (Ollama itself?), choose another port with {port_flag}, or leave it out"
    return ServeError(f"Cannot listen on {server.host}:{server.port}: {error.strerror or error}. {remedy}.")


def check_tls(server: ServerConfig) -> None:
    """Raises `ConfigError` if the certificate and the key cannot be used, with the remedy."""
    if server.tls_cert is None and server.tls_key is None:
        return
    if server.tls_cert is None or server.tls_key is None:
        given, missing = ("tls_key", "tls_cert") if server.tls_cert is None else ("tls_cert", "tls_key")
        raise ConfigError(f"{given} is set and {missing} is not; give both, or neither for plain HTTP.")
    for name, value in (("tls_cert", server.tls_cert), ("tls_key", server.tls_key)):
        try:
            if not stat.S_ISREG(expanded(value).stat().st_mode):  # it is read twice
                raise ConfigError(f"{name}: {value} is no regular file; name a PEM file.")
            read_file(expanded(value), _MAX_PEM_BYTES, "a PEM file")
        except OSError as error:
            raise ConfigError(f"{name}: {value} cannot be read: {error.strerror}.") from error
    cert, key = (expanded(value) for value in (server.tls_cert, server.tls_key))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_refuse_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert {server.tls_cert} and tls_key {server.tls_key} cannot be used: {_reason(error)}. Both are PEM "
            "files: the certificate, followed by the intermediate certificates, and its private key."
        ) from error


def tls_files(server: ServerConfig) -> tuple[str | None, str | None]:
    """The paths of the certificate and the key; None for plain HTTP."""
    files = (server.tls_cert, server.tls_key)
    cert, key = (None if file is None else str(expanded(file)) for file in files)
    return cert, key


def local_url(server: ServerConfig, host: str, port: int) -> str:
    """The URL at which programs on this machine reach a listener at `host`, or at all addresses."""
    scheme = "http" if server.tls_cert is None else "https"
    host = _LOOPBACK.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _refuse_password() -> str:
    raise ConfigError(
        "tls_key is encrypted, and the server cannot ask for a password. Decrypt it with "
        "`openssl pkey -in KEY -out PLAIN_KEY`, and let only your user read it."
    )


def _reason(error: ssl.SSLError) -> str:
    reason = (error.reason or "they are no PEM files").replace("_", " ").lower()
    return "the key does not belong to the certificate" if reason == "key values mismatch" else reason
