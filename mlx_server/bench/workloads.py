"""What a benchmark asks for: prompts of random token ids and fixed output lengths, by name and seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """Generate exactly `num_output_tokens` after the prompt, greedily, whatever comes."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all there at the start, in their order of arrival."""

    name: str
    requests: tuple[WorkloadRequest, ...]

    def first(self, count: int | None) -> Workload:
        """The same with its first `count` requests only; None is all."""
        return Workload(self.name, self.requests[:count])

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)


def make_workload(name: str, vocab_size: int, seed: int) -> Workload:
    """One of `WORKLOADS`; name, vocabulary and seed decide every token. `KeyError` for any other name."""
    draw = _Draw(random.Random(f"{name}:{seed}"), vocab_size)
    return Workload(name, tuple(WORKLOADS[name](draw)))


def make_warm_up(vocab_size: int) -> Workload:
    """A few short requests, too short to leave a full block in any cache."""
    draw = _Draw(random.Random("warm-up"), vocab_size)
    return Workload("warm-up", tuple(WorkloadRequest(draw.tokens(8), 4) for _ in range(2)))


class _Draw:
    """A seeded source of lengths and of prompts."""

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._vocab_size) for _ in range(count))

    def length(self, least: int, most: int) -> int:
        return self._rng.randint(least, most)


def _uniform(draw: _Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw.tokens(128), 128) for _ in range(16)]


def _shared_prefix(draw: _Draw) -> list[WorkloadRequest]:
    shared = draw.tokens(1024)
    return [WorkloadRequest(shared + draw.tokens(32), 32) for _ in range(16)]


def _mixed(draw: _Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw.tokens(draw.length(16, 2048)), draw.length(8, 256)) for _ in range(32)]


def _decode(draw: _Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw.tokens(32), 256) for _ in range(64)]


WORKLOADS: MappingProxyType[str, Callable[[_Draw], list[WorkloadRequest]]] = MappingProxyType(
    {"uniform": _uniform, "shared-prefix": _shared_prefix, "mixed": _mixed, "decode": _decode}
)
"""uniform: 16 x 128 in, 128 out. shared-prefix: 16 x (1,024 shared + 32) in, 32 out. mixed: 32 requests of
16 to 2,048 in and 8 to 256 out, both uniform. decode: 64 x 32 in, 256 out, so that nearly all steps decode."""
