"""The body of POST /v1/responses, and how its list of items becomes a chat template's turns.

Beside the protocol's own fields, those of sampling that chat completions take are honoured (`min_p`, `seed`,
`cache_salt` ...).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, Field, WithJsonSchema

from mlx_server.api.chat_plan import ChatCall, ToolUse, Turns
from mlx_server.api.openai.chat import ReasoningEffort, tool_use
from mlx_server.api.openai.document import STRING, either, list_of, members, of_type
from mlx_server.api.openai.fields import Bool, Int, OneAnswerOfText, Refused
from mlx_server.api.openai.responses.store import Item
from mlx_server.api.request_bounds import BOUNDED_ITEMS, BOUNDED_TOOLS, FIRST_ERROR, Strings
from mlx_server.engine.grammar.spec import StructuredSpec
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.engine.text.messages import parse_arguments, string_in, text_of
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


_TEXT_PART = members("type", "text", type={"enum": ["input_text", "output_text"]}, text=STRING)
_CONTENT = either(STRING, list_of(_TEXT_PART))
_ARGUMENTS = {**STRING, "description": "A JSON object."}
InputItem = Annotated[
    dict[str, Any],
    WithJsonSchema(
        either(
            members("role", "content", type={"const": "message"}, role={"enum": list(ROLES)}, content=_CONTENT),
            members("type", type={"const": "reasoning"}, content=list_of(_TEXT_PART)),
            of_type("function_call", call_id=STRING, name=STRING, arguments=_ARGUMENTS),
            of_type("function_call_output", call_id=STRING, output=_CONTENT),
        )
    ),
]
_FUNCTION = members(
    *("type", "name"),
    type={"const": "function"},
    name={**STRING, "minLength": 1},
    parameters={"type": ["object", "null"]},
)
_TOOL_CHOICE = either({"enum": ["none", "auto", "required"]}, of_type("function", name=STRING))


class Reasoning(BaseModel):
    """How much to reason. A summary is not made: the reasoning itself is sent."""

    effort: ReasoningEffort | None = None


class TextOptions(BaseModel):
    """What the answer's text must look like."""

    format: dict[str, Any] | None = None


class ResponsesRequest(OneAnswerOfText):
    """All fields of a response that mean something here."""

    input: Annotated[str | Annotated[list[InputItem], FIRST_ERROR], BOUNDED_ITEMS]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: Bool | None = None
    max_output_tokens: Int | None = Field(None, ge=1)
    metadata: dict[str, Any] | None = None
    user: str | None = None

    tools: Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_FUNCTION)]], FIRST_ERROR, BOUNDED_TOOLS] | None = (
        None
    )
    tool_choice: Annotated[str | dict[str, Any], WithJsonSchema(_TOOL_CHOICE)] | None = None
    parallel_tool_calls: Bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Annotated[Any, Refused((False,))] = None
    conversation: Annotated[Any, Refused()] = None
    prompt: Annotated[Any, Refused()] = None
    truncation: Annotated[Any, Refused(("disabled",), "no items are dropped, set it to disabled")] = None
    top_logprobs: Annotated[Any, Refused((0,))] = None
    include: Strings | None = None

    def check(self) -> None:
        super().check()
        if "message.output_text.logprobs" in (self.include or ()):
            raise InvalidRequestError(
                "include has message.output_text.logprobs, which only chat completions offer here.", "include"
            )

    @property
    def output_limit(self) -> int | None:
        return self.max_output_tokens

    def call(self, items: Sequence[Item], earlier: Sequence[Item] = ()) -> ChatCall:
        """The chat without what concerns sampling; `earlier` are the items of the responses before this one.
        Raises `InvalidRequestError`."""
        turns = Turns()
        if self.instructions:
            turns.instruct(self.instructions)
        read_items(turns, earlier, "previous_response_id")
        read_items(turns, items)
        if not turns.messages():
            raise InvalidRequestError("input is empty; send a text, or at least one item.", "input")
        return ChatCall(
            messages=turns.messages(),
            tool_use=self._tool_use(),
            options=ChatOptions(
                template_kwargs=self.chat_template_kwargs or {},
                reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            ),
            structured=self._structured(),
            truncation=self.prompt_truncation,
        )

    def _structured(self) -> StructuredSpec | None:
        """As `structured` says, under this protocol's name."""
        wanted = None if self.text is None else self.text.format
        if wanted is None:
            return self.structured()
        is_schema = wanted.get("type") == "json_schema"
        try:
            spec = self.structured({"type": "json_schema", "json_schema": wanted} if is_schema else wanted)
        except InvalidRequestError as error:
            raise InvalidRequestError(_own_name(error.message), _own_name(error.param or "")) from error
        return spec and replace(spec, param="text.format")

    def _tool_use(self) -> ToolUse:
        tools = [_nested(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())]
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = _nested_choice(choice)
        if not tools and choice == "auto":
            choice = None
        return tool_use(tools or None, choice, self.parallel_tool_calls is not False)


def _nested_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of tools in the form of chat completions."""
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    listed = choice.get("tools")
    if choice.get("type") == "allowed_tools" and isinstance(listed, list):
        tools = [_nested_choice(tool) if isinstance(tool, dict) else tool for tool in listed]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    return choice


def _own_name(text: str) -> str:
    return text.replace("response_format.json_schema", "text.format").replace("response_format", "text.format")


def _nested(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool in the form of chat completions."""
    if tool.get("type") != "function":
        raise InvalidRequestError(
            f"{where} is of type {tool.get('type')}; this server runs no tools of its own, only functions of the "
            "client's can be called.",
            f"{where}.type",
        )
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise InvalidRequestError(
            f"{where}.name must be a non-empty string. A tool's name and parameters stand beside its type here, not in "
            "a function.",
            f"{where}.name",
        )
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}
