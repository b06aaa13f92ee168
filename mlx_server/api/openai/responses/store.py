"""Responses that clients can ask for again or continue: on this server (`ResponseStore`), and in the fleet's shared
store.

They are kept as JSON, because parsed small items would take thirty times the memory.

A response is on its own server while it is generated. When it ends, it moves to the shared store, if there is one,
before its client gets the end, so every server can serve the next request. A response stays on this server if the
shared store does not answer or the response is too large for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from mlx_server.api.errors import NotFoundError
from mlx_server.api.http.request_bounds import MAX_BODY_BYTES
from mlx_server.api.shared_store import SharedStore, StoreAwayError
from mlx_server.errors import OverloadedError

Item = Mapping[str, Any]
"""A piece of a conversation: a message, a call, a call's output, reasoning."""

MAX_RESPONSES = 256
"""Of each owner."""

MAX_BYTES = 256 * 1024 * 1024
"""Of all owners; items that several responses share count for each."""

MAX_OWNER_BYTES = 64 * 2**20
"""Of one owner's responses in the shared store."""

MAX_SHARED_BYTES = 8 * 2**20
"""Of one response in the shared store: a larger one would delay others."""

TTL_S = 24 * 3600
TRANSFER_S = 2.0
_ID_WEIGHT = 32


@dataclass(frozen=True, slots=True)
class KeptItem:
    """One item; `text` is its JSON."""

    id: str
    text: bytes

    @classmethod
    def of(cls, item: Item) -> KeptItem:
        return cls(item["id"], to_json(item))

    def read(self) -> dict[str, Any]:
        item: dict[str, Any] = json.loads(self.text)
        return item


_ITEM_BYTES = sys.getsizeof(KeptItem("", b"")) + sys.getsizeof(b"") + 8
"""Of an item, beside its id and its text; the last is for the pointer to it."""


@dataclass(frozen=True, slots=True)
class KeptItems:
    """Items in order; `num_bytes` of memory."""

    items: tuple[KeptItem, ...] = ()
    num_bytes: int = 0

    @classmethod
    def of(cls, items: Iterable[KeptItem]) -> KeptItems:
        kept = tuple(items)
        return cls(kept, total_bytes(kept))


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response's body, and all items of its prompt, those of earlier responses included."""

    id: str
    status: str
    head: bytes
    """The body without its status and its output."""
    input: KeptItems
    output: KeptItems = KeptItems()

    @property
    def num_bytes(self) -> int:
        return sys.getsizeof(self.head) + self.input.num_bytes + self.output.num_bytes

    @property
    def is_in_progress(self) -> bool:
        return self.status == "in_progress"

    @property
    def items(self) -> tuple[KeptItem, ...]:
        """The conversation with the answer, which the next response continues."""
        return self.input.items + self.output.items

    def packed(self) -> bytes:
        """All of it as lines of JSON; the first line says what the others are."""
        ids = [item.id for item in self.items]
        first = to_json({"id": self.id, "status": self.status, "items": ids, "num_input_items": len(self.input.items)})
        return b"\n".join((first, self.head, *(item.text for item in self.items)))

    @classmethod
    def unpacked(cls, packed: bytes) -> StoredResponse:
        first, head, *texts = packed.split(b"\n")
        known = json.loads(first)
        items = tuple(KeptItem(item_id, text) for item_id, text in zip(known["items"], texts, strict=True))
        num_input = known["num_input_items"]
        return cls(known["id"], known["status"], head, KeptItems.of(items[:num_input]), KeptItems.of(items[num_input:]))

    def body(self, status: str | None = None) -> bytes:
        """The body as JSON, with another status if one is given."""
        status_text = to_json(self.status if status is None else status)
        return b'%b,"status":%b,"output":%b}' % (self.head[:-1], status_text, written(self.output.items))


def written(items: Iterable[KeptItem]) -> bytes:
    """The items as a list in JSON. They are not parsed, which would take a tenth of a second for a megabyte."""
    return b"[%b]" % b",".join([item.text for item in items])


def total_bytes(items: Iterable[KeptItem]) -> int:
    """The items' bytes of memory."""
    return sum(sys.getsizeof(item.id) + len(item.text) + _ITEM_BYTES for item in items)


