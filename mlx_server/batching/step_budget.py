"""How many prompt tokens a step may carry without stalling the requests that decode."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_server.config import BLOCK_SIZE

_FIRST_CHUNK = 4 * BLOCK_SIZE
"""Prompt tokens of a step while no speed is known."""

_ROW_MULTIPLE = 16
"""Matrix products are computed in tiles of rows: on a GPU, 60 rows take as long as 64."""

_DECODE_GAIN = 0.5
_MEMORY = 8 * BLOCK_SIZE
"""Prompt cost over which `speed` is averaged. Counted in work and not in steps: many tiny prompts, whose steps say
little about speed, do not outweigh a real chunk."""

_MAX_RATIO = 2.0
"""A step that takes longer than this multiple of its expected time is a hiccup, and counts as this multiple."""

_NEXT_SHARE = 0.45
"""While prompts of a better tier arrive, a step of worse tiers may take this share of the time that the next better
prompt needs, since that prompt may arrive just after the step has begun. On `cpu`, with prompts of 256 tokens, shares
of 0.4, 0.5, 0.6 and 0.8 give a p95 TTFT of 1.43, 1.49, 1.58 and 1.76 times the TTFT alone (1.99 without the rule). If a
better prompt arrives every 5 s, the other tiers get 9.9, 10.5, 11.0 and 11.4 answers a second (12.1 without)."""

_NEXT_DECODES = 2.0
"""Prompts always get this multiple of the time of the step's decodes, within the target: two thirds of the step. With
1, HIGH's prompts of 64 tokens take 1.73 instead of 2.03 times their time alone on `gpu`, and the others get a seventh
less. With 256 tokens there is no difference on `cpu` and `gpu`."""

_SHORTEST_WAIT_S = 0.025
"""A step may always last this long: nobody notices a first token that comes 25 ms later. If nobody decodes, short
prompts of a better tier would otherwise cut the prompts of worse tiers into pieces that cost little more than reading
the weights."""

_EXPECTED_FOR_S = 30.0
"""Another prompt of a tier is expected for this long after the last one. If they arrive every ten seconds on average,
one in twenty comes later than that."""

_LATEST_WEIGHT = 0.25

_SHORTEST_TARGET_S = 0.1
_LONGEST_TARGET_S = 0.4
"""Bounds of a target that follows the model's speed. A shorter target costs TTFT and saves no gap that a reader
notices; a longer one is a pause that a reader does notice."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes. `prompt_cost` is the cost of its prompt tokens, see `PromptBudget.cost`."""

    num_decode_tokens: int
    num_prompt_tokens: int
    prompt_cost: float


