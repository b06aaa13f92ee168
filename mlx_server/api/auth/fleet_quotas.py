"""Quotas of a fleet: what callers use on all servers together, counted in the shared store.

Two checks apply to each request: this server's own counts (`Quotas`), and the store's counts for all servers. So the
limits hold per server while the store is away, and a request that this server refuses by itself makes no call to the
store.

A request makes one call to the store before it is queued (`_TAKE`), which counts or refuses it. Everything else is
reported later, at the end of an answer or once a second: output tokens, wrong requests, seats given back. Seats are
leased: a server reports how many answers a key has in progress on it, and the store forgets that 30 seconds after the
last report, so that no seat is lost when a server is killed. Requests that only have text read are counted by each
server separately, since a router may send the same text to all of them.

Worked example, `requests_per_minute` 2. Server A takes one: slot 4 has 1. B takes one 250 ms later: slot 5 has 1. For
A's next request the sum is 2, so it must wait until slot 4 leaves the window: 60 seconds after the slot's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlx_server.api.auth.keys import Caller, UsageLog
from mlx_server.api.auth.quotas import (
    Allowance,
    Demand,
    Meter,
    Quotas,
    SlidingWindow,
    requests_refusal,
    seats_refusal,
    tokens_refusal,
)
from mlx_server.api.shared_store import SharedStore, StoreAwayError
from mlx_server.engine.fair_slots import shielded
from mlx_server.tiers import Tier

T = TypeVar("T")

SYNC_S = 1.0
LEASE_S = 30.0
SEAT_PAUSE_S = 0.05
"""The seat of an answer is given back shortly after its client has the answer. So a request that finds no seat is tried
again after this time."""

_NO_LIMIT = -1
_UNKNOWN = -1
_TAKE = """
-- KEYS: requests and tokens: amounts by slot of 250 ms, their total, the first slot and the last;
-- answers in progress by server, as "number:when the lease ends"
local now, server, lease_ms, held, want, num_requests, num_tokens, prompt_tokens,
  max_requests, max_tokens, max_seats = ARGV[1] + 0, ARGV[2], ARGV[3] + 0, ARGV[4] + 0, ARGV[5] + 0, ARGV[6] + 0,
  ARGV[7] + 0, ARGV[8] + 0, ARGV[9] + 0, ARGV[10] + 0, ARGV[11] + 0
