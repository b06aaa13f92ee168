"""Whether drafts pay, and how many: how long steps of more rows take, how often drafts are accepted, and the number of
drafts that gives the most tokens a second."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Steps are timed by their number of rows, in these buckets: kernels change at some of these numbers."""

_SLOWER_GAIN = 0.1
_FASTER_GAIN = 0.5
_MAX_RATIO = 2.0
_FRESH_STEPS = 100
_MAX_FRESH_STEPS = 400
_FORGIVING = 0.99
"""A time that was measured more than 100 steps ago shrinks by this factor in each step of other rows: to half in 70
steps. If a new try is about as slow as the known time, that stays fresh for twice as many steps, up to 400."""

_AS_SLOW = 0.9


class RowCosts:
    """How long a decode step takes by its number of rows, learnt from steps without prompts.

    Other work on the machine can only make a step longer. So a faster step changes the known time more than a slower
    one. A time that has not been measured for long shrinks until its number of rows is tried again, so one slow second
    has no lasting effect. The first step of a bucket is not counted, because it may compile.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._fresh_for: dict[int, int] = {}
        self._num_steps = 0
        self._known: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None  # for `curve`

    def observe(self, num_rows: int, step_time_s: float) -> None:
        if step_time_s <= 0.0:
            return
        self._num_steps += 1
        self._known = None
        bucket = _ROWS[min(bisect_left(_ROWS, num_rows), len(_ROWS) - 1)]
        is_first, is_stale = bucket not in self._measured_at, self._stale_for(bucket) > 0
        self._measured_at[bucket] = self._num_steps
        if num_rows < bucket:  # `curve` interpolates from the bucket below, so that must not get stale
            below = max((rows for rows in self._seconds if rows < num_rows), default=bucket)
            self._measured_at[below] = self._num_steps
        if is_first:
            return
        known_s = self._seconds.get(bucket, step_time_s)
        if step_time_s < _AS_SLOW * known_s:
            self._fresh_for.pop(bucket, None)
        elif is_stale:
            self._fresh_for[bucket] = min(2 * self._fresh_for.get(bucket, _FRESH_STEPS), _MAX_FRESH_STEPS)
        gain = _FASTER_GAIN if step_time_s < known_s else _SLOWER_GAIN
        self._seconds[bucket] = known_s + gain * (min(step_time_s, _MAX_RATIO * known_s) - known_s)

    def _stale_for(self, bucket: int) -> int:
        """For how many steps the known time of a bucket has been shrinking."""
        measured_at = self._measured_at.get(bucket, self._num_steps)
        return max(0, self._num_steps - measured_at - self._fresh_for.get(bucket, _FRESH_STEPS))

    def skip(self) -> None:
        """Call when these times ruled drafts out. Counts as a step, so that the times age and are measured again."""
        self._num_steps += 1
        self._known = None

    @property
    def max_rows(self) -> int:
        """The largest number of rows that was measured; 0 if none."""
        return max(self._seconds, default=0)

    def seconds(self, num_rows: int) -> float:
        return self.curve(num_rows, num_rows)[0]

    def curve(self, first: int, last: int) -> list[float]:
        """The seconds of a step for each number of rows from `first` to `last`; 0 while nothing is known. Linear
        between measured numbers; constant beyond them, so that more rows are tried once; never less than for fewer
        rows."""
        if not self._seconds:
            return [0.0] * (last - first + 1)
        if self._known is None:
            known = sorted(self._seconds)
            costs = [self._seconds[rows] * _FORGIVING ** self._stale_for(rows) for rows in known]
            self._known = np.array(known, dtype=np.float64), np.maximum.accumulate(costs)
        seconds: list[float] = np.interp(np.arange(first, last + 1), *self._known).tolist()
        return seconds


_FORGETTING = 0.9
RETRY = 0.995
"""In each step without drafts, the evidence against drafts shrinks by this factor: to a third in 200 steps."""

_FIRST_GUESS = 0.6
_WEIGHT_OF_GUESS = 2.0


@dataclass(slots=True)
class Acceptance:
    """How often a request's drafts are accepted: decayed counts of the compared and of the agreeing positions."""

    num_agreed: float = 0.0
    num_compared: float = 0.0

    def rate(self, guess: float) -> float:
        """The expected acceptance rate. `guess` has the weight of two comparisons."""
        return (self.num_agreed + _WEIGHT_OF_GUESS * guess) / (self.num_compared + _WEIGHT_OF_GUESS)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Counts a result. Of 7 drafts with 3 accepted, four were compared; those after the wrong one say nothing."""
        self.num_agreed = _FORGETTING * self.num_agreed + num_accepted
        self.num_compared = _FORGETTING * self.num_compared + num_accepted + (num_accepted < num_drafts)

    def decay(self) -> None:
        """Counts a step without drafts. After some hundreds of them, a request that stopped drafting tries again."""
        self.num_agreed *= RETRY
        self.num_compared *= RETRY


class Acceptances:
    """How often drafts of one kind are accepted, by request. With few results it is taken from all recent requests."""

    def __init__(self) -> None:
        self._of_all = Acceptance()
        self._by_request: dict[str, Acceptance] = {}

    def rate(self, request_id: str) -> float:
        guess, own = self._of_all.rate(_FIRST_GUESS), self._by_request.get(request_id)
        return guess if own is None else own.rate(guess)

    def add(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Counts a result: the first `num_accepted` of `num_drafts` drafts were accepted."""
        self._by_request.setdefault(request_id, Acceptance()).add(num_drafts, num_accepted)
        self._of_all.add(num_drafts, num_accepted)

    def decay(self, request_id: str) -> None:
        """Call when a step has no drafts for the request."""
        own = self._by_request.get(request_id)
        if own is not None:
            own.decay()

    def decay_all(self) -> None:
        """Call when a step has no drafts for any request."""
        self._of_all.decay()
        for own in self._by_request.values():
            own.decay()

    @property
    def best_rate(self) -> float:
        guess = self._of_all.rate(_FIRST_GUESS)
        return max([guess, *[own.rate(guess) for own in self._by_request.values()]])

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)


