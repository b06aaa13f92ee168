"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from mlx_server.api.chat_plan import ChatPlan
from mlx_server.api.context import Context
from mlx_server.api.disconnect import until_disconnect
from mlx_server.api.openai.chat_output import ChatShape, chat_chunks, chat_completion
from mlx_server.api.openai.chat_request import ChatCompletionRequest
from mlx_server.api.openai.exchange import Exchange, open_exchange
from mlx_server.api.sse import whole_or_streamed
from mlx_server.api.turn_route import TurnRoute

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
