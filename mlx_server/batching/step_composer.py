"""Which requests a step computes, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_server.batching.admission import AGED_SHARE, AdmissionControl
from mlx_server.batching.limits import SchedulerCounters, SchedulerLimits
from mlx_server.batching.request_table import RequestTable
from mlx_server.batching.step import StepBuilder
from mlx_server.batching.step_budget import PromptBudget
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds, NewRequestData, ScheduledChunk
from mlx_server.request import FinishReason, Request, RequestStatus

_STRETCH = 1.25
_MAX_SCORED_TOKENS = 4 * BLOCK_SIZE
"""Prompt positions of one request whose logits a step may hold at once: each is as wide as the vocabulary."""


class StepComposer:
    """Spends a step's token budget so that each request's `num_computed_tokens` catches up with its tokens.

    First, every request that decodes takes its token. What is left goes to prompts, running and waiting
    together, in order of tier and then of age; admission stops at the first request that does not fit.

    The rule for a prompt that cannot finish in this step: it cedes at most half of what is left to later
    prompts of its own base priority that can (those that run, and the next `MAX_CANDIDATES` that wait), and
    takes the rest. So a short prompt is not parked behind a long one, and the long one advances in every
    step by at least half of what was there for it: it takes at most twice as many steps, whatever arrives.
    Who starts early by this rule takes no seat and no block that one before it needs.

    Out of blocks, the running request of the lowest rank is preempted: it gives up its blocks (they stay
    cached), keeps its arrival time and output, and is admitted again in its turn. A waiting request of a better
    tier preempts running ones of a worse tier when it finds no room, but not those that run by their age. Ranks
    are a total order that only a promotion changes, and a request is preempted only for one of a better rank,
    so two requests cannot preempt each other in turns.
    """

    def __init__(
        self,
        table: RequestTable,
        limits: SchedulerLimits,
        counters: SchedulerCounters,
        budget: PromptBudget,
        is_device_shared: Callable[[], bool],
    ) -> None:
        self._table = table
        self._limits = limits
        self._counters = counters
        self._budget = budget
        self._is_device_shared = is_device_shared
        self._checkpoints = table.blocks.checkpoints
        self._admission = AdmissionControl(table, limits, counters)
        self.starved: list[Request] = []
        self._starving_since: float | None = None
        self._is_short = False
        self._owed = 0  # prompt tokens of steps of which those who have aged have not had their part
        self._now = 0.0

    @property
    def is_starving(self) -> bool:
        """Whether nothing can be computed for want of memory, although nothing runs beside."""
        return self._starving_since is not None

    def hold_admission(self, is_held: bool) -> None:
        """While it is held, nobody starts beside one who runs."""
        self._admission.is_held = is_held

    def preempt_lowest(self) -> bool:
        """Makes the running request of the lowest rank wait, unless it is the only one."""
        if len(self._table.running) < 2:
            return False
        self._preempt(self._table.running[-1])
        return True

    def compose(self, now: float) -> StepBuilder:
        """The next step, its effects on blocks and progress already booked; empty if nothing can run now."""
        self._now = now
        self._is_short = False
        step = StepBuilder()
        self._admission.open()
        for request in self._admission.preemptions_for_better_tier(now, self._has_tokens_for):
            self._preempt(request)
        prefilling = self._add_decodes(step)
        self._add_prompts(step, prefilling, now)
        if step.requests:
            self._publish(step)
            self._admission.headroom.on_step()
        elif not self._table.running and not self._table.submitted:
            self._starve_first_waiting()
        if not self._is_short:
            self._starving_since = None
        return step

    def _starve(self, request: Request) -> None:
        """There is no memory for one who is alone. It may come back, but is not waited for without end."""
        self._is_short = True
        if self._starving_since is None:
            self._starving_since = self._now
        if self._now - self._starving_since >= self._limits.memory_wait_s:
            self._starving_since = None
            self._table.end(request, FinishReason.ERROR)
            self.starved.append(request)

    def _starve_first_waiting(self) -> None:
        request = self._admission.first()
        if request is not None:
            self._starve(request)

    # --- decodes ------------------------------------------------------------------------------------------

    def _add_decodes(self, step: StepBuilder) -> list[Request]:
        """Adds everyone who decodes; returns those who run but have prompt to compute.

        Up to a block of known tokens counts as a decode (those that a grammar forces, or the uncached tail of a
        resumed request), as far as the step has room beside one token for everyone who runs.
        """
        running = self._table.running
        spare = self._limits.max_num_batched_tokens - len(running)
        most = min(BLOCK_SIZE, self._limits.max_chunk_tokens or BLOCK_SIZE)
        prefilling: list[Request] = []
        for request in running:  # a preemption shortens the list at its end, at or behind this place
            start = request.num_computed_tokens
            if request.num_in_flight:
                if not _needs_no_result(request):
                    continue
                num_tokens = 1
            else:
                num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) - start
                if self._is_prefilling(request, num_tokens):
                    prefilling.append(request)
                    continue
                if num_tokens > 1:
                    num_tokens = min(num_tokens, most, 1 + spare)
                    spare -= num_tokens - 1
            filled = start % BLOCK_SIZE
            block_ids = () if filled and filled + num_tokens <= BLOCK_SIZE else self._grow(request, num_tokens)
            if block_ids is not None:
                step.num_decode_tokens += num_tokens
                self._put(step, request, num_tokens, block_ids)
        return prefilling

    def _is_prefilling(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request with `num_tokens` known ones to compute takes them from the prompts' share:
        its first tokens, or those that it computes again after a preemption. Admission gave it their blocks."""
        if not request.output_token_ids:
            return True
        return num_tokens > BLOCK_SIZE and self._table.blocks.holds(request, request.num_tokens)

    def _grow(self, request: Request, num_tokens: int) -> BlockIds | None:
        """Blocks for the next `num_tokens` tokens, preempting worse requests if need be. None if the request
        must sit out this step: it waits for detached blocks or for memory, or was preempted itself."""
        blocks = self._table.blocks
        while True:
            block_ids = blocks.allocate(request, request.num_computed_tokens + num_tokens)
            if block_ids is not None:
                return block_ids
            if blocks.num_detached_blocks:
                return None
            victim = self._table.running[-1]
            if victim is self._table.running[0]:
                self._starve(victim)
                return None
            self._preempt(victim)
            self._admission.headroom.on_preemption()
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        self._table.preempt(request)
        self._counters.preemptions_by_tier[request.tier] += 1

    # --- prompts ------------------------------------------------------------------------------------------

    def _add_prompts(self, step: StepBuilder, prefilling: list[Request], now: float) -> None:
        waiting = self._admission.candidates(now)
        candidates = sorted([*prefilling, *waiting], key=_priority)
        if not candidates:
            return
        streams = [request for request in self._table.running if request not in prefilling]
        share = self._share(step.num_decode_tokens, candidates[0], streams)
        if share.num_tokens <= 0:
            return
        aged = self._serve_oldest(step, candidates, share, now)
        while candidates:
            self._serve(step, candidates, share, now)
            is_full = share.num_tokens <= step.num_prompt_tokens
            waiting = [] if is_full else self._admission.candidates(now)
            candidates = [request for request in waiting if share.left(step, request) > 0]
        if aged is not None:
            self._settle(step, aged)

    def _has_tokens_for(self, request: Request) -> bool:
        """Whether running prompts that come before a waiting one will leave it tokens of the step, or of the next if
        one is submitted, whose end the blocks of those that it preempts would have to wait for."""
        running = self._table.running
        prefilling = [
            other
            for other in running
            if not other.num_in_flight and self._is_prefilling(other, other.num_tokens - other.num_computed_tokens)
        ]
        before = sorted([other for other in prefilling if other.priority <= request.priority], key=_priority)
        if not before:
            return True
        streams = [other for other in running if other not in prefilling]
        num_steps = 2 if self._table.submitted else 1
        most = self._share(len(streams), before[0], streams).num_tokens
        left = num_steps * most
        for other in before:
            wanted = min(other.num_tokens - other.num_computed_tokens, num_steps * self._most(other))
            if wanted > left:
                rest = request.num_tokens - self._admission.first_token(request)
                return other.priority == request.priority and rest <= min(self._most(request), min(left, most) // 2)
            left -= wanted
        return left > 0

    def _share(self, num_decodes: int, first: Request, streams: list[Request]) -> _PromptShare:
        """What prompts may take of the step, those of `first`'s tier before all others, beside those who decode.

        Streams of that tier or a better one have the target kept. Those of worse tiers are held up for as long as
        a step may last at most, which also bounds how long one who arrives meanwhile waits for its first; for a
        quarter longer if that ends `first`'s prompt, since what it leaves behind would cost it a step.
        """
        room = self._limits.max_num_batched_tokens - num_decodes
        if not self._limits.bound_stalls:
            return _PromptShare(first.priority, room, room)
        start = self._admission.first_token(first)
        beside = min(room, self._budget.num_tokens(start, num_decodes, self._limits.target_step_s))
        if self._is_device_shared() or any(stream.priority <= first.priority for stream in streams):
            return _PromptShare(first.priority, beside, beside)
        if self._budget.is_known:
            most = max(beside, self._budget.num_tokens(start, num_decodes, self._limits.max_step_s))
            rest = min(first.num_tokens - start, self._most(first))
            room = min(room, rest if most < rest <= _STRETCH * most else most)
        return _PromptShare(first.priority, room, beside)

    def _serve_oldest(
        self, step: StepBuilder, candidates: list[Request], share: _PromptShare, now: float
    ) -> _Aged | None:
        """Who has aged past all others gets its part of a step that prompts of better tiers would fill; None if there
        is nobody, or nobody better.

        It is one in `AGED_SHARE` of the prompts' tokens. Prompts that go on in later steps anyway cede it what is due
        and what is owed from before, up to half of theirs. The best tier's cede nothing if they end in this step: then
        the part comes on top, as far as the token budget goes, and only if another is owed already. So it is paid by
        worse tiers, or between the best one's prompts, as long as there are such.
        """
        able = [request for request in candidates if self._admission.may_come_first(request)]
        oldest = min(able, key=self._table.waiting.key, default=None)
        if oldest is None:
            return None
        better = [request for request in candidates if request.priority < oldest.priority]
        if not better:
            self._owed = 0
            return None
        aged = _Aged(oldest, self._admission.first_token(oldest))
        best = [request for request in better if request.priority == better[0].priority]
        wanted = sum(map(self._wanted, best))
        do_end = wanted <= share.num_tokens
        part = min(self._part(share, wanted), self._wanted(oldest))
        if do_end and wanted + part <= self._limits.max_num_batched_tokens - step.num_decode_tokens:
            self._serve(step, best, share, now)
        self._serve(step, better, share.less(part), now)
        if part:
            most = max(share.num_tokens_of_worse, step.num_prompt_tokens + part)
            self._serve(step, [oldest], _PromptShare(oldest.priority, most, most), now)
        return aged

    def _part(self, share: _PromptShare, num_best: int) -> int:
        """Tokens for the oldest of a step for which the best tier has `num_best`."""
        if num_best > share.num_tokens:
            return min((self._owed + share.num_tokens) // AGED_SHARE, max(share.num_tokens // 2, 1))
        filled = max(num_best, share.num_tokens_of_worse)
        part = min((self._owed + filled) // AGED_SHARE, (filled - num_best) // 2)
        return max(part, filled // AGED_SHARE, 1) if self._owed >= filled else part

    def _settle(self, step: StepBuilder, aged: _Aged) -> None:
        """Books what those who have aged were due in this step, and what they got."""
        num_computed = aged.request.num_computed_tokens - aged.start if aged.request in step else 0
        owed = self._owed + step.num_prompt_tokens - AGED_SHARE * num_computed
        self._owed = min(max(owed, 0), self._limits.max_num_batched_tokens)

    def _serve(self, step: StepBuilder, candidates: list[Request], share: _PromptShare, now: float) -> None:
        """Spends the share on prompts, in this order."""
        for index, request in enumerate(candidates):
            left = share.left(step, request)
            if left <= 0:
                break
            block_ids = None if request in step else self._ensure_running(step, request, now)
            if block_ids is None:
                continue
            wanted = self._wanted(request)
            if wanted > left:
                left -= self._cede(step, request, candidates[index + 1 :], left // 2, now)
            self._put_prompt(step, request, min(wanted, left), block_ids)

    def _cede(self, step: StepBuilder, request: Request, later: list[Request], num_tokens: int, now: float) -> int:
        """Gives up to `num_tokens` of a request's share to those of `later` that can finish in this step;
        tokens given."""
        given = 0
        for other in later:
            if other in step:
                continue
            wanted = other.num_tokens - self._admission.first_token(other)
            if other.priority == request.priority and wanted <= min(self._most(other), num_tokens - given):
                block_ids = self._ensure_running(step, other, now)
                if block_ids is not None:
                    given += self._put_prompt(step, other, wanted, block_ids)
            elif other.status is RequestStatus.WAITING:
                self._admission.reserve(other, now)
        return given

    def _ensure_running(self, step: StepBuilder, request: Request, now: float) -> BlockIds | None:
        """The blocks that are new to a request's tables; None if it waits and cannot start now."""
        if request.status is RequestStatus.RUNNING:
            return self._move_windows(step, request) if self._table.blocks.groups.has_windows else ()
        block_ids = self._admission.admit(request, now)
        if block_ids is not None:
            step.new_requests.append(
                NewRequestData(
                    request.request_id,
                    tuple(request.prompt_token_ids),
                    tuple(request.output_token_ids),
                    request.sampling,
                    request.eos_token_ids,
                    self._table.blocks.resumed_checkpoint(request),
                    request.adapter,
                )
            )
        return block_ids

    def _move_windows(self, step: StepBuilder, request: Request) -> BlockIds | None:
        """Blocks for a running prompt's next chunk where layers see a window only: admission gave it as many as it
        ever holds there. What it has given up since pays for them, unless others hold it, too; then it may have to
        sit out a step (None), or to preempt others if there would be no step otherwise."""
        if step.requests or self._table.submitted:
            return self._table.blocks.allocate(request, request.num_tokens)
        return self._grow(request, request.num_tokens - request.num_computed_tokens)

    def _wanted(self, request: Request) -> int:
        return min(request.num_tokens - self._admission.first_token(request), self._most(request))

    def _most(self, request: Request) -> int:
        """Tokens that one step may compute of a request's prompt."""
        most = self._limits.max_chunk_tokens or request.num_tokens
        is_scored = request.sampling.prompt_logprobs is not None and not request.output_token_ids
        return min(most, _MAX_SCORED_TOKENS) if is_scored else most

    def _put_prompt(self, step: StepBuilder, request: Request, num_tokens: int, block_ids: BlockIds) -> int:
        """Adds the next chunk of a prompt, shorter if recurrent state is to be kept within it; its size."""
        start = request.num_computed_tokens
        if self._checkpoints is not None:
            num_tokens = self._checkpoints.cut(request, num_tokens)
        step.num_prompt_tokens += num_tokens
        step.prompt_cost += self._budget.cost(start, num_tokens)
        self._put(step, request, num_tokens, block_ids)
        return num_tokens

    # --- progress -----------------------------------------------------------------------------------------

    def _put(self, step: StepBuilder, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """Books the next `num_tokens` positions of the request as computed by this step."""
        start = request.num_computed_tokens
        end = start + num_tokens
        num_in_flight = request.num_in_flight
        num_prompt_tokens = len(request.prompt_token_ids)
        num_output_tokens = len(request.output_token_ids) + num_in_flight
        is_sampling = end == num_prompt_tokens + num_output_tokens
        constraint = request.constraint
        chunk = ScheduledChunk(
            request.request_id,
            start,
            num_tokens,
            None if num_in_flight else tuple(request.token_ids(start, end)),
            block_ids,
            is_sampling,
            num_output_tokens,
            None if constraint is None or not is_sampling else constraint.bitmask(),
            None if self._checkpoints is None else self._checkpoints.save(request, end),
        )
        step.add(request, chunk)
        request.num_computed_tokens = end
        if is_sampling:
            request.num_in_flight = num_in_flight + 1
        if start < num_prompt_tokens:
            self._counters.num_prompt_tokens_computed += min(end, num_prompt_tokens) - start
        if start % BLOCK_SIZE == 0 or end // BLOCK_SIZE > start // BLOCK_SIZE:
            step.filled.append(request)

    def _publish(self, step: StepBuilder) -> None:
        """Lets later steps hit what this one computes. Not earlier: inside one step a model may run its
        requests one after the other, in any order."""
        table = self._table
        for request in step.filled:
            table.blocks.cache_full_blocks(request, min(request.num_computed_tokens, request.num_tokens))
            table.blocks.give_up_unseen(request)
        if len(table.prefixes):
            for request in step.requests.values():
                if request.num_in_flight:
                    table.prefixes.stop(request.request_id)


@dataclass(frozen=True, slots=True)
class _PromptShare:
    """Prompt tokens of a step: all that prompts of `priority` may take, and all that those of worse tiers may fill
    it up to, so that they do not lengthen the step of a better one."""

    priority: int
    num_tokens: int
    num_tokens_of_worse: int

    def less(self, num_tokens: int) -> _PromptShare:
        """The same with so many tokens kept back for somebody."""
        most = self.num_tokens - num_tokens
        return _PromptShare(self.priority, most, min(self.num_tokens_of_worse, most))

    def left(self, step: StepBuilder, request: Request) -> int:
        """What `request` may still take."""
        most = self.num_tokens if request.priority <= self.priority else self.num_tokens_of_worse
        return most - step.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class _Aged:
    """Who has aged past better tiers, and where its prompt stood before the step."""

    request: Request
    start: int


def _priority(request: Request) -> int:
    return request.priority


def _needs_no_result(request: Request) -> bool:
    """Whether the next token of a request can be computed while its last one is in flight: a last token
    needs no successor, and a grammar's next mask depends on the token."""
    is_last = request.num_tokens + request.num_in_flight >= request.max_total_tokens
    return not is_last and request.constraint is None
