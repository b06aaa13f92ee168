"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the same engine.

Beside Anthropic's own fields, those of sampling that OpenAI's routes take are honoured (`min_p`, `seed`,
`cache_salt` ...). What a field of Anthropic's means for hosted models only, like `cache_control`, is tolerated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, WithJsonSchema
from starlette.responses import Response

from mlx_server.api.anthropic.output import PING, MessageWriter
from mlx_server.api.body import TurnRoute
from mlx_server.api.chat_plan import ChatCall, ToolUse, Turns
from mlx_server.api.context import Context
from mlx_server.api.openai.chat import tool_use
from mlx_server.api.openai.document import STRING, either, list_of, of_type
from mlx_server.api.openai.exchange import open_exchange
from mlx_server.api.openai.fields import Bool, Int, OneAnswerOfText, Refused, StringOrList
from mlx_server.api.request_bounds import BOUNDED_MESSAGES, BOUNDED_TOOLS, FIRST_ERROR
from mlx_server.api.sse import whole_or_streamed
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.engine.text.messages import string_in, unreadable_part
from mlx_server.errors import InvalidRequestError

_TEXT_BLOCK = of_type("text", text=STRING)
_MAYBE = {"type": ["string", "null"]}
_TEXTS = either(STRING, list_of(_TEXT_BLOCK))
_SOURCE = either(of_type("text", data=STRING), of_type("content", content=_TEXTS))

_DOCUMENT = of_type("document", source=_SOURCE)
_DOCUMENT["properties"] |= {"title": _MAYBE, "context": _MAYBE}
_USER_BLOCKS = (
    _DOCUMENT,
    of_type("search_result", title=STRING, source=STRING, content=_TEXTS),
    of_type("tool_result", tool_use_id=STRING),
)
_ASSISTANT_BLOCKS = (
    of_type("thinking", thinking=STRING),
    of_type("redacted_thinking"),
    of_type("tool_use", id=STRING, name=STRING, input={"type": "object"}),
)


def _message(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    content = either(STRING, list_of(either(_TEXT_BLOCK, *blocks)))
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
    _read_system(turns, _blocks(system or "", "system"))
    for index, message in enumerate(messages):
        _READERS[message.role](turns, _blocks(message.content, f"messages[{index}].content"))
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
        text = _text(block, where)
        stable = _VOLATILE.sub("", text[:_HEAD_CHARS]) + text[_HEAD_CHARS:]
        if stable:
            turns.instruct(stable)


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


class ToolParam(BaseModel):
    """A tool that the client runs; tools that Anthropic's servers run have another `type`."""

    name: str = Field(min_length=1)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def as_openai(self, where: str) -> dict[str, Any]:
        if self.type not in (None, "custom"):
            raise InvalidRequestError(
                f"{where} is of type {self.type}; this server runs no tools of its own, "
                "so leave it out or define it with an input_schema.",
                f"{where}.type",
            )
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


class ToolChoice(BaseModel):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Bool | None = None

    def as_openai(self, has_tools: bool) -> str | dict[str, Any] | None:
        if self.type == "tool":
            return {"type": "function", "function": {"name": str(self.name)}}
        if self.type == "auto" and not has_tools:
            return None
        return "required" if self.type == "any" else self.type


class Thinking(BaseModel):
    """Whether the model reasons first, for how many tokens at most, and whether the client sees it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Int | None = Field(None, ge=1)
    display: str | None = None


class OutputFormat(BaseModel):
    """What the answer must look like."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """How the answer is to be written."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(OneAnswerOfText):
    """The body of POST /v1/messages/count_tokens: what makes the prompt."""

    messages: Annotated[list[MessageParam], FIRST_ERROR, BOUNDED_MESSAGES] = Field(min_length=1)
    system: str | Annotated[list[TextBlock], FIRST_ERROR] | None = None
    tools: Annotated[list[ToolParam], FIRST_ERROR, BOUNDED_TOOLS] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop: StringOrList | None = Field(None, validation_alias=AliasChoices("stop_sequences", "stop"))
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: Annotated[Any, Refused(([],))] = None

    @property
    def thinks(self) -> bool:
        """Off unless asked for: simple clients take an answer's first block for its text."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is not None and self.thinks and self.thinking.display != "omitted"

    def call(self) -> ChatCall:
        """The chat without what concerns sampling. Raises `InvalidRequestError`."""
        turns = read_conversation(self.system, self.messages)
        if not turns.messages():
            raise InvalidRequestError("messages has no content; send at least one text.", "messages")
        return ChatCall(
            messages=turns.messages(),
            tool_use=self._tool_use(),
            options=ChatOptions(
                continue_final_message=turns.ends_with_answer,
                template_kwargs={"enable_thinking": self.thinks, **(self.chat_template_kwargs or {})},
                reasoning_effort=None if self.output_config is None else self.output_config.effort,
            ),
            structured=self.structured(self._wanted_format()),
            truncation=self.prompt_truncation,
            max_reasoning_tokens=None if self.thinking is None else self.thinking.budget_tokens,
        )

    def _tool_use(self) -> ToolUse:
        tools = [tool.as_openai(f"tools[{index}]") for index, tool in enumerate(self.tools or ())]
        choice = self.tool_choice
        if choice is None:
            return tool_use(tools or None, None, is_parallel=True)
        return tool_use(tools or None, choice.as_openai(bool(tools)), not choice.disable_parallel_tool_use)

    def _wanted_format(self) -> dict[str, Any] | None:
        config = self.output_config
        wanted = self.output_format if config is None or config.format is None else config.format
        return None if wanted is None else {"type": "json_schema", "json_schema": {"schema": wanted.json_schema}}


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: Int = Field(ge=1)

    @property
    def output_limit(self) -> int:
        return self.max_tokens


REQUEST_ID_HEADER = "request-id"
"""Where Anthropic's clients look for it."""


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail


_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicError, "description": "The request is wrong, or refused"},
    "5XX": {"model": AnthropicError, "description": "The server cannot do it, or not now"},
}

router = APIRouter(tags=["messages"], route_class=TurnRoute, responses=_ERROR_RESPONSES)


@router.post("/v1/messages", responses=whole_or_streamed("id", "type", "role", "model", "content", "usage"))
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    """A message, streamed with `stream: true`."""
    exchange = await open_exchange(body, request, context)
    sampling = body.sampling(exchange.engine.default_sampling)
    plan = await exchange.plan(body.call)
    writer = MessageWriter(exchange, plan.prompt, body.shows_thinking)
    response = await exchange.answer(exchange.chat_job(plan, sampling, writer.message_id), writer, PING)
    response.headers[REQUEST_ID_HEADER] = exchange.request_id
    return response


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request, context: Context) -> dict[str, int]:
    """How many tokens a message's prompt has, without generating."""
    exchange = await open_exchange(body, request, context, generates=False)
    prompt = await exchange.render(body.call)
    return {"input_tokens": len(prompt.token_ids)}
