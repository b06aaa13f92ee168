"""The routes of the Responses API: POST /v1/responses, and what can be done with a response afterwards.

Nothing runs in the background: a response that is not streamed is there when its request is answered.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.body import TurnRoute
from mlx_server.api.chat_plan import ChatCall
from mlx_server.api.context import Context
from mlx_server.api.openai.exchange import open_exchange
from mlx_server.api.openai.responses.output import ResponseWriter, check_echo
from mlx_server.api.openai.responses.request import ResponsesRequest, normalise_input, referenced_ids
from mlx_server.api.openai.responses.store import KeptItem, ResponseStore, total_bytes
from mlx_server.api.request_bounds import MAX_BODY_BYTES
from mlx_server.api.sse import whole_or_streamed
from mlx_server.errors import InvalidRequestError

router = APIRouter(tags=["responses"], route_class=TurnRoute)


async def _store_of(request: Request) -> ResponseStore:
    store = request.app.state.responses
    assert isinstance(store, ResponseStore)
    return store.of(caller_of(request).identity)


Store = Annotated[ResponseStore, Depends(_store_of)]


@router.post("/v1/responses", responses=whole_or_streamed("id", "object", "created_at", "model", "output", "usage"))
async def create_response(body: ResponsesRequest, request: Request, context: Context, store: Store) -> Response:
    """A response, streamed with `stream: true`."""
    exchange = await open_exchange(body, request, context)
    sampling = body.sampling(exchange.engine.default_sampling)
    reading = _Reading(body, store)
    plan = await exchange.plan(reading.call)
    keeping = None if body.store is False else store
    writer = ResponseWriter(exchange, body, sampling, keeping, reading.input_items)
    return await exchange.answer(exchange.chat_job(plan, sampling, writer.response_id), writer)


class _Reading:
    """A request's input, with what it goes on from and refers to. `call` reads it, in the thread that plans the chat;
    `input_items` are there when it is done."""

    def __init__(self, body: ResponsesRequest, store: ResponseStore) -> None:
        """Raises `InvalidRequestError` for what is not kept, and for too much."""
        self.input_items: tuple[KeptItem, ...] = ()
        self._body = body
        self._earlier = _earlier(body, store)
        self._referenced = store.find_items(referenced_ids(body.input))
        num_bytes = total_bytes(self._earlier) + total_bytes(self._referenced.values())
        if num_bytes > MAX_BODY_BYTES:
            raise InvalidRequestError(
                f"What the input goes on from has {num_bytes} bytes; at most {MAX_BODY_BYTES} are read. Send "
                "the items that still matter.",
                "previous_response_id" if self._earlier else "input",
            )

    def call(self) -> ChatCall:
        """Raises `InvalidRequestError`."""
        body, earlier = self._body, self._earlier
        check_echo(body)
        referenced = {item_id: item.read() for item_id, item in self._referenced.items()}
        items = normalise_input(body.input, referenced)
        if body.store is not False:
            known = {id(item): self._referenced[item_id] for item_id, item in referenced.items()}
            self.input_items = (*earlier, *(known.get(id(item)) or KeptItem.of(item) for item in items))
        return body.call(items, [item.read() for item in earlier])


def _earlier(body: ResponsesRequest, store: ResponseStore) -> tuple[KeptItem, ...]:
    """The items of the response that the request goes on from."""
    if body.previous_response_id is None:
        return ()
    previous = store.find(body.previous_response_id)
    if previous is None or previous.is_in_progress:
        what = "is not kept here" if previous is None else "is still in progress"
        raise InvalidRequestError(f"The response {body.previous_response_id} {what}.", "previous_response_id")
    return previous.items


@router.get("/v1/responses/{response_id}")
async def retrieve_response(response_id: str, store: Store, stream: bool = False) -> dict[str, Any]:
    """A kept response as it is now."""
    if stream:
        raise InvalidRequestError("A kept response cannot be streamed again; leave stream out.", "stream")
    return store.get(response_id).body()


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, store: Store) -> dict[str, Any]:
    """Forgets a response; one that is being streamed goes on."""
    store.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, context: Context, store: Store) -> dict[str, Any]:
    """Ends a response that is being streamed; its stream still gets its last events."""
    response = store.get(response_id)
    if response.is_in_progress:
        context.generations.abort({response_id})
    elif response.status != "cancelled":
        raise InvalidRequestError(f"The response {response_id} has ended already: {response.status}.")
    return {**response.body(), "status": "cancelled"}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    store: Store,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """What a response's prompt was made of, a page at a time."""
    items = list(store.get(response_id).input_items)
    if order == "desc":
        items.reverse()
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise InvalidRequestError(f"after names {after}, which is not an input item of this response.", "after")
    start = 0 if after is None else ids.index(after) + 1
    page = items[start : start + limit]
    return {
        "object": "list",
        "data": [item.read() for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": start + limit < len(items),
    }
