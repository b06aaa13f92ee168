"""POST /v1/chat/completions: the request's body, its tools, and the answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, WithJsonSchema
from starlette.responses import Response

from mlx_server.api.answers.chat_plan import ChatCall, ToolUse
from mlx_server.api.answers.collect import Answer, whole_call
from mlx_server.api.answers.generation import OutputEvent, Prompt
from mlx_server.api.context import Context
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.request_bounds import (
    BOUNDED_MESSAGES,
    BOUNDED_TOOLS,
    FIRST_ERROR,
    MAX_MESSAGES,
    Objects,
    at_most,
)
from mlx_server.api.http.sse import openapi_responses
from mlx_server.api.openai.document import CALL, IMAGE_URL, NULL, STRING, TEXT, either, list_of, members, of_type
from mlx_server.api.openai.exchange import Exchange, open_exchange
from mlx_server.api.openai.fields import Bool, GenerationFields, Int, Refused, TokenLimit
from mlx_server.api.openai.output import CompletionWriter, TokenNames, finite
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.engine.tools.parser import ToolCallDelta
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.errors import InvalidRequestError
from mlx_server.outputs import PositionLogprobs, TokenLogprob
from mlx_server.sampling_params import MAX_LOGPROBS

_REASONING = ("reasoning", "reasoning_content")
"""Both names are sent, since clients differ in which one they read."""

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_TEXT_PART = members("type", "text", type={"enum": ["text", "input_text", "output_text"]}, text=STRING)
_IMAGE_PART = of_type("image_url", image_url=either(IMAGE_URL, members("url", url=IMAGE_URL)))
_NAMED = members("name", name=STRING)

# Messages and tools go to the chat template as they came, with all members in their order: a pydantic model would
# reorder them. They are checked before the template gets them.
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        members(
            "role",
            role=STRING,
            content=either(STRING, list_of(either(_TEXT_PART, _IMAGE_PART)), NULL),
            tool_calls=either(list_of(CALL), NULL),
        )
    ),
]
Messages = Annotated[list[Message], FIRST_ERROR, BOUNDED_MESSAGES]
Tool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        members(
            "function",
            type={"const": "function"},
            function=members("name", name=TEXT, parameters={"type": "object"}),
        )
    ),
]
_ALLOWED = members("mode", "tools", mode={"enum": ["auto", "required"]}, tools=list_of({"type": "object"}, minItems=1))
_TOOL_CHOICE = either(
    {"enum": ["none", "auto", "required"]},
    of_type("function", function=_NAMED),
    of_type("allowed_tools", allowed_tools=_ALLOWED),
)


def _function_name(choice: Any) -> Any:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    return function.get("name") if isinstance(function, dict) else None


def tool_use(
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    is_parallel: bool | None = None,
    name_of: Callable[[Any], Any] = _function_name,
    form: str = '{"type": "function", "function": {"name": ...}}',
) -> ToolUse:
    """OpenAI's `tools` and `tool_choice`. `name_of` reads the function's name from a choice in the protocol's form;
    errors show that `form`. An empty list is none. Raises `InvalidRequestError` with the field's name."""
    names = [_tool_name(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    if choice is None or choice == "none":
        return ToolUse(tools=tools or (), mode="auto" if choice is None else "none", is_parallel=is_parallel)
    if tools is None or (not tools and choice != "auto"):
        raise InvalidRequestError("tool_choice needs tools.", "tool_choice")
    if choice == "auto":
        return ToolUse(tools=tools, is_parallel=is_parallel)
    if choice == "required":
        return ToolUse(tools=tools, mode="required", is_parallel=is_parallel)
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        wanted = _checked(name_of(choice), names, form)
        return ToolUse(tools=tools, mode="required", allowed=frozenset((wanted,)), is_parallel=False)
    inner = choice.get("allowed_tools", choice)  # the Responses API has its members beside the type
    listed = inner.get("tools") if isinstance(inner, dict) else None
    mode = inner.get("mode", "auto") if isinstance(inner, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise InvalidRequestError(
            "tool_choice of type allowed_tools must have the mode auto or required, and tools with at least one.",
            "tool_choice",
        )
    allowed = frozenset(_checked(name_of(tool), names, form) for tool in listed)
    return ToolUse(tools=tools, mode=mode, allowed=allowed, is_parallel=is_parallel)


def _checked(name: Any, names: list[str], form: str) -> str:
    if not isinstance(name, str):
        raise InvalidRequestError(
            f'tool_choice must be "none", "auto", "required", or name functions: {form}, or "allowed_tools" with such '
            "a list.",
            "tool_choice",
        )
    if name not in names:
        listed = ", ".join(names)
        raise InvalidRequestError(f"tool_choice names {name}, which is not in tools: {listed}.", "tool_choice")
    return name


def _tool_name(tool: dict[str, Any], where: str) -> str:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequestError(f"{where} must be of type function, with a function.", where)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where}.function.name must be a non-empty string.", f"{where}.function.name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise InvalidRequestError(f"{where}.function.parameters must be a JSON schema.", f"{where}.function.parameters")
    return name


class ReasoningOptions(BaseModel):
    """`reasoning`, OpenRouter's form: how much to reason, and whether to show it. The fields `reasoning_effort`,
    `thinking_token_budget` and `include_reasoning` take precedence."""

    effort: ReasoningEffort | None = None
    max_tokens: Int | None = Field(None, ge=1)
    enabled: Bool | None = None
    exclude: Bool | None = None


class ThinkingSwitch(BaseModel):
    """`thinking`, as the hosted services of DeepSeek, GLM and Kimi have it."""

    type: str


class _TextPart(BaseModel):
    """A part of a prediction; other members are ignored."""

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """`prediction`: a text that the answer is expected to repeat in large part."""

    type: Literal["content"]
    content: str | Annotated[list[_TextPart], FIRST_ERROR, at_most(MAX_MESSAGES, "parts")]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatFields(BaseModel):
    """The fields beside the messages that a chat's prompt depends on."""

    tools: Annotated[list[Tool], FIRST_ERROR, BOUNDED_TOOLS] | None = None
    reasoning_effort: ReasoningEffort | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: Bool | None = None
    thinking: ThinkingSwitch | Bool | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    chat_template: Annotated[Any, Refused()] = None

    def options(self) -> ChatOptions:
        kwargs = dict(self.chat_template_kwargs or {})
        if self.documents is not None:
            kwargs["documents"] = self.documents
        reasoning, thinking = self.reasoning, self.thinking
        switches = (
            self.enable_thinking,
            thinking.type != "disabled" if isinstance(thinking, ThinkingSwitch) else thinking,
            None if reasoning is None else reasoning.enabled,
        )
        for switch in switches:
            if switch is not None:
                kwargs.setdefault("enable_thinking", switch)
        return ChatOptions(
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_kwargs=kwargs,
            reasoning_effort=self.reasoning_effort or (None if reasoning is None else reasoning.effort),
        )


class ChatCompletionRequest(ChatFields, GenerationFields):
    """The fields of a chat completion that mean something here."""

    messages: Messages = Field(min_length=1)
    max_completion_tokens: TokenLimit = None
    max_tokens: TokenLimit = None
    logprobs: Bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    tool_choice: Annotated[str | dict[str, Any], WithJsonSchema(_TOOL_CHOICE)] | None = None
    parallel_tool_calls: Bool | None = None

    include_reasoning: Bool | None = None
    separate_reasoning: Bool | None = None
    thinking_token_budget: Int | None = Field(None, ge=-1)
    prediction: Prediction | None = None

    add_special_tokens: Annotated[Bool | None, Refused((False,))] = None
    echo: Annotated[Any, Refused((False,))] = None
    functions: Annotated[Any, Refused(([],), "use tools")] = None
    function_call: Annotated[Any, Refused(("none", "auto"), "use tool_choice")] = None
    modalities: Annotated[Any, Refused(([], ["text"]))] = None
    audio: Annotated[Any, Refused()] = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", "top_logprobs")

    def call(self, images: ImageParts | None = None) -> ChatCall:
        """The chat without sampling parameters. Raises `InvalidRequestError`."""
        budget = self.thinking_token_budget
        if budget is None and self.reasoning is not None:
            budget = self.reasoning.max_tokens
        return ChatCall(
            messages=self.messages if images is None else images.mark_messages(self.messages),
            tool_use=tool_use(self.tools, self.tool_choice, self.parallel_tool_calls),
            options=self.options(),
            structured=self.structured(),
            truncation=self.prompt_truncation,
            max_reasoning_tokens=None if budget == -1 else budget,
            splits_reasoning=self.separate_reasoning is not False,
            has_open_schemas=bool(self.open_schemas),
            prediction="" if self.prediction is None else self.prediction.text,
        )

    @property
    def output_limit(self) -> int | None:
        """OpenAI's newer name takes precedence."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatWriter(CompletionWriter):
    """Chat completions. In a stream each choice opens with its role, then come its pieces, then its end."""

    def __init__(self, exchange: Exchange, body: ChatCompletionRequest, prompt: Prompt) -> None:
        super().__init__(exchange, "chatcmpl", "chat.completion.chunk")
        self._body = body
        self._prompt_ids = {"prompt_token_ids": list(prompt.token_ids)} if body.return_token_ids else {}
        hides = body.reasoning is not None and body.reasoning.exclude and body.include_reasoning is None
        self._has_reasoning = body.include_reasoning is not False and not hides
        self._has_details = bool(body.logprobs or body.return_token_ids)

    def full_body(self, answer: Answer) -> dict[str, Any]:
        body = {**super().full_body(answer), "object": "chat.completion", **self._prompt_ids}
        found = self.prompt_logprobs(answer.choices[0])
        return body if found is None else {**body, "prompt_logprobs": found}

    def full_choice(self, choice: OutputEvent) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.tool_calls:
            message["content"] = choice.content or None
            message["tool_calls"] = list(map(_call_body, choice.tool_calls))
        if choice.reasoning and self._has_reasoning:
            message |= dict.fromkeys(_REASONING, choice.reasoning)
        return self._choice(choice, "message", message)

    def opening(self, has_output: bool) -> bytes:
        delta = {"role": "assistant", "content": ""}
        pieces = []
        for index in range(self._body.num_samples):
            choice = {"index": index, "delta": delta, "finish_reason": None}
            pieces.append(self.chunk(choice, **({} if index else self._prompt_ids)))
        return b"".join(pieces)

    def write_choice(self, event: OutputEvent) -> bytes:
        reasoning = event.reasoning if self._has_reasoning else ""
        if not (event.tool_calls or event.finish or self._has_details):
            if not reasoning:
                return self.piece(event.index, event.content, self._content)
            if not event.content:
                return self.piece(event.index, reasoning, self._reasoning, is_reasoning=True)
        text: dict[str, Any] = dict.fromkeys(_REASONING, reasoning) if reasoning else {}
        if event.content:
            text["content"] = event.content
        # Clients read one entry of a chunk's tool calls only, or take several of one index for different calls.
        deltas = [text] if text else []
        for _, pieces in groupby(event.tool_calls, attrgetter("index")):
            deltas.append({"tool_calls": [_call_delta(whole_call(list(pieces)))]})
        if not (deltas or event.finish or event.token_ids):
            return b""
        *early, last = deltas or [{}]
        chunks = [self.chunk(self._choice(OutputEvent(event.index), "delta", delta)) for delta in early]
        return b"".join([*chunks, self.chunk(self._choice(event, "delta", last))])

    def _content(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(OutputEvent(index), "delta", {"content": text})

    def _reasoning(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(OutputEvent(index), "delta", dict.fromkeys(_REASONING, text))

    def _position(self, position: PositionLogprobs) -> dict[str, Any]:
        top = [token_body(self._names, token) for token in position.top]
        return {**token_body(self._names, position.token), "top_logprobs": top}

    def _choice(self, source: OutputEvent, name: str, shown: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": source.index, name: shown, "logprobs": None, "finish_reason": None}
        if self._body.logprobs:
            choice["logprobs"] = {"content": list(map(self._position, source.logprobs)), "refusal": None}
        if source.finish is not None:
            choice["finish_reason"] = source.finish.reason
            choice["stop_reason"] = source.finish.stop_reason
        if self._has_token_ids:
            choice["token_ids"] = list(source.token_ids)
        return choice


def token_body(names: TokenNames, token: TokenLogprob) -> dict[str, Any]:
    """A token with its log-probability."""
    token_id = token.token_id
    return {"token": names.name(token_id), "logprob": finite(token.logprob), "bytes": names.bytes(token_id)}


def _call_body(call: ToolCallDelta) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments_fragment}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(piece: ToolCallDelta) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments_fragment}}
    return {"index": piece.index, **_call_body(piece)}


router = APIRouter(tags=["chat"], route_class=TurnRoute)


@router.post(
    "/v1/chat/completions", responses=openapi_responses("id", "object", "created", "model", "choices", "usage")
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, context: Context) -> Response:
    """A chat completion, streamed with `stream: true`."""
    exchange = await open_exchange(body, request, context)
    plan = await exchange.plan(body.call)
    return await exchange.answer(plan, ChatWriter(exchange, body, plan.prompts[0]))
