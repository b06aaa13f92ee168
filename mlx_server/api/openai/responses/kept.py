"""The responses that one owner may ask for again: those on this server, and those in the fleet's shared store.

A response is on its own server while it is made. Once it has ended it moves to the store, if there is one, before its
client hears of the end; so the next request finds it on whichever server. What the store does not take, since it is
away or the response too large, stays with this server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mlx_server.api.http.request_bounds import MAX_BODY_BYTES
from mlx_server.api.openai.responses.store import MAX_RESPONSES, KeptItem, ResponseStore, StoredResponse
from mlx_server.api.shared_store import Script, SharedStore, StoreAwayError
from mlx_server.errors import OverloadedError

MAX_OWNER_BYTES = 64 * 2**20
"""Of one owner's responses in the store."""

MAX_SHARED_BYTES = 8 * 2**20
"""Of one response: a larger one would hold up others."""

TTL_S = 24 * 3600
TRANSFER_S = 2.0
_ID_WEIGHT = 32

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
_PUT = Script(
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
_FIND = Script(
    _BEGIN
    + """
local body = redis.call('HGET', KEYS[1], ARGV[3])
if body then use(ARGV[3]) end
return body
"""
)
_FIND_ITEMS = Script(
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
_DROP = Script(_BEGIN + "return drop(ARGV[3])")


class KeptResponses:
    """As `ResponseStore`, for one request of `owner`. Event-loop thread only."""

    def __init__(self, local: ResponseStore, shared: SharedStore | None, owner: str) -> None:
        self._local = local.of(owner)
        self._shared = shared
        self._keys = [f"responses:{owner}:{what}" for what in ("bodies", "items", "uses")]
        self._own_id: str | None = None
        self._settling: asyncio.Task[None] | None = None

    def put(self, response: StoredResponse) -> None:
        """Keeps the response that this request makes, on this server until `settle`."""
        self._own_id = response.id
        self._local.put(response)

    def update(self, body: Mapping[str, Any]) -> None:
        """Replaces its body, unless it was deleted."""
        self._local.update(body)

    async def settle(self) -> None:
        """Moves it to the shared store, once it has ended."""
        response = None if self._shared is None or self._own_id is None else self._local.find(self._own_id)
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
        if self._local.find(response.id) is None:  # its client has deleted it on the way
            await self._drop_shared(response.id)
        elif is_taken:
            self._local.drop(response.id)

    def settle_later(self) -> None:
        """The same where nobody waits any more."""
        if self._shared is not None:
            self._settling = asyncio.get_running_loop().create_task(self.settle())

    async def find(self, response_id: str) -> StoredResponse | None:
        """The response, which counts as a use; None if it is not kept. Raises `OverloadedError` if the shared store is
        away, which may have it."""
        found = self._local.find(response_id)
        if found is None and self._shared is not None:
            packed = await self._ask(_FIND, f"response {response_id}", response_id)
            return None if packed is None else StoredResponse.unpacked(packed)
        return found

    async def find_items(self, ids: Collection[str]) -> dict[str, KeptItem]:
        """Those items of kept responses that have these ids. Raises as `find`."""
        found = self._local.find_items(ids)
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
        return await self.find(response_id) or self._local.get(response_id)

    async def delete(self, response_id: str) -> None:
        """Raises `NotFoundError`, and as `find`."""
        if self._local.find(response_id) is not None:
            self._local.delete(response_id)
            if self._shared is not None:  # which may have taken it although its answer came too late
                await self._drop_shared(response_id)
        elif self._shared is None or not await self._ask(_DROP, f"response {response_id}", response_id):
            self._local.delete(response_id)

    async def _drop_shared(self, response_id: str) -> None:
        """Now, or when the store is back."""
        assert self._shared is not None
        try:
            await self._run(_DROP, response_id)
        except StoreAwayError:
            self._shared.owe(_DROP, self._keys, [1000 * TTL_S, response_id])

    async def _ask(self, script: Script, what: str, *args: Any) -> Any:
        try:
            return await self._run(script, *args)
        except StoreAwayError as error:
            raise OverloadedError(
                f"The shared store does not answer, and the {what} is not kept on this server. Try again."
            ) from error

    async def _run(self, script: Script, *args: Any) -> Any:
        assert self._shared is not None
        return await self._shared.run(script, self._keys, [1000 * TTL_S, *args], TRANSFER_S)
