"""JSON from clients, bounded before it is parsed: a parser holds the interpreter, and with it all streams, until it is
done, and what it makes of `[[],[],...]` has thirty times the bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from mlx_server.errors import InvalidRequestError

MAX_VALUES = 2 * 1024 * 1024
"""Values between commas: a prompt of two million token ids."""

MAX_CONTAINERS = 128 * 1024
"""Lists and objects: some thirty thousand messages with a part of text each, beside all tools of an agent."""

MAX_MEMBERS = 256 * 1024
"""Members of all objects together; a new name for each is what costs a parser most."""

_SLICE_BYTES = 64 * 1024


def parse_json(body: bytes) -> Any:
    """What `body` says. Raises `InvalidRequestError` for more of anything than is read, and `json.JSONDecodeError` for
    what is no JSON, is nested deeper than 200 levels, or holds what cannot be written again: NaN, infinity, half of a
    surrogate pair. Any thread."""
    _check(body)
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error


def _check(body: bytes) -> None:
    """Counts in strings, too, before it looks more closely: a pass in C for most bodies."""
    if _excess(_counted(body)) is None:
        return
    totals = [0, 0, 0]
    for outside in _outside_strings(body):
        totals = [total + number for total, number in zip(totals, _counted(outside), strict=True)]
        excess = _excess(totals)
        if excess is not None:
            raise InvalidRequestError(
                f"The body has more than {excess}, which is all that is read of one request. Send less at a time."
            )


def _counted(text: bytes) -> list[int]:
    return [text.count(b","), text.count(b"[") + text.count(b"{"), text.count(b":")]


def _excess(totals: list[int]) -> str | None:
    num_values, num_containers, num_members = totals
    if num_containers > MAX_CONTAINERS:
        return f"{MAX_CONTAINERS} lists and objects"
    if num_members > MAX_MEMBERS:
        return f"{MAX_MEMBERS} members of objects"
    return f"{MAX_VALUES} values" if num_values > MAX_VALUES else None


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """What stands between the strings, a slice at a time."""
    is_inside, carried = False, b""
    for start in range(0, len(body), _SLICE_BYTES):
        piece = carried + body[start : start + _SLICE_BYTES]
        carried = b""
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the next slice begins with what it escapes
            piece, carried = piece[:-1], b"\\"
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield b" ".join(parts[1 if is_inside else 0 :: 2])
        is_inside ^= len(parts) % 2 == 0
