"""POST /v1/chat/completions.

The body of POST /v1/chat/completions.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from mlx_server.api.body import TurnRoute
from mlx_server.api.body_reader import FIRST_ERROR, MESSAGES, TOOLS, Objects, Strings
from mlx_server.api.chat_plan import ChatCall, ChatPlan, ToolUse
from mlx_server.api.context import Context
from mlx_server.api.middleware import until_disconnect
from mlx_server.api.openai.chat_output import ChatShape, chat_chunks, chat_completion
from mlx_server.api.openai.exchange import Exchange, open_exchange
from mlx_server.api.openai.fields import Bool, GenerationFields, Int
from mlx_server.api.sse import whole_or_streamed
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.errors import InvalidRequestError
from mlx_server.sampling_params import MAX_LOGPROBS

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
}
_TOOL_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["object", "null"]}},
        }
    },
}

# Messages and tools go to the chat template as they came, with all their fields: what they must have is checked
# there, and a model would only reorder them.
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"type": "string"},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]},
                "tool_calls": {"anyOf": [{"type": "array", "items": _TOOL_CALL}, {"type": "null"}]},
            },
        }
    ),
]
ToolDefinition = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string", "minLength": 1}, "parameters": {"type": "object"}},
                },
            },
        }
    ),
]

_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
        },
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["mode", "tools"],
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "minItems": 1, "items": {"type": "object"}},
                    },
                },
            },
        },
    ]
}


def tool_use(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, is_parallel: bool) -> ToolUse:
    """OpenAI's `tools` and `tool_choice`. Raises `InvalidRequestError` with the field's name."""
    if tools is not None and not tools:
        raise InvalidRequestError("tools is empty; leave it out or name at least one tool.", "tools")
    names = [_tool_name(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    if choice is None or choice == "none":
        return ToolUse(tools=tools or (), mode="auto" if choice is None else "none", is_parallel=is_parallel)
    if tools is None:
        raise InvalidRequestError("tool_choice needs tools.", "tool_choice")
    if choice == "auto":
        return ToolUse(tools=tools, is_parallel=is_parallel)
    if choice == "required":
        return ToolUse(tools=tools, mode="required", is_parallel=is_parallel)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed_tools(tools, names, choice, is_parallel)
    wanted = _checked(_named_function(choice), names)
    return ToolUse(tools=tools, mode="required", allowed=frozenset((wanted,)), is_parallel=False)


def _allowed_tools(tools: list[dict[str, Any]], names: list[str], choice: dict[str, Any], is_parallel: bool) -> ToolUse:
    """Some of the tools, which may or must be called."""
    inner = choice.get("allowed_tools")
    listed = inner.get("tools") if isinstance(inner, dict) else None
    mode = inner.get("mode", "auto") if isinstance(inner, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise InvalidRequestError(
            "tool_choice.allowed_tools must have the mode auto or required, and tools with at least one.", "tool_choice"
        )
    allowed = frozenset(_checked(_named_function(tool), names) for tool in listed)
    return ToolUse(tools=tools, mode=mode, allowed=allowed, is_parallel=is_parallel)


def _checked(name: str, names: list[str]) -> str:
    if name not in names:
        raise InvalidRequestError(
            f"tool_choice names {name}, which is not in tools: {', '.join(names)}.", "tool_choice"
        )
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


def _named_function(choice: str | dict[str, Any]) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError(
            'tool_choice must be "none", "auto", "required", or name functions: '
            '{"type": "function", "function": {"name": ...}}, or "allowed_tools" with such a list.',
            "tool_choice",
        )
    return name


class ChatCompletionRequest(GenerationFields):
    """All fields of a chat completion that mean something here."""

    messages: Annotated[list[Message], FIRST_ERROR, MESSAGES] = Field(min_length=1)
    max_completion_tokens: Int | None = Field(None, ge=1)
    max_tokens: Int | None = Field(None, json_schema_extra={"minimum": 1})
    logprobs: Bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    tools: Annotated[list[ToolDefinition], FIRST_ERROR, TOOLS] | None = None
    tool_choice: Annotated[str | dict[str, Any], WithJsonSchema(_TOOL_CHOICE)] | None = None
    parallel_tool_calls: Bool | None = None

    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: Bool | None = None
    separate_reasoning: Bool | None = None
    thinking_token_budget: Int | None = Field(None, ge=-1)

    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None

    chat_template: str | None = None
    echo: Bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Strings | None = None
    audio: Any = None

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationFields.refused,
        "add_special_tokens": (False,),
        "chat_template": (),
        "echo": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": ([], ["text"]),
        "audio": (),
    }

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", "top_logprobs")

    def call(self) -> ChatCall:
        """The chat without what concerns sampling. Raises `InvalidRequestError`."""
        budget = self.thinking_token_budget
        return ChatCall(
            messages=self.messages,
            tool_use=tool_use(self.tools, self.tool_choice, self.parallel_tool_calls is not False),
            options=ChatOptions(
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=bool(self.continue_final_message),
                template_kwargs=template_kwargs(self.chat_template_kwargs, self.documents),
                reasoning_effort=self.reasoning_effort,
            ),
            structured=self.structured(),
            truncation=self.truncation,
            max_reasoning_tokens=None if budget == -1 else budget,
            splits_reasoning=self.separate_reasoning is not False,
        )

    @property
    def output_limit(self) -> int | None:
        """The newer name wins, as OpenAI says."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def template_kwargs(given: dict[str, Any] | None, documents: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The variables for the chat template."""
    kwargs = dict(given or {})
    if documents is not None:
        kwargs["documents"] = documents
    return kwargs


router = APIRouter(tags=["chat"], route_class=TurnRoute)


@router.post(
    "/v1/chat/completions", responses=whole_or_streamed("id", "object", "created", "model", "choices", "usage")
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, context: Context) -> Response:
    """A chat completion, streamed with `stream: true`."""
    exchange = await open_exchange(body, request, context)
    sampling = body.sampling(exchange.engine.default_sampling)
    plan = await until_disconnect(request, context.chats.plan(exchange.engine, body.call, exchange.turn))
    shape = _shape(body, exchange, plan)
    job = exchange.chat_job(plan, body, sampling, shape.response_id, body.num_samples)
    if body.stream:
        return await exchange.stream(job, partial(chat_chunks, shape))
    return await exchange.whole(job, partial(chat_completion, shape))


def _shape(body: ChatCompletionRequest, exchange: Exchange, plan: ChatPlan) -> ChatShape:
    return ChatShape(
        response_id=f"chatcmpl-{exchange.request_id}",
        model=exchange.model_name,
        created_s=int(time.time()),
        names=exchange.names(bool(body.return_tokens_as_token_ids)),
        prompt_token_ids=plan.prompt.token_ids,
        n=body.num_samples,
        has_logprobs=bool(body.logprobs),
        num_prompt_logprobs=body.prompt_logprobs,
        has_token_ids=bool(body.return_token_ids),
        has_reasoning=body.include_reasoning is not False,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
