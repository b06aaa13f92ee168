"""Drafts of the tokens to come, for the model to check several in one step; and how many of them a step should carry.

The target's own token is drawn at every drafted position with the noise of that position, and drafts count while they
equal it: the answer is token for token what it is without drafts, at any temperature. So nothing here can change an
answer, only how long it takes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from mlx_server.request import Request, TokenConstraint


class Drafter(Protocol):
    """Proposes tokens for a request whose tokens are all known. Event-loop thread; microseconds a call.

    A drafter that needs the device runs there between two steps of the model, and its tokens are here when the second
    one is composed: see `draft_model.py` for a smaller model, and `draft_heads.py` for a model's own head. EAGLE's and
    DFlash's drafters would come in there, too, with hidden states of several layers.
    """

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` tokens that may follow; () if there is no good guess."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...


class Drafts(NamedTuple):
    """What one request's chunk carries behind its `num_known` known tokens, and the mask after each of them."""

    token_ids: tuple[int, ...]
    bitmasks: tuple[bytes | None, ...] = ()
    num_known: int = 1


NO_DRAFTS = Drafts(())


def allowed_drafts(token_ids: Sequence[int], constraint: TokenConstraint | None) -> Drafts:
    """As many of `token_ids` as a grammar allows before its output is complete."""
    if constraint is None:
        return Drafts(tuple(token_ids))
    ahead, bitmasks = constraint.fork(), list[bytes | None]()
    for token_id in token_ids if ahead is not None else ():
        assert ahead is not None
        if not ahead.accept(token_id) or ahead.is_terminated():
            break
        bitmasks.append(ahead.bitmask())
    return Drafts(tuple(token_ids[: len(bitmasks)]), tuple(bitmasks))


def recent_tokens(request: Request, start: int, end: int) -> tuple[int, ...]:
    """The tokens from `start` to `end`, and before them as many as one step's drafts may have given: for penalties."""
    if not request.sampling.has_penalties or request.num_in_flight:
        return ()
    return tuple(request.token_ids(max(request.num_prompt_tokens, start - BLOCK_SIZE), end))


_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows whose steps are timed apart: kernels change their ways at a few of them."""

_SLOWER_GAIN = 0.1
_FASTER_GAIN = 0.5
_MOST_SURPRISE = 2.0
_FRESH_STEPS = 100
_MOST_FRESH_STEPS = 400
_FORGIVING = 0.99
"""What a step of other rows leaves of what was measured more than 100 steps ago: after 70 a half. What a try has shown
to be as slow as it was known is believed twice as long, up to 400 steps."""

_AS_SLOW = 0.9


class RowCosts:
    """How long a step of decodes takes by its number of rows, learnt from steps that carry no prompt.

    Other work on the machine only ever makes a step longer. So a faster step is believed more than a slower one, and
    what has not been measured for long counts as less and less, until it is tried again: a slow second is not believed
    for ever. The first step of a kind is not counted, since it may compile."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._fresh_for: dict[int, int] = {}
        self._num_steps = 0
        self._known: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None = None  # as `curve` reads it

    def observe(self, num_rows: int, step_time_s: float) -> None:
        if step_time_s <= 0.0:
            return
        self._num_steps += 1
        self._known = None
        bucket = _ROWS[min(bisect_left(_ROWS, num_rows), len(_ROWS) - 1)]
        is_first, is_stale = bucket not in self._measured_at, self._stale_for(bucket) > 0
        self._measured_at[bucket] = self._num_steps
        if num_rows < bucket:  # `curve` reads it between this one and the one below, so that one must not fade
            below = max((rows for rows in self._seconds if rows < num_rows), default=bucket)
            self._measured_at[below] = self._num_steps
        if is_first:
            return
        known_s = self._seconds.get(bucket, step_time_s)
        if step_time_s < _AS_SLOW * known_s:
            self._fresh_for.pop(bucket, None)
        elif is_stale:
            self._fresh_for[bucket] = min(2 * self._fresh_for.get(bucket, _FRESH_STEPS), _MOST_FRESH_STEPS)
        gain = _FASTER_GAIN if step_time_s < known_s else _SLOWER_GAIN
        self._seconds[bucket] = known_s + gain * (min(step_time_s, _MOST_SURPRISE * known_s) - known_s)

    def _stale_for(self, bucket: int) -> int:
        """For how many steps what is known counts less and less."""
        measured_at = self._measured_at.get(bucket, self._num_steps)
        return max(0, self._num_steps - measured_at - self._fresh_for.get(bucket, _FRESH_STEPS))

    def pass_over(self) -> None:
        """A step was left out because of what is known here, which counts less for it in time."""
        self._num_steps += 1
        self._known = None

    @property
    def most_rows(self) -> int:
        """The largest number of rows that was measured; 0 if none was."""
        return max(self._seconds, default=0)

    def seconds(self, num_rows: int) -> float:
        return self.curve(num_rows, num_rows)[0]

    def curve(self, first: int, last: int) -> list[float]:
        """For each number of rows from `first` to `last`. Between measured ones on a straight line; beyond them as much
        as the nearest one, so that more rows are tried once. Never less than fewer rows take. 0 while nothing is
        known."""
        if not self._seconds:
            return [0.0] * (last - first + 1)
        if self._known is None:
            known = sorted(self._seconds)
            costs = [self._seconds[rows] * _FORGIVING ** self._stale_for(rows) for rows in known]
            self._known = np.array(known, dtype=np.float64), np.maximum.accumulate(costs)
        seconds: list[float] = np.interp(np.arange(first, last + 1), *self._known).tolist()
        return seconds


