"""The certificate that a server shows, read before a model is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path

from mlx_server.config import ServerConfig
from mlx_server.errors import ConfigError


def check_tls(server: ServerConfig) -> None:
    """Raises `ConfigError` for a certificate and key that cannot be used, with the remedy."""
    if server.tls_cert is None and server.tls_key is None:
        return
    if server.tls_cert is None or server.tls_key is None:
        given, missing = ("tls_key", "tls_cert") if server.tls_cert is None else ("tls_cert", "tls_key")
        raise ConfigError(f"{given} is set and {missing} is not; give both, or neither for plain HTTP.")
    for name, value in (("tls_cert", server.tls_cert), ("tls_key", server.tls_key)):
        try:
            Path(value).expanduser().read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: {value} cannot be read: {error.strerror}.") from error
    cert, key = (Path(value).expanduser() for value in (server.tls_cert, server.tls_key))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_refuse_password)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert {server.tls_cert} and tls_key {server.tls_key} cannot be used: {_reason(error)}. Both are PEM "
            "files: the certificate, with those that it is signed by behind it, and its own key."
        ) from error


def tls_files(server: ServerConfig) -> tuple[str | None, str | None]:
    """The paths of certificate and key; None for plain HTTP."""
    files = (server.tls_cert, server.tls_key)
    cert, key = (None if file is None else str(Path(file).expanduser()) for file in files)
    return cert, key


def scheme(server: ServerConfig) -> str:
    return "http" if server.tls_cert is None else "https"


def _refuse_password() -> str:
    raise ConfigError(
        "tls_key is encrypted, and there is nobody to ask for its password at start. Decrypt it with "
        "`openssl pkey -in KEY -out PLAIN_KEY`, and keep it readable for you alone."
    )


def _reason(error: ssl.SSLError) -> str:
    reason = (error.reason or "they are no PEM files").replace("_", " ").lower()
    return "the key is not that of the certificate" if reason == "key values mismatch" else reason
