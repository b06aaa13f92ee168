"""The body of POST /v1/responses.

The sampling fields of chat completions (`min_p`, `seed`, `cache_salt` ...) work beside the protocol's own.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from mlx_server.api.answers.chat_plan import ChatCall, ToolUse, Turns
from mlx_server.api.http.request_bounds import (
    BOUNDED_ITEMS,
    BOUNDED_TOOLS,
    FIRST_ERROR,
    MAX_ECHO_CHARS,
    MAX_TOOLS,
    Strings,
)
from mlx_server.api.http.text_turns import encode_in_pieces
from mlx_server.api.openai.chat import ReasoningEffort, tool_use
from mlx_server.api.openai.document import IMAGE_URL, NULL, STRING, TEXT, either, list_of, members, of_type
from mlx_server.api.openai.fields import Bool, Int, OneAnswerOfText, Refused
from mlx_server.api.openai.responses.custom_tools import as_function, input_patterns
from mlx_server.api.openai.responses.items import ROLES, qualified, read_items
from mlx_server.api.openai.responses.store import Item
from mlx_server.engine.grammar.spec import StructuredSpec
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.engine.text.messages import string_in
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.errors import InvalidRequestError

logger = logging.getLogger(__name__)

_TEXT_PART = members("type", "text", type={"enum": ["input_text", "output_text"]}, text=STRING)
_IMAGE_PART = of_type("input_image", image_url=either(IMAGE_URL, members("url", url=IMAGE_URL)))
_CONTENT = either(STRING, list_of(either(_TEXT_PART, _IMAGE_PART)))
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
_GRAMMAR = of_type("grammar", syntax={"enum": ["lark", "regex"]}, definition=STRING)
_FUNCTION = of_type("function", name=TEXT)
_FUNCTION["properties"]["parameters"] = {"type": ["object", "null"]}
_CUSTOM = of_type("custom", name=TEXT)
_CUSTOM["properties"]["format"] = either(of_type("text"), _GRAMMAR, NULL)
_CALLED = either(_FUNCTION, _CUSTOM)
_TOOL = either(_CALLED, of_type("namespace", name=TEXT, tools=list_of(_CALLED)))
_TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required"]}, of_type("function", name=STRING), of_type("custom", name=STRING)
)


class Reasoning(BaseModel):
    """How much to reason, and where clients read it: with `summary`, the reasoning itself stands in that place."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(BaseModel):
    """The format of the answer's text."""

    format: dict[str, Any] | None = None


class ConversationId(BaseModel):
    """A conversation."""

    id: str


class ResponsesRequest(OneAnswerOfText):
    """The fields of a response that mean something here."""

    input: Annotated[str | Annotated[list[InputItem], FIRST_ERROR], BOUNDED_ITEMS]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    store: Bool | None = None
    max_output_tokens: Int | None = Field(None, ge=1)
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    max_tool_calls: Int | None = None

    tools: Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_TOOL)]], FIRST_ERROR, BOUNDED_TOOLS] | None = None
    tool_choice: Annotated[str | dict[str, Any], WithJsonSchema(_TOOL_CHOICE)] | None = None
    parallel_tool_calls: Bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Bool | None = None
    prompt: Annotated[Any, Refused()] = None
    top_logprobs: Annotated[Any, Refused((0,))] = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Strings | None = None

    def check(self) -> None:
        super().check()
        if "message.output_text.logprobs" in (self.include or ()):
            raise InvalidRequestError(
                "include has message.output_text.logprobs, which only chat completions offer here.", "include"
            )

        if self.background and self.store is False:
            raise InvalidRequestError(
                "A response in the background is read where it is kept; leave store out.", "store"
            )
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequestError(
                "conversation and previous_response_id exclude each other: a conversation has all its earlier items. "
                "Leave one out.",
                "conversation",
            )

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationId) else self.conversation

    @property
    def continued(self) -> str:
        """The field that names what this response continues."""
        return "previous_response_id" if self.conversation is None else "conversation"

    def echo(self) -> bytes:
        """What answers and several events repeat of the request, as JSON: the members without braces. Any thread.
        Raises `InvalidRequestError` if it is too long."""
        members = {
            "instructions": self.instructions,
            "metadata": self.metadata or {},
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "tool_choice": self.tool_choice or "auto",
            "tools": [_shown(tool) for tool in self.tools or ()],
            "user": self.user,
        }
        encoded = encode_in_pieces(members)[1:-1]
        num_chars = len(encoded.decode())
        if num_chars > MAX_ECHO_CHARS:
            raise InvalidRequestError(
                f"instructions, metadata, tools, tool_choice, user and text have {num_chars} characters together, as "
                f"JSON; answers repeat them, up to {MAX_ECHO_CHARS}. Shorten them."
            )
        return encoded

    @property
    def output_limit(self) -> int | None:
        return self.max_output_tokens

    def call(self, images: ImageParts | None, items: Sequence[Item], earlier: Sequence[Item] = ()) -> ChatCall:
        """The chat without sampling parameters; `earlier` are the items that it continues. Raises
        `InvalidRequestError`."""
        turns = Turns()
        if self.instructions:
            turns.instruct(self.instructions)
        for field, given in ((self.continued, earlier), ("input", items)):
            read_items(turns, given if images is None else images.mark_messages(given, field), field)
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
            has_open_schemas=bool(self.open_schemas),
        )

    def _structured(self) -> StructuredSpec | None:
        wanted = None if self.text is None else self.text.format
        if wanted is not None and wanted.get("type") == "json_schema":
            if wanted.get("schema") is None:
                raise InvalidRequestError("text.format.schema is missing.", "text.format.schema")
            wanted = {"type": "json_schema", "schema": wanted["schema"]}
        return self.structured(wanted, "text.format")

    def _tool_use(self) -> ToolUse:
        tools = list(self.client_tools())
        patterns = input_patterns((tool.name, tool.body, tool.where) for tool in tools if tool.is_custom)
        if len(tools) > MAX_TOOLS:
            raise InvalidRequestError(f"tools has {len(tools)} functions; the most is {MAX_TOOLS}.", "tools")
        _check_names(tools)
        functions = [tool.as_function() for tool in tools]
        choice = _without_hosted(self.tool_choice)
        use = tool_use(functions, choice, self.parallel_tool_calls, _chosen_name, _CHOSEN)
        return replace(use, patterns=patterns, fields={tool.name: tool.schema_field for tool in tools})

    def client_tools(self) -> Iterator[ClientTool]:
        """All tools that the client runs; a namespace gives each of its tools. Those of OpenAI's servers are left out
        beside others: agents offer them in every request, and do without. Raises `InvalidRequestError`."""
        given = self.tools or ()
        has_own = any(tool.get("type") in ("function", "custom", "namespace") for tool in given)
        for index, tool in enumerate(given):
            where, hosted = f"tools[{index}]", _hosted_kind(tool)
            if has_own and hosted is not None:
                _note_left_out(hosted)
            elif tool.get("type") != "namespace":
                yield ClientTool.of(tool, "", where)
            else:
                yield from _tools_of(tool, where)


