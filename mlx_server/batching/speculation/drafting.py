"""Drafts of the next tokens, several of which the model checks in one step: which of them a step carries.

At each drafted position, the model's own token is sampled with that position's noise; a draft is accepted if it equals
that token. So at any temperature, drafts only change how long an output takes, never its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from mlx_server.batching.speculation.draft_costs import RETRY, Acceptances, RowCosts, StepRoom, choose_depths
from mlx_server.batching.speculation.draft_model import DraftModel
from mlx_server.outputs import EngineCounters, ModelRunnerOutput, SchedulerOutput
from mlx_server.request import Request, TokenConstraint

_WAIT_GAIN = 0.2

_FEW = 3
"""For so few requests, lookups take no longer than `choose_depths`."""


class Drafter(Protocol):
    """Proposes tokens for a request whose tokens are all known. Event-loop thread; a call takes microseconds.

    A drafter that needs the device runs there between two steps of the model, and its tokens are there when the second
    one is composed: see `draft_model.py` for a smaller model, and `draft_heads.py` for a model's own head and for
    drafters that were made for it.
    """

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` tokens that may come next; () if there is no good guess."""

    def forget(self, request: Request) -> None:
        """Call when the request has ended."""


class Drafts(NamedTuple):
    """The drafts that a chunk carries after `num_known` known tokens, and the grammar's bitmask after each draft."""

    token_ids: tuple[int, ...]
    bitmasks: tuple[bytes | None, ...] = ()
    num_known: int = 1


NO_DRAFTS = Drafts(())


def allowed_drafts(token_ids: Sequence[int], constraint: TokenConstraint | None) -> Drafts:
    """The first of `token_ids` that a grammar allows, up to the first forbidden one or the end of its output."""
    if constraint is None:
        return Drafts(tuple(token_ids))
    ahead, bitmasks = constraint.fork(), list[bytes | None]()
    for token_id in token_ids if ahead is not None else ():
        assert ahead is not None
        if not ahead.accept(token_id) or ahead.is_terminated():
            break
        bitmasks.append(ahead.bitmask())
    return Drafts(tuple(token_ids[: len(bitmasks)]), tuple(bitmasks))


