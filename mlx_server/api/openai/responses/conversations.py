"""The routes of the Conversations API: items that are kept together, which responses continue and add to."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.responses import Response

from mlx_server.api.answers.chat_plan import Turns
from mlx_server.api.errors import NotFoundError
from mlx_server.api.http.body import TurnRoute
from mlx_server.api.http.request_bounds import BOUNDED_ITEMS, FIRST_ERROR, at_most
from mlx_server.api.http.text_turns import turn_of
from mlx_server.api.openai.responses.items import read_items
from mlx_server.api.openai.responses.pages import Page, as_json, item_list
from mlx_server.api.openai.responses.reading import Kept, NewItems, Stores, check_room, extend
from mlx_server.api.openai.responses.request import InputItem
from mlx_server.api.openai.responses.store import Item, KeptItem, KeptItems, Record
from mlx_server.engine.vision.parts import ImageParts

router = APIRouter(tags=["conversations"], route_class=TurnRoute)

_Name = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
_Metadata = Annotated[dict[_Name, _Value], at_most(16, "members")]
_Items = Annotated[list[InputItem], FIRST_ERROR, BOUNDED_ITEMS]


class NewConversation(BaseModel):
    """A conversation to begin."""

    items: _Items | None = None
    metadata: _Metadata | None = None


class ConversationChange(BaseModel):
    """What replaces a conversation's metadata; null clears it."""

    metadata: _Metadata | None


class ConversationItems(BaseModel):
    """Items to add."""

    items: _Items


@router.post("/v1/conversations", response_model=dict[str, Any])
async def create_conversation(body: NewConversation, request: Request, stores: Kept) -> Response:
    """Begins a conversation, with items or without."""
    items = await _read(body.items or [], KeptItems(), request, stores)
    check_room(items, stores.conversations.max_bytes, "items")
    conversation_id = f"conv_{uuid.uuid4().hex}"
    made = Record(conversation_id, "completed", _head(conversation_id, int(time.time()), body.metadata), items)
    stores.conversations.put(made)
    await stores.conversations.settle()
    return as_json(made.head)


@router.get("/v1/conversations/{conversation_id}", response_model=dict[str, Any])
async def retrieve_conversation(conversation_id: str, stores: Kept) -> Response:
    """A conversation without its items."""
    return as_json((await stores.conversations.get(conversation_id)).head)


@router.post("/v1/conversations/{conversation_id}", response_model=dict[str, Any])
async def update_conversation(conversation_id: str, body: ConversationChange, stores: Kept) -> Response:
    """Replaces a conversation's metadata."""

    def changed(record: Record) -> Record:
        return replace(record, head=_head(record.id, json.loads(record.head)["created_at"], body.metadata))

    return as_json((await stores.conversations.change(conversation_id, changed)).head)


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(conversation_id: str, stores: Kept) -> dict[str, Any]:
    """Forgets a conversation with its items; responses keep theirs."""
    await stores.conversations.delete(conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@router.post("/v1/conversations/{conversation_id}/items", response_model=dict[str, Any])
async def add_items(conversation_id: str, body: ConversationItems, request: Request, stores: Kept) -> Response:
    """Adds items at the end."""
    earlier = (await stores.conversations.get(conversation_id)).input
    new = await _read(body.items, earlier, request, stores)
    return item_list((await extend(stores.conversations, conversation_id, new)).items)


@router.get("/v1/conversations/{conversation_id}/items", response_model=dict[str, Any])
async def list_items(conversation_id: str, stores: Kept, page: Page) -> Response:
    """The items of a conversation, a page at a time."""
    return page.of((await stores.conversations.get(conversation_id)).input.items)


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", response_model=dict[str, Any])
async def retrieve_item(conversation_id: str, item_id: str, stores: Kept) -> Response:
    """One item."""
    return as_json(_item_of(await stores.conversations.get(conversation_id), item_id).text)


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", response_model=dict[str, Any])
async def delete_item(conversation_id: str, item_id: str, stores: Kept) -> Response:
    """Takes an item out of its conversation, which is the answer."""

    def without(record: Record) -> Record:
        gone = _item_of(record, item_id)
        return replace(record, input=KeptItems.of(item for item in record.input.items if item is not gone))

    return as_json((await stores.conversations.change(conversation_id, without)).head)


async def _read(value: Sequence[Item], earlier: KeptItems, request: Request, stores: Stores) -> KeptItems:
    """The items as they are kept after `earlier` ones. Raises `InvalidRequestError` for items that no model could read;
    whether one reads images is seen when it must."""
    referenced = await stores.find_items(value)

    def read() -> KeptItems:
        new = NewItems(value, referenced, "items", keeps_images=True)
        read_items(Turns(), ImageParts().mark_messages(new.items, "items"), "items")
        return new.kept(earlier)

    return await turn_of(request).in_thread(read)


def _item_of(record: Record, item_id: str) -> KeptItem:
    """Raises `NotFoundError`."""
    for item in record.input.items:
        if item.id == item_id:
            return item
    raise NotFoundError(f"The conversation {record.id} has no item {item_id}.")


def _head(conversation_id: str, created_at: int, metadata: Mapping[str, str] | None) -> bytes:
    head = {"id": conversation_id, "object": "conversation", "created_at": created_at, "metadata": metadata or {}}
    return to_json(head)
