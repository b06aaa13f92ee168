"""Texts of settings that must have a form: sizes of memory, shares of it, names of hosts, and origins of web pages."""

from __future__ import annotations

import re

from mlx_server.errors import ConfigError

AUTO = "auto"
ANY_ORIGIN = "*"

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,*]+", re.IGNORECASE)


def parse_size(text: str, name: str = "size") -> int:
    """Bytes of `512MB`, `4GiB`, `1.5g` or a plain number; raises `ConfigError`."""
    match = _SIZE.match(text)
    if match is None:
        raise ConfigError(f"{name} is {text!r}; write bytes, or a size like 512MB or 4GiB.")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " kmgt".index(unit.lower() or " "))


def parse_share(text: str, whole_bytes: int, name: str) -> int:
    """Bytes of a size, or of a share of `whole_bytes` like `70%`; raises `ConfigError`."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        return parse_size(text, name)
    percent = float(match[1])
    if percent > 100:
        raise ConfigError(f"{name} is {text!r}; the most is 100%.")
    return int(whole_bytes * percent / 100)


def parse_origins(text: str, name: str) -> tuple[str, ...]:
    """Origins of web pages out of a list joined by commas, as browsers send them; `*` is any. Raises `ConfigError`."""
    origins = tuple(part.strip() for part in text.split(",") if part.strip())
    for origin in origins:
        # Browsers send `null` for pages that are files.
        if origin not in (ANY_ORIGIN, "null") and _ORIGIN.fullmatch(origin) is None:
            raise ConfigError(
                f"{name}: {origin} is no origin; write scheme, host and port alone, like http://localhost:3000, or "
                f"`{ANY_ORIGIN}` for all."
            )
    return origins


def parse_hosts(text: str, name: str) -> tuple[str, ...]:
    """Names of hosts out of a list joined by commas, in small letters. Raises `ConfigError`."""
    hosts = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    for host in hosts:
        if _HOST.fullmatch(host) is None:
            raise ConfigError(f"{name}: {host} is no name of a host; write names alone, like my-mac.local, no port.")
    return hosts


def check_size(text: str, name: str) -> None:
    """Raises `ConfigError` for what is neither `auto` nor a size."""
    if text != AUTO:
        parse_size(text, name)


def check_share(text: str, name: str) -> None:
    """Raises `ConfigError` for what is neither `auto` nor a size or a share."""
    if text != AUTO:
        parse_share(text, 0, name)


def check_reserve(text: str, name: str) -> None:
    """Raises `ConfigError` for what is no size and no share."""
    parse_share(text, 0, name)
