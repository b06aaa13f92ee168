"""How many prompt tokens a step may carry so that those who decode are not stalled."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_server.config import BLOCK_SIZE

_FIRST_CHUNK = 4 * BLOCK_SIZE
_DECODE_GAIN = 0.5
_ROW_MULTIPLE = 16
"""Matrix products are made of tiles: 60 rows take longer than 64, on OpenBLAS 1.4 times as long."""

_MEMORY = 8 * BLOCK_SIZE
"""Prompt cost over which `speed` is averaged. Counted in work, not in steps, so that many tiny prompts, whose
steps say little about speed, do not outweigh a real chunk."""

_MOST_SURPRISE = 2.0
"""A step that takes longer than this multiple of what was foretold counts as this: it is a hiccup."""


_NEXT_SHARE = 0.45
"""While prompts of a better tier come, a step of worse ones takes no more than this of what the next one will take by
itself, which may come just after it has begun. On `cpu`, with prompts of 256 tokens, 0.4, 0.5, 0.6 and 0.8 give a p95
TTFT of 1.43, 1.49, 1.58 and 1.76 times alone (1.99 without); and where one comes every 5 s, others have 9.9, 10.5, 11.0
and 11.4 answers a second (12.1 without)."""

_NEXT_DECODES = 2.0
"""But prompts always have this multiple of the time that decoding takes, as far as the target goes: two thirds of the
step. With 1, HIGH's prompts of 64 tokens take 1.73 instead of 2.03 times as long as alone on `gpu`, and the others have
a seventh less; with 256 tokens both are alike on `cpu` and `gpu`."""

_SHORTEST_WAIT_S = 0.025
"""And a step may always last as long: nobody notices that the first token is so much later. Where nobody decodes,
short prompts of a better tier would else cut those of worse ones into pieces that take the time of the weights."""

_EXPECTED_S = 30.0
"""So long after its last prompt another one of a tier is expected: of those that come every ten seconds on average,
one in twenty takes longer."""

_LATEST_WEIGHT = 0.25


_SHORTEST_TARGET_S = 0.1
_LONGEST_TARGET_S = 0.4
"""Bounds of a target that follows the model's speed. A shorter one costs TTFT and saves no gap that a reader notices;
a longer one is a pause that one does."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step was made of. `prompt_cost` is its prompt tokens weighted by `PromptBudget.cost`."""

    num_decode_tokens: int
    num_prompt_tokens: int
    prompt_cost: float


