"""Responses that clients may ask for again, or go on from.

They are kept as JSON, so that what they hold is known: parsed, small items would have thirty times the bytes.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_server.api.errors import NotFoundError

Item = Mapping[str, Any]
"""A piece of a conversation: a message, a call, a call's output, reasoning."""

MAX_RESPONSES = 256
"""Of each owner."""

MAX_BYTES = 256 * 1024 * 1024
"""Of all owners; items that several responses share count for each."""

_POINTER_BYTES = 8


@dataclass(frozen=True, slots=True)
class KeptItem:
    """One item, written as `text`."""

    id: str
    text: bytes

    @classmethod
    def of(cls, item: Item) -> KeptItem:
        return cls(item["id"], _written(item))

    def read(self) -> dict[str, Any]:
        """The item itself; takes time in proportion to it."""
        item: dict[str, Any] = json.loads(self.text)
        return item

    @property
    def num_bytes(self) -> int:
        """What it takes of memory."""
        return sys.getsizeof(self) + sys.getsizeof(self.id) + sys.getsizeof(self.text) + _POINTER_BYTES


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response's body, and all items that its prompt was made of, those of earlier responses included."""

    id: str
    status: str
    head: bytes
    """The body without its output."""
    input_items: tuple[KeptItem, ...]
    output: tuple[KeptItem, ...]
    num_bytes: int

    @classmethod
    def of(cls, body: Mapping[str, Any], input_items: tuple[KeptItem, ...]) -> StoredResponse:
        head = _written({**body, "output": []})
        output = tuple(KeptItem.of(item) for item in body["output"])
        num_bytes = sys.getsizeof(head) + total_bytes(input_items) + total_bytes(output)
        return cls(body["id"], body["status"], head, input_items, output, num_bytes)

    @property
    def is_in_progress(self) -> bool:
        return self.status == "in_progress"

    @property
    def items(self) -> tuple[KeptItem, ...]:
        """The conversation with the answer, from which the next response goes on."""
        return (*self.input_items, *self.output)

    def packed(self) -> bytes:
        """All of it as lines of JSON, of which the first says what the others are."""
        ids = [item.id for item in self.items]
        first = _written({"id": self.id, "status": self.status, "items": ids, "num_input_items": len(self.input_items)})
        return b"\n".join((first, self.head, *(item.text for item in self.items)))

    @classmethod
    def unpacked(cls, packed: bytes) -> StoredResponse:
        first, head, *texts = packed.split(b"\n")
        known = json.loads(first)
        items = tuple(KeptItem(item_id, text) for item_id, text in zip(known["items"], texts, strict=True))
        num_input = known["num_input_items"]
        num_bytes = sys.getsizeof(head) + total_bytes(items)
        return cls(known["id"], known["status"], head, items[:num_input], items[num_input:], num_bytes)

    def body(self) -> dict[str, Any]:
        return {**json.loads(self.head), "output": [item.read() for item in self.output]}


def total_bytes(items: Iterable[KeptItem]) -> int:
    """What the items take of memory."""
    return sum(item.num_bytes for item in items)


def _written(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(slots=True)
class _Shelf:
    """One owner's responses, those used last at the end."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def put(self, response: StoredResponse) -> None:
        known = self.responses.get(response.id)
        self.num_bytes += response.num_bytes - (0 if known is None else known.num_bytes)
        self.responses[response.id] = response

    def drop(self, response_id: str) -> int:
        """How many bytes it had."""
        num_bytes = self.responses.pop(response_id).num_bytes
        self.num_bytes -= num_bytes
        return num_bytes

    def drop_oldest(self) -> int:
        return self.drop(next(iter(self.responses)))


class ResponseStore:
    """The responses used last, in memory only, as one owner sees them: their own. On the event loop's thread.

    Who keeps most gives way first, so that no owner can push out what others keep within an equal share."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._owner = ""
        self._shelves: dict[str, _Shelf] = {}

    def of(self, owner: str) -> ResponseStore:
        """The same store as `owner` sees it."""
        view = ResponseStore(self._max_responses, self._max_bytes)
        view._owner, view._shelves = owner, self._shelves
        return view

    @property
    def _own(self) -> _Shelf:
        return self._shelves.setdefault(self._owner, _Shelf())

    def put(self, response: StoredResponse) -> None:
        """Keeps a response; those that were not used for longest go while there is no room."""
        shelf = self._own
        shelf.put(response)
        while len(shelf.responses) > self._max_responses:
            shelf.drop_oldest()
        num_bytes = sum(shelf.num_bytes for shelf in self._shelves.values())
        while num_bytes > self._max_bytes:
            largest = max(self._shelves.values(), key=lambda shelf: shelf.num_bytes)
            num_bytes -= largest.drop_oldest()

    def update(self, body: Mapping[str, Any]) -> None:
        """Replaces the body of a response that is still kept; one that was deleted stays so."""
        known = self._own.responses.get(body["id"])
        if known is not None:
            self.put(StoredResponse.of(body, known.input_items))

    def find(self, response_id: str) -> StoredResponse | None:
        """The response, which counts as a use; None if it is not kept."""
        found = self._own.responses.get(response_id)
        if found is not None:
            self._own.responses.move_to_end(response_id)
        return found

    def find_items(self, ids: Collection[str]) -> dict[str, KeptItem]:
        """Those items of kept responses that have these ids; it counts as a use of their responses."""
        found: dict[str, KeptItem] = {}
        responses = self._own.responses
        for response in list(reversed(responses.values())) if ids else ():
            new = {item.id: item for item in response.items if item.id in ids and item.id not in found}
            if new:
                found.update(new)
                responses.move_to_end(response.id)
            if len(found) == len(ids):
                break
        return found

    def get(self, response_id: str) -> StoredResponse:
        """Like `find`; raises `NotFoundError`."""
        found = self.find(response_id)
        if found is None:
            raise NotFoundError(
                f"There is no response {response_id}; the last {self._max_responses} that were not sent with "
                "store: false are kept."
            )
        return found

    def delete(self, response_id: str) -> None:
        """Raises `NotFoundError`."""
        self.get(response_id)
        self._own.drop(response_id)

    def drop(self, response_id: str) -> None:
        """Forgets it, if it is kept."""
        if response_id in self._own.responses:
            self._own.drop(response_id)
