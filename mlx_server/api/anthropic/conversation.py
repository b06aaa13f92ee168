"""The messages of Anthropic's protocol, lists of blocks, and how they become a chat template's turns.

Texts, reasoning, calls and results are read, no matter which side ran the tool. If the model takes no images, an image
or a file in a tool's result becomes a note (`media_note`), as does one that an agent puts beside results in the same
message; one in a user's own message is refused. Blocks that only the server that wrote them can read are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, WithJsonSchema

from mlx_server.api.answers.chat_plan import Turns
from mlx_server.api.http.request_bounds import FIRST_ERROR
from mlx_server.api.openai.document import IMAGE_URL, STRING, either, list_of, of_type
from mlx_server.engine.text.messages import (
    UnseenPartError,
    media_note,
    string_in,
    unreadable_part,
    without_volatile,
)
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.errors import InvalidRequestError

_TEXT_BLOCK = of_type("text", text=STRING)
_TEXTS = either(STRING, list_of(_TEXT_BLOCK))
_BLOCK = either(
    _TEXT_BLOCK,
    of_type("document", source=either(of_type("text", data=STRING), of_type("content", content=_TEXTS))),
    of_type("image", source=either(of_type("base64", media_type=STRING, data=STRING), of_type("url", url=IMAGE_URL))),
    of_type("search_result", title=STRING, source=STRING, content=_TEXTS),
    of_type("tool_result", tool_use_id=STRING),
    of_type("thinking", thinking=STRING),
    of_type("redacted_thinking"),
    of_type("tool_use", id=STRING, name=STRING, input={"type": "object"}),
)

Block = dict[str, Any]
TextBlock = Annotated[Block, WithJsonSchema(_TEXT_BLOCK)]
Content = str | Annotated[list[Annotated[Block, WithJsonSchema(_BLOCK)]], FIRST_ERROR]


class MessageParam(BaseModel):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content


def read_conversation(
    system: Content | None, messages: Sequence[MessageParam], images: ImageParts | None = None
) -> Turns:
    """The turns. With `images`, image blocks are added to these and marked. Raises `InvalidRequestError`."""
    turns = Turns()
    try:
        _read_system(turns, _blocks(system or "", "system"))
    except UnseenPartError as error:
        if images is None or error.kind != "image":
            raise
        raise InvalidRequestError(
            f"{error.where} is an image, and system takes text only. Send it in a message of the user.", error.where
        ) from error
    given = [{"role": message.role, "content": message.content} for message in messages]
    for index, message in enumerate(given if images is None else images.mark_messages(given)):
        _READERS[message["role"]](turns, _blocks(message["content"], f"messages[{index}].content"))
    if turns.has_open_calls:
        raise InvalidRequestError(
            "The last message has tool_use blocks; send a user message with their tool_result blocks.", "messages"
        )
    return turns


_Blocks = Sequence[tuple[str, Block]]
"""Blocks, each with its path in the request."""


def _blocks(content: Content, where: str) -> _Blocks:
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})] if content else []
    return [(f"{where}[{index}]", block) for index, block in enumerate(content)]


def _read_system(turns: Turns, blocks: _Blocks) -> None:
    for where, block in blocks:
        text = without_volatile(_text(block, where))
        if text:
            turns.instruct(text)


def _read_user(turns: Turns, blocks: _Blocks) -> None:
    # Templates expect results right after the calls.
    results = [item for item in blocks if item[1].get("type") == "tool_result"]
    for where, block in results:
        turns.result(string_in(block, "tool_use_id", where), _result_text(block, where))
    for where, block in blocks:
        if block.get("type") != "tool_result":
            turns.say(_text(_with_notes(block) if results else block, where))


def _read_assistant(turns: Turns, blocks: _Blocks) -> None:
    server_calls: dict[Any, Block] = {}
    for where, block in blocks:
        match block.get("type"):
            case "thinking":
                turns.think(string_in(block, "thinking", where))
            case str(kind) if kind in PASSED_OVER:
                pass
            case "tool_use":
                arguments = block.get("input", {})
                if not isinstance(arguments, dict):
                    raise InvalidRequestError(f"{where}.input must be an object.", f"{where}.input")
                turns.call(string_in(block, "id", where), string_in(block, "name", where), arguments)
            case "server_tool_use" | "mcp_tool_use":
                server_calls[str(block.get("id"))] = block
            case str(kind) if kind.endswith("_tool_result"):
                _read_server_result(turns, block, server_calls)
            case "compaction":
                turns.answer(_readable_text(block.get("content") or ""))
            case _:
                turns.answer(_text(_with_notes(block), where))


PASSED_OVER = frozenset(("redacted_thinking", "container_upload", "fallback", "mcp_tool_listing"))
"""Blocks of an assistant that only the server that wrote them can read, or that are of no use to a model."""


def _read_server_result(turns: Turns, block: Block, calls: Mapping[str, Block]) -> None:
    """A tool that ran on the server that wrote the answer: call and result at once, so that no call without a result
    stays open."""
    call_id = str(block.get("tool_use_id"))
    call = calls.get(call_id, {})
    arguments = call.get("input")
    name = str(call.get("name") or str(block["type"]).removesuffix("_tool_result"))
    turns.call(call_id, name, arguments if isinstance(arguments, dict) else {})
    turns.result(call_id, _readable_text(block.get("content") or ""))


def _readable_text(content: Any) -> str:
    """The result of a server's tool: texts as they are, and all else as JSON."""
    if isinstance(content, list):
        return "\n".join(map(_readable_text, content))
    if isinstance(content, dict) and content.get("type") == "text":
        content = content.get("text")
    return content if isinstance(content, str) else json.dumps(_readable(content), ensure_ascii=False)


