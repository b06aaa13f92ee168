"""Refuses requests by host, origin and key before their bodies are read, and bounds how much of a body is read.

While no key is required, anyone who can connect may use the server, and a browser connects for every page it has open:
a page may bind its own name to our address (DNS rebinding), or send a form here. Both show in the headers that browsers
send.
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
"""Bytes of one key's bodies that are received and not read yet. The keys of a tier together may have twice as many."""

_RETRY_S = 1.0
_MAX_SHOWN_CHARS = 100


class HeldBody:
    """The bytes of one request's body, counted from their arrival until they are read: parsed, and the prompts made of
    them. Until then the request may wait for a model, for images or for a thread."""

    def __init__(self, held: Counter[str], caller: Caller) -> None:
        """`held` counts the bytes of all requests, by key and by tier."""
        self._held = held
        self._bounds = {f"key {caller.identity}": MAX_HELD_BYTES, f"tier {caller.tier.name}": 2 * MAX_HELD_BYTES}
        self._num_bytes = 0
        self.num_received = 0
        """All bytes of the body so far, read or not."""

    def add(self, num_bytes: int) -> None:
        """Counts received bytes. Raises a 413 when the body is too large, and `QuotaExceededError` when the caller has
        too many that are not read."""
        self.num_received += num_bytes
        if self.num_received > MAX_BODY_BYTES:
            raise _too_large(self.num_received)
        for owner, limit in self._bounds.items():
            if self._held[owner] + num_bytes > limit:
                raise QuotaExceededError(
                    f"{self._held[owner]} bytes of bodies from the {owner} are not read yet; at most {limit} may "
                    "wait. Send fewer large requests at a time.",
                    _RETRY_S,
                )
        for owner in self._bounds:
            self._held[owner] += num_bytes
        self._num_bytes += num_bytes

    def release(self) -> None:
        """The bytes are read or dropped. Idempotent."""
        for owner in self._bounds:
            self._held[owner] -= self._num_bytes
            if not self._held[owner]:
                del self._held[owner]
        self._num_bytes = 0


class AccessMiddleware:
    """Refuses requests by host, origin and key. In the state of an accepted request it sets, until the answer ends,
    `caller`, `held_body`, and `leases`, an `ExitStack` that releases what the request holds, like the model that it
    keeps loaded."""

    def __init__(self, app: ASGIApp, server: ServerConfig, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys
        self._is_local_only = is_loopback(server.host)
        self._hosts = frozenset(parse_hosts(server.allowed_hosts))
        self._origins = frozenset(parse_origins(server.allowed_origins or ""))
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = self._let_in(scope)
        except ServeError as error:
            return await error_info(error).response(scope["path"])(scope, receive, send)
        body = HeldBody(self._held, caller)
        with contextlib.ExitStack() as leases:
            leases.callback(body.release)
            scope.setdefault("state", {}).update(caller=caller, held_body=body, leases=leases)
            return await self._app(scope, _bounded(scope, receive, body), send)

    def _let_in(self, scope: Scope) -> Caller:
        if self._is_local_only and not self._keys.requires_keys:
            _check_names(Headers(scope=scope), self._hosts, self._origins)
        if scope["path"] in FREE_PATHS or scope["method"] == "OPTIONS":
            return Caller()
        caller = self._keys.identify(sent_key(scope), is_local=is_local(scope))
        check_discovery(caller, scope["method"], scope["path"])
        return caller


def _bounded(scope: Scope, receive: Receive, body: HeldBody) -> Receive:
    """Raises a 413 once the declared or received body exceeds the limit, without reading the rest, and
    `QuotaExceededError` while too many bytes of the caller are not read."""
    declared = Headers(scope=scope).get("content-length", "")

    async def bounded() -> Message:
        if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
            raise _too_large(int(declared))
        message = await receive()
        body.add(len(message.get("body", b"")))
        return message

    return bounded


def _too_large(num_bytes: int) -> HTTPException:
    return HTTPException(413, f"The body has {num_bytes} bytes or more; this server reads at most {MAX_BODY_BYTES}.")


def _check_names(headers: Headers, hosts: Collection[str], origins: Collection[str]) -> None:
    """Raises `PermissionDeniedError` for a host name that is not this machine's, and for a page of another site."""
    host = headers.get("host", "")
    if host and not _is_ours(host_of(f"//{host}"), hosts):
        raise PermissionDeniedError(
            f"This server serves its own machine only, and the request names the host {host[:_MAX_SHOWN_CHARS]!r}: a "
            "web page could use such a name to get in. Call it at 127.0.0.1 or localhost, name the host with "
            "--allowed-hosts, or require keys (`mlx-serve keys create`)."
        )
    origin = headers.get("origin")
    if not (origin is None or origin in origins or ANY_ORIGIN in origins or _is_own_page(origin, hosts)):
        raise PermissionDeniedError(
            f"Web pages of {origin[:_MAX_SHOWN_CHARS]!r} may not use this server. Allow them with --allowed-origins."
        )


def _is_own_page(origin: str, hosts: Collection[str]) -> bool:
    """Whether the origin is a page of this machine, or an application with a scheme of its own, which no web page can
    claim."""
    scheme, _, _ = origin.partition("://")
    return origin != "null" and (scheme not in ("http", "https") or _is_ours(host_of(origin), hosts))


def _is_ours(host: str, hosts: Collection[str]) -> bool:
    return is_loopback(host) or host in hosts
