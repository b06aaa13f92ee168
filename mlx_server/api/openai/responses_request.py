"""The body of POST /v1/responses.

Beside the protocol's own fields, those of sampling that chat completions take are honoured (`min_p`, `seed`,
`cache_salt` ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from mlx_server.api.chat_plan import ChatCall, ToolUse
from mlx_server.api.openai.chat_request import ReasoningEffort, tool_use
from mlx_server.api.openai.fields import ONE_ANSWER_OF_TEXT, Bool, GenerationFields, Int
from mlx_server.api.openai.responses_input import ROLES, read_items
from mlx_server.api.openai.responses_store import Item
from mlx_server.api.sizes import FIRST_ERROR, ITEMS, TOOLS, Strings
from mlx_server.api.turns import Turns
from mlx_server.engine.chat import ChatOptions
from mlx_server.engine.structured_spec import STRUCTURED_FIELDS, StructuredSpec, parse_structured
from mlx_server.errors import InvalidRequestError

_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}


def _item(kind: str, *required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": {"type": {"const": kind}, **properties}}


InputItem = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "anyOf": [
                _item("message", "role", "content", role={"enum": list(ROLES)}, content=_CONTENT),
                _item("reasoning", "type", content={"type": "array", "items": _TEXT_PART}),
                _item(
                    "function_call",
                    *("type", "call_id", "name", "arguments"),
                    call_id={"type": "string"},
                    name={"type": "string"},
                    arguments={"type": "string", "description": "A JSON object."},
                ),
                _item("function_call_output", "type", "call_id", "output", call_id={"type": "string"}, output=_CONTENT),
            ]
        }
    ),
]
FunctionTool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        _item(
            "function",
            *("type", "name"),
            name={"type": "string", "minLength": 1},
            parameters={"type": ["object", "null"]},
        )
    ),
]
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _item("function", "type", "name", name={"type": "string"}),
    ]
}


class Reasoning(BaseModel):
    """How much to reason. A summary is not made: the reasoning itself is sent."""

    model_config = ConfigDict(extra="ignore")

    effort: ReasoningEffort | None = None


class TextOptions(BaseModel):
    """What the answer's text must look like."""

    model_config = ConfigDict(extra="ignore")

    format: dict[str, Any] | None = None


class ResponsesRequest(GenerationFields):
    """All fields of a response that mean something here."""

    input: Annotated[str | Annotated[list[InputItem], FIRST_ERROR], ITEMS]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: Bool | None = None
    max_output_tokens: Int | None = Field(None, ge=1)
    metadata: dict[str, Any] | None = None
    user: str | None = None

    tools: Annotated[list[FunctionTool], FIRST_ERROR, TOOLS] | None = None
    tool_choice: Annotated[str | dict[str, Any], WithJsonSchema(_TOOL_CHOICE)] | None = None
    parallel_tool_calls: Bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Bool | None = None
    conversation: Any = None
    prompt: Any = None
    truncation_strategy: str | None = Field(None, alias="truncation", json_schema_extra={"enum": ["disabled", None]})
    top_logprobs: Int | None = None
    include: Strings | None = None

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationFields.refused,
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "top_logprobs": (0,),
        **ONE_ANSWER_OF_TEXT,
    }

    def check(self) -> None:
        super().check()
        if self.truncation_strategy not in (None, "disabled"):
            raise InvalidRequestError("truncation must be disabled; this server drops no items.", "truncation")
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
            structured=self.structured(),
            truncation=self.truncation,
        )

    def structured(self) -> StructuredSpec | None:
        """As in the base class, with `text.format` for `response_format`."""
        fields = {name: getattr(self, name) for name in STRUCTURED_FIELDS}
        wanted = None if self.text is None else self.text.format
        if wanted is not None:
            is_schema = wanted.get("type") == "json_schema"
            fields["response_format"] = {"type": "json_schema", "json_schema": wanted} if is_schema else wanted
        try:
            spec = parse_structured(fields)
        except InvalidRequestError as error:
            raise InvalidRequestError(_own_name(error.message), _own_name(error.param or "")) from error
        return spec if spec is None or wanted is None else replace(spec, param="text.format")

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
