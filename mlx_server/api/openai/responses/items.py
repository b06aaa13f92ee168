"""The items of a response's input: which of their members are kept, and how they become a chat template's turns.

Texts, reasoning, calls and results are read, no matter which side ran the tool. Items that only the server that wrote
them can read, or that are of no use to a model, are skipped (`PASSED_OVER`), so a conversation can begin on another
server and continue here. For a model that takes no images, media are refused in a user's message, and a note replaces
them in a tool's result.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.api.answers.chat_plan import Turns
from mlx_server.api.openai.responses.store import Item, KeptItem, KeptItems
from mlx_server.engine.text.messages import parse_arguments, string_in, text_of
from mlx_server.errors import InvalidRequestError

_INSTRUCTING = ("system", "developer")
ROLES = ("user", "assistant", *_INSTRUCTING)
_PART_FIELDS = ("type", "text", "refusal")
_IMAGE_FIELDS = ("image_url", "detail")
_IMAGE_WEIGHT = 2000

_MAX_ID_CHARS = 512
"""Of an item's id. A fleet's store counts them with a weight, and would drop a conversation of longer ones."""


def qualified(name: str, namespace: str) -> str:
    """A function's name for the model: `files__read` for `read` of the namespace `files`."""
    return f"{namespace}__{name}" if namespace else name


def unqualified(name: str, namespace: str) -> str:
    """The function's own name."""
    return name.removeprefix(f"{namespace}__") if namespace else name


def referenced_ids(value: str | Sequence[Item]) -> set[str]:
    """The ids of items that the input refers to instead of sending them."""
    if isinstance(value, str):
        return set()
    ids = (item.get("id") for item in value if _is_reference(item))
    return {item_id for item_id in ids if isinstance(item_id, str)}


def normalise_input(
    value: str | Sequence[Item], referenced: Mapping[str, Item], field: str = "input", *, keeps_images: bool = False
) -> list[Item]:
    """The items of the request's `field` as clients get them back: each with a type and an id, content as parts,
    without members that are not read (images only if it `keeps_images`), and with the items of `referenced`, by id, in
    place of references. Raises `InvalidRequestError` for references to other items, and for a second reference to the
    same one."""
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    unused = dict(referenced)
    part_fields = (*_PART_FIELDS, *(_IMAGE_FIELDS if keeps_images else ()))
    return [
        _referenced(item, unused, where) if _is_reference(item) else _normalised(item, where, part_fields)
        for where, item in ((f"{field}[{index}]", item) for index, item in enumerate(items))
    ]


def with_own_ids(items: Iterable[KeptItem], taken: Iterable[str]) -> KeptItems:
    """The items as they are kept. One whose id is `taken`, or that of an item before it, gets a fresh one, since pages
    of items begin after an id; so does one whose id cannot be part of a path, or is long."""
    seen = {"", ".", "..", *taken}

    def own(kept: KeptItem) -> KeptItem:
        if kept.id in seen or "/" in kept.id or len(kept.id) > _MAX_ID_CHARS:
            item = kept.read()
            called = {"call_id": _call_id(item)} if _is_of_call(item) else {}
            kept = KeptItem.of({**item, **called, "id": _fresh_id(KINDS.get(item["type"], _UNREAD))})
        seen.add(kept.id)
        return kept

    return KeptItems.of(map(own, items))


def cut_points(items: Sequence[Item]) -> list[int]:
    """The numbers of normalised items at the beginning that can be left out without separating a call from its output.
    A later call may have the id of an earlier one: some clients number the calls of each turn. The last item stays."""
    ends, last = dict[str, int](), list(range(len(items)))
    for index in reversed(range(len(items))):
        item = items[index]
        if _is_of_call(item):
            last[index] = ends.setdefault(_call_id(item), index)
            if not item["type"].endswith("_output"):
                del ends[_call_id(item)]
    cuts, open_until = list[int](), 0
    for index, end in enumerate(last[:-1]):
        open_until = max(open_until, end)
        if open_until == index:
            cuts.append(index + 1)
    return cuts