def _readable(value: Any) -> Any:
    """Leaves out what is encrypted, and puts notes in place of files."""
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "base64":
        return media_note("file")
    return {key: _readable(item) for key, item in value.items() if not key.startswith("encrypted_")}


_READERS = {"user": _read_user, "assistant": _read_assistant, "system": _read_system}


def _result_text(block: Block, where: str) -> str:
    text = _joined(block.get("content") or "", f"{where}.content", _result_part)
    return f"Error: {text}" if block.get("is_error") else text


def _result_part(block: Block, where: str) -> str:
    """The text of a part of a tool's result; a search for tools gives the names that it has found."""
    if block.get("type") == "tool_reference":
        return string_in(block, "tool_name", where)
    return _text(_with_notes(block), where)


def _with_notes(block: Block) -> Block:
    """The block, with notes in place of media, also inside a document."""
    kind, source = block.get("type"), block.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        parts = source.get("content")
        if not isinstance(parts, list):
            return block
        noted = [_with_notes(part) if isinstance(part, dict) else part for part in parts]
        return {**block, "source": {**source, "content": noted}}
    note = media_note(kind) if isinstance(kind, str) else None
    return block if note is None else {"type": "text", "text": note}


def _text(block: Block, where: str) -> str:
    """The text of a text block, a search result, or a document of text, under their headings."""
    match block.get("type"):
        case "document":
            headings, text = ("title", "context"), _document_text(block.get("source"), where)
        case "search_result":
            headings, text = ("title", "source"), _joined(block.get("content"), f"{where}.content")
        case _:
            return _plain_text(block, where)
    return "\n".join([*(string_in(block, name, where) for name in headings if block.get(name) is not None), text])


def _plain_text(block: Block, where: str) -> str:
    if block.get("type") != "text":
        raise unreadable_part(block.get("type"), where)
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
    """A string, or the texts that `read` finds in blocks, joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidRequestError(f"{where} must be a string or a list of blocks.", where)
    return "\n".join(read(part, path) for path, part in _blocks(content, where))
