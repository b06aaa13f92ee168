"""Traffic for the simulator: made up from a seed, or read from a recorded trace.

Its requests have no text, so drafts are made up, too: how often there are some, and how many of them are right.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, takewhile
from pathlib import Path

from mlx_server.bench.serve.workloads import BLOCK_TOKENS, TraceLine, read_dataset
from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ConfigError
from mlx_server.outputs import SampledToken
from mlx_server.request import Priority, Request

_MOST_TOKENS = 4096
"""Of a made-up request's own, and of its answer."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One arrival. `hash_ids` name the prompt's blocks of `hash_block_tokens` tokens, the last one possibly
    partial; equal leading ids are an equal prefix."""

    arrival_s: float
    tier: Priority
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    hash_block_tokens: int = BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What made-up requests look like. Own tokens and output tokens are drawn log-normally around their means
    (a long tail, as measured of real traffic) with a `spread` of their logarithms, 0 for all alike; a
    `shared_share` of the requests begin with one of
    `num_prefixes` prefixes of `prefix_tokens` tokens, the popular ones more often (Zipf)."""

    own_tokens: float = 200.0
    output_tokens: float = 64.0
    shared_share: float = 0.5
    num_prefixes: int = 64
    prefix_tokens: int = 512
    tiers: tuple[float, float, float] = (0.1, 0.7, 0.2)
    spread: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Conversations of `turns` turns, each with a prefix of its own of the mix's `prefix_tokens`. A turn comes
    `pause_s` after the one before on average, and its prompt is that one's and own tokens behind it."""

    turns: int
    pause_s: float


class Traffic:
    """Draws requests of one mix; the seed decides all of them."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self._mix = mix
        self._rng = random.Random(seed)
        self._fresh_ids = count(mix.num_prefixes * _num_blocks(mix.prefix_tokens))
        self._popularity = [1.0 / (rank + 1) for rank in range(mix.num_prefixes)]

    def poisson(self, rate: float, tier: Priority | None = None, start_s: float = 0.0) -> Iterator[TracedRequest]:
        """Independent arrivals, `rate` a second, without end; of one tier or of the mix's."""
        now = start_s
        while True:
            now += self._rng.expovariate(rate)
            yield self._draw(now, tier, self._prefix_ids())

    def bursts(self, rate: float, size: int) -> Iterator[TracedRequest]:
        """`size` requests at the same moment, again and again at random, `rate` requests a second on average.
        Those of a burst that begin with a shared prefix begin with the same one: one client's fan-out."""
        now = 0.0
        while True:
            now += self._rng.expovariate(rate / size)
            prefix_ids = self._prefix_ids()
            for _ in range(size):
                yield self._draw(now, None, prefix_ids)

    def chats(self, rate: float, chats: Chats, num_requests: int) -> list[TracedRequest]:
        """So many requests of conversations, `rate` requests a second on average while all of them go on."""
        rng, prefix_tokens, found, began_s = self._rng, self._mix.prefix_tokens, list[TracedRequest](), 0.0
        while len(found) < num_requests:
            began_s += rng.expovariate(rate / chats.turns)
            arrival_s = began_s
            ids = tuple(islice(self._fresh_ids, _num_blocks(prefix_tokens)))
            for _ in range(chats.turns):
                turn = self._draw(arrival_s, None, ())
                ids += turn.hash_ids
                num_tokens = (len(ids) - len(turn.hash_ids)) * BLOCK_SIZE + turn.num_prompt_tokens
                found.append(replace(turn, num_prompt_tokens=num_tokens, hash_ids=ids))
                arrival_s += rng.expovariate(1.0 / chats.pause_s)
        return sorted(found[:num_requests], key=lambda request: request.arrival_s)

    def at(self, arrival_s: float, tier: Priority) -> TracedRequest:
        """One arrival."""
        return self._draw(arrival_s, tier, self._prefix_ids())

    def _prefix_ids(self) -> Sequence[int]:
        """The blocks of one of the shared prefixes."""
        chosen = self._rng.choices(range(self._mix.num_prefixes), self._popularity)[0]
        per_prefix = _num_blocks(self._mix.prefix_tokens)
        return range(chosen * per_prefix, (chosen + 1) * per_prefix)

    def _draw(self, arrival_s: float, tier: Priority | None, shared_ids: Sequence[int]) -> TracedRequest:
        mix, rng = self._mix, self._rng
        num_own = self._length(mix.own_tokens)
        prefix_ids = shared_ids if rng.random() < mix.shared_share else ()
        return TracedRequest(
            arrival_s,
            rng.choices(list(Priority), mix.tiers)[0] if tier is None else tier,
            len(prefix_ids) * BLOCK_SIZE + num_own,
            self._length(mix.output_tokens),
            (*prefix_ids, *islice(self._fresh_ids, _num_blocks(num_own))),
        )

    def _length(self, mean: float) -> int:
        sigma = self._mix.spread
        drawn = self._rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        return min(max(round(drawn) if sigma == 0.0 else int(drawn), 1), _MOST_TOKENS)