_FORGETTING = 0.9
_RETRY = 0.995
"""What is left, after a step without drafts, of what speaks against them: after 200 steps a third."""

_FIRST_GUESS = 0.6
_WEIGHT_OF_GUESS = 2.0


@dataclass(slots=True)
class Acceptance:
    """How often a request's drafts are right: decayed counts of positions that were compared and that agreed."""

    num_agreed: float = 0.0
    num_compared: float = 0.0

    def rate(self, guess: float) -> float:
        """`guess` counts as two comparisons."""
        return (self.num_agreed + _WEIGHT_OF_GUESS * guess) / (self.num_compared + _WEIGHT_OF_GUESS)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Of 7 drafts with 3 right, four were compared; those behind the wrong one say nothing."""
        self.num_agreed = _FORGETTING * self.num_agreed + num_accepted
        self.num_compared = _FORGETTING * self.num_compared + num_accepted + (num_accepted < num_drafts)

    def fade(self) -> None:
        """A step without drafts: a request that gave up tries again after some hundred of them."""
        self.num_agreed *= _RETRY
        self.num_compared *= _RETRY


class Acceptances:
    """How often drafts of one kind are right, by request. One that has few is expected to be like all recent ones."""

    def __init__(self) -> None:
        self._of_all = Acceptance()
        self._by_request: dict[str, Acceptance] = {}

    def rate(self, request_id: str) -> float:
        guess, own = self._of_all.rate(_FIRST_GUESS), self._by_request.get(request_id)
        return guess if own is None else own.rate(guess)

    def add(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """The first `num_accepted` of `num_drafts` drafts were right."""
        self._by_request.setdefault(request_id, Acceptance()).add(num_drafts, num_accepted)
        self._of_all.add(num_drafts, num_accepted)

    def fade(self, request_id: str) -> None:
        """The request has no drafts in a step."""
        own = self._by_request.get(request_id)
        if own is not None:
            own.fade()

    def fade_all(self) -> None:
        """No request has drafts in a step."""
        self._of_all.fade()
        for own in self._by_request.values():
            own.fade()

    @property
    def best_rate(self) -> float:
        guess = self._of_all.rate(_FIRST_GUESS)
        return max([guess, *[own.rate(guess) for own in self._by_request.values()]])

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)


LEAST_GAIN = 1.05
LEAST_GAIN_BESIDE_PROMPTS = 1.5
"""What drafts take there makes prompts come in more and shorter pieces, each of which reads all weights."""

_WAIT_GAIN = 0.2


class StepRoom(NamedTuple):
    """What a step has beside drafts: `num_rows`, one of each request that runs. `most` rows may be added, as long as
    decoding takes no longer than `limit_s`, and `least_gain` times as many tokens a second come then.

    Time that prompts in the step take does not count, and who computes one counts as if it decoded, as it soon will:
    what drafts take there is lost to prompts, and pays only if it is less than their tokens take later. To count drafts
    as cheap because such a step is long anyway made four streams beside prompts of 1,500 tokens up to a fifth slower in
    all, in the simulator, where rows cost much.

    `num_known` is for models with recurrent state, which cannot be cut back: of each request that may draft, the known
    tokens before its drafts. If one of these is wrong, all tokens before it are computed again with the next ones.
    """

    num_rows: int
    most: int = 256
    limit_s: float = math.inf
    least_gain: float = LEAST_GAIN
    num_known: Mapping[str, int] | None = None

    @property
    def num_known_rows(self) -> int:
        """Rows of known tokens: a step without drafts has so many."""
        return self.num_rows + sum([count - 1 for count in (self.num_known or {}).values()])


def choose_depths(
    proposed: Mapping[str, int], rates: Mapping[str, float], room: StepRoom, costs: RowCosts, wait_s: float = 0.0
) -> dict[str, int]:
    """How many of its `proposed` drafts each request should carry, so that the step gives most tokens a second.

    A step gives each of its requests a token. The j-th draft of a request whose drafts are right at the rate a adds
    a^j tokens and one row. Rows are added in the order of what they add, and the prefix of that order with the most
    tokens a second is taken, if it is 5 % better than none (or as much as `room` asks for). Twice as many rows as
    were ever measured are tried at most, since their cost is not known. `wait_s` is how long the device waits for
    the host behind a step with drafts.

        one stream, a = 0.8, steps of 10, 11, 12, 13 and 20 ms for 1, 2, 3, 4 and 8 rows (so 14.75 ms for 5)
        drafts                0      1      2      3      4      7
        tokens                1      1.8    2.44   2.95   3.36   4.16
        tokens a second       100    164    203    227    228    208     so it carries 4

    Of a model with recurrent state, rows that a wrong draft is expected to have computed again cost as much as the
    drafts' own do: the j-th draft is the first wrong one in a^(j-1) (1 - a) of all steps, and then the known tokens and
    the j - 1 right drafts come again. With one known token, of the same stream:
        rows to come again    0      0.2    0.52   0.9    1.31   2.48
        tokens a second       100    161    195    212    206    177     so it carries 3
    """
    known, num_rows = room.num_known, room.num_known_rows
    gains = [
        (rates[name] ** place, name, 0.0 if known is None else expected_again(rates[name], place, known.get(name, 1)))
        for name, count in proposed.items()
        for place in range(1, count + 1)
    ]
    gains.sort(key=lambda gain: -gain[0])
    del gains[max(0, min(room.most, 2 * max(costs.most_rows, num_rows) - num_rows)) :]
    if not gains:
        return {}
    plain_s, *drafted_s = costs.curve(num_rows, num_rows + len(gains))
    if plain_s <= 0.0:
        return {}
    tokens, best, best_count = float(room.num_rows), room.least_gain * room.num_rows / plain_s, 0
    num_again = 0.0
    for count, ((gain, _, again), decode_s) in enumerate(zip(gains, drafted_s), start=1):
        if decode_s > max(room.limit_s, plain_s):
            break
        tokens += gain
        num_again += again
        again_s = num_again * (decode_s - plain_s) / count
        speed = tokens / (decode_s + again_s + wait_s)
        if speed > best:
            best, best_count = speed, count
    depths: dict[str, int] = {}
    for _, request_id, _ in gains[:best_count]:
        depths[request_id] = depths.get(request_id, 0) + 1
    return depths


def expected_again(rate: float, place: int, num_known: int) -> float:
    """Rows that are computed again because the draft at `place` is the first wrong one, times how often it is that."""
    return rate ** (place - 1) * (1.0 - rate) * (num_known + place - 1)


@dataclass(slots=True)
class SpeculationCounters:
    """Totals since start. `num_accepted_by_place[j]` counts drafts that were right at place j of their chunk. Behind
    one of `num_draft_errors` a draft model is not used any more."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_place: dict[int, int] = field(default_factory=dict)
    num_draft_errors: int = 0


