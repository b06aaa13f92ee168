"""What each caller may still do: the limits of its tier, held against what it does.

    Quotas.check(caller, demand)     raises what refuses it, and changes nothing
    Quotas.refuse(caller)            counts a request that was wrong
    Quotas.open(caller, demand)      -> Grant: takes it; the grant counts output as it comes, and gives seats back
    Quotas.begin_reading(caller)     raises as `check`, or counts a request that only reads text

Everything that generates passes here, right before it is queued. All limits but the scheduler's queue bounds hold
for one identity: two keys of a tier have a quota each.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from mlx_server.api.caller import Caller
from mlx_server.api.key_usage import UsageLog
from mlx_server.api.sliding_window import SlidingWindow
from mlx_server.errors import ContextLengthError, InvalidRequestError, QuotaExceededError
from mlx_server.sampling_params import SamplingParams
from mlx_server.tiers import Tier

_SEAT_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request wants: answers generated side by side, and prompt tokens, each prompt counted once."""

    num_answers: int = 1
    num_prompt_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Allowance:
    """One rate: its limit, what is left of it now, and the seconds until all of it is back."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Quota:
    """A caller's rates; None where there is no limit."""

    requests: Allowance | None
    tokens: Allowance | None


@dataclass(slots=True)
class _Meter:
    """What one identity has used, and does."""

    requests: SlidingWindow = field(default_factory=SlidingWindow)
    tokens: SlidingWindow = field(default_factory=SlidingWindow)
    readings: SlidingWindow = field(default_factory=SlidingWindow)
    read_tokens: SlidingWindow = field(default_factory=SlidingWindow)
    num_answers: int = 0


class Grant:
    """A request that was let in. `close` it on every path."""

    def __init__(
        self, meter: _Meter, demand: Demand, clock: Callable[[], float], on_close: Callable[[int], None]
    ) -> None:
        self._meter = meter
        self._num_answers = demand.num_answers
        self._clock = clock
        self._on_close = on_close
        self._num_output_tokens = 0
        self._is_open = True

    def add_output(self, num_tokens: int) -> None:
        """Output tokens have come."""
        self._meter.tokens.add(num_tokens, self._clock())
        self._num_output_tokens += num_tokens

    def close(self) -> None:
        """Gives the seats back. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._meter.num_answers -= self._num_answers
            self._on_close(self._num_output_tokens)


class Quotas:
    """The meters of all callers. Event-loop thread only, so that nothing comes between `check` and `open`."""

    def __init__(self, usage: UsageLog | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`usage` is told what keys have used. `refused` counts requests that their tiers' rates and seats kept out."""
        self.refused: Counter[str] = Counter()
        self._usage = usage
        self._clock = clock
        self._meters: dict[str, _Meter] = {}

    def check(self, caller: Caller, demand: Demand) -> None:
        """Raises `QuotaExceededError` for what the caller may do later, and `InvalidRequestError` for what it never
        may."""
        with self._counting_refusals(caller.tier):
            tier, meter, now = caller.tier, self._meter(caller), self._clock()
            _check_seats(tier, meter, demand)
            _check_rate(tier, tier.requests_per_minute, meter.requests, now, "requests have come", "send")
            if tier.tokens_per_minute is not None:
                _check_tokens(tier, tier.tokens_per_minute, meter.tokens, demand.num_prompt_tokens, now)

    def begin_reading(self, caller: Caller) -> None:
        """Counts a request that has text read and generates nothing. It is held against the tier's rates, too, but
        apart from what generates. Raises `QuotaExceededError`."""
        with self._counting_refusals(caller.tier):
            tier, meter, now = caller.tier, self._meter(caller), self._clock()
            _check_rate(tier, tier.requests_per_minute, meter.readings, now, "requests have come", "send")
            _check_rate(tier, tier.tokens_per_minute, meter.read_tokens, now, "tokens have been read", "have read")
            meter.readings.add(1, now)

    def add_read(self, caller: Caller, num_tokens: int) -> None:
        """Such a request's text had so many tokens."""
        self._meter(caller).read_tokens.add(num_tokens, self._clock())

    @contextlib.contextmanager
    def _counting_refusals(self, tier: Tier) -> Iterator[None]:
        try:
            yield
        except QuotaExceededError:
            self.refused[tier.name] += 1
            raise

    def refuse(self, caller: Caller) -> None:
        """A request was wrong: it counts as one, since reading it has cost as much as others."""
        self._meter(caller).requests.add(1, self._clock())

    def open(self, caller: Caller, demand: Demand) -> Grant:
        """Takes what `check` has let pass."""
        meter, now = self._meter(caller), self._clock()
        meter.requests.add(1, now)
        meter.tokens.add(demand.num_prompt_tokens, now)
        meter.num_answers += demand.num_answers

        def record(num_output_tokens: int) -> None:
            if self._usage is not None and caller.key_id is not None:
                self._usage.add(
                    caller.key_id,
                    num_requests=1,
                    num_prompt_tokens=demand.num_prompt_tokens,
                    num_output_tokens=num_output_tokens,
                )

        return Grant(meter, demand, self._clock, record)

    def quota(self, caller: Caller) -> Quota:
        """What is left now."""
        meter, now = self._meter(caller), self._clock()
        return Quota(
            _allowance(caller.tier.requests_per_minute, meter.requests, now),
            _allowance(caller.tier.tokens_per_minute, meter.tokens, now),
        )

    def _meter(self, caller: Caller) -> _Meter:
        return self._meters.setdefault(caller.identity, _Meter())


