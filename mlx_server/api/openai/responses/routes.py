"""The routes of the Responses API: POST /v1/responses, and what can be done with a response afterwards."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from mlx_server.api.answers.chat_plan import Read
from mlx_server.api.answers.generation import Prompt
from mlx_server.api.answers.images import RequestImages
from mlx_server.api.context import Context
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.sse import openapi_responses
from mlx_server.api.openai.exchange import open_exchange
from mlx_server.api.openai.responses.output import ResponseWriter
from mlx_server.api.openai.responses.pages import Page, as_json
from mlx_server.api.openai.responses.reading import Kept, Reading, check_room
from mlx_server.api.openai.responses.request import ResponsesRequest
from mlx_server.api.openai.responses.truncation import within_context
from mlx_server.errors import InvalidRequestError, UnsupportedError

router = APIRouter(tags=["responses"], route_class=TurnRoute)


@router.post("/v1/responses", responses=openapi_responses("id", "object", "created_at", "model", "output", "usage"))
async def create_response(body: ResponsesRequest, request: Request, context: Context, stores: Kept) -> Response:
    """A response, streamed with `stream: true`; with `background: true` it goes on without its client."""
    exchange = await open_exchange(body, request, context)
    reading = await Reading.open(body, stores)
    plan = await within_context(exchange, body, reading, exchange.plan, lambda plan: len(plan.prompts[0].token_ids))
    if body.conversation is not None:
        check_room(reading.earlier + reading.new_items, stores.conversations.max_bytes, "conversation")
    writer = ResponseWriter(exchange, body, reading, stores)
    if not body.background:
        return await exchange.answer(plan, writer)
    run = await context.background.start(exchange, plan, writer)
    keep_alive_s = context.config.server.sse_keep_alive_s
    response = run.events(0, keep_alive_s) if body.stream else as_json(writer.body())
    response.headers.update(exchange.headers(plan))
    return response


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: ResponsesRequest, request: Request, context: Context, stores: Kept
) -> dict[str, Any]:
    """How many tokens a response's prompt has, without generating."""
    exchange = await open_exchange(body, request, context, generates=False)
    reading = await Reading.open(body, stores)

    async def render(read: Read, images: RequestImages) -> Prompt:
        return await context.chats.render(exchange.engine, read, exchange.turn, images)

    prompt = await within_context(exchange, body, reading, render, lambda prompt: len(prompt.token_ids))
    context.quotas.add_read(exchange.caller, len(prompt.token_ids))
    return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}


@router.post("/v1/responses/compact", response_model=dict[str, Any])
async def compact() -> Response:
    """Not supported."""
    raise UnsupportedError(
        "This server does not compact conversations. Ask the model for a summary and continue from it, as agents do "
        "with other providers than OpenAI."
    )


@router.get("/v1/responses/{response_id}", response_model=dict[str, Any])
async def retrieve_response(
    response_id: str,
    context: Context,
    stores: Kept,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=0)] | None = None,
) -> Response:
    """A kept response as it is now, or with `stream` the events of one in the background, those after a number."""
    response = await stores.responses.get(response_id)
    if stream:
        start = 0 if starting_after is None else starting_after + 1
        return context.background.find(response_id).events(start, context.config.server.sse_keep_alive_s)
    return as_json(response.body())


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, context: Context, stores: Kept) -> dict[str, Any]:
    """Forgets a response. A stream in progress continues; a response in the background ends."""
    await stores.responses.delete(response_id)
    if context.background.is_running(response_id):
        context.generations.abort({response_id})
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", response_model=dict[str, Any])
async def cancel_response(response_id: str, context: Context, stores: Kept) -> Response:
    """Ends a response that is being streamed or in the background; its stream still gets its last events."""
    response = await stores.responses.get(response_id)
    if response.is_in_progress:
        context.generations.abort({response_id})
    elif response.status != "cancelled":
        raise InvalidRequestError(f"The response {response_id} has ended already: {response.status}.")
    return as_json(response.body("cancelled"))


@router.get("/v1/responses/{response_id}/input_items", response_model=dict[str, Any])
async def list_input_items(response_id: str, stores: Kept, page: Page) -> Response:
    """The items of a response's prompt, a page at a time."""
    return page.of((await stores.responses.get(response_id)).input.items)
