"""Prompts as token ids, without generating: POST /tokenize and /detokenize, as in vLLM and with SGLang's names too, and
the /render routes, for routers that place requests by prefix.

Some routers ask for every request, so nothing here enters the engine or waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from mlx_server.api.answers.chat_plan import ChatCall
from mlx_server.api.answers.generation import Prompt, Truncation
from mlx_server.api.answers.generation_service import lease_engine
from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.context import Context
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.request_bounds import at_most
from mlx_server.api.http.text_turns import turn_of
from mlx_server.api.openai.chat import ChatCompletionRequest, ChatFields, Messages, tool_use
from mlx_server.api.openai.completions import CompletionRequest, plan_text
from mlx_server.api.openai.exchange import Exchange, open_exchange
from mlx_server.api.openai.fields import Bool, Ints
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.text.tokenizer import check_ids
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.errors import InvalidRequestError

MAX_IDS = 128 * 1024
"""Most ids of one `/detokenize` request: all streams stand still while the library decodes them, for some 50 ms."""

router = APIRouter(tags=["tokens"], route_class=TurnRoute)


class TokenizeBody(ChatFields):
    """Either `prompt`, or `messages` and the fields of chats."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: Bool | None = None
    return_token_strs: Bool | None = None
    messages: Messages | None = None

    def call(self, images: ImageParts | None) -> ChatCall:
        messages = self.messages or []
        return ChatCall(
            messages=messages if images is None else images.mark_messages(messages),
            tool_use=tool_use(self.tools, None, True),
            options=self.options(),
        )


@router.post("/tokenize", response_model=dict[str, Any])
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(body: TokenizeBody, request: Request, context: Context) -> Response:
    """The ids that a completion of `prompt`, or a chat of `messages`, begins with."""
    turn = turn_of(request)
    engine = await lease_engine(request, context.pool, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give either prompt or messages.", "prompt")
    token_ids: Sequence[int]
    if body.prompt is None:
        token_ids = (await context.chats.render(engine, body.call, turn)).token_ids
    else:
        text, add_special_tokens = body.prompt, body.add_special_tokens is not False
        token_ids = await turn.in_thread(lambda: _tokens_of_text(engine, text, add_special_tokens))

    def answer() -> Response:
        strings = engine.tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
        counts = {"count": len(token_ids), "max_model_len": engine.max_model_len}
        return JSONResponse({**counts, "tokens": token_ids, "token_strs": strings})

    context.quotas.add_read(caller_of(request), len(token_ids))
    return await turn.in_thread(answer)


def _tokens_of_text(engine: AsyncEngine, text: str, add_special_tokens: bool) -> list[int]:
    part = Truncation().part(text, engine.tokenizer, engine.max_model_len, is_counted=True)
    return engine.tokenizer.encode(part, add_special_tokens=add_special_tokens)


class DetokenizeBody(BaseModel):
    model: str | None = None
    tokens: Annotated[Ints, at_most(MAX_IDS, "ids")]


@router.post("/detokenize", response_model=dict[str, str])
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(body: DetokenizeBody, request: Request, context: Context) -> Response:
    """The text of token ids, special tokens included."""
    tokenizer = (await lease_engine(request, context.pool, body.model)).tokenizer

    def answer() -> Response:
        check_ids("tokens", body.tokens, tokenizer.vocab_size)
        text = tokenizer.decode(body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text, "text": text})

    context.quotas.add_read(caller_of(request), len(body.tokens))
    return await turn_of(request).in_thread(answer)


@router.post("/v1/chat/completions/render", response_model=dict[str, Any])
async def render_chat_completion(body: ChatCompletionRequest, request: Request, context: Context) -> Response:
    """The prompt of a chat as token ids, with the parameters that would sample its answer."""
    exchange = await open_exchange(body, request, context, generates=False)
    prompt = await exchange.render(body.call)
    return await exchange.turn.in_thread(lambda: JSONResponse(_rendered(exchange, prompt)))


@router.post("/v1/completions/render", response_model=list[dict[str, Any]])
async def render_completion(body: CompletionRequest, request: Request, context: Context) -> Response:
    """The same for text completions: one entry a prompt."""
    exchange = await open_exchange(body, request, context, generates=False)
    plan = await plan_text(exchange, body, is_counted=True)
    context.quotas.add_read(exchange.caller, sum(len(prompt.token_ids) for prompt in plan.prompts))
    return await exchange.turn.in_thread(lambda: JSONResponse([_rendered(exchange, prompt) for prompt in plan.prompts]))


def _rendered(exchange: Exchange, prompt: Prompt) -> dict[str, Any]:
    body, sampling = exchange.body, dataclasses.asdict(exchange.sampling)
    del sampling["is_scoring"]  # known to this server alone
    return {
        "request_id": exchange.request_id,
        "model": exchange.model_name,
        "token_ids": list(prompt.token_ids),
        "features": None,
        "sampling_params": {**sampling, "n": body.num_samples},
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
    }
