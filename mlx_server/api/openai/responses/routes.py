"""The routes of the Responses API: POST /v1/responses, and what can be done with a response afterwards.

Nothing runs in the background: a response that is not streamed is complete when its request is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic_core import to_json
from starlette.responses import Response

from mlx_server.api.answers.chat_plan import ChatCall
from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.context import Context
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.request_bounds import MAX_BODY_BYTES
from mlx_server.api.http.sse import openapi_responses
from mlx_server.api.openai.exchange import open_exchange
from mlx_server.api.openai.responses.items import normalise_input, referenced_ids, with_own_ids
from mlx_server.api.openai.responses.output import ResponseWriter, echoed
from mlx_server.api.openai.responses.request import ResponsesRequest
from mlx_server.api.openai.responses.store import KeptItem, KeptItems, KeptResponses, total_bytes, written
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.errors import InvalidRequestError, UnsupportedError

router = APIRouter(tags=["responses"], route_class=TurnRoute)


async def _store_of(request: Request, context: Context) -> KeptResponses:
    return KeptResponses(context.responses, context.shared_store, caller_of(request).identity)


Store = Annotated[KeptResponses, Depends(_store_of)]


@router.post("/v1/responses", responses=openapi_responses("id", "object", "created_at", "model", "output", "usage"))
async def create_response(body: ResponsesRequest, request: Request, context: Context, store: Store) -> Response:
    """A response, streamed with `stream: true`."""
    exchange = await open_exchange(body, request, context)
    reading = await _Reading.open(body, store)
    plan = await exchange.plan(reading.call)
    keeping = None if body.store is False else store
    return await exchange.answer(plan, ResponseWriter(exchange, body, keeping, reading.input_items, reading.echo))


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: ResponsesRequest, request: Request, context: Context, store: Store
) -> dict[str, Any]:
    """How many tokens a response's prompt has, without generating."""
    exchange = await open_exchange(body, request, context, generates=False)
    reading = await _Reading.open(body, store)
    prompt = await exchange.render(reading.call)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}


@router.post("/v1/responses/compact", response_model=dict[str, Any])
async def compact() -> Response:
    """Not supported."""
    raise UnsupportedError(
        "This server does not compact conversations. Ask the model for a summary and continue from it, as agents do "
        "with other providers than OpenAI."
    )


class _Reading:
    """A request's input, with the earlier items that it continues or refers to. `call` reads it, in the thread that
    plans the chat, and sets `input_items` and `echo`."""

    def __init__(
        self, body: ResponsesRequest, earlier: tuple[KeptItem, ...], referenced: Mapping[str, KeptItem]
    ) -> None:
        self.input_items = KeptItems()
        self.echo = b""
        self._body = body
        self._earlier = earlier
        self._referenced = referenced

    @classmethod
    async def open(cls, body: ResponsesRequest, store: KeptResponses) -> _Reading:
        """Raises `InvalidRequestError` for earlier items that are not kept here, or are too long together."""
        earlier = await _earlier(body, store)
        referenced = await store.find_items(referenced_ids(body.input))
        num_bytes = total_bytes(earlier) + total_bytes(referenced.values())
        if num_bytes > MAX_BODY_BYTES:
            raise InvalidRequestError(
                f"The earlier items have {num_bytes} bytes; at most {MAX_BODY_BYTES} are read. Send only the items "
                "that still matter.",
                "previous_response_id" if earlier else "input",
            )
        return cls(body, earlier, referenced)

    def call(self, images: ImageParts | None) -> ChatCall:
        """Raises `InvalidRequestError`."""
        body, earlier = self._body, self._earlier
        self.echo = echoed(body)
        referenced = {item_id: item.read() for item_id, item in self._referenced.items()}
        items = normalise_input(body.input, referenced, keeps_images=images is not None)
        call = body.call(images, items, [item.read() for item in earlier])
        if body.store is not False:
            known = {id(item): self._referenced[item_id] for item_id, item in referenced.items()}
            kept = with_own_ids(items, [item.id for item in earlier])
            self.input_items = KeptItems.of((*earlier, *(known.get(id(item)) or KeptItem.of(item) for item in kept)))
        return call


async def _earlier(body: ResponsesRequest, store: KeptResponses) -> tuple[KeptItem, ...]:
    """The items of the response that the request continues."""
    if body.previous_response_id is None:
        return ()
    previous = await store.find(body.previous_response_id)
    if previous is None or previous.is_in_progress:
        what = "is not kept here" if previous is None else "is still in progress"
        raise InvalidRequestError(f"The response {body.previous_response_id} {what}.", "previous_response_id")
    return previous.items


@router.get("/v1/responses/{response_id}", response_model=dict[str, Any])
async def retrieve_response(response_id: str, store: Store, stream: bool = False) -> Response:
    """A kept response as it is now."""
    if stream:
        raise InvalidRequestError("A kept response cannot be streamed again; leave stream out.", "stream")
    return _json((await store.get(response_id)).body())


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, store: Store) -> dict[str, Any]:
    """Forgets a response; a stream in progress continues."""
    await store.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel", response_model=dict[str, Any])
async def cancel_response(response_id: str, context: Context, store: Store) -> Response:
    """Ends a response that is being streamed; its stream still gets its last events."""
    response = await store.get(response_id)
    if response.is_in_progress:
        context.generations.abort({response_id})
    elif response.status != "cancelled":
        raise InvalidRequestError(f"The response {response_id} has ended already: {response.status}.")
    return _json(response.body("cancelled"))


@router.get("/v1/responses/{response_id}/input_items", response_model=dict[str, Any])
async def list_input_items(
    response_id: str,
    store: Store,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The items of a response's prompt, a page at a time."""
    items = list((await store.get(response_id)).input.items)
    if order == "desc":
        items.reverse()
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"after names {after}, which is not an input item of this response.", "after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    head = {
        "object": "list",
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": start + limit < len(items),
    }
    return _json(b'%b,"data":%b}' % (to_json(head)[:-1], written(page)))


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