def _allowance(limit: int | None, window: SlidingWindow, now: float) -> Allowance | None:
    if limit is None:
        return None
    return Allowance(limit, max(0, limit - window.used(now)), window.empty_in_s(now))


def _check_seats(tier: Tier, meter: _Meter, demand: Demand) -> None:
    limit = tier.max_concurrent_requests
    if limit is None or meter.num_answers + demand.num_answers <= limit:
        return
    if demand.num_answers > limit:
        raise InvalidRequestError(
            f"The request asks for {demand.num_answers} answers; a key of the tier {tier.name} may have {limit} at a "
            "time. Lower n, or send fewer prompts.",
            "n",
        )
    raise QuotaExceededError(
        f"{meter.num_answers} answers are in progress and the request asks for {demand.num_answers}; a key of the "
        f"tier {tier.name} may have {limit} at a time. Wait for one to end.",
        _SEAT_RETRY_S,
    )


def _check_rate(tier: Tier, limit: int | None, window: SlidingWindow, now: float, used: str, may: str) -> None:
    wait_s = 0.0 if limit is None else window.wait_s(1, limit, now)
    if wait_s > 0:
        raise QuotaExceededError(
            f"{window.used(now)} {used} within a minute; a key of the tier {tier.name} may {may} {limit}. "
            f"Try again in {math.ceil(wait_s)} s.",
            wait_s,
        )


def _check_tokens(tier: Tier, limit: int, window: SlidingWindow, num_prompt_tokens: int, now: float) -> None:
    if num_prompt_tokens > limit:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens; a key of the tier {tier.name} may use {limit} a minute. "
            "Shorten the prompt.",
            "input_tokens",
        )
    wait_s = window.wait_s(num_prompt_tokens, limit, now)
    if wait_s > 0:
        raise QuotaExceededError(
            f"{window.used(now)} tokens were used within a minute and the prompt has {num_prompt_tokens}; a key of the "
            f"tier {tier.name} may use {limit}. Try again in {math.ceil(wait_s)} s.",
            wait_s,
        )


def bounded(sampling: SamplingParams, tier: Tier, num_prompt_tokens: int) -> SamplingParams:
    """The parameters, `max_tokens` cut to what the tier allows beside the prompt. Raises `ContextLengthError` for a
    prompt that leaves no room."""
    limits = [sampling.max_tokens, tier.max_output_tokens]
    if tier.max_context_tokens is not None:
        if num_prompt_tokens >= tier.max_context_tokens:
            raise ContextLengthError(
                f"The prompt has {num_prompt_tokens} tokens; the context of a key of the tier {tier.name} is "
                f"{tier.max_context_tokens} tokens, and at least one must be left for the answer. Shorten the prompt.",
                "input_tokens",
            )
        limits.append(tier.max_context_tokens - num_prompt_tokens)
    max_tokens = min((limit for limit in limits if limit is not None), default=None)
    return sampling if max_tokens == sampling.max_tokens else replace(sampling, max_tokens=max_tokens)
