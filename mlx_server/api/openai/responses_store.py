"""Responses that clients may ask for again, or go on from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.api.errors import NotFoundError

Item = Mapping[str, Any]
"""A piece of a conversation: a message, a call, a call's output, reasoning."""

MAX_RESPONSES = 256
MAX_BYTES = 256 * 1024 * 1024
"""Of the items that are kept; those that several responses share count for each."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response's body, and all items that its prompt was made of, those of earlier responses included.
    `num_bytes` is what these items had in the requests that sent them."""

    body: Mapping[str, Any]
    input_items: tuple[Item, ...]
    num_bytes: int = 0

    @property
    def is_in_progress(self) -> bool:
        return bool(self.body["status"] == "in_progress")

    @property
    def items(self) -> tuple[Item, ...]:
        """The conversation with the answer, from which the next response goes on."""
        return (*self.input_items, *self.body["output"])


@dataclass(frozen=True, slots=True)
class KeptItems:
    """Items by their ids, and what the requests had that sent them, at most."""

    items: Mapping[str, Item]
    num_bytes: int


class ResponseStore:
    """The responses used last, in memory only, as one owner sees them: their own. On the event loop's thread."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._owner = ""
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def of(self, owner: str) -> ResponseStore:
        """The same store as `owner` sees it."""
        view = ResponseStore(self._max_responses, self._max_bytes)
        view._owner, view._responses = owner, self._responses
        return view

    def put(self, response: StoredResponse) -> None:
        """Keeps a new response; those that were not used for longest go while there is no room."""
        self._responses[self._owner, response.body["id"]] = response
        num_bytes = sum(kept.num_bytes for kept in self._responses.values())
        while len(self._responses) > self._max_responses or num_bytes > self._max_bytes:
            num_bytes -= self._responses.popitem(last=False)[1].num_bytes

    def update(self, body: Mapping[str, Any]) -> None:
        """Replaces the body of a response that is still kept; one that was deleted stays so."""
        key = (self._owner, body["id"])
        known = self._responses.get(key)
        if known is not None:
            self._responses[key] = replace(known, body=body)

    def find(self, response_id: str) -> StoredResponse | None:
        """The response, which counts as a use; None if it is not kept."""
        key = (self._owner, response_id)
        found = self._responses.get(key)
        if found is not None:
            self._responses.move_to_end(key)
        return found

    def find_items(self, ids: Collection[str]) -> KeptItems:
        """Those items of kept responses that have these ids; it counts as a use of their responses."""
        found: dict[str, Item] = {}
        num_bytes = 0
        own = [key for key in reversed(self._responses) if key[0] == self._owner]
        for key in own if ids else ():
            response = self._responses[key]
            new = {item["id"]: item for item in response.items if item["id"] in ids and item["id"] not in found}
            if new:
                found.update(new)
                num_bytes += response.num_bytes
                self._responses.move_to_end(key)
        return KeptItems(found, num_bytes)

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
        del self._responses[self._owner, response_id]


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept of one response beside its body, and where: `store` is None if nothing is to be."""

    store: ResponseStore | None
    input_items: tuple[Item, ...]
    num_bytes: int

    def put(self, body: Mapping[str, Any]) -> None:
        if self.store is not None:
            self.store.put(StoredResponse(body, self.input_items, self.num_bytes))

    def update(self, body: Mapping[str, Any]) -> None:
        if self.store is not None:
            self.store.update(body)