class RecentPrompts:
    """What prompts of each tier cost of late, in tokens at position 0: a running mean, kept for half a minute."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # by priority, and when the last came

    def add(self, priority: int, cost: float, now: float) -> None:
        """A prompt starts."""
        mean, last_s = self._means.get(priority, (cost, -math.inf))
        is_expected = now - last_s <= _EXPECTED_S
        self._means[priority] = (mean + _LATEST_WEIGHT * (cost - mean) if is_expected else cost, now)

    def least_of_better(self, priority: int, now: float) -> float:
        """What the next prompt of a better tier than `priority` will cost, of the one whose prompts are the shortest;
        infinite if none is expected."""
        means = [
            mean for other, (mean, last_s) in self._means.items() if other < priority and now - last_s <= _EXPECTED_S
        ]
        return min(means, default=math.inf)


class PromptBudget:
    """Sizes the prompts' share of a step by measured speed.

    A step is foretold to last `decode + speed * prompt_cost` seconds. A prompt token at position p costs
    `1 + p / context_doubling_tokens`: attention over the context comes on top of the weights. What a step
    takes corrects both, so that they are learnt from steps that do both: under load there may be no others. `speed`
    learns from a step only as far as prompts were what it was foretold to be spent on: a wrong `decode` is corrected
    by steps that carry a prompt, and must not pass its error on.
    """

    def __init__(self, context_doubling_tokens: float) -> None:
        self._doubling = context_doubling_tokens
        self._decode_s: float | None = None
        self._speed = 0.0
        self._observed_cost = 0.0

    def cost(self, start: int, num_tokens: int) -> float:
        """Cost of computing positions [start, start + num_tokens), in tokens at position 0."""
        return num_tokens * (1.0 + (start + 0.5 * num_tokens) / self._doubling)

    @property
    def is_known(self) -> bool:
        """Whether enough was computed to tell how long a prompt takes."""
        return self._observed_cost >= BLOCK_SIZE

    def target_s(self, num_rows: int) -> float:
        """The target for a model whose products are cheap from `num_rows` on: as long as so many prompt tokens take,
        between 0.1 and 0.4 s. Shorter pieces of a slow model's prompt would cost more a token than they spare streams.

        At 128 rows: 1,500 tokens a second make 0.1 s (of 0.085), 500 make 0.256 s, 100 make 0.4 s (of 1.28).
        """
        return min(max(num_rows * self._speed, _SHORTEST_TARGET_S), _LONGEST_TARGET_S)

    def num_tokens(self, start: int, num_decode_tokens: int, target_s: float, next_cost: float = math.inf) -> int:
        """Prompt tokens, from position `start` on, that bring a step to `target_s` beside its decodes, or take as long
        as these if that is more, but not longer than `target_s`; at least one block. Both together come to the nearest
        multiple of 16. If a prompt of `next_cost` may have to wait for the step, that has 0.45 of its time at most, or
        0.025 s, or prompts have twice as long as decodes take, whichever is most.

        With a target of 200 ms, prompts get 170 ms beside decodes of 30 ms, 120 ms beside 120, and 200 ms beside 250:
        however slow decoding is, prompts have a half of the time, as far as the target goes. If the next prompt of a
        better tier takes 300 ms, they get 105, 120 and 200 ms.
        """
        wanted = self._affordable(start, num_decode_tokens, target_s, next_cost) if self.is_known else _FIRST_CHUNK
        num_rows = round((wanted + num_decode_tokens) / _ROW_MULTIPLE) * _ROW_MULTIPLE
        return max(num_rows - num_decode_tokens, BLOCK_SIZE)

    def _affordable(self, start: int, num_decode_tokens: int, target_s: float, next_cost: float) -> int:
        decode_s = self._decode_s or 0.0
        prompt_s = max(target_s - decode_s, min(decode_s, target_s))
        waited_s = max(_NEXT_SHARE * next_cost * self._speed, _SHORTEST_WAIT_S)
        if num_decode_tokens:
            waited_s = max(waited_s - decode_s, _NEXT_DECODES * decode_s)
        cost = min(prompt_s, waited_s) / self._speed
        # The n for which cost(start, n) is `cost`: the root of a quadratic.
        first = 1.0 + start / self._doubling
        return int(self._doubling * (math.sqrt(first * first + 2.0 * cost / self._doubling) - first))

    def foretold_s(self, shape: StepShape) -> float:
        """How long a step of this shape will take; 0 while too little has been measured to tell."""
        if (shape.num_decode_tokens and self._decode_s is None) or (shape.num_prompt_tokens and not self.is_known):
            return 0.0
        decode_s = self._decode_s or 0.0 if shape.num_decode_tokens else 0.0
        return decode_s + self._speed * shape.prompt_cost

    def observe(self, shape: StepShape, step_time_s: float) -> None:
        """Learns from a finished step; one that took no measurable time teaches nothing."""
        if step_time_s <= 0.0:
            return
        if shape.num_prompt_tokens == 0:
            self._decode_s = self._decode_s or step_time_s
            self._decode_s *= 1.0 + _DECODE_GAIN * _surprise(step_time_s, self._decode_s)
            return
        cost = shape.prompt_cost
        decode_s = self._decode_s or 0.0 if shape.num_decode_tokens else 0.0
        if self._observed_cost == 0.0:
            # Decodes may be fewer now than when they were timed: if they leave less than half, the prompt took it all.
            self._speed = (step_time_s - decode_s if decode_s <= 0.5 * step_time_s else step_time_s) / cost
        else:
            foretold_s = decode_s + self._speed * cost
            surprise = _surprise(step_time_s, foretold_s)
            prompt_share = self._speed * cost / foretold_s
            self._speed *= 1.0 + surprise * prompt_share**2 * cost / (self._observed_cost + cost)
            if decode_s:
                self._decode_s = decode_s * (1.0 + _DECODE_GAIN * surprise)
        if decode_s:
            self._decode_s = min(self._decode_s or 0.0, step_time_s)
        self._observed_cost = min(self._observed_cost + cost, _MEMORY)


def _surprise(step_time_s: float, foretold_s: float) -> float:
    return min(step_time_s / foretold_s, _MOST_SURPRISE) - 1.0
