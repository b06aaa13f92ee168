"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol over the same engine."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from mlx_server.api.anthropic.output import MessageShape, message_body, message_events
from mlx_server.api.anthropic.request import CountTokensRequest, MessagesRequest
from mlx_server.api.anthropic.stream import anthropic_stream
from mlx_server.api.context import Context
from mlx_server.api.disconnect import until_disconnect
from mlx_server.api.openai.exchange import open_exchange
from mlx_server.api.sse import event_stream, whole_or_streamed
from mlx_server.api.turn_route import TurnRoute

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
    plan = await until_disconnect(request, context.chats.plan(exchange.engine, body.call, exchange.turn))
    shape = MessageShape(
        message_id=f"msg_{exchange.request_id}",
        model=exchange.model_name,
        num_prompt_tokens=len(plan.prompt.token_ids),
        max_model_len=exchange.engine.max_model_len,
        shows_thinking=body.shows_thinking,
    )
    job = exchange.chat_job(plan, body, sampling, shape.message_id)
    if body.stream:
        generation = await exchange.begin(job)
        events = anthropic_stream(message_events(shape, generation), exchange.keep_alive_s)
        response = event_stream(events, 0, generation.close, exchange.headers)
    else:
        response = await exchange.whole(job, partial(message_body, shape))
    response.headers[REQUEST_ID_HEADER] = exchange.request_id
    return response


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request, context: Context) -> dict[str, int]:
    """How many tokens a message's prompt has, without generating."""
    exchange = await open_exchange(body, request, context, generates=False)
    prompt = await until_disconnect(request, context.chats.render(exchange.engine, body.call, exchange.turn))
    context.quotas.add_read(exchange.caller, len(prompt.token_ids))
    return {"input_tokens": len(prompt.token_ids)}
