"""The limits of tiers, checked against what each caller uses.

    Quotas.check(caller, demand)           raises if a limit refuses the request; changes nothing
    Quotas.count_wrong_request(caller)     counts a request that was wrong
    Quotas.reserve(caller, demand)         asks the fleet's store, if there is one (`fleet_quotas`)
    Quotas.open(caller, demand)            counts the request -> Grant, which counts output and gives seats back
    Quotas.begin_reading(caller)           checks and counts a request that only has text read

Every generation passes here right before it is queued. All limits except those of the scheduler's queue hold for one
identity: two keys of a tier have a quota each. A seat is one answer in progress.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from mlx_server.api.auth.keys import Caller, UsageLog
from mlx_server.api.errors import ANTHROPIC_PREFIX
from mlx_server.errors import ContextLengthError, InvalidRequestError, QuotaExceededError
from mlx_server.sampling_params import SamplingParams
from mlx_server.tiers import Tier

WINDOW_S = 60.0
_SLOT_S = 0.25
SEAT_RETRY_S = 1.0


@dataclass(slots=True)
class _Slot:
    """Amounts that came close together. They leave the window together, when the last one does."""

    first_s: float
    last_s: float
    amount: int


class SlidingWindow:
    """Amounts of the last 60 seconds. A limit on `used` holds in any 60 seconds, not only in the minutes of a clock.

    Amounts leave up to a quarter of a second late, so that a window has at most 240 slots: of 5 at 0.0 s and 3 at 0.2
    s, all 8 leave at 60.2 s. Times are from one monotonic clock and never decrease.
    """

    def __init__(self) -> None:
        self.num_unreported = 0
        """The sum of the amounts that a fleet's store has yet to add (`fleet_quotas`)."""
        self._slots: deque[_Slot] = deque()
        self._total = 0

    def add(self, amount: int, now: float) -> None:
        if self._slots and now - self._slots[-1].first_s < _SLOT_S:
            self._slots[-1].amount += amount
            self._slots[-1].last_s = now
        else:
            self._forget(now)
            self._slots.append(_Slot(now, now, amount))
        self._total += amount
        self.num_unreported += amount

    def used(self, now: float) -> int:
        self._forget(now)
        return self._total

    def wait_s(self, amount: int, limit: int, now: float) -> float:
        """Seconds until `amount` more fits the limit, if nothing else comes: 0 if it fits now, infinity if it exceeds
        the limit."""
        excess = self.used(now) + amount - limit
        if excess <= 0:
            return 0.0
        for slot in self._slots:
            excess -= slot.amount
            if excess <= 0:
                return slot.last_s + WINDOW_S - now
        return math.inf

    def empty_in_s(self, now: float) -> float:
        self._forget(now)
        return self._slots[-1].last_s + WINDOW_S - now if self._slots else 0.0

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0].last_s + WINDOW_S <= now:
            self._total -= self._slots.popleft().amount


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for: answers in progress at the same time, and prompt tokens, counting each prompt once."""

    num_answers: int = 1
    num_prompt_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Allowance:
    """A rate limit: what remains of it now, and the seconds until all of it is available again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class Meter:
    """What one identity has used within a minute, and its answers in progress."""

    requests: SlidingWindow = field(default_factory=SlidingWindow)
    tokens: SlidingWindow = field(default_factory=SlidingWindow)
    readings: SlidingWindow = field(default_factory=SlidingWindow)
    read_tokens: SlidingWindow = field(default_factory=SlidingWindow)
    num_answers: int = 0