def left_out(items: Sequence[Item], num: int) -> set[int]:
    """Which of normalised items go when the first `num` are left out: not the instructions, nor the user's message
    that the others follow, without which a model does not know what they are for, and templates fail."""
    gone = [index for index, item in enumerate(items[:num]) if item.get("role") not in _INSTRUCTING]
    follower = next((item for item in items[num:] if item.get("role") not in _INSTRUCTING), None)
    asked = None
    if follower is None or follower.get("role") != "user":
        asked = next((index for index in reversed(gone) if items[index].get("role") == "user"), None)
    return {index for index in gone if index != asked}


def weight(item: Any) -> int:
    """Roughly the characters that an item, or a part of one, has in a prompt."""
    if isinstance(item, str):
        return len(item)
    if isinstance(item, list):
        return sum(map(weight, item))
    if not isinstance(item, dict) or item.get("type") == "reasoning":  # most templates leave earlier reasoning out
        return 0
    return _IMAGE_WEIGHT if item.get("type") == "input_image" else sum(map(weight, item.values()))


def read_items(turns: Turns, items: Iterable[Item], field: str) -> None:
    """Adds normalised items of the request's `field` to `turns`. Raises `InvalidRequestError`, also for media."""
    for index, item in enumerate(items):
        where, kind = f"{field}[{index}]", item["type"]
        if kind in PASSED_OVER:
            continue
        if kind not in KINDS:
            raise InvalidRequestError(
                f"{where} is of type {kind}; this server knows {', '.join((*KINDS, *sorted(PASSED_OVER)))}.",
                f"{where}.type",
            )
        KINDS[kind].read(turns, item, where)


def _is_reference(item: Item) -> bool:
    """References may leave out their type."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and not item.keys() & {"role", "content"})


def _referenced(item: Item, unused: dict[str, Item], where: str) -> Item:
    item_id = string_in(item, "id", where)
    if item_id not in unused:
        raise InvalidRequestError(
            f"{where} refers to the item {item_id}, which is not kept here or is referred to twice; send the item.",
            f"{where}.id",
        )
    return unused.pop(item_id)


def _normalised(item: Item, where: str, part_fields: Sequence[str]) -> Item:
    name = str(item.get("type") or "message")
    kind = KINDS.get(name, _UNREAD)
    given = {
        field: _known_parts(item[field], part_fields)
        for field in ("id", "status", *kind.fields)
        if item.get(field) is not None
    }
    if "id" in given:
        string_in(given, "id", where)  # others may refer to it
    whole = {"id": _fresh_id(kind), **given, "type": name}
    if name == "message" and isinstance(whole.get("content"), str):
        is_output = whole.get("role") == "assistant"
        part = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
        whole["content"] = [{**part, "text": whole["content"]}]
    return {"status": "completed", **whole} if name != "reasoning" else whole


def _fresh_id(kind: Kind) -> str:
    return f"{kind.prefix}_{uuid.uuid4().hex}"


def _known_parts(value: Any, fields: Sequence[str]) -> Any:
    """Content without members that are not read."""
    if not isinstance(value, list):
        return value
    return [_known_part(part, fields) if isinstance(part, dict) and "type" in part else part for part in value]


def _known_part(part: Item, fields: Sequence[str]) -> Item:
    known = {field: part[field] for field in fields if field in part}
    return {**known, "annotations": []} if part.get("type") == "output_text" else known


def _read_message(turns: Turns, item: Item, where: str) -> None:
    text = text_of(item.get("content"), f"{where}.content", notes_media=item.get("role") == "assistant")
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
    """The reasoning itself, or else its summary. Encrypted reasoning comes from another server and is not read."""
    for field in ("content", "summary"):
        parts = item.get(field) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise InvalidRequestError(f"{where}.{field} must be a list of parts.", f"{where}.{field}")
        if parts:
            return turns.think("\n".join(string_in(part, "text", f"{where}.{field}") for part in parts))
    return None


def _read_call(turns: Turns, item: Item, where: str) -> None:
    name = qualified(string_in(item, "name", where), str(item.get("namespace") or ""))
    arguments = parse_arguments(string_in(item, "arguments", where), f"{where}.arguments")
    turns.call(string_in(item, "call_id", where), name, arguments)


def _read_output(turns: Turns, item: Item, where: str) -> None:
    output = text_of(item.get("output"), f"{where}.output", notes_media=True)
    turns.result(string_in(item, "call_id", where), output)


def _read_mcp_call(turns: Turns, item: Item, where: str) -> None:
    """A call together with its result."""
    name = string_in(item, "name", where)
    turns.call(item["id"], name, parse_arguments(item.get("arguments"), f"{where}.arguments"))
    turns.result(item["id"], _as_text(item.get("output") or item.get("error") or ""))


def _own_call(name: str, field: str) -> Reader:
    """For calls of a tool with its own item type and all arguments in one field. An item's name replaces `name`."""

    def read(turns: Turns, item: Item, where: str) -> None:
        called = string_in(item, "name", where) if "name" in item else name
        turns.call(_call_id(item), qualified(called, str(item.get("namespace") or "")), {field: item.get(field)})

    return read


