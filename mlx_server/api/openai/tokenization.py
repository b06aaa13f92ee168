"""POST /tokenize and /detokenize, in vLLM's shapes with SGLang's names beside them.

What a prompt becomes, without generating: routers that place requests by prefix ask for the token ids.

Asked for every request by some of them, so it only tokenizes: it neither enters the engine nor waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.body import TurnRoute
from mlx_server.api.body_reader import FIRST_ERROR, MESSAGES, TOOLS, Objects
from mlx_server.api.chat_plan import ChatCall, ChatPlanner
from mlx_server.api.context import Context
from mlx_server.api.generation import Prompt, Truncation
from mlx_server.api.generation_service import lease_engine
from mlx_server.api.middleware import until_disconnect
from mlx_server.api.openai.chat import (
    ChatCompletionRequest,
    Message,
    ReasoningEffort,
    ToolDefinition,
    template_kwargs,
    tool_use,
)
from mlx_server.api.openai.completions import CompletionRequest, plan_text
from mlx_server.api.openai.exchange import Exchange, open_exchange
from mlx_server.api.openai.fields import Bool, GenerationFields, Ints
from mlx_server.api.text_turns import TextTurn, turn_of
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.text.chat import ChatOptions
from mlx_server.errors import InvalidRequestError
from mlx_server.sampling_params import SamplingParams

MAX_IDS = 1_000_000
"""What `/detokenize` reads at a time: about a second of a thread that shares the interpreter with all streams."""

router = APIRouter(tags=["tokens"], route_class=TurnRoute)


class TokenizeBody(BaseModel):
    """Either `prompt`, or `messages` with what belongs to them."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: Bool | None = None
    return_token_strs: Bool | None = None
    messages: Annotated[list[Message], FIRST_ERROR, MESSAGES] | None = None
    tools: Annotated[list[ToolDefinition], FIRST_ERROR, TOOLS] | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    documents: Objects | None = None
    chat_template: str | None = None

    def call(self, messages: list[Message]) -> ChatCall:
        if self.chat_template is not None:
            raise InvalidRequestError("chat_template is not supported by this server; leave it out.", "chat_template")
        return ChatCall(
            messages=messages,
            tool_use=tool_use(self.tools, None, True),
            options=ChatOptions(
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=bool(self.continue_final_message),
                template_kwargs=template_kwargs(self.chat_template_kwargs, self.documents),
                reasoning_effort=self.reasoning_effort,
            ),
        )


@router.post("/tokenize", response_model=dict[str, Any])
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(body: TokenizeBody, request: Request, context: Context) -> Response:
    """The ids that a completion of `prompt`, or a chat of `messages`, begins with."""
    turn, caller = turn_of(request), caller_of(request)
    engine = await lease_engine(request, context.pool, body.model)
    tokenizing: Coroutine[Any, Any, Sequence[int]]
    if body.messages is not None and body.prompt is None:
        messages = body.messages
        tokenizing = _tokens_of_chat(context.chats, engine, lambda: body.call(messages), turn)
    elif body.prompt is not None and body.messages is None:
        text, add_special_tokens = body.prompt, body.add_special_tokens is not False
        tokenizing = turn.in_thread(lambda: _tokens_of_text(engine, text, add_special_tokens))
    else:
        raise InvalidRequestError("Give either prompt or messages.", "prompt")
    token_ids = await until_disconnect(request, tokenizing)
    context.quotas.add_read(caller, len(token_ids))
    return await turn.in_thread(lambda: _tokens_answer(engine, token_ids, bool(body.return_token_strs)))


def _tokens_answer(engine: AsyncEngine, token_ids: Sequence[int], with_strings: bool) -> Response:
    return JSONResponse(
        {
            "count": len(token_ids),
            "max_model_len": engine.max_model_len,
            "tokens": token_ids,
            "token_strs": engine.tokenizer.convert_ids_to_tokens(token_ids) if with_strings else None,
        }
    )


async def _tokens_of_chat(
    chats: ChatPlanner, engine: AsyncEngine, read: Callable[[], ChatCall], turn: TextTurn
) -> Sequence[int]:
    return (await chats.render(engine, read, turn)).token_ids


def _tokens_of_text(engine: AsyncEngine, text: str, add_special_tokens: bool) -> list[int]:
    part = Truncation().part(text, engine.tokenizer, engine.max_model_len)
    return engine.tokenizer.encode(part, add_special_tokens=add_special_tokens)


class DetokenizeBody(BaseModel):
    model: str | None = None
    tokens: Ints


@router.post("/detokenize")
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(body: DetokenizeBody, request: Request, context: Context) -> dict[str, str]:
    """The text of token ids, special tokens included."""
    engine = await lease_engine(request, context.pool, body.model)
    tokenizer = engine.tokenizer
    if len(body.tokens) > MAX_IDS:
        raise InvalidRequestError(
            f"tokens has {len(body.tokens)} ids; at most {MAX_IDS} are read at a time. Send them in parts.", "tokens"
        )
    for extreme in (min(body.tokens), max(body.tokens)) if body.tokens else ():
        if not 0 <= extreme < tokenizer.vocab_size:
            raise InvalidRequestError(
                f"tokens has the id {extreme}; ids are 0 to {tokenizer.vocab_size - 1}.", "tokens"
            )
    context.quotas.add_read(caller_of(request), len(body.tokens))
    decoding = turn_of(request).in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    text = await until_disconnect(request, decoding)
    return {"prompt": text, "text": text}


@router.post("/v1/chat/completions/render", response_model=dict[str, Any])
async def render_chat_completion(body: ChatCompletionRequest, request: Request, context: Context) -> Response:
    """The prompt of a chat as token ids, with the parameters that would sample its answer."""
    exchange = await open_exchange(body, request, context, generates=False)
    sampling = body.sampling(exchange.engine.default_sampling)
    prompt = await until_disconnect(request, context.chats.render(exchange.engine, body.call, exchange.turn))
    context.quotas.add_read(exchange.caller, len(prompt.token_ids))
    return await exchange.turn.in_thread(lambda: JSONResponse(_rendered(exchange, body, prompt, sampling)))


@router.post("/v1/completions/render", response_model=list[dict[str, Any]])
async def render_completion(body: CompletionRequest, request: Request, context: Context) -> Response:
    """The same for text completions: one entry a prompt."""
    exchange = await open_exchange(body, request, context, generates=False)
    sampling = body.sampling(exchange.engine.default_sampling)
    plan = await until_disconnect(request, plan_text(exchange.engine, body, exchange.turn))
    context.quotas.add_read(exchange.caller, sum(len(prompt.token_ids) for prompt in plan.prompts))
    return await exchange.turn.in_thread(
        lambda: JSONResponse([_rendered(exchange, body, prompt, sampling) for prompt in plan.prompts])
    )


def _rendered(exchange: Exchange, body: GenerationFields, prompt: Prompt, sampling: SamplingParams) -> dict[str, Any]:
    return {
        "request_id": exchange.request_id,
        "model": exchange.model_name,
        "token_ids": list(prompt.token_ids),
        "features": None,
        "sampling_params": {**dataclasses.asdict(sampling), "n": body.num_samples},
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
    }
