"""The door: which requests come in, before anything of their bodies is read, and how much of a body does.

Without keys, all that can connect may use the server, and a web browser connects for any page that it has open: a page
may name our address as its own (DNS rebinding), or send a form here. Both show in the headers that browsers send.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_server.api.auth.authentication import FREE_PATHS, check_discovery, host_of, is_local, is_loopback, sent_key
from mlx_server.api.auth.keys import Caller, KeyRing
from mlx_server.api.errors import error_info
from mlx_server.api.http.request_bounds import MAX_BODY_BYTES
from mlx_server.config import ServerConfig
from mlx_server.errors import PermissionDeniedError, QuotaExceededError, ServeError
from mlx_server.setting import ANY_ORIGIN, parse_hosts, parse_origins

MAX_HELD_BYTES = 8 * MAX_BODY_BYTES
"""Of the bodies of one key that have not been read yet; all keys of a tier together have twice as much."""

_RETRY_S = 1.0
_MAX_SHOWN_CHARS = 100


class HeldBody:
    """The bytes of one request's body, from when they come until they are parsed."""

    def __init__(self, held: Counter[str], caller: Caller) -> None:
        """`held` are the bytes of all requests, by key and by tier."""
        self._held = held
        self._bounds = {f"key {caller.identity}": MAX_HELD_BYTES, f"tier {caller.tier.name}": 2 * MAX_HELD_BYTES}
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises `QuotaExceededError` when the caller sends too much at a time."""
        for owner, limit in self._bounds.items():
            if self._held[owner] + num_bytes > limit:
                raise QuotaExceededError(
                    f"{self._held[owner]} bytes of bodies from the {owner} are still to be read; at most {limit} may "
                    "wait. Send fewer large requests at a time.",
                    _RETRY_S,
                )
        for owner in self._bounds:
            self._held[owner] += num_bytes
        self._num_bytes += num_bytes

    def release(self) -> None:
        """They are parsed, or dropped. Idempotent."""
        for owner in self._bounds:
            self._held[owner] -= self._num_bytes
            if not self._held[owner]:
                del self._held[owner]
        self._num_bytes = 0


class DoorMiddleware:
    """Refuses requests by host, by origin and by key. A request that is let in has in its state, until its answer,
    streamed or not, is over: `caller`, `held_body`, and `leases`, an `ExitStack` that then lets go of what was taken
    for it, like the model that it keeps loaded."""

    def __init__(self, app: ASGIApp, server: ServerConfig, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys
        self._is_local_only = is_loopback(server.host)
        self._hosts = frozenset(parse_hosts(server.allowed_hosts))
        self._origins = frozenset(parse_origins(server.allowed_origins or ""))
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            caller = self._let_in(scope)
        except ServeError as error:
            return await error_info(error).response(scope["path"])(scope, receive, send)
        body = HeldBody(self._held, caller)
        with contextlib.ExitStack() as leases:
            leases.callback(body.release)
            scope.setdefault("state", {}).update(caller=caller, held_body=body, leases=leases)
            await self._app(scope, _bounded(scope, receive, body), send)
        return None

    def _let_in(self, scope: Scope) -> Caller:
        if self._is_local_only and not self._keys.asks_for_keys:
            _check_names(Headers(scope=scope), self._hosts, self._origins)
        if scope["path"] in FREE_PATHS or scope["method"] == "OPTIONS":
            return Caller()
        caller = self._keys.identify(sent_key(scope), is_local=is_local(scope))
        check_discovery(caller, scope["method"], scope["path"])
        return caller


def _bounded(scope: Scope, receive: Receive, body: HeldBody) -> Receive:
    """Raises a 413 as soon as the declared or received body passes the limit, without reading the rest, and
    `QuotaExceededError` while too much of the caller's waits to be read."""
    declared = Headers(scope=scope).get("content-length", "")
    num_bytes = 0

    async def bounded() -> Message:
        nonlocal num_bytes
        if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
            raise _too_large(int(declared))
        message = await receive()
        piece = len(message.get("body", b""))
        num_bytes += piece
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large(num_bytes)
        body.add(piece)
        return message

    return bounded


def _too_large(num_bytes: int) -> HTTPException:
    return HTTPException(413, f"The body has {num_bytes} bytes or more; this server reads at most {MAX_BODY_BYTES}.")


def _check_names(headers: Headers, hosts: Collection[str], origins: Collection[str]) -> None:
    """Raises `PermissionDeniedError` for the name of another machine, and for a page of another site."""
    host = headers.get("host", "")
    if host and not _is_ours(host_of(f"//{host}"), hosts):
        raise PermissionDeniedError(
            f"This server answers to its own machine only, and was asked as {host[:_MAX_SHOWN_CHARS]!r}: a web page "
            "could hide behind such a name. Call it at 127.0.0.1 or localhost, name the host with --allowed-hosts, or "
            "ask for keys (`mlx-serve keys create`)."
        )
    origin = headers.get("origin")
    if not (origin is None or origin in origins or ANY_ORIGIN in origins or _is_own_page(origin, hosts)):
        raise PermissionDeniedError(
            f"Web pages of {origin[:_MAX_SHOWN_CHARS]!r} may not use this server. Allow them with --allowed-origins."
        )


def _is_own_page(origin: str, hosts: Collection[str]) -> bool:
    """Of this machine, or of an application, which has a scheme of its own: no web page can pretend to that."""
    scheme, _, _ = origin.partition("://")
    return origin != "null" and (scheme not in ("http", "https") or _is_ours(host_of(origin), hosts))


def _is_ours(host: str, hosts: Collection[str]) -> bool:
    return is_loopback(host) or host in hosts
