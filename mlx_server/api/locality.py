"""Who is at this machine, and who only looks like it."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
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
