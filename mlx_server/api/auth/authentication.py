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

from mlx_server.api.auth.keys import ADMIN_REMEDY, DISCOVERY, Caller, KeyRing
from mlx_server.errors import AuthenticationError, PermissionDeniedError

_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
_MAX_SHOWN_CHARS = 100
_OWN_SITES = ("same-origin", "none")


def is_loopback(host: str) -> bool:
    """Whether `host` is an address that only this machine can connect to."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_local(scope: Scope) -> bool:
    """Whether a request comes from a program on this machine, and not through a proxy or from a web page in a local
    browser (which shows as a foreign `Origin`, or as a host name that was rebound to our address)."""
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
    """The host in a URL, in lower case; empty if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


PROBE_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""Polled by supervisors, routers and scrapers."""

PAGE_FILES = frozenset(
    {"page.css", "page.js", "common.js", "admin.js", "chat.js", "markdown.js", "vendor/marked.esm.js"}
)
"""The files of the live page."""

FREE_PATHS = PROBE_PATHS | {"/", "/dashboard"} | {f"/dashboard/{name}" for name in PAGE_FILES}
"""Readable without a key. None of these shows what users wrote."""


DISCOVERY_PATHS = PROBE_PATHS | {
    *("/v1/models", "/server_info", "/get_server_info", "/model_info", "/get_model_info"),
    *("/load", "/v1/loads", "/kv_event_sources"),
}
"""What routers read to find the models and the load of a server; the discovery key allows nothing else."""


def check_discovery(caller: Caller, method: str, path: str) -> None:
    """Raises `AuthenticationError` if the caller has the discovery key and does anything but read `DISCOVERY_PATHS`. A
    router that adds the discovery key to requests also adds it for clients without a key of their own."""
    is_listing = path in DISCOVERY_PATHS or path.startswith("/v1/models/")
    if caller.identity == DISCOVERY and not (is_listing and method in ("GET", "HEAD")):
        raise AuthenticationError(
            f"The discovery key reads models, health and load; it may not {method} {path[:_MAX_SHOWN_CHARS]}. Send a "
            "key of your own as `Authorization: Bearer KEY`; a router must pass it on."
        )


def caller_of(request: Request) -> Caller:
    """The caller, as `AccessMiddleware` identified it."""
    caller: Caller = request.state.caller
    return caller


def sent_key(scope: Scope) -> str | None:
    """The key in a request: `Authorization: Bearer` or `X-Api-Key`."""
    headers = Headers(scope=scope)
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return headers.get("x-api-key")


def exposure_warning(host: str, keys: KeyRing) -> str | None:
    """A warning if other machines can use the server without a key; None otherwise."""
    if keys.requires_keys or is_loopback(host):
        return None
    return (
        f"Listening on {host} without an API key: anyone who can reach this machine can use the server. Create a key "
        "with `mlx-serve keys create`, or set MLX_SERVE_SERVER_API_KEY, or listen on 127.0.0.1."
    )


async def require_admin(request: Request) -> None:
    """Raises `AuthenticationError` for a request without a key, and `PermissionDeniedError` for a caller that is not an
    admin."""
    if caller_of(request).is_admin:
        return
    message = (
        "This route is for admins. Send the admin key, or a key of a tier with `admin = true`, as `Authorization: "
        f"Bearer KEY` or `X-Api-Key: KEY`. If there is neither, {ADMIN_REMEDY}. Programs on the same "
        "machine need none only while the server asks for no key at all."
    )
    raise AuthenticationError(message) if sent_key(request.scope) is None else PermissionDeniedError(message)


RequireAdmin = Depends(require_admin)
"""For the `dependencies` of a router or a route."""
