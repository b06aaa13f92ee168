"""Traffic for the simulator: made up from a seed, or read from a recorded trace."""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

from mlx_server.bench.serve.workloads import BLOCK_TOKENS, parse_trace_line
from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ConfigError
from mlx_server.request import Priority


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
    (a long tail, as measured of real traffic); a `shared_share` of the requests begin with one of
    `num_prefixes` prefixes of `prefix_tokens` tokens, the popular ones more often (Zipf)."""

    own_tokens: float = 200.0
    output_tokens: float = 64.0
    shared_share: float = 0.5
    num_prefixes: int = 64
    prefix_tokens: int = 512
    tiers: tuple[float, float, float] = (0.1, 0.7, 0.2)
    most_tokens: int = 4096


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
        sigma = 1.0
        drawn = self._rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        return min(max(int(drawn), 1), self._mix.most_tokens)


def with_flood(base: Iterable[TracedRequest], extra: Iterable[TracedRequest], end_s: float) -> Iterator[TracedRequest]:
    """`base` traffic, and `extra` on top until `end_s`."""
    during = takewhile(lambda request: request.arrival_s < end_s, extra)
    return heapq.merge(base, during, key=lambda request: request.arrival_s)


def read_trace(
    path: Path, *, shrink: int = 1, tiers: Sequence[float] = (0, 1, 0), seed: int = 0
) -> list[TracedRequest]:
    """Reads JSON lines in the format of Mooncake's public traces; also `tier` (high, normal, low), which is drawn
    from `tiers` where it is missing. `shrink` divides all lengths. Raises `ConfigError` with the line."""
    if BLOCK_TOKENS % (shrink * BLOCK_SIZE):
        raise ConfigError(f"--shrink is {shrink}; it must divide {BLOCK_TOKENS // BLOCK_SIZE}.")
    rng = random.Random(seed)
    requests: list[TracedRequest] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"Cannot read the trace {path}: {error.strerror}.") from error
    for number, line in enumerate(lines, start=1):
        try:
            requests.append(_parse(json.loads(line), shrink, rng.choices(list(Priority), tiers)[0]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number} is no request of a trace: {error!r}.") from error
    if not requests:
        raise ConfigError(f"The trace {path} is empty.")
    return sorted(requests, key=lambda request: request.arrival_s)


def _parse(entry: dict[str, Any], shrink: int, tier: Priority) -> TracedRequest:
    named, line = entry.get("tier"), parse_trace_line(entry)
    num_prompt_tokens = max(line.input_len // shrink, 1)
    block_tokens = BLOCK_TOKENS // shrink
    if len(line.hash_ids) * block_tokens < num_prompt_tokens:
        raise ValueError(f"{len(line.hash_ids)} hash_ids do not cover input_length {line.input_len}")
    return TracedRequest(
        line.arrival_s,
        tier if named is None else Priority[str(named).upper()],
        num_prompt_tokens,
        max(line.output_len // shrink, 1),
        line.hash_ids,
        block_tokens,
    )


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
