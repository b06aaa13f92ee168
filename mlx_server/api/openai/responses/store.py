"""Responses and conversations that clients can ask for again or continue: on this server (`RecordStore`), and in the
fleet's shared store.

They are kept as JSON, because parsed small items would take thirty times the memory.

A response is on its own server while it is generated. When it ends, it moves to the shared store, if there is one,
before its client gets the end, so every server can serve the next request. A response stays on this server if the
shared store does not answer or the response is too large for it; so does a conversation, which moves when it is made.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import to_json

from mlx_server.api.errors import NotFoundError
from mlx_server.api.http.request_bounds import MAX_BODY_BYTES
from mlx_server.api.shared_store import SharedStore, StoreAwayError
from mlx_server.errors import OverloadedError

Item = Mapping[str, Any]
"""A piece of a conversation: a message, a call, a call's output, reasoning."""

RecordKind = Literal["response", "conversation"]

MAX_RECORDS = 256
"""Of each owner and kind."""

MAX_BYTES = 256 * 1024 * 1024
"""Of all owners; items that several responses share count for each."""

MAX_OWNER_BYTES = 64 * 2**20
"""Of one owner's records of a kind in the shared store."""

MAX_SHARED_BYTES = 8 * 2**20
"""Of one record in the shared store: a larger one would delay others."""

_FORMAT = 2
"""Of `Record.packed`. It is in the names of keys, so that servers of two versions can share a store."""

TTL_S = 24 * 3600
TRANSFER_S = 2.0
_ID_WEIGHT = 32
_MAX_CHANGES = 16


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


_ITEM_BYTES = sys.getsizeof(KeptItem("", b"")) + sys.getsizeof(b"") + 8 + 136
"""Of an item, beside its id and its text: also for the pointer to it, and its entry in the index."""


@dataclass(frozen=True, slots=True)
class KeptItems:
    """Items in order; `num_bytes` of memory."""

    items: tuple[KeptItem, ...] = ()
    num_bytes: int = 0

    @classmethod
    def of(cls, items: Iterable[KeptItem]) -> KeptItems:
        kept = tuple(items)
        return cls(kept, total_bytes(kept))

    def __add__(self, others: KeptItems) -> KeptItems:
        return KeptItems(self.items + others.items, self.num_bytes + others.num_bytes)


@dataclass(frozen=True, slots=True)
class Record:
    """A response with all items of its prompt, those of earlier responses included; or a conversation, whose items are
    `input`. The `version` is a different one after each change in the shared store."""

    id: str
    status: str
    head: bytes
    """The body; without its status and its output if it is a response."""
    input: KeptItems
    output: KeptItems = KeptItems()
    version: str = ""

    @property
    def num_bytes(self) -> int:
        return sys.getsizeof(self.head) + self.input.num_bytes + self.output.num_bytes

    @property
    def is_in_progress(self) -> bool:
        return self.status == "in_progress"

    @property
    def items(self) -> KeptItems:
        """The conversation with the answer, which the next response continues."""
        return self.input + self.output

    def packed(self) -> bytes:
        """All of it, as a new version and lines of JSON; the first one says what the others are."""
        items = self.items.items
        ids = [item.id for item in items]
        first = to_json({"id": self.id, "status": self.status, "items": ids, "num_input_items": len(self.input.items)})
        return b"\n".join((uuid.uuid4().hex.encode(), first, self.head, *(item.text for item in items)))

    @classmethod
    def unpacked(cls, packed: bytes) -> Record:
        version, first, head, *texts = packed.split(b"\n")
        known = json.loads(first)
        items = tuple(KeptItem(item_id, text) for item_id, text in zip(known["items"], texts, strict=True))
        num_input = known["num_input_items"]
        asked, answered = KeptItems.of(items[:num_input]), KeptItems.of(items[num_input:])
        return cls(known["id"], known["status"], head, asked, answered, version.decode())

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
class OwnerRecords:
    """One owner's records of a kind on this server: those that have ended, the most recently used last, with an index
    of their items and their bytes, and those in progress. What generates these holds them anyway, so they are neither
    counted nor pushed out."""

    records: OrderedDict[str, Record] = field(default_factory=OrderedDict)
    in_progress: dict[str, Record] = field(default_factory=dict)
    items: defaultdict[str, list[KeptItem]] = field(default_factory=lambda: defaultdict(list))
    """By id, the newest last: one for each record that has it. Clients may give different items one id."""
    num_bytes: int = 0

    def __contains__(self, record_id: str) -> bool:
        return record_id in self.records or record_id in self.in_progress

    def put(self, record: Record) -> None:
        self.drop(record.id)
        if record.is_in_progress:
            self.in_progress[record.id] = record
            return
        self.records[record.id] = record
        self.num_bytes += record.num_bytes
        for item in record.items.items:
            self.items[item.id].append(item)

    def find(self, record_id: str) -> Record | None:
        """The record, or None; finding it is a use."""
        if record_id in self.records:
            self.records.move_to_end(record_id)
            return self.records[record_id]
        return self.in_progress.get(record_id)

    def drop(self, record_id: str) -> bool:
        """Forgets a record; returns whether it was kept."""
        if self.in_progress.pop(record_id, None) is not None:
            return True
        dropped = self.records.pop(record_id, None)
        if dropped is None:
            return False
        self.num_bytes -= dropped.num_bytes
        for item in dropped.items.items:
            found = self.items[item.id]
            found.remove(item)
            if not found:
                del self.items[item.id]
        return True