_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "computer", "tool_search")
"""How the types of tools begin that run on OpenAI's servers, or find others there."""


def _hosted_kind(tool: Any) -> str | None:
    kind = str(tool.get("type")) if isinstance(tool, dict) else ""
    return next(filter(kind.startswith, _HOSTED), None)


def _without_hosted(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """A choice that allows tools, without those that are left out, if it allows others."""
    allowed = choice.get("tools") if isinstance(choice, dict) else None
    own = [tool for tool in allowed if _hosted_kind(tool) is None] if isinstance(allowed, list) else []
    return {**choice, "tools": own} if isinstance(choice, dict) and own else choice


@functools.cache
def _note_left_out(kind: str) -> None:
    logger.warning("Requests offer the model tools of type %s, which do not run here; they are left out.", kind)


def _tools_of(namespace: dict[str, Any], where: str) -> Iterator[ClientTool]:
    name, inner = string_in(namespace, "name", where), namespace.get("tools")
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        raise InvalidRequestError(f"{where}.tools must be a list of functions.", f"{where}.tools")
    for number, each in enumerate(inner):
        yield ClientTool.of(each, name, f"{where}.tools[{number}]")


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A function or a custom tool at the path `where` of the request."""

    body: dict[str, Any]
    namespace: str
    where: str

    @classmethod
    def of(cls, body: dict[str, Any], namespace: str, where: str) -> ClientTool:
        """Raises `InvalidRequestError`."""
        if body.get("type") not in ("function", "custom"):
            raise InvalidRequestError(
                f"{where} is of type {body.get('type')}; this server runs no tools of its own. Send functions or "
                "custom tools, which the client runs.",
                f"{where}.type",
            )
        if not isinstance(body.get("name"), str) or not body["name"]:
            raise InvalidRequestError(
                f"{where}.name must be a non-empty string. A tool's name and parameters stand beside its type here, "
                "not in a function.",
                f"{where}.name",
            )
        if body["type"] == "function" and not isinstance(body.get("parameters") or {}, dict):
            raise InvalidRequestError(f"{where}.parameters must be a JSON schema.", f"{where}.parameters")
        return cls(body, namespace, where)

    @property
    def name(self) -> str:
        """The name that the model knows."""
        return qualified(self.body["name"], self.namespace)

    @property
    def is_custom(self) -> bool:
        return bool(self.body["type"] == "custom")

    @property
    def schema_field(self) -> str:
        """The request's field that its arguments must fit."""
        return f"{self.where}.{'format' if self.is_custom else 'parameters'}"

    def as_function(self) -> dict[str, Any]:
        """In the form of chat completions."""
        body = as_function(self.body) if self.is_custom else self.body
        function = {key: value for key, value in body.items() if key != "type" and value is not None}
        return {"type": "function", "function": {**function, "name": self.name}}


def _shown(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool with all members that functions have in a response."""
    missing = {"description": None, "parameters": None, "strict": None} if tool.get("type") == "function" else {}
    return {**missing, **tool}


def _check_names(tools: Sequence[ClientTool]) -> None:
    """Raises `InvalidRequestError` if a call of a namespace's function could be a call of another function."""
    names = Counter(tool.name for tool in tools)
    for tool in tools:
        if tool.namespace and names[tool.name] > 1:
            raise InvalidRequestError(
                f"tools has several functions that the model would call {tool.name}: a namespace's name, `__` and the "
                "function's are joined. Rename one.",
                "tools",
            )


_CHOSEN = '{"type": "function", "name": ...}'


def _chosen_name(choice: Any) -> Any:
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return None
    name, namespace = choice.get("name"), choice.get("namespace")
    return qualified(str(name), str(namespace or "")) if name else None
