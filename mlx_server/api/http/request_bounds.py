"""Limits of one request: far more than agents send, and little enough to be parsed quickly.

Limits are checked before a body is parsed: the parser holds the GIL, and stalls all streams, until it is done, and
`[[],[],...]` takes thirty times its bytes once parsed. The length of a list is checked before its entries, and checking
stops at the first wrong entry, so that a million wrong entries do not make a million errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from mlx_server.errors import InvalidRequestError

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Room for a prompt of several million tokens."""

MAX_VALUES = 2 * 1024 * 1024
"""Commas: enough for a prompt of two million token ids."""

MAX_CONTAINERS = 128 * 1024
"""Lists and objects: enough for sixteen thousand messages of several parts each, and all tools of an agent."""

MAX_MEMBERS = 256 * 1024
"""Members of all objects together. New names are what costs the parser most."""

MAX_BACKSLASHES = 2 * 1024 * 1024
"""Backslashes: every character of a prompt of a million tokens may be escaped."""

MAX_MESSAGES = 16_384
"""Messages of a chat, and items of a response's input."""

MAX_TOOLS = 2048

MAX_NAME_CHARS = 1024
"""Length of the name of a model or tool: room for a long path."""

MAX_ECHO_CHARS = 1024 * 1024
"""What an answer and three events of its stream repeat of its request: tools, metadata, instructions."""

_MAX_DEPTH = 200
"""Of the parser: how many lists and objects may be around a value."""

_ESCAPE = re.compile(rb"(?is)\\(?:ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}|(?P<half>ud[89a-f][0-9a-f]{2})|.)")
"""An escape in a string; both halves of a pair are one."""

_SLICE_BYTES = 64 * 1024

_SLICE_VALUES = 16 * 1024


def parse_json(body: bytes) -> Any:
    """Parses a body. Half of a surrogate pair, which agents leave where they cut a text within an emoji, is read as
    U+FFFD, since the session that has it would be refused for ever. Raises `InvalidRequestError` if the body exceeds a
    limit, and `RequestValidationError` if it is not JSON, or contains NaN or infinity (also as a number that is too
    large). Any thread."""
    _check(body)
    try:
        parsed = from_json(body, allow_inf_nan=False, cache_strings="keys")
        if _has_infinity([parsed]):
            raise ValueError("a number is too large: at most about 1.8e308 can be read")
        return parsed
    except ValueError as error:
        if "hex escape" in str(error) and (whole := _ESCAPE.sub(_whole_character, body)) != body:
            return parse_json(whole)
        if "recursion limit" in str(error):
            raise InvalidRequestError(f"The body is nested more than {_MAX_DEPTH} levels deep; flatten it.") from error
        problem = {"type": "json_invalid", "loc": ("body", 0), "msg": "JSON decode error", "input": {}}
        raise RequestValidationError([{**problem, "ctx": {"error": str(error)}}]) from error


def _whole_character(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape["half"] else escape[0]


def _has_infinity(values: list[Any]) -> bool:
    """Whether a number among the values, or within them, was too large. In slices, because the interpreter gives no
    other thread a turn within one."""
    pending = [values]
    while pending:
        members = pending.pop()
        for start in range(0, len(members), _SLICE_VALUES):
            part = members[start : start + _SLICE_VALUES]
            kinds = set(map(type, part))
            if float in kinds and not all(math.isfinite(value) for value in part if isinstance(value, float)):
                return True
            if list in kinds:
                pending += [value for value in part if isinstance(value, list)]
            if dict in kinds:
                pending += [list(value.values()) for value in part if isinstance(value, dict)]
    return False


def _check(body: bytes) -> None:
    """Counts over the whole text first, strings included, and looks closer only if that exceeds a limit."""
    excess = None
    if sum(piece.count(b"\\") for piece in _slices(body)) > MAX_BACKSLASHES:
        excess = f"{MAX_BACKSLASHES} backslashes"
    elif _excess(_slices(body)) is not None:
        excess = _excess(_outside_strings(body))
    if excess is not None:
        raise InvalidRequestError(f"The body has more than {excess}, the limit of one request. Send less at a time.")


def _excess(pieces: Iterable[bytes]) -> str | None:
    """The limit that is exceeded, if one is. Stops as soon as it is known."""
    num_values = num_containers = num_members = 0
    for piece in pieces:
        num_values += piece.count(b",")
        num_containers += piece.count(b"[") + piece.count(b"{")
        num_members += piece.count(b":")
        if num_containers > MAX_CONTAINERS:
            return f"{MAX_CONTAINERS} lists and objects"
        if num_members > MAX_MEMBERS:
            return f"{MAX_MEMBERS} members of objects"
        if num_values > MAX_VALUES:
            return f"{MAX_VALUES} values"
    return None


def _slices(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), _SLICE_BYTES):
        yield body[start : start + _SLICE_BYTES]


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """The parts of the body outside strings, a slice at a time."""
    is_inside, carried = False, b""
    for slice_ in _slices(body):
        piece, carried = carried + slice_, b""
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the next slice begins with what it escapes
            piece, carried = piece[:-1], b"\\"
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        yield b" ".join(parts[1 if is_inside else 0 :: 2])
        is_inside ^= len(parts) % 2 == 0


def at_most(limit: int, what: str) -> BeforeValidator:
    """A validator for a field's type: a list or an object has at most `limit` entries. `what` names them."""

    def checked(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"must have at most {limit} {what}, got {len(value)}; send fewer at a time")
        return value

    return BeforeValidator(checked)


FIRST_ERROR = Field(fail_fast=True)
"""For a list's type: only the first wrong entry is reported, and no later one is looked at."""

BOUNDED_MESSAGES = at_most(MAX_MESSAGES, "messages")
BOUNDED_ITEMS = at_most(MAX_MESSAGES, "items")
BOUNDED_TOOLS = at_most(MAX_TOOLS, "tools")

Strings = Annotated[list[str], FIRST_ERROR]
Objects = Annotated[list[dict[str, Any]], FIRST_ERROR]


def check_name(model: str | None) -> None:
    """Raises `InvalidRequestError` for a model's name that is too long."""
    if model is not None and len(model) > MAX_NAME_CHARS:
        raise InvalidRequestError(
            f"model has {len(model)} characters; a name has at most {MAX_NAME_CHARS}. GET /v1/models lists them.",
            "model",
        )
