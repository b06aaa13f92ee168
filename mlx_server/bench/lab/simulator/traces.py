"""Traffic for the simulator, generated from a seed or read from a recorded trace.

The requests have no text, so drafts are generated as well, with a given rate of acceptance.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from mlx_server.bench.serve.workloads import BLOCK_TOKENS, TraceLine, read_dataset
from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ConfigError
from mlx_server.outputs import SampledToken
from mlx_server.request import Priority, Request

_MAX_TOKENS = 4096
"""Most own tokens of a generated request, and most tokens of its answer."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One arrival of a client. `hash_ids` name the prompt's blocks of `hash_block_tokens` tokens, the last one possibly
    partial; equal leading ids are an equal prefix."""

    arrival_s: float
    tier: Priority
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    hash_block_tokens: int = BLOCK_SIZE
    client: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """The distribution of generated requests. Own tokens and output tokens are log-normal (a long tail, as measured in
    real traffic): these are the means, and `spread` is the standard deviation of the logarithms; 0 makes all equal. A
    `shared_share` of the requests begins with one of `num_prefixes` prefixes of `prefix_tokens` tokens, chosen by
    Zipf's law."""

    own_tokens: float = 200.0
    output_tokens: float = 64.0
    shared_share: float = 0.5
    num_prefixes: int = 64
    prefix_tokens: int = 512
    tiers: tuple[float, float, float] = (0.1, 0.7, 0.2)
    spread: float = 1.0


class Traffic:
    """Generates requests of one mix, reproducibly for a seed. The blocks of its prompts have ids from `first_id` on."""

    def __init__(self, mix: Mix, seed: int, first_id: int = 0) -> None:
        self._mix = mix
        self._rng = random.Random(seed)
        self._first_id = first_id
        self._fresh_ids = count(first_id + mix.num_prefixes * _num_blocks(mix.prefix_tokens))
        self._popularity = [1.0 / (rank + 1) for rank in range(mix.num_prefixes)]

    def poisson(self, rate: float, tier: Priority | None = None, start_s: float = 0.0) -> Iterator[TracedRequest]:
        """Endless independent arrivals, `rate` a second, of one tier or of the mix's tiers."""
        now = start_s
        while True:
            now += self._rng.expovariate(rate)
            yield self._draw(now, tier, self._prefix_ids())

    def bursts(self, rate: float, size: int) -> Iterator[TracedRequest]:
        """Endless bursts of `size` requests at random times, `rate` requests a second on average. Within a burst, all
        requests with a shared prefix have the same one, as when one client sends a batch."""
        now = 0.0
        while True:
            now += self._rng.expovariate(rate / size)
            prefix_ids = self._prefix_ids()
            for _ in range(size):
                yield self._draw(now, None, prefix_ids)

    def chats(self, rate: float, turns: int, pause_s: float, num_requests: int) -> list[TracedRequest]:
        """`num_requests` requests of conversations with `turns` turns, `rate` requests a second on average. Each
        conversation has its own prefix of the mix's `prefix_tokens`. A turn arrives `pause_s` after the previous one on
        average; its prompt is that turn's prompt and the mix's own tokens."""
        rng = self._rng
        found: list[TracedRequest] = []
        began_s = 0.0
        while len(found) < num_requests:
            began_s += rng.expovariate(rate / turns)
            arrival_s = began_s
            ids = tuple(islice(self._fresh_ids, _num_blocks(self._mix.prefix_tokens)))
            for _ in range(turns):
                turn = self._draw(arrival_s, None, ())
                ids += turn.hash_ids
                num_tokens = (len(ids) - len(turn.hash_ids)) * BLOCK_SIZE + turn.num_prompt_tokens
                found.append(replace(turn, num_prompt_tokens=num_tokens, hash_ids=ids))
                arrival_s += rng.expovariate(1.0 / pause_s)
        return sorted(found[:num_requests], key=lambda request: request.arrival_s)

    def at(self, arrival_s: float, tier: Priority) -> TracedRequest:
        """One request."""
        return self._draw(arrival_s, tier, self._prefix_ids())

    def _prefix_ids(self) -> Sequence[int]:
        """The blocks of one of the shared prefixes."""
        chosen = self._rng.choices(range(self._mix.num_prefixes), self._popularity)[0]
        per_prefix = _num_blocks(self._mix.prefix_tokens)
        first = self._first_id + chosen * per_prefix
        return range(first, first + per_prefix)

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
        return min(max(round(drawn) if sigma == 0.0 else int(drawn), 1), _MAX_TOKENS)


FLOOD = "flood"


