"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the same engine.

OpenAI's sampling fields (`min_p`, `seed`, `cache_salt` ...) work beside Anthropic's own. Fields with a meaning for
hosted models only, like `cache_control`, are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AliasChoices, BaseModel, Field
from starlette.responses import Response

from mlx_server.api.answers.chat_plan import ChatCall, ToolUse
from mlx_server.api.anthropic.conversation import MessageParam, TextBlock, read_conversation
from mlx_server.api.anthropic.output import MessageWriter
from mlx_server.api.context import Context
from mlx_server.api.errors import error_responses
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.request_bounds import BOUNDED_MESSAGES, BOUNDED_TOOLS, FIRST_ERROR
from mlx_server.api.http.sse import openapi_responses
from mlx_server.api.openai.chat import tool_use
from mlx_server.api.openai.document import STRING, list_of, members
from mlx_server.api.openai.exchange import open_exchange
from mlx_server.api.openai.fields import Bool, Int, OneAnswerOfText, Refused, StopStrings
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.errors import InvalidRequestError

_CLIENT_TOOLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Runs a command in a persistent shell of the user's machine, or restarts the shell.",
        members(command=STRING, restart={"type": "boolean"}),
    ),
    "text_editor": (
        "Views, creates and edits files: str_replace replaces old_str, which must stand once in the file, by new_str; "
        "insert puts insert_text (new_str in older versions) after the line insert_line; create writes file_text.",
        members(
            *("command", "path"),
            command={"enum": ["view", "create", "str_replace", "insert", "undo_edit"]},
            **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), STRING),
            insert_line={"type": "integer"},
            view_range=list_of({"type": "integer"}),
        ),
    ),
}
"""Tools that the client runs and Anthropic's models know by their type: description and parameters for other models."""


class ToolParam(BaseModel):
    """A tool that the client runs; tools that Anthropic's servers run have another `type`."""

    name: str = Field(min_length=1)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    def as_openai(self, where: str) -> dict[str, Any]:
        kind = re.sub(r"_\d{8}$", "", self.type or "custom")
        known = _CLIENT_TOOLS.get(kind)
        if known is None and kind != "custom":
            raise InvalidRequestError(
                f"{where} is of type {self.type}; this server runs no tools of its own, so leave it out or define it "
                "with an input_schema.",
                f"{where}.type",
            )
        description, parameters = known or (self.description, self.input_schema)
        function = {"name": self.name, "description": description, "parameters": parameters}
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
    """The format of the answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """Effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(OneAnswerOfText):
    """The body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[MessageParam], FIRST_ERROR, BOUNDED_MESSAGES] = Field(min_length=1)
    system: str | Annotated[list[TextBlock], FIRST_ERROR] | None = None
    tools: Annotated[list[ToolParam], FIRST_ERROR, BOUNDED_TOOLS] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop: StopStrings | None = Field(None, validation_alias=AliasChoices("stop_sequences", "stop"))
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: Annotated[Any, Refused(([],))] = None

    @property
    def thinks(self) -> bool:
        """Off unless requested: simple clients take an answer's first block for its text."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is not None and self.thinks and self.thinking.display != "omitted"

    def call(self, images: ImageParts | None) -> ChatCall:
        """The chat without sampling parameters. Raises `InvalidRequestError`."""
        turns = read_conversation(self.system, self.messages, images)
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
            has_open_schemas=bool(self.open_schemas),
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
    thread: Annotated[Any, Refused((), "send the whole conversation")] = None
    compaction: Annotated[Any, Refused((), "ask for a summary in a message")] = None

    @property
    def output_limit(self) -> int:
        return self.max_tokens


REQUEST_ID_HEADER = "request-id"
"""The name that Anthropic's clients read."""


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail


router = APIRouter(tags=["messages"], route_class=TurnRoute, responses=error_responses(AnthropicError))


@router.post("/v1/messages", responses=openapi_responses("id", "type", "role", "model", "content", "usage"))
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    """A message, streamed with `stream: true`."""
    exchange = await open_exchange(body, request, context)
    plan = await exchange.plan(body.call)
    response = await exchange.answer(plan, MessageWriter(exchange, plan.prompts[0], body.shows_thinking))
    response.headers[REQUEST_ID_HEADER] = exchange.request_id
    return response


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request, context: Context) -> dict[str, int]:
    """How many tokens a message's prompt has, without generating."""
    exchange = await open_exchange(body, request, context, generates=False)
    prompt = await exchange.render(body.call)
    return {"input_tokens": len(prompt.token_ids)}
