"""Which names a server that is open to its own machine answers to.

Without keys, whoever can connect may use the server, and a web browser connects for whatever page it has open: a page
may name our address as its own (DNS rebinding), or send a form here. Both show in what browsers tell with a request.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_server.api.errors import error_info
from mlx_server.api.keys import KeyRing
from mlx_server.api.locality import host_of, is_loopback
from mlx_server.config import ServerConfig
from mlx_server.errors import PermissionDeniedError
from mlx_server.setting_forms import ANY_ORIGIN, parse_hosts, parse_origins

_MAX_SHOWN_CHARS = 100


class HostMiddleware:
    """Refuses requests for names that are not this machine's, and from other sites' pages, as long as no key is asked
    for and only this machine can connect."""

    def __init__(self, app: ASGIApp, server: ServerConfig, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys
        self._is_local_only = is_loopback(server.host)
        self._hosts = frozenset(parse_hosts(server.allowed_hosts, "allowed_hosts"))
        self._origins = frozenset(parse_origins(server.allowed_origins or "", "allowed_origins"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_local_only and not self._keys.asks_for_keys:
            refusal = _refusal(Headers(scope=scope), self._hosts, self._origins)
            if refusal is not None:
                return await error_info(refusal).response(scope["path"])(scope, receive, send)
        return await self._app(scope, receive, send)


def _refusal(headers: Headers, hosts: Collection[str], origins: Collection[str]) -> PermissionDeniedError | None:
    host = headers.get("host", "")
    if host and not _is_ours(host_of(f"//{host}"), hosts):
        return PermissionDeniedError(
            f"This server answers to its own machine only, and was asked as {host[:_MAX_SHOWN_CHARS]!r}: a web page "
            "could hide behind such a name. Call it at 127.0.0.1 or localhost, name the host with --allowed-hosts, or "
            "ask for keys (`mlx-serve keys create`)."
        )
    origin = headers.get("origin")
    if origin is None or origin in origins or ANY_ORIGIN in origins or _is_own_page(origin, hosts):
        return None
    return PermissionDeniedError(
        f"Web pages of {origin[:_MAX_SHOWN_CHARS]!r} may not use this server. Allow them with --allowed-origins."
    )


def _is_own_page(origin: str, hosts: Collection[str]) -> bool:
    """Of this machine, or of an application, which has a scheme of its own: no web page can pretend to that."""
    scheme, _, _ = origin.partition("://")
    return origin != "null" and (scheme not in ("http", "https") or _is_ours(host_of(origin), hosts))


def _is_ours(host: str, hosts: Collection[str]) -> bool:
    return is_loopback(host) or host in hosts