@dataclass(slots=True)
class OwnerResponses:
    """One owner's responses on this server, the most recently used last."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def put(self, response: StoredResponse) -> None:
        known = self.responses.get(response.id)
        self.num_bytes += response.num_bytes - (0 if known is None else known.num_bytes)
        self.responses[response.id] = response

    def find(self, response_id: str) -> StoredResponse | None:
        """The response, or None; finding it is a use."""
        found = self.responses.get(response_id)
        if found is not None:
            self.responses.move_to_end(response_id)
        return found

    async def find_items(self, ids: Collection[str]) -> dict[str, KeptItem]:
        """The kept items with these ids; finding them is a use of their responses. Streams go on between one response
        and the next, since all of them may have a million items."""
        found: dict[str, KeptItem] = {}
        for response in list(reversed(self.responses.values())):
            if len(found) == len(ids):
                break
            new = {item.id: item for item in response.items if item.id in ids and item.id not in found}
            if new:
                found.update(new)
                self.find(response.id)
            await asyncio.sleep(0)
        return found

    def drop(self, response_id: str) -> bool:
        """Forgets a response; returns whether it was kept."""
        dropped = self.responses.pop(response_id, None)
        self.num_bytes -= 0 if dropped is None else dropped.num_bytes
        return dropped is not None


class ResponseStore:
    """The most recently used responses, in memory only, by owner. Event-loop thread only.

    The owner with most bytes loses responses first, so no owner can push out others that stay within an equal share."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_owner: dict[str, OwnerResponses] = {}

    def of_owner(self, owner: str) -> OwnerResponses:
        return self._by_owner.setdefault(owner, OwnerResponses())

    def make_room(self) -> None:
        """Drops the least recently used responses while there are too many, or too many bytes."""
        for owned in self._by_owner.values():
            while len(owned.responses) > self.max_responses:
                owned.drop(next(iter(owned.responses)))
        while sum(owned.num_bytes for owned in self._by_owner.values()) > self._max_bytes:
            largest = max(self._by_owner.values(), key=lambda owned: owned.num_bytes)
            largest.drop(next(iter(largest.responses)))


_BEGIN = """
-- KEYS: of one owner, by response id: bodies, ids of items, times of last use
local now, ttl_ms = ARGV[1] + 0, ARGV[2] + 0
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local function drop(id)
  redis.call('ZREM', KEYS[3], id)
  redis.call('HDEL', KEYS[2], id)
  return redis.call('HDEL', KEYS[1], id)
end
local function use(id)
  redis.call('ZADD', KEYS[3], now, id)
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now - ttl_ms)) do drop(id) end
"""
_PUT = (
    _BEGIN
    + """
local id, most, most_bytes, id_weight = ARGV[3], ARGV[6] + 0, ARGV[7] + 0, ARGV[8] + 0
redis.call('HSET', KEYS[1], id, ARGV[4])
redis.call('HSET', KEYS[2], id, ARGV[5])
use(id)
local num_bytes = 0
for rank, id in ipairs(redis.call('ZREVRANGE', KEYS[3], 0, -1)) do
  num_bytes = num_bytes + redis.call('HSTRLEN', KEYS[1], id) + id_weight * redis.call('HSTRLEN', KEYS[2], id)
  if rank > most or num_bytes > most_bytes then drop(id) end
end
"""
)
_FIND = (
    _BEGIN
    + """
local body = redis.call('HGET', KEYS[1], ARGV[3])
if body then use(ARGV[3]) end
return body
"""
)
_FIND_ITEMS = (
    _BEGIN
    + """
local wanted, num_wanted, bodies, num_bytes = {}, 0, {}, 0
for _, id in ipairs(cjson.decode(ARGV[3])) do
  wanted[id] = true
  num_wanted = num_wanted + 1
end
for _, response in ipairs(redis.call('ZREVRANGE', KEYS[3], 0, -1)) do
  if num_wanted == 0 or num_bytes > ARGV[4] + 0 then break end
  local has_some = false
  for _, id in ipairs(cjson.decode(redis.call('HGET', KEYS[2], response) or '[]')) do
    if wanted[id] then
      wanted[id], num_wanted, has_some = nil, num_wanted - 1, true
    end
  end
  if has_some then
    bodies[#bodies + 1] = redis.call('HGET', KEYS[1], response)
    num_bytes = num_bytes + #bodies[#bodies]
    use(response)
  end
end
return bodies
"""
)
_DROP = _BEGIN + "return drop(ARGV[3])"


