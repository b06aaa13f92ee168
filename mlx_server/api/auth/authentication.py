"""What a request says about its sender: its key, whether it comes from this machine, and which routes it may use.

Admins have the admin key or a key of an admin tier. While the server asks for no key at all, programs on this machine
are admins, too.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from fastapi import Depends
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from mlx_server.api.auth.keys import ADMIN_REMEDY, Caller, KeyRing
from mlx_server.errors import AuthenticationError, PermissionDeniedError

_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
_MAX_SHOWN_CHARS = 100
_OWN_SITES = ("same-origin", "none")
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def local_url(host: str, port: int, scheme: str = "http") -> str:
    """How programs on this machine reach what listens at `host`, which may be all of its addresses."""
    host = _EVERYWHERE.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_local(scope: Scope) -> bool:
    """Whether a request comes from a program on this machine, as far as can be told: not through a proxy, and not
    from a web page that a browser here has open (a foreign origin, or a name that was bound to our address)."""
    client, headers = scope.get("client"), Headers(scope=scope)
    if client is None or not is_loopback(client[0]) or any(name in headers for name in _FORWARDED):
        return False
    if not is_loopback(host_of(f"//{headers.get('host', '')}")):
        return False
    if headers.get("sec-fetch-site", "none") not in _OWN_SITES:
        return False
    origin = headers.get("origin")
    return origin is None or is_loopback(host_of(origin))


def host_of(url: str) -> str:
    """The host that a URL names, in small letters; empty for none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


PROBE_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""What supervisors, routers and scrapers ask again and again."""

PAGE_FILES = frozenset(
    {"page.css", "page.js", "common.js", "admin.js", "chat.js", "markdown.js", "vendor/marked.esm.js"}
)
"""Of the live page."""

FREE_PATHS = PROBE_PATHS | {"/", "/dashboard"} | {f"/dashboard/{name}" for name in PAGE_FILES}
"""What probes, routers, scrapers and browsers read without a key; none of it tells what users wrote."""


DISCOVERY_PATHS = PROBE_PATHS | {
    *("/v1/models", "/server_info", "/get_server_info", "/model_info", "/get_model_info"),
    *("/load", "/v1/loads", "/kv_event_sources"),
}
"""What routers read to find a server's models and its load: all that the discovery key is good for."""


def check_discovery(caller: Caller, method: str, path: str) -> None:
    """Raises `AuthenticationError` for anything but reading what routers need, where that is all the caller may: it is
    what a client without a key of its own gets of a router that adds the discovery key."""
    is_listing = path in DISCOVERY_PATHS or path.startswith("/v1/models/")
    if caller.is_discovery and not (is_listing and method in ("GET", "HEAD")):
        raise AuthenticationError(
            f"The discovery key reads models, health and load; it may not {method} {path[:_MAX_SHOWN_CHARS]}. Send a "
            "key of your own as `Authorization: Bearer KEY`; a router must pass it on."
        )


def caller_of(request: Request) -> Caller:
    """The caller that the middleware has let in."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def sent_key(scope: Scope) -> str | None:
    """The key that a request carries, as `Authorization: Bearer` or `X-Api-Key`."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key")


def exposure_warning(host: str, keys: KeyRing) -> str | None:
    """A warning for a server that strangers can reach; None when they cannot."""
    if keys.asks_for_keys or is_loopback(host):
        return None
    return (
        f"Listening on {host} without an API key: anyone who can reach this machine can use the server. Make a key "
        "with `mlx-serve keys create`, or set MLX_SERVE_SERVER_API_KEY, or listen on 127.0.0.1."
    )


async def require_admin(request: Request) -> None:
    """Refuses callers that are no admins. Raises `AuthenticationError` without a key, else `PermissionDeniedError`."""
    if caller_of(request).is_admin:
        return
    message = (
        "This route is for admins. Send the admin key as `Authorization: Bearer KEY` or `X-Api-Key: KEY`, or a key of "
        f"a tier with `admin = true`. Where there is neither, {ADMIN_REMEDY}; only a server that asks for no key at "
        "all lets clients on its own machine use it."
    )
    raise AuthenticationError(message) if sent_key(request.scope) is None else PermissionDeniedError(message)


RequireAdmin = Depends(require_admin)
"""For `APIRouter(dependencies=[RequireAdmin])`, or one route's."""
