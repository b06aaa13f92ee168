"""How much of anything one request may have: far more than agents send, and little enough to be read in passing.

Lists are held against their bounds before their entries are looked at, and the first wrong entry ends the look: a
million entries would be a million errors.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from mlx_server.errors import InvalidRequestError

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
