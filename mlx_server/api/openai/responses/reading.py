"""The input of a response, or items for a conversation, read together with the kept items that they continue or refer
to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Request

from mlx_server.api.answers.chat_plan import ChatCall
from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.context import Context
from mlx_server.api.http.request_bounds import MAX_BODY_BYTES, MAX_MESSAGES
from mlx_server.api.openai.responses.items import LEFT_OUT, left_out, normalise_input, referenced_ids, with_own_ids
from mlx_server.api.openai.responses.request import ResponsesRequest
from mlx_server.api.openai.responses.store import Item, KeptItem, KeptItems, KeptRecords, Record, total_bytes
from mlx_server.engine.vision.parts import ImageParts
from mlx_server.errors import InvalidRequestError


class Stores:
    """The caller's responses and conversations, for one request."""

    def __init__(self, request: Request, context: Context) -> None:
        owner = caller_of(request).identity
        self.responses = KeptRecords(context.records, context.shared_store, owner, "response")
        self.conversations = KeptRecords(context.records, context.shared_store, owner, "conversation")

    async def find_items(self, value: str | Sequence[Item]) -> dict[str, KeptItem]:
        """The kept items that the input refers to, by id. Raises `OverloadedError` like `KeptRecords.find`."""
        ids = referenced_ids(value)
        found = await self.responses.find_items(ids)
        return {**found, **await self.conversations.find_items(ids - found.keys())}


async def _stores_of(request: Request, context: Context) -> Stores:
    return Stores(request, context)


Kept = Annotated[Stores, Depends(_stores_of)]


class NewItems:
    """Items of a request's `field`, as they are read and as they are kept. For a thread: there may be thousands."""

    def __init__(
        self, value: str | Sequence[Item], referenced: Mapping[str, KeptItem], field: str, *, keeps_images: bool
    ) -> None:
        """Raises `InvalidRequestError`."""
        self._referenced = referenced
        self._read = {item_id: item.read() for item_id, item in referenced.items()}
        self.items = normalise_input(value, self._read, field, keeps_images=keeps_images)

    def kept(self, earlier: KeptItems) -> KeptItems:
        """With ids that are not those of `earlier` items."""
        known = {id(item): self._referenced[item_id] for item_id, item in self._read.items()}
        kept = (known.get(id(item)) or KeptItem.of(item) for item in self.items)
        return with_own_ids(kept, (item.id for item in earlier.items))


@dataclass(frozen=True, slots=True)
class Parsed:
    """Earlier items and then those of the input. They take up to thirty times the memory of kept items, so nothing
    holds them while the answer is generated."""

    items: Sequence[Item]
    num_earlier: int


class Reading:
    """A response's input, with the earlier items that it continues or refers to. `parse` and `write` are for the thread
    that plans the chat; `parse` sets `echo` and `new_items`."""

    def __init__(self, body: ResponsesRequest, earlier: KeptItems, referenced: Mapping[str, KeptItem]) -> None:
        self.earlier = earlier
        self.new_items = KeptItems()
        self.echo = b""
        self._body = body
        self._referenced = referenced

    @classmethod
    async def open(cls, body: ResponsesRequest, stores: Stores) -> Reading:
        """Raises `InvalidRequestError` for earlier items that are not kept here, or are too long together, and
        `NotFoundError` for a conversation that is not."""
        earlier = await _earlier(body, stores)
        referenced = await stores.find_items(body.input)
        num_bytes = earlier.num_bytes + total_bytes(referenced.values())
        if num_bytes > MAX_BODY_BYTES:
            raise InvalidRequestError(
                f"The earlier items have {num_bytes} bytes; at most {MAX_BODY_BYTES} are read. Send only the items "
                "that still matter.",
                body.continued if earlier.items else "input",
            )
        return cls(body, earlier, referenced)

    def call(self, images: ImageParts | None) -> ChatCall:
        """Raises `InvalidRequestError`."""
        return self.write(self.parse(images), images)

    def parse(self, images: ImageParts | None) -> Parsed:
        """Raises `InvalidRequestError`."""
        body = self._body
        self.echo = body.echo()
        new = NewItems(body.input, self._referenced, "input", keeps_images=images is not None)
        if body.store is not False or body.conversation is not None:
            self.new_items = new.kept(self.earlier)
        return Parsed([*(item.read() for item in self.earlier.items), *new.items], len(self.earlier.items))

    def write(self, parsed: Parsed, images: ImageParts | None, num_left_out: int = 0) -> ChatCall:
        """The call without the oldest items. Raises `InvalidRequestError`."""
        gone = left_out(parsed.items, num_left_out)
        items = [LEFT_OUT if index in gone else item for index, item in enumerate(parsed.items)]
        return self._body.call(images, items[parsed.num_earlier :], items[: parsed.num_earlier])


async def _earlier(body: ResponsesRequest, stores: Stores) -> KeptItems:
    """The items of the conversation or the response that the request continues."""
    if body.conversation_id is not None:
        return (await stores.conversations.get(body.conversation_id)).items
    if body.previous_response_id is None:
        return KeptItems()
    previous = await stores.responses.find(body.previous_response_id)
    if previous is None or previous.is_in_progress:
        what = "is not kept here" if previous is None else "is still in progress"
        raise InvalidRequestError(f"The response {body.previous_response_id} {what}.", "previous_response_id")
    return previous.items


def check_room(items: KeptItems, max_bytes: int, field: str) -> None:
    """Raises `InvalidRequestError`, about the request's `field`, if a conversation cannot have so many items."""
    if len(items.items) > MAX_MESSAGES or items.num_bytes > max_bytes:
        raise InvalidRequestError(
            f"The conversation would have {len(items.items)} items of {items.num_bytes} bytes; it can have "
            f"{MAX_MESSAGES} items and {max_bytes} bytes. Delete items, or begin a new conversation.",
            field,
        )


async def extend(
    conversations: KeptRecords, conversation_id: str, new: KeptItems, output: KeptItems | None = None
) -> KeptItems:
    """Adds items to a conversation, and an answer; returns the items as they are kept there. Raises like
    `KeptRecords.change`, and `InvalidRequestError` if it has no room for the items: others may have come meanwhile."""
    added = new

    def extended(record: Record) -> Record:
        nonlocal added
        added = with_own_ids(new.items, (item.id for item in record.input.items))
        longer = record.input + added
        check_room(longer, conversations.max_bytes, "items")
        return replace(record, input=longer + (output or KeptItems()))

    await conversations.change(conversation_id, extended)
    return added
