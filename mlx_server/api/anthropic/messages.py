"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the same engine.

OpenAI's sampling fields (`min_p`, `seed`, `cache_salt` ...) work beside Anthropic's own. Fields with a meaning for
hosted models only, like `cache_control`, are ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AliasChoices, BaseModel, Field
from starlette.responses import Response

from mlx_server.api.answers.chat_plan import ChatCall, ToolUse
from mlx_server.api.answers.collect import Answer, Usage, arguments_object, is_cut_off, joined, usage_of
from mlx_server.api.answers.generation import Finish, OutputEvent, Prompt, in_order
from mlx_server.api.answers.output_parser import Part, Thought
from mlx_server.api.anthropic.conversation import MessageParam, TextBlock, read_conversation
from mlx_server.api.context import Context
from mlx_server.api.errors import ErrorInfo, error_responses
from mlx_server.api.http import sse
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.request_bounds import BOUNDED_MESSAGES, BOUNDED_TOOLS, FIRST_ERROR
from mlx_server.api.openai.chat import tool_use
from mlx_server.api.openai.document import STRING, list_of, members
from mlx_server.api.openai.exchange import Exchange, Writer, open_exchange
from mlx_server.api.openai.fields import Bool, Int, OneAnswerOfText, Refused, StopStrings
from mlx_server.engine.grammar.spec import StructuredSpec
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
    "memory": (
        "Files below /memories that last from one conversation to the next. View /memories before you begin, and write "
        "down what later conversations will need. view shows a file or folder; create writes file_text; str_replace "
        "replaces old_str, which must stand once in the file, by new_str; insert puts insert_text after the line "
        "insert_line; delete takes a path; rename takes old_path and new_path.",
        members(
            "command",
            command={"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text", "old_path", "new_path"), STRING),
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

    def as_openai(self) -> str | dict[str, Any] | None:
        if self.type == "tool":
            if self.name is None:
                raise InvalidRequestError("tool_choice of type tool must have the name of a tool.", "tool_choice.name")
            return {"type": "function", "function": {"name": self.name}}
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
            structured=self._structured(),
            truncation=self.prompt_truncation,
            max_reasoning_tokens=None if self.thinking is None else self.thinking.budget_tokens,
            has_open_schemas=bool(self.open_schemas),
        )

    def _tool_use(self) -> ToolUse:
        tools = [tool.as_openai(f"tools[{index}]") for index, tool in enumerate(self.tools or ())]
        choice = self.tool_choice
        if choice is None:
            use = tool_use(tools, None)
        else:
            is_one = choice.disable_parallel_tool_use
            use = tool_use(tools, choice.as_openai(), None if is_one is None else not is_one)
        fields = {tool.name: f"tools[{index}].input_schema" for index, tool in enumerate(self.tools or ())}
        return replace(use, fields=fields)

    def _structured(self) -> StructuredSpec | None:
        wanted, name = self.output_format, "output_format"
        if self.output_config is not None and self.output_config.format is not None:
            wanted, name = self.output_config.format, "output_config.format"
        return self.structured(None if wanted is None else {"type": "json_schema", "schema": wanted.json_schema}, name)


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: Int = Field(ge=1)
    thread: Annotated[Any, Refused((), "send the whole conversation")] = None
    compaction: Annotated[Any, Refused((), "ask for a summary in a message")] = None

    @property
    def output_limit(self) -> int:
        return self.max_tokens


PING = sse.named("ping", {"type": "ping"})

# The protocol has no reason of its own for an abort, which cuts an answer off as the token limit does.
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "abort": "max_tokens"}