class Grant:
    """An admitted request. `close` it on every path."""

    def __init__(
        self, meter: Meter, demand: Demand, clock: Callable[[], float], on_close: Callable[[int], None]
    ) -> None:
        self._meter = meter
        self._num_answers = demand.num_answers
        self._clock = clock
        self._on_close = on_close
        self._num_output_tokens = 0
        self._is_open = True

    def add_output(self, num_tokens: int) -> None:
        self._meter.tokens.add(num_tokens, self._clock())
        self._num_output_tokens += num_tokens

    def close(self) -> None:
        """Gives the seats back. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._meter.num_answers -= self._num_answers
            self._on_close(self._num_output_tokens)


class Quotas:
    """The meters of all callers. Event-loop thread only, so that nothing happens between `check` and `open`."""

    def __init__(self, usage: UsageLog | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`usage` records what keys use. `refused` counts answers of status 429 by tier."""
        self.refused: Counter[str] = Counter()
        self._usage = usage
        self._clock = clock
        self._meters: dict[str, Meter] = {}

    def check(self, caller: Caller, demand: Demand) -> None:
        """Raises `QuotaExceededError` for what the caller may do later, and `InvalidRequestError` for what it may never
        do."""
        tier, meter, now = caller.tier, self._meter(caller), self._clock()
        _check_seats(tier, meter, demand)
        _check_rate(tier, tier.requests_per_minute, meter.requests, now, "requests have come", "send")
        if tier.tokens_per_minute is not None:
            _check_tokens(tier, tier.tokens_per_minute, meter.tokens, demand.num_prompt_tokens, now)

    def inputs_at_a_time(self, caller: Caller) -> int:
        """How many inputs of one pooling request of the caller may be in the engine now, at least 1. The request holds
        one seat. Its inputs share the tier's seats evenly with the caller's other answers on this server, so that many
        such requests put no more into the queue than as many chats: of 8 seats, each of 2 requests gets 4."""
        limit = caller.tier.max_concurrent_requests
        return sys.maxsize if limit is None else max(1, limit // max(1, self._meter(caller).num_answers))

    def begin_reading(self, caller: Caller) -> None:
        """Counts a request that has text read and generates nothing. The rates of the tier hold for such requests
        separately. Raises `QuotaExceededError`."""
        tier, meter, now = caller.tier, self._meter(caller), self._clock()
        _check_rate(tier, tier.requests_per_minute, meter.readings, now, "requests have come", "send")
        _check_rate(tier, tier.tokens_per_minute, meter.read_tokens, now, "tokens have been read", "have read")
        meter.readings.add(1, now)

    def add_read(self, caller: Caller, num_tokens: int) -> None:
        """Counts the tokens of such a request."""
        self._meter(caller).read_tokens.add(num_tokens, self._clock())

    def count_wrong_request(self, caller: Caller) -> None:
        """Counts a wrong request, since reading it costs as much as reading others."""
        self._meter(caller).requests.add(1, self._clock())

    async def reserve(self, caller: Caller, demand: Demand) -> contextlib.AbstractContextManager[None]:
        """Reserves the demand in the fleet's store. Call `check` and `open` inside the block, which must not await.
        What is not opened is given back at the end of the block. Raises `QuotaExceededError`."""
        return contextlib.nullcontext()

    async def close(self) -> None:
        """Call it when the server ends."""

    def open(self, caller: Caller, demand: Demand) -> Grant:
        """Counts a request that `check` allowed."""
        meter, now = self._meter(caller), self._clock()
        meter.requests.add(1, now)
        meter.tokens.add(demand.num_prompt_tokens, now)
        meter.num_answers += demand.num_answers
        return Grant(meter, demand, self._clock, partial(self._on_close, caller, demand))

    def _on_close(self, caller: Caller, demand: Demand, num_output_tokens: int) -> None:
        if self._usage is not None and caller.key_id is not None:
            self._usage.add(
                caller.key_id,
                num_requests=1,
                num_prompt_tokens=demand.num_prompt_tokens,
                num_output_tokens=num_output_tokens,
            )

    def rates(self, caller: Caller, *, is_reading: bool = False) -> dict[str, Allowance]:
        """What remains of `requests` and `tokens`, for those that the tier limits: for requests that generate, or with
        `is_reading` for those that only have text read."""
        meter, now, tier = self._meter(caller), self._clock(), caller.tier
        limits = {
            "requests": (tier.requests_per_minute, meter.readings if is_reading else meter.requests),
            "tokens": (tier.tokens_per_minute, meter.read_tokens if is_reading else meter.tokens),
        }
        return {
            name: Allowance(limit, max(0, limit - window.used(now)), window.empty_in_s(now))
            for name, (limit, window) in limits.items()
            if limit is not None
        }

    def _meter(self, caller: Caller) -> Meter:
        return self._meters.setdefault(caller.identity, Meter())


def _check_seats(tier: Tier, meter: Meter, demand: Demand) -> None:
    limit = tier.max_concurrent_requests
    if limit is None or meter.num_answers + demand.num_answers <= limit:
        return
    if demand.num_answers > limit:
        raise InvalidRequestError(
            f"The request asks for {demand.num_answers} answers; a key of the tier {tier.name} may have {limit} at a "
            "time. Lower n, or send fewer prompts.",
            "n",
        )
    raise seats_refusal(tier, meter.num_answers, demand)


def _check_rate(tier: Tier, limit: int | None, window: SlidingWindow, now: float, used: str, may: str) -> None:
    wait_s = 0.0 if limit is None else window.wait_s(1, limit, now)
    if wait_s > 0:
        raise _rate_refusal(tier, limit, f"{window.used(now)} {used}", may, wait_s)


def _check_tokens(tier: Tier, limit: int, window: SlidingWindow, num_prompt_tokens: int, now: float) -> None:
    if num_prompt_tokens > limit:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens; a key of the tier {tier.name} may use {limit} a minute. "
            "Shorten the prompt.",
            "input_tokens",
        )
    wait_s = window.wait_s(num_prompt_tokens, limit, now)
    if wait_s > 0:
        raise tokens_refusal(tier, window.used(now), num_prompt_tokens, wait_s)


