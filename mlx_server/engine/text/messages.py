"""Turns OpenAI's messages, in all the forms that clients send, into the one form that chat templates expect.

Text parts of any protocol are accepted. Other media are refused by name if a user sends them. If a tool or another
model put them into the history, a note replaces them, since the agent's session could not continue otherwise.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from mlx_server.engine.tools.values import read_arguments
from mlx_server.errors import InvalidRequestError

logger = logging.getLogger(__name__)

_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def text_of(content: Any, where: str, *, mixes_strings: bool = False, notes_media: bool = False) -> str:
    """The text of OpenAI's content: a string, or a list of parts (and of strings, with `mixes_strings`), joined by line
    breaks. `where` is its path in the request. Other media become notes with `notes_media`. Otherwise, and for invalid
    content, raises `InvalidRequestError`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{where} must be a string or a list of parts.", where)
    return "\n".join(
        part if mixes_strings and isinstance(part, str) else _part_text(part, f"{where}[{index}]", notes_media)
        for index, part in enumerate(content)
    )


def _part_text(part: Any, where: str, notes_media: bool) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidRequestError(f"{where} must be a part with a type.", where)
    if kind in _TEXT_FIELDS:
        return string_in(part, _TEXT_FIELDS[kind], where)
    note = media_note(kind) if notes_media else None
    if note is None:
        raise unreadable_part(kind, where)
    return note


def string_in(part: Mapping[str, Any], field: str, where: str) -> str:
    """The string in `part[field]`. Raises `InvalidRequestError` if it is not a string."""
    value = part.get(field)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{field} must be a string.", f"{where}.{field}")
    return value


_VOLATILE = re.compile(r"^x-anthropic-billing-header:.*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)
"""A line that Claude Code writes at the head of the system prompt, and proxies pass on in other protocols. It changes
with every request, so with it no prefix would be found in the cache."""

_HEAD_CHARS = 16_384
"""Where that line is searched: a search of a long prompt would stop all other threads."""


def without_volatile(instructions: str) -> str:
    """Instructions without such lines."""
    return _VOLATILE.sub("", instructions[:_HEAD_CHARS]) + instructions[_HEAD_CHARS:]


def normalise_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns copies in which `content` is a string (text parts joined by line breaks, null becomes empty),
    `tool_calls` is present only if there are any, with arguments as objects instead of JSON text, and `reasoning` is
    called `reasoning_content`. Results come in the order of their calls, since many templates tell them apart by
    nothing else.

    Other keys are kept for the template. Media of a tool or the assistant become notes. Raises `InvalidRequestError`
    for media of other roles, and for invalid messages.
    """
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one message.", "messages")
    chat = [_normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for index, message in enumerate(chat):
        if len(calls := message.get("tool_calls", ())) > 1:
            _order_results(chat, index + 1, calls)
    return chat


def _order_results(chat: list[dict[str, Any]], start: int, calls: Sequence[Mapping[str, Any]]) -> None:
    """Puts the results of `calls`, which begin at `start`, into the order of the calls, if all of them name theirs."""
    places = {str(call.get("id")): place for place, call in enumerate(calls)}
    results = list(takewhile(lambda one: one["role"] == "tool", chat[start : start + len(calls)]))
    if all(str(one.get("tool_call_id")) in places for one in results):
        results.sort(key=lambda one: places[str(one.get("tool_call_id"))])
        chat[start : start + len(results)] = results


def _normalise(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a role.", where)
    copy = {key: value for key, value in message.items() if value is not None}
    if "function_call" in copy or copy["role"] == "function":
        where = f"{where}.function_call" if "function_call" in copy else f"{where}.role"
        raise InvalidRequestError(
            f"{where}: OpenAI's old function calls are not supported; send tool_calls, and results as role tool.", where
        )
    by_agent = copy["role"] in ("tool", "assistant")
    copy["content"] = text_of(copy.get("content", ""), f"{where}.content", mixes_strings=True, notes_media=by_agent)
    if copy["role"] in ("system", "developer"):
        copy["content"] = without_volatile(copy["content"])
    reasoning = copy.pop("reasoning", None)
    if isinstance(reasoning, str):
        copy.setdefault("reasoning_content", reasoning)
    calls = copy.pop("tool_calls", None)
    if calls:
        where = f"{where}.tool_calls"
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise InvalidRequestError(f"{where} must be a list.", where)
        copy["tool_calls"] = [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]
    return copy


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must have a function with a name.", where)
    arguments = parse_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def parse_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Parses a call's arguments, which clients send as JSON text and templates iterate over (`read_arguments`). Raises
    `InvalidRequestError` for JSON that is not an object."""
    parsed = read_arguments(arguments or "{}") if isinstance(arguments, str) else arguments
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"{where} must be a JSON object.", where)
    return parsed


_MEDIA = {
    "image": "image",
    "screenshot": "image",
    "audio": "audio",
    "video": "video",
    "document": "document",
    "file": "file",
    "upload": "file",
}
"""Words in the types of media parts, in any protocol (`image_url`, `input_audio`, `computer_screenshot`), and how the
note names the medium."""


def media_note(kind: str) -> str | None:
    """The note that replaces a part of type `kind`; None if that is not a media type. Logged once for each medium."""
    medium = next((name for word, name in _MEDIA.items() if word in kind), None)
    return None if medium is None else _noted(medium)


@functools.cache
def _noted(medium: str) -> str:
    note = f"[{medium} omitted: this model reads text only]"
    logger.warning(
        "A conversation has a tool's result of type %s. This model reads text only, so it sees %r instead. "
        "This is logged once.",
        medium,
        note,
    )
    return note


class UnseenPartError(InvalidRequestError):
    """The part of type `kind` at `where` is not text, and the model reads text only. `reason` says why it cannot see
    images, if that is known."""

    def __init__(self, kind: str, where: str, reason: str = "") -> None:
        because = f": {reason}" if reason and "image" in (_MEDIA[word] for word in _MEDIA if word in kind) else ""
        super().__init__(
            f"{where} is of type {kind}, which this model cannot read{because} (GET /v1/models says which models can "
            "see images). Leave the part out, or send its content as a part of type text.",
            where,
        )
        self.kind = kind
        self.where = where


def unreadable_part(kind: Any, where: str) -> InvalidRequestError:
    """The error for a part of type `kind` that the model cannot read, or that is not allowed at `where`."""
    if isinstance(kind, str) and any(word in kind for word in _MEDIA):
        return UnseenPartError(kind, where)
    return InvalidRequestError(f"{where} is of type {kind}, which is not allowed; send parts of type text.", where)