class MessageWriter(Writer):
    """One message. In a stream the message opens, then each block opens, grows and closes, then the message ends. One
    block is open at a time: output of another kind closes it."""

    keep_alive = PING

    def __init__(self, exchange: Exchange, prompt: Prompt, shows_thinking: bool) -> None:
        self.response_id = f"msg_{exchange.request_id}"
        self._head = {"id": self.response_id, "type": "message", "role": "assistant", "model": exchange.model_name}
        self._num_prompt_tokens = len(prompt.token_ids)
        self._max_model_len = exchange.engine.max_model_len
        self._shows_thinking = shows_thinking
        self._is_started = False
        self._index = -1
        self._open: str | None = None
        self._thinking: list[str] = []
        self._template: sse.Template | None = None  # of the open block's deltas

    def full_body(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        ending = self._ending(answer.finish, answer.usage)
        return {**self._head, "content": list(self._blocks(choice)), **ending, "usage": usage_body(answer.usage)}

    def opening(self, has_output: bool) -> bytes:
        """The first event names the cached tokens only if there is output already: it does not wait for output."""
        return b"" if has_output else self._start(num_cached_tokens=0)

    def write(self, event: OutputEvent) -> bytes:
        pieces = [] if self._is_started else [self._start(event.delta.num_cached_tokens)]
        pieces += self._pieces(event)
        return b"".join(pieces)

    def closing(self) -> bytes:
        return _event("message_stop")

    def failure(self, error: ErrorInfo) -> bytes:
        return sse.named("error", error.anthropic_body())

    def _start(self, num_cached_tokens: int) -> bytes:
        self._is_started = True
        usage = usage_body(Usage(self._num_prompt_tokens, num_cached_tokens))
        stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**self._head, "content": [], **stop, "usage": usage}) + PING

    def _ending(self, finish: Finish, usage: Usage) -> dict[str, Any]:
        if finish.reason == "stop" and isinstance(finish.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_reason}
        if finish.reason == "length" and usage.num_prompt_tokens + usage.num_output_tokens >= self._max_model_len:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS[finish.reason], "stop_sequence": None}

    def _blocks(self, choice: OutputEvent) -> Iterator[dict[str, Any]]:
        for part in joined(self._shown(choice)):
            if isinstance(part, Thought):
                yield {"type": "thinking", "thinking": part, "signature": _signature(part)}
            elif isinstance(part, str):
                yield {"type": "text", "text": part}
            else:
                written = part.arguments_fragment
                given = {} if is_cut_off(written, choice.finish) else arguments_object(written)
                yield {"type": "tool_use", "id": part.id, "name": part.name, "input": given}

    def _shown(self, output: OutputEvent) -> Iterator[Part]:
        return (part for part in in_order(output) if self._shows_thinking or not isinstance(part, Thought))

    def _pieces(self, event: OutputEvent) -> Iterator[bytes]:
        for part in self._shown(event):
            if isinstance(part, Thought):
                yield from self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._thinking.append(part)
                yield self._delta("thinking_delta", "thinking", part)
                continue
            if isinstance(part, str):
                yield from self._enter("text", {"type": "text", "text": ""})
                yield self._delta("text_delta", "text", part)
                continue
            block: dict[str, Any] = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            yield from self._enter(f"tool_use {part.index}", block)
            if part.arguments_fragment:
                yield self._delta("input_json_delta", "partial_json", part.arguments_fragment)
        if event.finish is not None:
            yield from self._leave()
            usage = usage_of([event])
            yield _event("message_delta", delta=self._ending(event.finish, usage), usage=usage_body(usage))

    def _enter(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Makes `kind` the open block; `block` is how it begins, if it is not open yet."""
        if self._open == kind:
            return
        yield from self._leave()
        self._open = kind
        self._index += 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _leave(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            signed = {"type": "signature_delta", "signature": _signature("".join(self._thinking))}
            yield _event("content_block_delta", index=self._index, delta=signed)
            self._thinking.clear()
        self._open = self._template = None
        yield _event("content_block_stop", index=self._index)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        """The open block grows; all its deltas are of one kind."""
        if self._template is None:
            index = self._index
            self._template = sse.Template(
                lambda blank: _event("content_block_delta", index=index, delta={"type": kind, name: blank})
            )
        return self._template.fill(text)


def _event(kind: str, **fields: Any) -> bytes:
    return sse.named(kind, {"type": kind, **fields})


def _signature(thinking: str) -> str:
    """Clients send thinking back only with a signature. This server does not check it."""
    return hashlib.blake2b(thinking.encode(), digest_size=16).hexdigest()


def usage_body(usage: Usage) -> dict[str, Any]:
    """`input_tokens` counts the prompt's tokens that were not cached. Caching is free and automatic, so no tokens count
    as written to the cache."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicError(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail


router = APIRouter(tags=["messages"], route_class=TurnRoute, responses=error_responses(AnthropicError))


@router.post("/v1/messages", responses=sse.openapi_responses("id", "type", "role", "model", "content", "usage"))
async def create_message(body: MessagesRequest, request: Request, context: Context) -> Response:
    """A message, streamed with `stream: true`."""
    exchange = await open_exchange(body, request, context)
    plan = await exchange.plan(body.call)
    return await exchange.answer(plan, MessageWriter(exchange, plan.prompts[0], body.shows_thinking))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request, context: Context) -> dict[str, int]:
    """How many tokens a message's prompt has, without generating."""
    exchange = await open_exchange(body, request, context, generates=False)
    prompt = await exchange.render(body.call)
    return {"input_tokens": len(prompt.token_ids)}
