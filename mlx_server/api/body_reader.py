"""Reads bodies that are not small: beside the event loop, one at a time, and within a bound of bytes for each caller.

Parsing holds the interpreter, on whatever thread it runs. Between two bodies the streams have their turn.

JSON from clients, bounded before it is parsed: a parser holds the interpreter, and with it all streams, until it is
done, and what it makes of `[[],[],...]` has thirty times the bytes.

How much of anything one request may have: far more than agents send, and little enough to be read in passing.

Lists are held against their bounds before their entries are looked at, and the first wrong entry ends the look: a
million entries would be a million errors.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from mlx_server.api.auth.keys import Caller
from mlx_server.errors import InvalidRequestError, QuotaExceededError

MAX_BODY_BYTES = 32 * 1024 * 1024
"""Room for a prompt of several million tokens; far below what could hurt the host."""

MAX_HELD_BYTES = 8 * MAX_BODY_BYTES
"""Of the bodies of one key that have not been read yet; all keys of a tier together have twice as much."""

_RETRY_S = 1.0

T = TypeVar("T")


class HeldBody:
    """The bytes of one request's body, from when they come until it is read."""

    def __init__(self, held: Counter[str], caller: Caller) -> None:
        self._held = held
        self._bounds = (
            (f"key {caller.identity}", MAX_HELD_BYTES),
            (f"tier {caller.tier.name}", 2 * MAX_HELD_BYTES),
        )
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises `QuotaExceededError` when the caller sends too much at a time."""
        for owner, limit in self._bounds:
            if self._held[owner] + num_bytes > limit:
                raise QuotaExceededError(
                    f"{self._held[owner]} bytes of bodies from the {owner} are still to be read; at most {limit} may "
                    "wait. Send fewer large requests at a time.",
                    _RETRY_S,
                )
        for owner, _ in self._bounds:
            self._held[owner] += num_bytes
        self._num_bytes += num_bytes

    def release(self) -> None:
        """They are read, or dropped. Idempotent."""
        for owner, _ in self._bounds:
            self._held[owner] -= self._num_bytes
            if not self._held[owner]:
                del self._held[owner]
        self._num_bytes = 0


class BodyReader:
    """One server's. On the event loop's thread."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")
        self._is_reading = False
        self._num_waiting: Counter[str] = Counter()
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def hold(self, caller: Caller) -> HeldBody:
        """Counts what is about to come."""
        return HeldBody(self._held, caller)

    async def read(self, caller: Caller, work: Callable[[], T]) -> T:
        """Runs `work` in the thread when it is the caller's turn: by priority, then by how many bodies of the same
        caller wait already, so that many of one key do not keep others out."""
        await self._turn(caller)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        try:
            return await loop.run_in_executor(self._thread, work)
        finally:
            # Half of the time is the streams', however many bodies wait.
            loop.call_later(loop.time() - start_s, self._pass_on)

    async def _turn(self, caller: Caller) -> None:
        if not self._is_reading:
            self._is_reading = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rank = (caller.tier.priority, self._num_waiting[caller.identity], next(self._numbers))
        heapq.heappush(self._waiting, (*rank, turn))
        self._num_waiting[caller.identity] += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise
        finally:
            self._num_waiting[caller.identity] -= 1

    def _pass_on(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[-1]
            if not turn.done():
                return turn.set_result(None)
        self._is_reading = False
        return None


MAX_VALUES = 2 * 1024 * 1024
"""Values between commas: a prompt of two million token ids."""

MAX_CONTAINERS = 128 * 1024
"""Lists and objects: sixteen thousand messages of several parts each, beside all tools of an agent."""

MAX_MEMBERS = 256 * 1024
"""Members of all objects together; a new name for each is what costs a parser most."""

MAX_BACKSLASHES = 2 * 1024 * 1024
"""In strings: all characters of a prompt of a million tokens may be escapes."""

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
    """Counts in strings, too, before it looks more closely: most bodies need no more."""
    excess = None
    if sum(piece.count(b"\\") for piece in _slices(body)) > MAX_BACKSLASHES:
        excess = f"{MAX_BACKSLASHES} backslashes"
    elif _excess(_slices(body)) is not None:
        excess = _excess(_outside_strings(body))
    if excess is not None:
        raise InvalidRequestError(
            f"The body has more than {excess}, which is all that is read of one request. Send less at a time."
        )


def _excess(pieces: Iterable[bytes]) -> str | None:
    """What there is too much of. Ends as soon as it is known."""
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
    """What stands between the strings, a slice at a time."""
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


MAX_MESSAGES = 16_384
"""Of a chat; and items of a response's input."""

MAX_TOOLS = 2048

MAX_NAME_CHARS = 1024
"""Of a model's or a tool's name: the longest path that a model could be configured by."""

MAX_ECHO_CHARS = 4 * 1024 * 1024
"""Of what an answer repeats of its request: tools, metadata, instructions."""


def at_most(limit: int, what: str) -> BeforeValidator:
    """For the type of a field: a list or an object may have `limit` entries, which are `what`."""

    def checked(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"must have at most {limit} {what}, got {len(value)}")
        return value

    return BeforeValidator(checked)


FIRST_ERROR = Field(fail_fast=True)
"""For the type of a list: the first wrong entry is told of, and no other looked at."""

MESSAGES = at_most(MAX_MESSAGES, "messages")
ITEMS = at_most(MAX_MESSAGES, "items")
TOOLS = at_most(MAX_TOOLS, "tools")

Strings = Annotated[list[str], FIRST_ERROR]
Objects = Annotated[list[dict[str, Any]], FIRST_ERROR]


def check_name(name: str | None, param: str) -> None:
    """Raises `InvalidRequestError` for a name that nothing can have."""
    if name is not None and len(name) > MAX_NAME_CHARS:
        raise InvalidRequestError(
            f"{param} has {len(name)} characters; a name has at most {MAX_NAME_CHARS}. GET /v1/models lists them.",
            param,
        )
