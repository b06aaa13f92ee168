"""What a prompt becomes, without generating: routers that place requests by prefix ask for the token ids.

Asked for every request by some of them, so it only tokenizes: it neither enters the engine nor waits for it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mlx_server.api.context import Context
from mlx_server.api.disconnect import until_disconnect
from mlx_server.api.openai.chat_request import ChatCompletionRequest
from mlx_server.api.openai.completion_request import CompletionRequest
from mlx_server.api.openai.completions import plan_text
from mlx_server.api.openai.exchange import Exchange, open_exchange
from mlx_server.api.openai.fields import GenerationFields
from mlx_server.api.prompts import Prompt
from mlx_server.api.turn_route import TurnRoute
from mlx_server.sampling_params import SamplingParams

router = APIRouter(tags=["tokens"], route_class=TurnRoute)


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