_FEW = 3
"""Requests for which looking up takes no longer than what `choose_depths` does."""


class DraftPlan(NamedTuple):
    """By request: the drafts that were found, and how many of them a step should carry."""

    found: dict[str, Drafts]
    depths: dict[str, int]


NO_PLAN = DraftPlan({}, {})


class Speculation:
    """Which drafts a step carries, and what has become of them. Event-loop thread only."""

    has_model = False
    changes_pool = False  # a draft model's pool waits to be changed
    wake: Callable[[], None] = staticmethod(lambda: None)  # it is to be changed, though nothing runs

    def __init__(self, drafter: Drafter, max_draft_tokens: int, num_spares: int | None = None) -> None:
        """`num_spares` is for models with recurrent state: how many requests may have a second one, behind their
        drafts. None for other models."""
        self.num_spares = num_spares
        self.costs = RowCosts()
        self.counters = SpeculationCounters(num_accepted_by_place=dict.fromkeys(range(max_draft_tokens), 0))
        self._drafter = drafter
        self.max_draft_tokens = max_draft_tokens
        self.wait_s = 0.0
        self._acceptances = Acceptances()

    def observe(self, num_rows: int, step_time_s: float, idle_time_s: float, *, is_drafted: bool) -> None:
        """Learns from a step without prompts; `idle_time_s` is how long the device had nothing to do before it."""
        self.costs.observe(num_rows, step_time_s)
        if is_drafted:
            self.wait_s += _WAIT_GAIN * (min(idle_time_s, step_time_s) - self.wait_s)
        else:
            self.wait_s *= _RETRY

    def choose(self, free: Mapping[Request, int], room: StepRoom) -> dict[str, Drafts]:
        """The drafts of a step, of requests that have room for `free` each, as far as grammars allow them. Those that
        are not worth their rows fade, so that they are tried again some time."""
        found, depths = self.plan(free, room)
        if not depths:
            self.pass_over()
            return {}
        for request_id in found.keys() - depths.keys():
            self._acceptances.fade(request_id)
        return {
            request_id: Drafts(found[request_id].token_ids[:depth], found[request_id].bitmasks[:depth])
            for request_id, depth in depths.items()
        }

    def plan(self, free: Mapping[Request, int], room: StepRoom) -> DraftPlan:
        """What `choose` would choose, without any effect on later choices."""
        found = self._find(free, room)
        if not found:
            return NO_PLAN
        proposed = {request_id: len(drafts.token_ids) for request_id, drafts in found.items()}
        rates = {request_id: self._rate(request_id) for request_id in found}
        return DraftPlan(found, choose_depths(proposed, rates, room, self.costs, self.wait_s))

    def may_gain(self, num_requests: int, room: StepRoom) -> bool:
        """Whether so many requests are worth looking at for drafts: a few always are, more of them not if drafts that
        are right as often as the best request's would gain nothing."""
        if num_requests <= _FEW or room.most <= 0:
            return num_requests <= _FEW
        best = {"any": self._acceptances.best_rate}
        return bool(choose_depths({"any": self.max_draft_tokens}, best, room, self.costs, self.wait_s))

    def pass_over(self) -> None:
        """A step has no drafts: they are tried again some time."""
        self._acceptances.fade_all()

    def would_draft(self, free: Mapping[Request, int], room: StepRoom) -> bool:
        """Whether a step should wait until the tokens of these are known, since it would carry drafts then."""
        return bool(self.choose(free, room))

    def _rate(self, request_id: str) -> float:
        return self._acceptances.rate(request_id)

    def _find(self, free: Mapping[Request, int], room: StepRoom) -> dict[str, Drafts]:
        found: dict[str, Drafts] = {}
        if not self.may_gain(len(free), room):
            return found
        for request, num_free in free.items():
            token_ids = self._drafter.propose(request, min(num_free, self.max_draft_tokens)) if num_free > 0 else ()
            drafts = allowed_drafts(token_ids, request.constraint) if token_ids else NO_DRAFTS
            if drafts.token_ids:
                found[request.request_id] = drafts
        return found

    def on_result(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """The first `num_accepted` of `num_drafts` drafts were what the model has drawn itself."""
        self._learn(request_id, num_drafts, num_accepted)
        counters = self.counters
        counters.num_drafts += 1
        counters.num_draft_tokens += num_drafts
        counters.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            counters.num_accepted_by_place[place] += 1

    def _learn(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        self._acceptances.add(request_id, num_drafts, num_accepted)

    def compose_burst(self, free: Mapping[Request, int], room: StepRoom) -> tuple[SchedulerOutput, ...]:
        """Steps of a draft model that run before the next step is composed; () if there are none."""
        return ()

    def give_way(self) -> None:
        """The model has no memory for its next blocks: a draft model gives some of its own back."""

    def take_burst(self, output: ModelRunnerOutput) -> None:
        """Those steps are over."""

    def on_chunk(self, chunk: ScheduledChunk) -> None:
        """A step computes the chunk of a request."""

    def check_integrity(self) -> None:
        """Asserts the invariants of a draft model's blocks."""

    def release(self, request: Request) -> None:
        """The request waits again."""

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._acceptances.forget(request.request_id)
        self._drafter.forget(request)