class RecentPrompts:
    """The mean cost of each tier's recent prompts, in tokens at position 0. Forgotten 30 s after the last prompt."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # by priority: the mean, and when the last one came

    def add(self, priority: int, cost: float, now: float) -> None:
        """A prompt starts."""
        mean, last_s = self._means.get(priority, (cost, -math.inf))
        is_expected = now - last_s <= _EXPECTED_FOR_S
        self._means[priority] = (mean + _LATEST_WEIGHT * (cost - mean) if is_expected else cost, now)

    def least_of_better(self, priority: int, now: float) -> float:
        """The expected cost of the next prompt of a tier better than `priority`, for the tier with the shortest
        prompts; infinite if no such prompt is expected."""
        better = [entry for other, entry in self._means.items() if other < priority]
        return min([mean for mean, last_s in better if now - last_s <= _EXPECTED_FOR_S], default=math.inf)


class PromptBudget:
    """Decides how many prompt tokens fit a step, by the measured speed of earlier steps.

    A step is expected to take `decode_s + speed * prompt_cost` seconds. A prompt token at position p costs `1 + p /
    context_doubling_tokens`: attention over the context comes on top of reading the weights.

    Each finished step corrects both numbers, because under load every step may carry decodes and prompts. `speed`
    learns only by the share of the step that was expected to go into prompts. If `decode_s` is wrong, mixed steps
    correct it, and its error must not spread to `speed`.

        speed 1 ms, decode_s 50 ms: a step of 100 prompt tokens beside decodes is expected to take 150 ms
        it takes 180 ms, an error of 20 %: decode_s rises by half of that, to 55 ms, and speed by 2.5 %, which is
        20 % * (100 / 150)^2 * 100 / (256 + 100): prompts were two thirds of the step, and 256 tokens were seen before
    """

    def __init__(self, context_doubling_tokens: float) -> None:
        self._doubling = context_doubling_tokens
        self._decode_s = 0.0  # 0: not known yet
        self._speed = 0.0  # seconds for each unit of cost
        self._observed_cost = 0.0

    def cost(self, start: int, num_tokens: int) -> float:
        """Cost of computing positions [start, start + num_tokens), in tokens at position 0."""
        return num_tokens * (1.0 + (start + 0.5 * num_tokens) / self._doubling)

    def alone(self, start: int, num_tokens: int) -> StepShape:
        """A step with nothing but a prompt's tokens from position `start` on."""
        return StepShape(0, num_tokens, self.cost(start, num_tokens))

    @property
    def is_known(self) -> bool:
        """Whether enough has been measured to say how long a prompt takes."""
        return self._observed_cost >= BLOCK_SIZE

    def target_s(self, num_rows: int) -> float:
        """The default target of a step: the time of `num_rows` prompt tokens, within 0.1 to 0.4 s. `num_rows` is the
        smallest chunk whose products are cheap. Smaller pieces of a prompt would cost the prompt more than they save
        the streams.

        With 128 rows: 1,500 tokens a second give 0.1 s (85 ms is too short), 500 give 0.256 s, 100 give 0.4 s (1.28 s
        is too long).
        """
        return min(max(num_rows * self._speed, _SHORTEST_TARGET_S), _LONGEST_TARGET_S)

    def num_tokens(self, start: int, num_decode_tokens: int, target_s: float, next_cost: float = math.inf) -> int:
        """How many prompt tokens, from position `start` on, a step may carry beside its decodes.

        Prompts get the time that decodes leave of `target_s`, or as much time as the decodes take if that is more, but
        never more than `target_s`. While a better tier's prompt of `next_cost` may arrive and wait for this step, the
        whole step is bounded by 0.45 of that prompt's own time, or by 25 ms, or prompts get twice the time of the
        decodes, whichever is the longest. The rows of the step are rounded to a multiple of 16, and prompts get at
        least one block.

            target 200 ms, 1 ms a token; decodes take     30 ms   120 ms   250 ms
            prompts get                                  170 ms   120 ms   200 ms
            a prompt of 300 ms is expected               105 ms   120 ms   200 ms
        """
        wanted = self._affordable(start, num_decode_tokens, target_s, next_cost) if self.is_known else _FIRST_CHUNK
        num_rows = round((wanted + num_decode_tokens) / _ROW_MULTIPLE) * _ROW_MULTIPLE
        return max(num_rows - num_decode_tokens, BLOCK_SIZE)

    def _affordable(self, start: int, num_decode_tokens: int, target_s: float, next_cost: float) -> int:
        decode_s = self._decode_s
        prompt_s = max(target_s - decode_s, min(decode_s, target_s))
        waited_s = max(_NEXT_SHARE * next_cost * self._speed, _SHORTEST_WAIT_S)
        if num_decode_tokens:
            waited_s = max(waited_s - decode_s, _NEXT_DECODES * decode_s)
        cost = min(prompt_s, waited_s) / self._speed
        # The n with cost(start, n) == cost is the root of a quadratic.
        first = 1.0 + start / self._doubling
        return int(self._doubling * (math.sqrt(first * first + 2.0 * cost / self._doubling) - first))

    def expected_s(self, shape: StepShape) -> float:
        """The expected time of a step of this shape; 0 while too little has been measured."""
        if (shape.num_decode_tokens and not self._decode_s) or (shape.num_prompt_tokens and not self.is_known):
            return 0.0
        decode_s = self._decode_s if shape.num_decode_tokens else 0.0
        return decode_s + self._speed * shape.prompt_cost

    def observe(self, shape: StepShape, step_time_s: float) -> None:
        """Learns from a finished step. A step that took no measurable time teaches nothing."""
        if step_time_s <= 0.0:
            return
        if shape.num_prompt_tokens == 0:
            self._decode_s = self._decode_s or step_time_s
            self._decode_s *= 1.0 + _DECODE_GAIN * _relative_error(step_time_s, self._decode_s)
            return
        cost = shape.prompt_cost
        decode_s = self._decode_s if shape.num_decode_tokens else 0.0
        if self._observed_cost == 0.0:
            self._speed = step_time_s / cost  # how many decoded when `decode_s` was measured is not known
        else:
            expected_s = decode_s + self._speed * cost
            error = _relative_error(step_time_s, expected_s)
            prompt_share = self._speed * cost / expected_s
            self._speed *= 1.0 + error * prompt_share**2 * cost / (self._observed_cost + cost)
            decode_s *= 1.0 + _DECODE_GAIN * error
        if decode_s:
            self._decode_s = min(decode_s, step_time_s)
        self._observed_cost = min(self._observed_cost + cost, _MEMORY)


def _relative_error(step_time_s: float, expected_s: float) -> float:
    return min(step_time_s / expected_s, _MAX_RATIO) - 1.0