class Speculation:
    """Decides which drafts a step carries, and learns from their results. Event-loop thread only.

    The `drafter` is asked first. The draft `model` drafts for requests for which the drafter finds nothing that is
    worth its rows. There is at least one of the two.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        max_draft_tokens: int,
        num_spares: int | None = None,
        model: DraftModel | None = None,
    ) -> None:
        """`num_spares` is for models with recurrent state: how many requests may have a second state, after their
        drafts. None for other models."""
        self.num_spares = num_spares
        self.model = model
        self.costs = RowCosts()
        self.counters = EngineCounters(num_accepted_by_place=dict.fromkeys(range(max_draft_tokens), 0))
        self._drafter = drafter
        self.max_draft_tokens = max_draft_tokens
        self.wait_s = 0.0
        self._acceptances = Acceptances()
        self._by_model: set[str] = set()  # requests whose last drafts are the model's

    @property
    def changes_pool(self) -> bool:
        """Whether a change of a draft model's pool is due."""
        return self.model is not None and self.model.blocks.is_changed

    def observe(self, num_rows: int, step_time_s: float, idle_time_s: float, *, is_drafted: bool) -> None:
        """Learns from a step without prompts; the device was idle for `idle_time_s` before it."""
        self.costs.observe(num_rows, step_time_s)
        if is_drafted:
            self.wait_s += _WAIT_GAIN * (min(idle_time_s, step_time_s) - self.wait_s)
        else:
            self.wait_s *= RETRY

    def choose(self, free: Mapping[Request, int], room: StepRoom) -> dict[str, Drafts]:
        """The drafts of a step. `free` is how many each request has room for; grammars may allow fewer. The
        acceptance rate of requests whose drafts are not worth their rows decays, so that they are tried again later."""
        found, depths = self._plan(free, room)
        if not depths:
            self.skip()
            return {}
        for request_id in found.keys() - depths.keys():
            self._acceptances.decay(request_id)
        return {
            request_id: Drafts(found[request_id].token_ids[:depth], found[request_id].bitmasks[:depth])
            for request_id, depth in depths.items()
        }

    def _plan(self, free: Mapping[Request, int], room: StepRoom) -> tuple[dict[str, Drafts], dict[str, int]]:
        """What `choose` would choose, without an effect on later choices. By request: the drafts that were found, and
        how many of them the step should carry."""
        found = self._look_up(free, room) if self.model is None else self._find(self.model, free, room)
        if not found:
            return found, {}
        proposed = {request_id: len(drafts.token_ids) for request_id, drafts in found.items()}
        rates = {request_id: self._results_of(request_id).rate(request_id) for request_id in found}
        return found, choose_depths(proposed, rates, room)

    def may_gain(self, num_requests: int, room: StepRoom) -> bool:
        """Whether it is worth looking for drafts for this many requests. For a few it always is; for more, only if
        drafts with the best request's acceptance rate would gain something."""
        if num_requests <= _FEW or room.most <= 0:
            return num_requests <= _FEW
        best = {"any": self._acceptances.best_rate}
        return bool(choose_depths({"any": self.max_draft_tokens}, best, room))

    def skip(self) -> None:
        """Call when a step has no drafts, so that they are tried again later."""
        self._acceptances.decay_all()

    def would_draft(self, free: Mapping[Request, int], room: StepRoom) -> bool:
        """Whether the next step would carry drafts if it waited until the tokens of these requests are known."""
        if self.choose(free, room):
            return True
        model = self.model
        return model is not None and model.would_draft(free, self.max_draft_tokens, room)

    def on_result(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Takes a result: the first `num_accepted` of `num_drafts` drafts were accepted."""
        self._results_of(request_id).add(request_id, num_drafts, num_accepted)
        counters = self.counters
        counters.num_drafts += 1
        counters.num_draft_tokens += num_drafts
        counters.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            counters.num_accepted_by_place[place] += 1

    def compose_burst(self, free: Mapping[Request, int], room: StepRoom) -> tuple[SchedulerOutput, ...]:
        """The steps that the draft model runs before the next step is composed; () if there are none."""
        assert self.model is not None, "a burst is a draft model's"
        self.model.discard_drafts()
        _, looked_up = self._plan(free, room)
        others = {request: num_free for request, num_free in free.items() if request.request_id not in looked_up}
        return self.model.compose(others, self.max_draft_tokens, room)

    def take_burst(self, output: ModelRunnerOutput) -> None:
        """Takes the result of the steps from `compose_burst`."""
        assert self.model is not None, "a burst is a draft model's"
        self.model.take(output)
        self.counters.num_draft_errors += output.draft_error is not None

    def release(self, request: Request) -> None:
        """Call when the request was preempted."""
        if self.model is not None:
            self.model.release(request)

    def forget(self, request: Request) -> None:
        """Call when the request has ended."""
        self._acceptances.forget(request.request_id)
        if self._drafter is not None:
            self._drafter.forget(request)
        if self.model is not None:
            self.model.forget(request)
            self._by_model.discard(request.request_id)

    def _results_of(self, request_id: str) -> Acceptances:
        """The results of the drafts that a request has now: a lookup's or the model's."""
        if self.model is not None and request_id in self._by_model:
            return self.model.acceptances
        return self._acceptances

    def _find(self, model: DraftModel, free: Mapping[Request, int], room: StepRoom) -> dict[str, Drafts]:
        """The drafts of the model's last burst, and lookups for the other requests."""
        by_model = {request: token_ids for request in free if (token_ids := model.drafts(request))}
        found = self._look_up({r: num_free for r, num_free in free.items() if r not in by_model}, room)
        self._by_model -= {request.request_id for request in free}
        for request, token_ids in by_model.items():
            drafts = allowed_drafts(token_ids[: free[request]], request.constraint)
            if drafts.token_ids:
                found[request.request_id] = drafts
                self._by_model.add(request.request_id)
        return found

    def _look_up(self, free: Mapping[Request, int], room: StepRoom) -> dict[str, Drafts]:
        found: dict[str, Drafts] = {}
        if self._drafter is None or not self.may_gain(len(free), room):
            return found
        for request, num_free in free.items():
            token_ids = self._drafter.propose(request, min(num_free, self.max_draft_tokens)) if num_free > 0 else ()
            drafts = allowed_drafts(token_ids, request.constraint) if token_ids else NO_DRAFTS
            if drafts.token_ids:
                found[request.request_id] = drafts
        return found