class ClosedLoop:
    """Clients of each tier that ask without a pause: each sends its next request when its answer has ended, until
    `num_requests` are sent in all."""

    def __init__(self, traffic: Traffic, num_clients: Mapping[Priority, int], num_requests: int) -> None:
        self._traffic = traffic
        self._num_clients = num_clients
        self._num_left = num_requests

    def first(self) -> list[TracedRequest]:
        """One of each client, at the same moment."""
        tiers = [tier for tier, count in self._num_clients.items() for _ in range(count)]
        return [request for tier in tiers if (request := self._send(tier, 0.0)) is not None]

    def next_of(self, ended: TracedRequest, now: float) -> TracedRequest | None:
        """What the client of a request sends when its answer has ended."""
        return self._send(ended.tier, now)

    def _send(self, tier: Priority, now: float) -> TracedRequest | None:
        if self._num_left == 0:
            return None
        self._num_left -= 1
        return self._traffic.at(now, tier)


def with_flood(base: Iterable[TracedRequest], extra: Iterable[TracedRequest], end_s: float) -> Iterator[TracedRequest]:
    """`base` traffic, and `extra` on top until `end_s`."""
    during = takewhile(lambda request: request.arrival_s < end_s, extra)
    return heapq.merge(base, during, key=lambda request: request.arrival_s)


def read_trace(
    path: Path, *, shrink: int = 1, tiers: Sequence[float] = (0, 1, 0), seed: int = 0
) -> list[TracedRequest]:
    """A trace in any format that `bench serve` replays, from its first arrival on; tiers are drawn. Without hash ids,
    no prompt begins as another. `shrink` divides all lengths. Raises `ConfigError`."""
    if BLOCK_TOKENS % (shrink * BLOCK_SIZE):
        raise ConfigError(f"--shrink is {shrink}; it must divide {BLOCK_TOKENS // BLOCK_SIZE}.")
    rng, fresh_ids, block_tokens = random.Random(seed), count(-1, -1), BLOCK_TOKENS // shrink
    requests = []
    for number, line in enumerate(read_dataset(path), start=1):
        if not isinstance(line, TraceLine):
            raise ConfigError(f"{path} holds prompts; the simulator replays traces.")
        num_prompt_tokens = max(line.input_len // shrink, 1)
        hash_ids = line.hash_ids or tuple(islice(fresh_ids, -(-num_prompt_tokens // block_tokens)))
        if len(hash_ids) * block_tokens < num_prompt_tokens:
            raise ConfigError(
                f"{path}, request {number}: {len(hash_ids)} hash_ids do not cover input_length {line.input_len}."
            )
        tier = rng.choices(list(Priority), tiers)[0]
        num_output_tokens = max(line.output_len // shrink, 1)
        requests.append(
            TracedRequest(line.arrival_s, tier, num_prompt_tokens, num_output_tokens, hash_ids, block_tokens)
        )
    return requests


def write_trace(path: Path, requests: Iterable[TracedRequest]) -> None:
    """Writes a trace in Mooncake's format, whose hash ids stand for 512 tokens: to be read with `shrink` 16.
    Lengths are 16 times those of the requests."""
    factor = BLOCK_TOKENS // BLOCK_SIZE
    lines = [
        {
            "timestamp": round(1000 * request.arrival_s),
            "input_length": factor * request.num_prompt_tokens,
            "output_length": factor * request.num_output_tokens,
            "hash_ids": request.hash_ids,
        }
        for request in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


_DRAFTED = SampledToken(7)
MOST_DRAFTS = 8
"""Tokens of one draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMix:
    """`acceptances` are dealt to requests in turn: how often a draft is what the model says, if all before it were.
    `found_share` is how often looking up finds something."""

    acceptances: tuple[float, ...]
    found_share: float = 1.0
    seed: int = 0


class MadeUpDrafts:
    """A drafter, and the model that it drafts for: both know the mix only. Request ids are numbers."""

    def __init__(self, mix: DraftMix) -> None:
        self._mix = mix
        self._rng = random.Random(mix.seed)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return (_DRAFTED.token_id,) * most if self._rng.random() < self._mix.found_share else ()

    def forget(self, request: Request) -> None:
        """Nothing is kept of a request."""

    def sampled(self, request_id: str, num_drafts: int) -> SampledToken:
        """What a step gives a request: the drafts that are right, and a token behind them."""
        acceptance, num_right = self._mix.acceptances[int(request_id) % len(self._mix.acceptances)], 0
        while num_right < num_drafts and self._rng.random() < acceptance:
            num_right += 1
        return _DRAFTED._replace(accepted=(_DRAFTED,) * num_right)
