"""Anthropic's system prompt and messages, as a chat template's turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from mlx_server.api.sizes import FIRST_ERROR
from mlx_server.api.turns import Turns
from mlx_server.engine.content import string_in, unreadable_part
from mlx_server.errors import InvalidRequestError

_STRING = {"type": "string"}


def _block(kind: str, **properties: Any) -> dict[str, Any]:
    named = {"type": {"const": kind}, **properties}
    return {"type": "object", "required": list(named), "properties": named}


_TEXT_BLOCK = _block("text", text=_STRING)
_MAYBE = {"type": ["string", "null"]}
_TEXTS = {"anyOf": [_STRING, {"type": "array", "items": _TEXT_BLOCK}]}
_SOURCE = {"anyOf": [_block("text", data=_STRING), _block("content", content=_TEXTS)]}

_DOCUMENT = _block("document", source=_SOURCE)
_DOCUMENT["properties"] |= {"title": _MAYBE, "context": _MAYBE}
_USER_BLOCKS = (
    _DOCUMENT,
    _block("search_result", title=_STRING, source=_STRING, content=_TEXTS),
    _block("tool_result", tool_use_id=_STRING),
)
_ASSISTANT_BLOCKS = (
    _block("thinking", thinking=_STRING),
    _block("redacted_thinking"),
    _block("tool_use", id=_STRING, name=_STRING, input={"type": "object"}),
)


def _message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    items = {"anyOf": [_TEXT_BLOCK, *blocks]}
    content = {"anyOf": [_STRING, {"type": "array", "items": items}]}
    return {"properties": {"role": {"const": role}, "content": content}}


Block = dict[str, Any]
TextBlock = Annotated[Block, WithJsonSchema(_TEXT_BLOCK)]
Content = str | Annotated[list[Block], FIRST_ERROR]

_VOLATILE = re.compile(r"^x-anthropic-billing-header:.*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)
"""A line that some agents write at the head of the system prompt, different in every request."""

_HEAD_CHARS = 16_384
"""How far it is looked for: the search holds the interpreter for as long as it lasts."""


class MessageParam(BaseModel):
    """One message as it comes."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [_message("user", *_USER_BLOCKS), _message("assistant", *_ASSISTANT_BLOCKS), _message("system")]
        }
    )

    role: Literal["user", "assistant", "system"]
    content: Content


def read_conversation(system: Content | None, messages: Sequence[MessageParam]) -> Turns:
    """The turns, the last of them open if it is the assistant's. Raises `InvalidRequestError`."""
    turns = Turns()
    for where, block in _blocks(system or "", "system"):
        _instruct(turns, _text(block, where))
    for index, message in enumerate(messages):
        _READERS[message.role](turns, list(_blocks(message.content, f"messages[{index}].content")))
    if turns.has_open_calls:
        raise InvalidRequestError(
            "The last message has tool_use blocks; send a user message with their tool_result blocks.", "messages"
        )
    return turns


_Blocks = Sequence[tuple[str, Block]]
"""Blocks, each with the path at which the client finds it."""


def _blocks(content: Content, where: str) -> _Blocks:
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})] if content else []
    return [(f"{where}[{index}]", block) for index, block in enumerate(content)]


def _read_system(turns: Turns, blocks: _Blocks) -> None:
    for where, block in blocks:
        _instruct(turns, _text(block, where))


def _read_user(turns: Turns, blocks: _Blocks) -> None:
    # A template knows the results of calls only right behind the calls.
    results = [item for item in blocks if item[1].get("type") == "tool_result"]
    for where, block in results:
        turns.result(string_in(block, "tool_use_id", where), _result_text(block, where))
    others = [item for item in blocks if item[1].get("type") != "tool_result"]
    for where, block in others:
        turns.say(_text(block, where))


def _read_assistant(turns: Turns, blocks: _Blocks) -> None:
    for where, block in blocks:
        match block.get("type"):
            case "thinking":
                turns.think(string_in(block, "thinking", where))
            case "redacted_thinking":
                pass  # only who wrote it can read it
            case "tool_use":
                arguments = block.get("input", {})
                if not isinstance(arguments, dict):
                    raise InvalidRequestError(f"{where}.input must be an object.", f"{where}.input")
                turns.call(string_in(block, "id", where), string_in(block, "name", where), arguments)
            case _:
                turns.answer(_text(block, where))


_READERS = {"user": _read_user, "assistant": _read_assistant, "system": _read_system}


def _instruct(turns: Turns, text: str) -> None:
    stable = _VOLATILE.sub("", text[:_HEAD_CHARS]) + text[_HEAD_CHARS:]
    if stable:
        turns.instruct(stable)


def _result_text(block: Block, where: str) -> str:
    text = _joined(block.get("content") or "", f"{where}.content", _result_part)
    return f"Error: {text}" if block.get("is_error") else text


def _result_part(block: Block, where: str) -> str:
    """What a part of a tool's result says; a search for tools names those that it has found."""
    return string_in(block, "tool_name", where) if block.get("type") == "tool_reference" else _text(block, where)


def _text(block: Block, where: str) -> str:
    """What a block of text says, a search result, or a document that is text."""
    match block.get("type"):
        case "document":
            return _lines(block, ("title", "context"), _document_text(block.get("source"), where), where)
        case "search_result":
            return _lines(block, ("title", "source"), _joined(block.get("content"), f"{where}.content"), where)
        case _:
            return _plain_text(block, where)


def _plain_text(block: Block, where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        raise unreadable_part(kind, where)
    return string_in(block, "text", where)


def _document_text(source: Any, where: str) -> str:
    if not isinstance(source, Mapping):
        raise InvalidRequestError(f"{where}.source must be an object.", f"{where}.source")
    match source.get("type"):
        case "text":
            return string_in(source, "data", f"{where}.source")
        case "content":
            return _joined(source.get("content"), f"{where}.source.content")
        case kind:
            raise unreadable_part(f"document with a source of type {kind}", where)


def _joined(content: Any, where: str, read: Callable[[Block, str], str] = _plain_text) -> str:
    """A string, or what `read` makes of blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidRequestError(f"{where} must be a string or a list of blocks.", where)
    return "\n".join(read(part, path) for path, part in _blocks(content, where))


def _lines(block: Block, headings: Sequence[str], text: str, where: str) -> str:
    """What stands over a text, as far as it is given, and the text."""
    given = [string_in(block, name, where) for name in headings if block.get(name) is not None]
    return "\n".join([*given, text])
