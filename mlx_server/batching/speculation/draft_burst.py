"""A burst of a draft model: for which requests and how far it drafts, what it has computed of each request, and the
steps that it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_server.batching.speculation.draft_costs import RowCosts, StepRoom, expected_again
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds, NewRequestData, PoolChange, ScheduledChunk, SchedulerOutput
from mlx_server.request import Request


class Burst(NamedTuple):
    """How many tokens a draft model should draft, and for whom. `saved_s` is how many seconds sooner a stream then gets
    a token."""

    depth: int
    request_ids: frozenset[str]
    saved_s: float


NO_BURST = Burst(0, frozenset(), 0.0)


def choose_burst(
    rates: Mapping[str, float], most: int, room: StepRoom, draft: RowCosts, *, is_one_step: bool = False
) -> Burst:
    """The burst of up to `most` tokens a request that gives the most tokens a second, counting its own time (by the
    costs of `draft`) and that of the step after it; `NO_BURST` if that is not 5 % more than without drafts.

    All requests of a burst get the same number of drafts, since its steps take nearly as long for few requests as for
    many. So of n requests, the m whose drafts are accepted most often get k tokens each, for the best m and k.

        one stream, drafts accepted at 0.8; the model's steps of 1, 2, 3, 4, 5 rows take 40, 41, 42, 43, 44 ms, those of
        the draft model 4 ms
        drafts                0      1      2      3      4
        tokens                1      1.8    2.44   2.95   3.36
        milliseconds          40     45     50     55     60
        tokens a second       25     40     48.8   53.7   56.0       so it drafts four, if no more are allowed
        with steps of 30 ms of the draft model: 25, 25.4, 23.9, ...  so it does not draft

    If `is_one_step`, the burst is one step of the draft model, whatever the number of tokens: in the example, four take
    48 ms, and 70 tokens a second.

    Rows that are computed again after a wrong draft count as in `choose_depths`.
    """
    names = sorted(rates, key=lambda name: -rates[name])
    num_known, target = room.num_known_rows, room.costs
    max_rows = min(room.most, 2 * max(target.max_rows, num_known) - num_known)
    most = min(most, max_rows)
    if not names or most < 1:
        return NO_BURST
    places, counts = np.arange(1, most + 1), np.arange(1, len(names) + 1)[:, None]
    tokens = np.array([rates[name] for name in names])[:, None] ** places
    tokens = room.num_rows + tokens.cumsum(axis=1).cumsum(axis=0)
    num_rows = counts * places
    curve = np.array(target.curve(num_known, num_known + len(names) * most))
    burst_s = np.array(draft.curve(1, len(names)))[:, None] * (np.ones_like(places) if is_one_step else places)
    plain_s = float(curve[0])
    if plain_s <= 0.0 or burst_s[0, 0] <= 0.0:
        return NO_BURST
    decode_s = burst_s + curve[num_rows]
    again_s = _expected_rows_again(names, rates, most, room) * (curve[num_rows] - plain_s) / num_rows
    speeds = tokens / (decode_s + again_s + room.wait_s)
    speeds[(num_rows > max_rows) | (decode_s > max(room.limit_s, plain_s))] = 0.0
    best = int(speeds.argmax())
    if speeds.flat[best] * plain_s <= room.min_gain * room.num_rows:
        return NO_BURST
    saved_s = plain_s - room.num_rows / float(speeds.flat[best])
    return Burst(best % most + 1, frozenset(names[: best // most + 1]), saved_s)


def _expected_rows_again(
    names: Sequence[str], rates: Mapping[str, float], most: int, room: StepRoom
) -> npt.NDArray[np.float64]:
    """`[m, k]`: the expected rows that are computed again if the first m + 1 of `names` draft k + 1 tokens each."""
    known = room.num_known
    if known is None:
        return np.zeros((len(names), most))
    again = [[expected_again(rates[name], place, known.get(name, 1)) for place in range(1, most + 1)] for name in names]
    return np.cumsum(np.cumsum(again, axis=0), axis=1)


@dataclass(slots=True, eq=False)
class Follower:
    """What the draft model has computed of a request. `shadow` shares the request's tokens and counts those computed by
    the draft model, which knows the ids of the first `num_checked`. `fed` are drafts whose K/V lie after them. A head's
    shadow counts from the hidden state of position `first` on."""

    shadow: Request
    fed: tuple[int, ...] = ()
    num_checked: int = 0
    knows_ids: bool = True
    first: int = 0

    @staticmethod
    def shadow_of(request: Request, kind: type[Request] = Request) -> Request:
        """The request as the draft model computes it: its tokens, without log-probabilities, which only its answer
        shows."""
        shadow = kind(
            request.request_id,
            request.prompt_token_ids,
            replace(request.sampling, logprobs=None, prompt_logprobs=None),
            arrival_s=request.arrival_s,
            max_total_tokens=request.max_total_tokens,
            eos_token_ids=request.eos_token_ids,
            extra_keys=request.extra_keys,
        )
        shadow.output_token_ids = request.output_token_ids
        return shadow

    def num_behind(self) -> int:
        """How many known tokens the draft model must compute, at least one; drafts that it was fed and that were right
        count as computed."""
        shadow = self.shadow
        if self.fed:
            came = shadow.token_ids(shadow.num_computed_tokens, shadow.num_tokens)
            right = takewhile(lambda pair: pair[0] == pair[1], zip(self.fed, came))
            shadow.num_computed_tokens += len(list(right))
            self.fed = ()
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, shadow.num_tokens - 1)
        return shadow.num_tokens - shadow.num_computed_tokens

    def knows(self, vocab_size: int) -> bool:
        """Whether all ids of the request are in the draft model's vocabulary."""
        shadow = self.shadow
        if self.knows_ids and self.num_checked < shadow.num_tokens:
            self.knows_ids = max(shadow.token_ids(self.num_checked, shadow.num_tokens)) < vocab_size
            self.num_checked = shadow.num_tokens
        return self.knows_ids