-- The values in the keys say what has expired; the keys' lifetime only removes those that nobody uses any more.
local SLOT_MS, WINDOW_MS, LIFETIME_MS = 250, 60000, 600000
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A slot's amount leaves a minute after the slot's end. Only the slots that leave are read.
local function read(key)
  local found = redis.call('HMGET', key, 'total', 'first', 'last')
  local last_gone = math.floor((now - WINDOW_MS) / SLOT_MS) - 1
  if not found[1] then return {used = 0} end
  if found[3] + 0 <= last_gone then
    redis.call('DEL', key)
    return {used = 0}
  end
  local window = {used = found[1] + 0, first = found[2] + 0, last = found[3] + 0}
  if window.first <= last_gone then
    local gone = {}
    for slot = window.first, last_gone do gone[#gone + 1] = slot end
    for _, amount in ipairs(redis.call('HMGET', key, unpack(gone))) do
      if amount then window.used = window.used - amount end
    end
    redis.call('HDEL', key, unpack(gone))
    window.first = last_gone + 1
    redis.call('HSET', key, 'total', window.used, 'first', window.first)
  end
  return window
end

local function add(key, window, amount)
  if amount == 0 then return end
  window.last = math.max(math.floor(now / SLOT_MS), window.last or 0)
  window.first = window.first or window.last
  window.used = window.used + amount
  redis.call('HINCRBY', key, window.last, amount)
  redis.call('HSET', key, 'total', window.used, 'first', window.first, 'last', window.last)
  redis.call('PEXPIRE', key, LIFETIME_MS)
end

local function leaves_ms(slot) return slot and (slot + 1) * SLOT_MS + WINDOW_MS - now or 0 end

local function wait(key, window, excess)
  for slot = window.first or 0, window.last or -1 do
    excess = excess - (redis.call('HGET', key, slot) or 0)
    if excess <= 0 then return leaves_ms(slot) end
  end
  return leaves_ms(window.last)
end

local requests, tokens, seats, leases = read(KEYS[1]), read(KEYS[2]), held, redis.call('HGETALL', KEYS[3])
add(KEYS[1], requests, num_requests)
add(KEYS[2], tokens, num_tokens)
for i = 1, #leases, 2 do
  local number, ends = string.match(leases[i + 1], '(%d+):(%d+)')
  if ends + 0 <= now then
    redis.call('HDEL', KEYS[3], leases[i])
  elseif leases[i] ~= server then
    seats = seats + number
  end
end

local refusal, wait_ms = '', 0
if want > 0 then
  local too_many = requests.used + 1 - max_requests
  local too_much = tokens.used + prompt_tokens - max_tokens
  if max_seats >= 0 and seats + want > max_seats then
    refusal = 'seats'
  elseif max_requests >= 0 and too_many > 0 then
    refusal, wait_ms = 'requests', wait(KEYS[1], requests, too_many)
  elseif max_tokens >= 0 and too_much > 0 then
    refusal, wait_ms = 'tokens', wait(KEYS[2], tokens, too_much)
  end
  if refusal == '' then
    add(KEYS[1], requests, 1)
    add(KEYS[2], tokens, prompt_tokens)
    held, seats = held + want, seats + want
  end
end
if held > 0 then
  redis.call('HSET', KEYS[3], server, string.format('%d:%d', held, now + lease_ms))
  redis.call('PEXPIRE', KEYS[3], LIFETIME_MS)
else
  redis.call('HDEL', KEYS[3], server)
end
return {refusal, wait_ms, seats, requests.used, leaves_ms(requests.last),
  tokens.used, leaves_ms(tokens.last)}
"""


def _unreported(window: SlidingWindow, now: float) -> int:
    """What the store has yet to add; below 0 for requests that it has counted and that were not opened. Amounts older
    than a minute, from while the store was away, are left out."""
    return min(window.num_unreported, window.used(now))


@dataclass(frozen=True, slots=True)
class _Reply:
    """The store's reply about all servers, at `at_s` on this server's clock."""

    refusal: str
    wait_s: float
    num_answers: int
    rates: dict[str, tuple[int, float]]
    """For `requests` and `tokens`: the amount used within a minute, and the seconds until the window is empty."""
    at_s: float


@dataclass(slots=True)
class _Share:
    """One identity on this server, and what the store knows about it."""

    tier: Tier
    keys: tuple[str, ...]
    meter: Meter
    num_reported: int = 0
    """Answers in progress, as the store counts them for this server; `_UNKNOWN` from the start of a call until its
    reply."""
    reported_s: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A server's calls for an identity must reach the store in order."""
    reply: _Reply | None = None
    refused_until_s: float = 0.0
    """Until then the store refuses every request."""

    def has_unreported(self, now: float) -> bool:
        is_due = self.meter.num_answers > 0 and now - self.reported_s > LEASE_S / 3
        has_tokens = self.tier.tokens_per_minute is not None and _unreported(self.meter.tokens, now) != 0
        has_requests = _unreported(self.meter.requests, now) != 0
        return is_due or has_tokens or has_requests or self.meter.num_answers != self.num_reported


class FleetQuotas(Quotas):
    """The meters of this server's callers, together with the store's for all servers. Event-loop thread only. `close`
    it."""

    def __init__(
        self, store: SharedStore, usage: UsageLog | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(usage, clock)
        self._store = store
        self._server = uuid.uuid4().hex
        self._shares: dict[str, _Share] = {}
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def check(self, caller: Caller, demand: Demand) -> None:
        super().check(caller, demand)
        share = self._shares.get(caller.identity)
        if share is not None and share.reply is not None and self._store.is_here:
            wait_s, limit = share.refused_until_s - self._clock(), caller.tier.requests_per_minute
            used, _ = share.reply.rates["requests"]
            if wait_s > 0 and limit is not None and used >= limit:  # fewer if the store has lost its data since
                raise requests_refusal(caller.tier, used, wait_s)

    async def reserve(self, caller: Caller, demand: Demand) -> contextlib.AbstractContextManager[None]:
        if not _is_limited(caller.tier):
            return contextlib.nullcontext()
        share = self._share(caller)
        self._wake()
        try:
            reply = await self._take(share, demand)
            if reply.refusal == "seats":
                await self._pause()
                reply = await self._take(share, demand)
        except StoreAwayError:
            return contextlib.nullcontext()
        if reply.refusal == "seats":
            raise seats_refusal(caller.tier, reply.num_answers, demand)
        if reply.refusal == "requests":
            share.refused_until_s = reply.at_s + reply.wait_s
            raise requests_refusal(caller.tier, reply.rates["requests"][0], reply.wait_s)
        if reply.refusal:
            raise tokens_refusal(caller.tier, reply.rates["tokens"][0], demand.num_prompt_tokens, reply.wait_s)
        return self._reserved(share)

    def count_wrong_request(self, caller: Caller) -> None:
        super().count_wrong_request(caller)
        if _is_limited(caller.tier):
            self._share(caller)
            self._wake()

    def rates(self, caller: Caller, *, is_reading: bool = False) -> dict[str, Allowance]:
        rates, share = super().rates(caller, is_reading=is_reading), self._shares.get(caller.identity)
        if is_reading or share is None or share.reply is None or not self._store.is_here:
            return rates
        passed_s = self._clock() - share.reply.at_s
        for name, rate in rates.items():
            used, reset_s = share.reply.rates[name]
            if passed_s < reset_s:
                remaining = min(rate.remaining, max(0, rate.limit - used))
                rates[name] = Allowance(rate.limit, remaining, max(rate.reset_s, reset_s - passed_s))
        return rates

    async def close(self) -> None:
        """Reports the rest, so that seats are free at once."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # the store may be away
        for share in self._shares.values():
            await self._report(share)

    def _on_close(self, caller: Caller, demand: Demand, num_output_tokens: int) -> None:
        super()._on_close(caller, demand, num_output_tokens)
        if caller.identity in self._shares:
            self._start(self._report(self._shares[caller.identity]))

    def _share(self, caller: Caller) -> _Share:
        share = self._shares.get(caller.identity)
        if share is None:
            keys = tuple(f"quota:{caller.identity}:{what}" for what in ("requests", "tokens", "answers"))
            share = self._shares[caller.identity] = _Share(caller.tier, keys, self._meter(caller))
        share.tier = caller.tier
        return share

    @staticmethod
    async def _pause() -> None:
        await asyncio.sleep(SEAT_PAUSE_S)

    @contextlib.contextmanager
    def _reserved(self, share: _Share) -> Iterator[None]:
        """Inside the block, `open` counts here what the store has already counted. If it is not called, the
        requests are given back to the store. The block must not await, so that no report comes between."""
        try:
            yield
        finally:
            if share.has_unreported(self._clock()):
                self._start(self._report(share))

    async def _take(self, share: _Share, demand: Demand) -> _Reply:
        """If the caller is cancelled, the reply is still waited for and booked, since the store may have counted; the
        next report gives back what was granted."""
        async with share.lock:
            calling = self._start(self._call(share, demand))
            try:
                reply = await shielded(calling)
            except asyncio.CancelledError:
                await asyncio.wait([calling])
                if calling.exception() is None:
                    self._book(share, demand, calling.result())
                raise
            self._book(share, demand, reply)
            return reply

    @staticmethod
    def _book(share: _Share, demand: Demand, reply: _Reply) -> None:
        if not reply.refusal:
            share.num_reported += demand.num_answers
            share.meter.requests.num_unreported -= 1
            share.meter.tokens.num_unreported -= demand.num_prompt_tokens

    async def _report(self, share: _Share) -> None:
        """Reports what has changed since the last call; nothing while the store is away."""
        with contextlib.suppress(StoreAwayError):
            async with share.lock:
                if share.has_unreported(self._clock()):
                    await self._call(share, Demand(0, 0))

    async def _call(self, share: _Share, demand: Demand) -> _Reply:
        now, tier, held = self._clock(), share.tier, share.meter.num_answers
        windows = (share.meter.requests, share.meter.tokens)
        counted = [window.num_unreported for window in windows]
        limits = (tier.requests_per_minute, tier.tokens_per_minute, tier.max_concurrent_requests)
        share.num_reported = _UNKNOWN  # without a reply, it is unknown whether the store has counted
        refusal, wait_ms, num_answers, *used = await self._store.run(
            _TAKE,
            share.keys,
            [
                *(self._server, int(1000 * LEASE_S), held, demand.num_answers),
                *(_unreported(window, now) for window in windows),
                demand.num_prompt_tokens,
                *(_NO_LIMIT if limit is None else limit for limit in limits),
            ],
        )
        for window, num_counted in zip(windows, counted, strict=True):
            window.num_unreported -= num_counted
        share.num_reported, share.reported_s = held, now
        rates = {"requests": (used[0], used[1] / 1000), "tokens": (used[2], used[3] / 1000)}
        share.reply = _Reply(refusal.decode(), wait_ms / 1000, num_answers, rates, now)
        return share.reply

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _wake(self) -> None:
        if self._timer is None and not self._is_closed:
            self._timer = asyncio.get_running_loop().call_later(SYNC_S, lambda: self._start(self._sync()))

    async def _sync(self) -> None:
        """Reports all changes, once a second while there are any."""
        self._timer = None  # a share may change after its report
        for share in list(self._shares.values()):
            await self._report(share)
        if any(share.meter.num_answers or share.has_unreported(self._clock()) for share in self._shares.values()):
            self._wake()


def _is_limited(tier: Tier) -> bool:
    """Whether the tier has a limit that is counted over all servers."""
    return (tier.max_concurrent_requests, tier.requests_per_minute, tier.tokens_per_minute) != (None, None, None)
