"""The Responses API: POST /v1/responses, and what can be done with a response afterwards.

Nothing runs in the background: a response that is not streamed is there when its request is answered.

The event stream of a response, and what is kept of it while it runs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from mlx_server.api import sse
from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.body import TurnRoute
from mlx_server.api.body_reader import MAX_BODY_BYTES
from mlx_server.api.chat_plan import ChatCall
from mlx_server.api.collect import Answer, UsageMeter
from mlx_server.api.context import Context
from mlx_server.api.errors import error_info
from mlx_server.api.generation import Generation
from mlx_server.api.middleware import until_disconnect
from mlx_server.api.openai.exchange import open_exchange
from mlx_server.api.openai.responses_output import Event, OutputItems, ResponseShape, check_echo, whole_output
from mlx_server.api.openai.responses_request import ResponsesRequest, normalise_input, referenced_ids
from mlx_server.api.openai.responses_store import Keeping, KeptItem, ResponseStore, StoredResponse, total_bytes
from mlx_server.api.sse import event_stream, whole_or_streamed
from mlx_server.errors import InvalidRequestError

logger = logging.getLogger(__name__)

# The protocol has no event of its own for a response that was cancelled; its body says so.
_LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


class ResponseStream:
    """One response that is streamed."""

    def __init__(self, shape: ResponseShape, generation: Generation, keeping: Keeping) -> None:
        self._shape = shape
        self._generation = generation
        self._keeping = keeping
        self._body = shape.opening()
        self._numbers = itertools.count()
        keeping.put(self._body)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response opens, then each item opens, grows and closes, then the response ends. An error on the way
        ends it, too: the status is long sent."""
        yield self._encode({"type": "response.created", "response": self._body})
        yield self._encode({"type": "response.in_progress", "response": self._body})
        output, meter = OutputItems(), UsageMeter(1)
        try:
            async with contextlib.aclosing(self._generation.events()) as events:
                async for event in events:
                    meter.update(event)
                    for piece in output.append(event):
                        yield self._encode(piece)
                    if event.finish is not None:
                        self._keep(self._shape.ending(event.finish, output.done, meter.total()))
        except Exception as error:
            if error_info(error).status == 500:
                logger.exception("A stream failed")
            self._keep(self._shape.failure(error, output.done))
        yield self._encode({"type": _LAST_EVENTS[self._body["status"]], "response": self._body})

    def close(self) -> None:
        """Ends what is unfinished, for a client that has gone. Idempotent."""
        self._generation.close()
        if self._body["status"] == "in_progress":
            self._keep({**self._body, "status": "cancelled"})

    def _keep(self, body: dict[str, Any]) -> None:
        self._body = body
        self._keeping.update(body)

    def _encode(self, event: Event) -> bytes:
        return sse.named(event["type"], {**event, "sequence_number": next(self._numbers)})


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
    reading = _reading(body, store)
    plan = await until_disconnect(request, context.chats.plan(exchange.engine, reading.call, exchange.turn))
    # The id is a key to what is kept, so it is never one that a client has chosen.
    shape = ResponseShape(
        response_id=f"resp_{uuid.uuid4().hex}",
        model=exchange.model_name,
        created_s=int(time.time()),
        request=body,
        sampling=sampling,
    )
    job = exchange.chat_job(plan, body, sampling, shape.response_id)
    keeping = Keeping(store if body.store is not False else None, reading.input_items)
    if not body.stream:
        return await exchange.whole(job, partial(_whole_body, shape, keeping))
    stream = ResponseStream(shape, await exchange.begin(job), keeping)
    return event_stream(stream.events(), exchange.keep_alive_s, stream.close, exchange.headers)


class _Reading:
    """A request's input, with what it goes on from and refers to. `call` reads it, in the thread that plans the chat;
    `input_items` are there when it is done."""

    def __init__(self, body: ResponsesRequest, earlier: Sequence[KeptItem], referenced: Mapping[str, KeptItem]) -> None:
        self.input_items: tuple[KeptItem, ...] = ()
        self._body = body
        self._earlier = earlier
        self._referenced = referenced

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


def _reading(body: ResponsesRequest, store: ResponseStore) -> _Reading:
    previous = _previous(body, store)
    earlier = () if previous is None else previous.items
    referenced = store.find_items(referenced_ids(body.input))
    num_bytes = total_bytes(earlier) + total_bytes(referenced.values())
    if num_bytes > MAX_BODY_BYTES:
        raise InvalidRequestError(
            f"What the input goes on from has {num_bytes} bytes; at most {MAX_BODY_BYTES} are read. Send "
            "the items that still matter.",
            "previous_response_id" if earlier else "input",
        )
    return _Reading(body, earlier, referenced)


def _previous(body: ResponsesRequest, store: ResponseStore) -> StoredResponse | None:
    """The response that the request goes on from."""
    if body.previous_response_id is None:
        return None
    previous = store.find(body.previous_response_id)
    if previous is None or previous.is_in_progress:
        what = "is not kept here" if previous is None else "is still in progress"
        raise InvalidRequestError(f"The response {body.previous_response_id} {what}.", "previous_response_id")
    return previous


def _whole_body(shape: ResponseShape, keeping: Keeping, answer: Answer) -> dict[str, Any]:
    (choice,) = answer.choices
    body = shape.ending(choice.finish, whole_output(choice), answer.usage)
    keeping.put(body)
    return body


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