class BurstSteps:
    """The steps of a burst: `computed` are the followers whose tokens it computes, and `drafting`, by request, those of
    them that get drafts. The others' chunks are pieces of prompts."""

    def __init__(self, wanted: Iterable[Follower] = ()) -> None:
        """`wanted` keep their blocks even if others find no room."""
        self.wanted = set(wanted)
        self.block_ids: dict[str, BlockIds] = {}
        self.new_requests: list[NewRequestData] = []
        self.computed: list[Follower] = []
        self.drafting: dict[str, Follower] = {}
        self.num_prompt_tokens = 0
        self.prompt_cost = 0.0
        self.change: PoolChange | None = None
        self._first: list[ScheduledChunk] = []
        self._singles: list[list[ScheduledChunk]] = []

    @property
    def num_steps(self) -> int:
        return 1 + len(self._singles)

    def add(
        self,
        follower: Follower,
        end: int,
        *,
        is_sampling: bool,
        bitmask: bytes | None = None,
        block: tuple[int, ...] = (),
    ) -> None:
        """Adds a request's tokens up to position `end` that are not computed to the first step, and the `block` of a
        block drafter after them. They count as computed from now on, but the block does not."""
        shadow, start = follower.shadow, follower.shadow.num_computed_tokens
        shadow.num_computed_tokens = end
        self.computed.append(follower)
        self._first.append(
            ScheduledChunk(
                shadow.request_id,
                start,
                end - start + len(block),
                (*shadow.token_ids(start, end), *block),
                self.block_ids[shadow.request_id],
                is_sampling,
                shadow.num_output_tokens,
                bitmask,
                num_drafts=max(0, len(block) - 2),
                recent_token_ids=recent_tokens(shadow, start, end),
                hidden_offset=follower.first,
                num_block=len(block),
            )
        )

    def follow(self, shadow: Request, start: int, count: int) -> None:
        """Adds single tokens from position `start` on, each of which the step before has sampled."""
        for place in range(count):
            if place == len(self._singles):
                self._singles.append([])
            chunk = ScheduledChunk(
                shadow.request_id, start + place, 1, None, (), True, shadow.num_output_tokens + place + 1
            )
            self._singles[place].append(chunk)

    def outputs(self, dropped: tuple[str, ...]) -> tuple[SchedulerOutput, ...]:
        self._first.sort(key=lambda chunk: chunk.num_tokens > 1)
        chunks, new_requests = tuple(self._first), tuple(self.new_requests)
        first = SchedulerOutput(-1, chunks, new_requests, dropped, pool_change=self.change)
        return first, *[SchedulerOutput(-1, tuple(singles)) for singles in self._singles]


def recent_tokens(request: Request, start: int, end: int) -> tuple[int, ...]:
    """For penalties: the tokens from `start` to `end`, and before them as many as one step's drafts can have added."""
    if not request.sampling.has_penalties or request.num_in_flight:
        return ()
    return tuple(request.token_ids(max(request.num_prompt_tokens, start - BLOCK_SIZE), end))