def _read_own_output(turns: Turns, item: Item, where: str) -> None:
    turns.result(_call_id(item), _as_text(item.get("output") or ""))


def _is_of_call(item: Item) -> bool:
    """Whether it is a call or the output of one."""
    return "call_id" in KINDS.get(item["type"], _UNREAD).fields


def _call_id(item: Item) -> str:
    return str(item.get("call_id") or item["id"])


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Reader = Callable[[Turns, Item, str], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of items: how their ids begin, which members are kept beside id and status, and how they are read."""

    prefix: str
    fields: tuple[str, ...]
    read: Reader


_CALL_FIELDS = ("call_id", "name", "namespace")
_OUTPUT_FIELDS = ("call_id", "output")

KINDS: Mapping[str, Kind] = {
    "message": Kind("msg", ("role", "content"), _read_message),
    "reasoning": Kind("rs", ("summary", "content"), _read_reasoning),
    "function_call": Kind("fc", (*_CALL_FIELDS, "arguments"), _read_call),
    "function_call_output": Kind("fco", _OUTPUT_FIELDS, _read_output),
    "custom_tool_call": Kind("ctc", (*_CALL_FIELDS, "input"), _own_call("custom", "input")),
    "custom_tool_call_output": Kind("ctco", _OUTPUT_FIELDS, _read_output),
    "local_shell_call": Kind("lsh", ("call_id", "action"), _own_call("local_shell", "action")),
    "local_shell_call_output": Kind("lsho", _OUTPUT_FIELDS, _read_own_output),
    "shell_call": Kind("sh", ("call_id", "action"), _own_call("shell", "action")),
    "shell_call_output": Kind("sho", _OUTPUT_FIELDS, _read_own_output),
    "apply_patch_call": Kind("apc", ("call_id", "operation"), _own_call("apply_patch", "operation")),
    "apply_patch_call_output": Kind("apco", _OUTPUT_FIELDS, _read_own_output),
    "mcp_call": Kind("mcp", ("name", "arguments", "output", "error"), _read_mcp_call),
}
"""The items that are read, by type."""

_UNREAD = Kind("item", (), lambda *_: None)
PASSED_OVER = frozenset(
    (
        # Tools that ran on the server that wrote the answer; the answer has what matters of their results.
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("computer_call", "computer_call_output", "program", "program_output"),
        # Tools that were found or listed there; `tools` has those that can be called here.
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("tool_search_call", "tool_search_output", "additional_tools", "configuration_update"),
        # Encrypted, or a client's own bookkeeping.
        *("compaction", "compaction_summary", "context_compaction", "compaction_trigger", "ghost_snapshot"),
    )
)
"""Items that are not read: not text, or written for another server."""

LEFT_OUT: Item = {"type": "compaction"}
"""Stands in the place of an item that is left out, so that errors name the others by their places in the request."""