class KeptResponses:
    """The responses of `owner`, for one request. Event-loop thread only."""

    def __init__(self, store: ResponseStore, shared: SharedStore | None, owner: str) -> None:
        self._store, self._owned = store, store.of_owner(owner)
        self._shared = shared
        self._keys = [f"responses:{owner}:{what}" for what in ("bodies", "items", "uses")]
        self._own_id: str | None = None
        self._settling: asyncio.Task[None] | None = None

    def put(self, response: StoredResponse) -> None:
        """Keeps the response of this request, on this server until `settle`."""
        self._own_id = response.id
        self._owned.put(response)
        self._store.make_room()

    def update(self, response: StoredResponse) -> None:
        """Replaces it, unless it was deleted."""
        if response.id in self._owned.responses:
            self.put(response)

    async def settle(self) -> None:
        """Moves it to the shared store, once it has ended."""
        response = None if self._shared is None or self._own_id is None else self._owned.find(self._own_id)
        if response is None or response.is_in_progress:
            return
        packed = response.packed()
        if len(packed) > MAX_SHARED_BYTES:
            return
        ids = json.dumps([item.id for item in response.items])
        is_taken = True
        try:
            await self._run(_PUT, response.id, packed, ids, MAX_RESPONSES, MAX_OWNER_BYTES, _ID_WEIGHT)
        except StoreAwayError:
            is_taken = False
        if self._owned.find(response.id) is None:  # its client has deleted it on the way
            await self._drop_shared(response.id)
        elif is_taken:
            self._owned.drop(response.id)

    def settle_later(self) -> None:
        """Starts `settle` without waiting for it, when the client has left."""
        if self._shared is not None:
            self._settling = asyncio.get_running_loop().create_task(self.settle())

    async def find(self, response_id: str) -> StoredResponse | None:
        """The response, or None; finding it is a use. Raises `OverloadedError` if the shared store, which may have it,
        does not answer."""
        found = self._owned.find(response_id)
        if found is None and self._shared is not None:
            packed = await self._ask(_FIND, f"response {response_id}", response_id)
            return None if packed is None else StoredResponse.unpacked(packed)
        return found

    async def find_items(self, ids: Collection[str]) -> dict[str, KeptItem]:
        """The kept items with these ids. Raises like `find`."""
        found = await self._owned.find_items(ids)
        missing = set(ids) - found.keys()
        if missing and self._shared is not None:
            wanted, what = json.dumps(sorted(missing)), f"item {min(missing)}"
            bodies: Sequence[bytes] = await self._ask(_FIND_ITEMS, what, wanted, MAX_BODY_BYTES)
            for packed in bodies:
                items = {item.id: item for item in StoredResponse.unpacked(packed).items if item.id in missing}
                found = {**items, **found}
        return found

    async def get(self, response_id: str) -> StoredResponse:
        """Like `find`; raises `NotFoundError`."""
        found = await self.find(response_id)
        if found is None:
            raise self._not_found(response_id)
        return found

    async def delete(self, response_id: str) -> None:
        """Raises `NotFoundError`, and like `find`."""
        if self._owned.drop(response_id):
            if self._shared is not None:  # it may have a copy if its answer to `settle` came too late
                await self._drop_shared(response_id)
        elif self._shared is None or not await self._ask(_DROP, f"response {response_id}", response_id):
            raise self._not_found(response_id)

    def _not_found(self, response_id: str) -> NotFoundError:
        return NotFoundError(
            f"There is no response {response_id}; the last {self._store.max_responses} are kept, without those of "
            "requests with store: false."
        )

    async def _drop_shared(self, response_id: str) -> None:
        """Now, or when the store is back."""
        assert self._shared is not None
        try:
            await self._run(_DROP, response_id)
        except StoreAwayError:
            self._shared.defer(_DROP, self._keys, [1000 * TTL_S, response_id])

    async def _ask(self, script: str, what: str, *args: Any) -> Any:
        try:
            return await self._run(script, *args)
        except StoreAwayError as error:
            raise OverloadedError(
                f"The shared store does not answer, and the {what} is not kept on this server. Try again."
            ) from error

    async def _run(self, script: str, *args: Any) -> Any:
        assert self._shared is not None
        return await self._shared.run(script, self._keys, [1000 * TTL_S, *args], TRANSFER_S)