MIN_GAIN = 1.05
MIN_GAIN_BESIDE_PROMPTS = 1.5
"""Beside prompts, the time of drafts leads to more and shorter prompt chunks, each of which reads all weights."""


class StepRoom(NamedTuple):
    """The rows of a step. Without drafts it has `num_rows`, one for each running request. Drafts may add up to `most`,
    if decoding then takes at most `limit_s` and gives `min_gain` times as many tokens a second. `costs` are the times
    of steps, and `wait_s` is how long the device waits for the host after a step with drafts.

    The time of prompts in the step does not count, and a request that computes its prompt counts as if it decoded, as
    it soon will. The time that drafts take is lost to prompts, so drafts pay off only if their tokens would take longer
    later. (Counting them as cheap, because such a step is long anyway, was tried: four streams beside prompts of 1,500
    tokens became up to a fifth slower overall, in the simulator, with costly rows.)

    `num_known` is for models with recurrent state, which cannot be cut back: each drafting request's known tokens
    before its drafts. If a draft is wrong, all tokens of the chunk before it are computed again with the next ones.
    """

    num_rows: int
    costs: RowCosts
    most: int = 256
    limit_s: float = math.inf
    min_gain: float = MIN_GAIN
    wait_s: float = 0.0
    num_known: Mapping[str, int] | None = None

    @property
    def num_known_rows(self) -> int:
        """The number of rows of known tokens: those of a step without drafts."""
        return self.num_rows + sum([count - 1 for count in (self.num_known or {}).values()])


def choose_depths(proposed: Mapping[str, int], rates: Mapping[str, float], room: StepRoom) -> dict[str, int]:
    """How many of its `proposed` drafts each request should carry, so that the step gives the most tokens a second.

    A step gives each of its requests a token. If a request's acceptance rate is a, its j-th draft adds a^j tokens and
    one row. Rows are added in the order of the tokens that they add. The prefix of that order with the most tokens a
    second is taken, if it is 5 % better than no drafts (or by the factor that `room` asks for). At most twice as many
    rows as were ever measured are tried, because their cost is not known.

        one stream, a = 0.8, steps of 10, 11, 12, 13 and 20 ms for 1, 2, 3, 4 and 8 rows (so 14.75 ms for 5)
        drafts                0      1      2      3      4      7
        tokens                1      1.8    2.44   2.95   3.36   4.16
        tokens a second       100    164    203    227    228    208     so it carries 4

    With recurrent state, the rows that are expected to be computed again because of a wrong draft cost as much as rows
    of drafts. The j-th draft is the first wrong one in a^(j-1) (1 - a) of all steps; then the known tokens and the
    accepted drafts before it are computed again. The same stream, with one known token:
        rows again            0      0.2    0.52   0.9    1.31   2.48
        tokens a second       100    161    195    212    206    177     so it carries 3
    """
    known, num_rows, costs = room.num_known, room.num_known_rows, room.costs
    gains = [
        (rates[name] ** place, name, 0.0 if known is None else expected_again(rates[name], place, known.get(name, 1)))
        for name, count in proposed.items()
        for place in range(1, count + 1)
    ]
    gains.sort(key=lambda gain: -gain[0])
    del gains[max(0, min(room.most, 2 * max(costs.max_rows, num_rows) - num_rows)) :]
    if not gains:
        return {}
    plain_s, *drafted_s = costs.curve(num_rows, num_rows + len(gains))
    if plain_s <= 0.0:
        return {}
    tokens, best, best_count = float(room.num_rows), room.min_gain * room.num_rows / plain_s, 0
    num_again = 0.0
    for count, ((gain, _, again), decode_s) in enumerate(zip(gains, drafted_s), start=1):
        if decode_s > max(room.limit_s, plain_s):
            break
        tokens += gain
        num_again += again
        again_s = num_again * (decode_s - plain_s) / count
        speed = tokens / (decode_s + again_s + room.wait_s)
        if speed > best:
            best, best_count = speed, count
    depths: dict[str, int] = {}
    for _, request_id, _ in gains[:best_count]:
        depths[request_id] = depths.get(request_id, 0) + 1
    return depths


def expected_again(rate: float, place: int, num_known: int) -> float:
    """The expected number of rows that are computed again because the draft at `place` is the first wrong one."""
    return rate ** (place - 1) * (1.0 - rate) * (num_known + place - 1)