class ClosedLoop:
    """`num_clients` clients of each tier. Each sends its next request when its previous one ends, until `num_requests`
    are sent in total."""

    def __init__(self, traffic: Traffic, num_clients: Mapping[Priority, int], num_requests: int) -> None:
        self._traffic = traffic
        self._num_clients = num_clients
        self._num_left = num_requests

    def first(self) -> list[TracedRequest]:
        """One request of each client, all at time 0."""
        tiers = [tier for tier, count in self._num_clients.items() for _ in range(count)]
        return [request for tier in tiers if (request := self._next(tier, 0.0)) is not None]

    def next_of(self, ended: Request, now: float) -> TracedRequest | None:
        """The next request of a client whose request has ended; None when all are sent."""
        return self._next(ended.priority, now)

    def _next(self, tier: Priority, now: float) -> TracedRequest | None:
        if self._num_left == 0:
            return None
        self._num_left -= 1
        return self._traffic.at(now, tier)


class Flood:
    """A client named `FLOOD` that keeps `num_open` requests of one priority open until `until_s`."""

    def __init__(self, traffic: Traffic, tier: Priority, num_open: int, until_s: float) -> None:
        self._traffic = traffic
        self._tier = tier
        self._num_open = num_open
        self._until_s = until_s

    def first(self) -> list[TracedRequest]:
        """Its first requests, all at time 0."""
        return [self._at(0.0) for _ in range(self._num_open)]

    def next_of(self, ended: Request, now: float) -> TracedRequest | None:
        """Its next request when one of its requests has ended."""
        return self._at(now) if ended.tier == FLOOD and now < self._until_s else None

    def _at(self, now: float) -> TracedRequest:
        return replace(self._traffic.at(now, self._tier), client=FLOOD)


def read_trace(
    path: Path, *, shrink: int = 1, speed: float = 1.0, tiers: Sequence[float] = (0, 1, 0), seed: int = 0
) -> list[TracedRequest]:
    """Reads a trace in any format of `bench serve`; arrivals count from the first, and tiers are drawn by their shares.
    Without hash ids, prompts have no common prefixes. `shrink` divides all lengths, `speed` the times. Raises
    `ConfigError`."""
    if BLOCK_TOKENS % (shrink * BLOCK_SIZE):
        raise ConfigError(f"--shrink is {shrink}; it must divide {BLOCK_TOKENS // BLOCK_SIZE}.")
    rng, fresh_ids, block_tokens = random.Random(seed), count(-1, -1), BLOCK_TOKENS // shrink
    requests = []
    for number, line in enumerate(read_dataset(path), start=1):
        if not isinstance(line, TraceLine):
            raise ConfigError(f"{path} holds prompts; the simulator replays traces.")
        made = line.scaled(speed, shrink)
        hash_ids = line.hash_ids or tuple(islice(fresh_ids, -(-made.input_len // block_tokens)))
        if len(hash_ids) * block_tokens < made.input_len:
            raise ConfigError(
                f"{path}, request {number}: {len(hash_ids)} hash_ids do not cover input_length {line.input_len}."
            )
        tier = rng.choices(list(Priority), tiers)[0]
        requests.append(TracedRequest(made.arrival_s, tier, made.input_len, made.output_len, hash_ids, block_tokens))
    return requests


def write_trace(path: Path, requests: Iterable[TracedRequest]) -> None:
    """Writes a trace in Mooncake's format, whose hash ids stand for 512 tokens. Its lengths are 16 times the requests',
    so read it with `shrink` 16."""
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


TOKEN = SampledToken(7)
MAX_DRAFT_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMix:
    """`acceptances` are dealt to the requests in turn: the probability that a drafted token is accepted if all tokens
    before it were. `found_share` is the probability that a step finds a draft."""

    acceptances: tuple[float, ...]
    found_share: float = 1.0
    seed: int = 0


class MadeUpDrafts:
    """The drafter and the sampler of a model that accepts drafts as the mix says. Request ids must be numbers."""

    def __init__(self, mix: DraftMix) -> None:
        self._mix = mix
        self._rng = random.Random(mix.seed)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return (TOKEN.token_id,) * most if self._rng.random() < self._mix.found_share else ()

    def forget(self, request: Request) -> None:
        """Does nothing: no state is kept for a request."""

    def sampled(self, request_id: str, num_drafts: int) -> SampledToken:
        """The result of a step for a request: the accepted drafts and the token after them."""
        acceptance, num_right = self._mix.acceptances[int(request_id) % len(self._mix.acceptances)], 0
        while num_right < num_drafts and self._rng.random() < acceptance:
            num_right += 1
        return TOKEN._replace(accepted=(TOKEN,) * num_right)
