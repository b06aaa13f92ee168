"""The input of the Responses API: a list of items, made into a chat template's turns."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_server.api.openai.responses_store import Item
from mlx_server.api.turns import Turns
from mlx_server.engine.content import string_in, text_of
from mlx_server.engine.messages import parse_arguments
from mlx_server.errors import InvalidRequestError

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary", "content"),
}
_PART_FIELDS = ("type", "text", "refusal")
ROLES = ("user", "assistant", "system", "developer")


def referenced_ids(value: str | Sequence[Item]) -> set[str]:
    """The ids of items that are not sent, but referred to."""
    ids = (item.get("id") for item in value if not isinstance(item, str) and _is_reference(item))
    return {item_id for item_id in ids if isinstance(item_id, str)}


def normalise_input(value: str | Sequence[Item], referenced: Mapping[str, Item]) -> list[Item]:
    """The items with a type and an id each, and content as parts, as they are handed out again, without fields that
    are not read; `referenced`, by id, in the place of references. Raises `InvalidRequestError` for references to
    others, and for a second one to the same."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    unused = dict(referenced)
    return [
        _referenced(item, unused, where) if _is_reference(item) else _normalised(item, where)
        for where, item in ((f"input[{index}]", item) for index, item in enumerate(items))
    ]


def _is_reference(item: Item) -> bool:
    """Their type may be left out."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and not item.keys() & {"role", "content"})


def _referenced(item: Item, unused: dict[str, Item], where: str) -> Item:
    item_id = string_in(item, "id", where)
    if item_id not in unused:
        raise InvalidRequestError(
            f"{where} refers to the item {item_id}, which is not kept here, or was referred to before; send the item "
            "itself.",
            f"{where}.id",
        )
    return unused.pop(item_id)


def _normalised(item: Item, where: str) -> Item:
    kind = str(item.get("type") or "message")
    fields = ("id", "status", *_FIELDS.get(kind, ()))
    given = {field: _known_parts(item[field]) for field in fields if item.get(field) is not None}
    if "id" in given:
        string_in(given, "id", where)  # others may refer to it
    whole = {"id": f"{_ID_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}", **given, "type": kind}
    if kind == "message" and isinstance(whole.get("content"), str):
        is_output = whole.get("role") == "assistant"
        part = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
        whole["content"] = [{**part, "text": whole["content"]}]
    return {"status": "completed", **whole} if kind != "reasoning" else whole


def _known_parts(value: Any) -> Any:
    """Content without what nobody reads."""
    if not isinstance(value, list):
        return value
    return [_known_part(part) if isinstance(part, dict) else part for part in value]


def _known_part(part: Item) -> Item:
    known = {field: part[field] for field in _PART_FIELDS if field in part}
    return {**known, "annotations": []} if part.get("type") == "output_text" else known


def read_items(turns: Turns, items: Iterable[Item], field: str = "input") -> None:
    """Adds normalised items, those of the request's `field`, to `turns`. Raises `InvalidRequestError`, for what
    is no text, too."""
    for index, item in enumerate(items):
        where = f"{field}[{index}]"
        match item["type"]:
            case "message":
                _read_message(turns, item, where)
            case "reasoning":
                _read_reasoning(turns, item, where)
            case "function_call":
                call_id, name = string_in(item, "call_id", where), string_in(item, "name", where)
                turns.call(call_id, name, parse_arguments(string_in(item, "arguments", where), f"{where}.arguments"))
            case "function_call_output":
                text = text_of(item.get("output"), f"{where}.output")
                turns.result(string_in(item, "call_id", where), text)
            case kind:
                raise InvalidRequestError(
                    f"{where} is of type {kind}; this server knows {', '.join(_ID_PREFIXES)}.", f"{where}.type"
                )


def _read_message(turns: Turns, item: Item, where: str) -> None:
    text = text_of(item.get("content"), f"{where}.content")
    match item.get("role"):
        case "user":
            turns.say(text)
        case "assistant":
            turns.answer(text)
        case "system" | "developer":
            turns.instruct(text)
        case _:
            raise InvalidRequestError(f"{where}.role must be one of {', '.join(ROLES)}.", f"{where}.role")


def _read_reasoning(turns: Turns, item: Item, where: str) -> None:
    """The reasoning itself, or else its summary. What is encrypted was not written here and stays unread."""
    for field in ("content", "summary"):
        parts = item.get(field) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise InvalidRequestError(f"{where}.{field} must be a list of parts.", f"{where}.{field}")
        if parts:
            return turns.think("\n".join(string_in(part, "text", f"{where}.{field}") for part in parts))
    return None