def seats_refusal(tier: Tier, num_answers: int, demand: Demand) -> QuotaExceededError:
    return QuotaExceededError(
        f"{num_answers} answers are in progress and the request asks for {demand.num_answers}; a key of the "
        f"tier {tier.name} may have {tier.max_concurrent_requests} at a time. Wait for one to end.",
        SEAT_RETRY_S,
    )


def requests_refusal(tier: Tier, num_requests: int, wait_s: float) -> QuotaExceededError:
    """The refusal when too many requests came within a minute; `wait_s` is when another is allowed."""
    return _rate_refusal(tier, tier.requests_per_minute, f"{num_requests} requests have come", "send", wait_s)


def tokens_refusal(tier: Tier, num_tokens: int, num_prompt_tokens: int, wait_s: float) -> QuotaExceededError:
    """The refusal when too many tokens were used within a minute; `wait_s` is when the prompt's are allowed."""
    return QuotaExceededError(
        f"{num_tokens} tokens were used within a minute and the prompt has {num_prompt_tokens}; a key of the tier "
        f"{tier.name} may use {tier.tokens_per_minute}. Try again in {math.ceil(wait_s)} s.",
        wait_s,
    )


def _rate_refusal(tier: Tier, limit: int | None, used: str, may: str, wait_s: float) -> QuotaExceededError:
    return QuotaExceededError(
        f"{used} within a minute; a key of the tier {tier.name} may {may} {limit}. Try again in {math.ceil(wait_s)} s.",
        wait_s,
    )


def bounded(sampling: SamplingParams, tier: Tier, num_prompt_tokens: int) -> SamplingParams:
    """The parameters with `max_tokens` reduced to what the tier allows. Raises `ContextLengthError` for a prompt that
    leaves no room for output."""
    limits = [sampling.max_tokens, tier.max_output_tokens]
    if tier.max_context_tokens is not None:
        if num_prompt_tokens >= tier.max_context_tokens:
            raise ContextLengthError.of_prompt(
                str(num_prompt_tokens),
                tier.max_context_tokens,
                "Shorten the prompt.",
                whose=f" for a key of the tier {tier.name}",
            )
        limits.append(tier.max_context_tokens - num_prompt_tokens)
    max_tokens = min((limit for limit in limits if limit is not None), default=None)
    return sampling if max_tokens == sampling.max_tokens else replace(sampling, max_tokens=max_tokens)


def quota_headers(rates: Mapping[str, Allowance], path: str) -> dict[str, str]:
    """Headers that tell clients what remains of their quota: Anthropic's names on its routes, with the time of the
    reset; OpenAI's elsewhere, with the seconds until the reset."""
    headers = {}
    for name, rate in rates.items():
        if path.startswith(ANTHROPIC_PREFIX):
            instant = datetime.datetime.fromtimestamp(math.ceil(time.time() + rate.reset_s), datetime.UTC)
            headers[f"anthropic-ratelimit-{name}-limit"] = str(rate.limit)
            headers[f"anthropic-ratelimit-{name}-remaining"] = str(rate.remaining)
            headers[f"anthropic-ratelimit-{name}-reset"] = instant.isoformat().replace("+00:00", "Z")
        else:
            headers[f"x-ratelimit-limit-{name}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(rate.reset_s * 1000) / 1000:g}s"
    return headers