class RecordStore:
    """The most recently used records, in memory only, by kind and owner. Event-loop thread only.

    The kind and owner with most bytes lose records first, so no owner can push out others that stay within an equal
    share."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self.max_records = max_records
        self._max_bytes = max_bytes
        self._by_owner: dict[tuple[RecordKind, str], OwnerRecords] = {}

    def of(self, kind: RecordKind, owner: str) -> OwnerRecords:
        return self._by_owner.setdefault((kind, owner), OwnerRecords())

    def make_room(self) -> None:
        """Drops the least recently used records while there are too many, or too many bytes."""
        for owned in self._by_owner.values():
            while len(owned.records) > self.max_records:
                owned.drop(next(iter(owned.records)))
        while sum(owned.num_bytes for owned in self._by_owner.values()) > self._max_bytes:
            largest = max(self._by_owner.values(), key=lambda owned: owned.num_bytes)
            largest.drop(next(iter(largest.records)))


_BEGIN = """
-- KEYS: of one owner, by record id: bodies, ids of items, times of last use
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
local id, most, most_bytes, id_weight, version = ARGV[3], ARGV[6] + 0, ARGV[7] + 0, ARGV[8] + 0, ARGV[9]
if version ~= '' and version ~= string.sub(redis.call('HGET', KEYS[1], id) or '', 1, #version) then return 0 end
redis.call('HSET', KEYS[1], id, ARGV[4])
redis.call('HSET', KEYS[2], id, ARGV[5])
use(id)
local num_bytes = 0
for rank, id in ipairs(redis.call('ZREVRANGE', KEYS[3], 0, -1)) do
  num_bytes = num_bytes + redis.call('HSTRLEN', KEYS[1], id) + id_weight * redis.call('HSTRLEN', KEYS[2], id)
  if rank > most or num_bytes > most_bytes then drop(id) end
end
return 1
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
local wanted, num_wanted, found, num_bytes = {}, 0, {}, 0
for _, id in ipairs(cjson.decode(ARGV[3])) do
  wanted[id] = true
  num_wanted = num_wanted + 1
end
for _, record in ipairs(redis.call('ZREVRANGE', KEYS[3], 0, -1)) do
  if num_bytes > ARGV[4] + 0 then break end
  local ids, has_some = cjson.decode(redis.call('HGET', KEYS[2], record) or '[]'), false
  for _, id in ipairs(ids) do
    if wanted[id] then has_some = true end
  end
  local body, from = has_some and redis.call('HGET', KEYS[1], record), 1  -- the store may have evicted the bodies
  for index = -2, body and #ids or -3 do
    local to, id = string.find(body, '\\n', from, true) or #body + 1, ids[index]
    if wanted[id] then
      found[#found + 1], found[#found + 2] = id, string.sub(body, from, to - 1)
      wanted[id], num_wanted, num_bytes = nil, num_wanted - 1, num_bytes + to - from
      if num_wanted == 0 then return found end
    end
    from = to + 1
  end
end
return found
"""
)
_DROP = _BEGIN + "return drop(ARGV[3])"


def _put_arguments(record: Record) -> tuple[Any, ...]:
    """For `_PUT`, which takes a record of another version only, if it has one."""
    ids = json.dumps([item.id for item in record.items.items])
    return record.id, record.packed(), ids, MAX_RECORDS, MAX_OWNER_BYTES, _ID_WEIGHT, record.version


class KeptRecords:
    """The records of `owner`, for one request. Event-loop thread only."""

    def __init__(
        self, store: RecordStore, shared: SharedStore | None, owner: str, kind: RecordKind = "response"
    ) -> None:
        self._store, self._owned = store, store.of(kind, owner)
        self._shared = shared
        self._kind = kind
        self._keys = [f"{kind}s-{_FORMAT}:{owner}:{what}" for what in ("bodies", "items", "uses")]
        self._own_id: str | None = None
        self._settling: asyncio.Task[None] | None = None

    @property
    def max_bytes(self) -> int:
        """Of one conversation: what a response can read, and the shared store takes."""
        return MAX_BODY_BYTES if self._shared is None else MAX_SHARED_BYTES

    def put(self, record: Record) -> None:
        """Keeps the record that this request makes, on this server until `settle`."""
        self._own_id = record.id
        self._owned.put(record)
        self._store.make_room()

    def update(self, record: Record) -> None:
        """Replaces it, unless it was deleted."""
        if record.id in self._owned:
            self.put(record)

    async def change(self, record_id: str, change: Callable[[Record], Record]) -> Record:
        """Replaces a record that has ended by what `change` makes of it, and returns that. `change` is called again if
        another server of the fleet has changed the record meanwhile. Raises what it raises, and like `get`."""
        for _ in range(_MAX_CHANGES):
            known = await self.get(record_id)
            changed = change(known)
            if record_id in self._owned:
                self.put(changed)
                return changed
            if await self._ask(_PUT, f"{self._kind} {record_id}", *_put_arguments(changed)):
                return changed
        raise OverloadedError(f"The {self._kind} {record_id} is changed by too many requests at a time. Try again.")

    async def settle(self) -> None:
        """Moves it to the shared store, once it has ended."""
        record = None if self._shared is None or self._own_id is None else self._owned.find(self._own_id)
        if record is None or record.is_in_progress:
            return
        arguments = _put_arguments(record)
        if len(arguments[1]) > MAX_SHARED_BYTES:
            return
        is_taken = True
        try:
            await self._run(_PUT, *arguments)
        except StoreAwayError:
            is_taken = False
        if self._owned.find(record.id) is None:  # its client has deleted it on the way
            await self._drop_shared(record.id)
        elif is_taken:
            self._owned.drop(record.id)

    def settle_later(self) -> None:
        """Starts `settle` without waiting for it, if its client has left before it was done."""
        if self._shared is not None and self._own_id in self._owned.records:
            self._settling = asyncio.get_running_loop().create_task(self.settle())

    async def find(self, record_id: str) -> Record | None:
        """The record, or None; finding it is a use. Raises `OverloadedError` if the shared store, which may have it,
        does not answer."""
        found = self._owned.find(record_id)
        if found is None and self._shared is not None:
            packed = await self._ask(_FIND, f"{self._kind} {record_id}", record_id)
            return None if packed is None else Record.unpacked(packed)
        return found

    async def find_items(self, ids: Collection[str]) -> dict[str, KeptItem]:
        """The kept items with these ids. Raises like `find`."""
        known = self._owned.items
        found = {item_id: known[item_id][-1] for item_id in ids if item_id in known}
        missing = set(ids) - found.keys()
        if missing and self._shared is not None:
            wanted, what = json.dumps(sorted(missing)), f"item {min(missing)}"
            reply: Sequence[bytes] = await self._ask(_FIND_ITEMS, what, wanted, MAX_BODY_BYTES)
            items = (KeptItem(item_id.decode(), text) for item_id, text in zip(reply[::2], reply[1::2], strict=True))
            found.update((item.id, item) for item in items)
        return found

    async def get(self, record_id: str) -> Record:
        """Like `find`; raises `NotFoundError`."""
        found = await self.find(record_id)
        if found is None:
            raise self._not_found(record_id)
        return found

    async def delete(self, record_id: str) -> None:
        """Raises `NotFoundError`, and like `find`."""
        if self._owned.drop(record_id):
            if self._shared is not None:  # it may have a copy if its answer to `settle` came too late
                await self._drop_shared(record_id)
        elif self._shared is None or not await self._ask(_DROP, f"{self._kind} {record_id}", record_id):
            raise self._not_found(record_id)

    def _not_found(self, record_id: str) -> NotFoundError:
        without = ", without those of requests with store: false" if self._kind == "response" else ""
        return NotFoundError(
            f"There is no {self._kind} {record_id}; the last {self._store.max_records} are kept{without}."
        )

    async def _drop_shared(self, record_id: str) -> None:
        """Now, or when the store is back."""
        assert self._shared is not None
        try:
            await self._run(_DROP, record_id)
        except StoreAwayError:
            self._shared.defer(_DROP, self._keys, [1000 * TTL_S, record_id])

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
