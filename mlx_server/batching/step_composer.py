"""Which requests a step computes, and how many tokens of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain

from mlx_server.batching.admission import AGED_SHARE, Admission
from mlx_server.batching.image_bounds import ImageTurns, cut_at_second_image, with_whole_images
from mlx_server.batching.limits import SchedulerCounters, SchedulerLimits
from mlx_server.batching.request_table import RequestTable, Step
from mlx_server.batching.speculation.draft_room import DraftRoom, needs_no_result
from mlx_server.batching.speculation.drafting import NO_DRAFTS, recent_tokens
from mlx_server.batching.step_budget import PromptBudget, RecentPrompts
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds, NewRequestData, ScheduledChunk, SchedulerOutput
from mlx_server.request import FinishReason, Priority, Request, RequestStatus

_MAX_SCORED_TOKENS = 4 * BLOCK_SIZE
"""Prompt positions of one request whose logits a step may hold at once: each is as wide as the vocabulary."""

_AGED_CREDIT = 4 * BLOCK_SIZE
"""What those who have aged are due waits for steps of worse prompts: HIGH's pay for what is beyond twice this, NORMAL's
for what is beyond once. Without it, one HIGH prompt of 256 tokens in three was a ninth longer, or a fifth; half of it
spares those of 256 tokens, and of 512 not all. LOW gets as much as without."""


class StepComposer:
    """Spends a step's token budget so that each request's `num_computed_tokens` catches up with its tokens.

    First, every request that decodes takes its token. What is left goes to prompts, running and waiting together, in
    order of tier; `_serve_tier` says who computes within one, `Admission` who may start, and `_aged` what is kept for
    those that have waited past better tiers.

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
        self.admission = Admission(table, limits, counters)
        self._draft_room = DraftRoom.of(table, limits, budget, self.admission)
        self.starved: list[Request] = []
        self.starving_since: float | None = None  # there is no memory for one who is alone
        self._work = table.waiting.work
        self._is_short = False
        self._recent, self._images = RecentPrompts(), ImageTurns()
        self._sat_out_for = math.inf  # the tier for whose prompts worse ones have sat the last step out
        self._due = 0.0  # prompt tokens that those who have aged are due
        self._last = Step(0.0)
        self._is_burst_over = False

    def compose(self, now: float) -> Step:
        """The next step, its effects on blocks and progress already booked; empty if nothing can run now."""
        table, step = self._table, Step(now)
        self._last = step
        self._is_short = False
        disk = table.disk
        if disk is not None:
            disk.advance(now, is_busy=bool(table.running))
        if table.has_waiting:
            table.waiting.expire(now)
            for request in self.admission.preemptions(step, self._would_compute):
                self.preempt(request)
        prefilling = self._add_decodes(step)
        if prefilling or table.has_waiting:
            self._add_prompts(step, prefilling)
        if step.requests:
            table.publish_filled(step)
        elif not table.running and not table.submitted:
            if disk is not None and (disk.is_loading or not table.has_waiting):
                disk.save_idle(now)
            elif table.has_waiting and not self._is_memory_coming():
                self._starve(self.admission.promoted(now) or table.waiting.heads(now)[0], now)
        if not self._is_short:
            self.starving_since = None
        return step

    def compose_burst(self, now: float) -> SchedulerOutput | None:
        """A draft model's burst, submitted: at most one before each step, and none beside one."""
        steps: tuple[SchedulerOutput, ...] = ()
        if self._draft_room is not None and not self._table.submitted and not self._is_burst_over:
            steps = self._draft_room.compose_burst()
        self._is_burst_over = bool(steps)  # before the next step is composed
        if not steps:
            return None
        self._table.submitted.append(Step(now, steps))
        return self._table.submitted[-1].submit(-1, (), None, None)

    def waits_to_draft(self) -> bool:
        """Whether a step runs and the next one is better composed when its result is known."""
        return self._draft_room is not None and bool(self._table.submitted) and self._draft_room.waits()

    def explain(self, request: Request, step: SchedulerOutput) -> str:
        """How many tokens `step`, the last that was composed, gives a request that has no output yet, and what kept it
        from more."""
        given = {chunk.request_id: chunk.num_tokens for chunk in step.chunks}
        others = ", ".join(f"{name} {num_tokens}" for name, num_tokens in given.items() if name != request.request_id)
        if request.request_id in given:
            num_tokens, num_left = given[request.request_id], self._work(request)
            return f"gets {num_tokens} tokens and has {num_left} left; others: {others or '-'}"
        is_waiting = request.status is RequestStatus.WAITING
        reason = self.admission.why_not(request, self._last) if is_waiting else None
        return reason or f"no tokens are left: {others or 'none for prompts'}"

    def preempt(self, request: Request) -> None:
        """Makes a running request wait."""
        self._table.preempt(request)
        self._counters.preemptions_by_tier[request.tier] += 1

    def _is_memory_coming(self) -> bool:
        """Whether a draft model, which is asked to if the pool can use it, gives memory back before the next step."""
        speculation, blocks = self._table.speculation, self._table.blocks
        if speculation is not None and blocks.num_blocks < blocks.max_blocks:
            speculation.give_way()
        return speculation is not None and speculation.changes_pool

    def _starve(self, request: Request, now: float) -> None:
        """There is no memory for one who is alone. It may come back, but is not waited for without end."""
        self._is_short = True
        if self.starving_since is None:
            self.starving_since = now
        if now - self.starving_since >= self._limits.memory_wait_s:
            self.starving_since = None
            self._table.end(request, FinishReason.ERROR)
            self.starved.append(request)

    # --- decodes ------------------------------------------------------------------------------------------

    def _add_decodes(self, step: Step) -> list[Request]:
        """Adds everyone who decodes; returns those who run but have prompt to compute.

        Up to a block of known tokens counts as a decode (those that a grammar forces, or the uncached tail of a
        resumed request), as far as the step has room beside one token for everyone who runs.
        """
        running = self._table.running
        drafts = {} if self._draft_room is None else self._draft_room.choose()
        drafted = set(chain.from_iterable(other.drafts for other in self._table.submitted))
        num_taken = sum([own.num_known - 1 + len(own.token_ids) for own in drafts.values()])
        spare = self._limits.max_num_batched_tokens - len(running) - num_taken
        most = min(BLOCK_SIZE, self._limits.max_chunk_tokens or BLOCK_SIZE)
        prefilling: list[Request] = []
        for request in running:  # a preemption shortens the list at its end, at or behind this place
            start = request.num_computed_tokens
            if request.num_in_flight:
                if not needs_no_result(request) or request.request_id in drafted:
                    continue
                num_tokens, own_drafts = 1, NO_DRAFTS
            else:
                num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) - start
                if self._is_prefilling(request, num_tokens):
                    prefilling.append(request)
                    continue
                own_drafts = drafts.get(request.request_id, NO_DRAFTS)
                if own_drafts is not NO_DRAFTS:
                    num_tokens += len(own_drafts.token_ids)
                elif num_tokens > 1:
                    num_tokens = min(num_tokens, most, 1 + spare)
                    spare -= num_tokens - 1
            filled = start % BLOCK_SIZE
            block_ids = () if filled and filled + num_tokens <= BLOCK_SIZE else self._grow(step, request, num_tokens)
            if block_ids is not None:
                if own_drafts is not NO_DRAFTS:
                    step.drafts[request.request_id] = own_drafts
                step.num_decode_tokens += num_tokens
                self._put(step, request, num_tokens, block_ids)
        return prefilling

    def _is_prefilling(self, request: Request, num_tokens: int) -> bool:
        """Whether a running request with `num_tokens` known ones to compute takes them from the prompts' share:
        its first tokens, or those that it computes again after a preemption. Admission gave it their blocks."""
        if not request.output_token_ids:
            return True
        return num_tokens > BLOCK_SIZE and self._table.blocks.holds(request, request.num_tokens)

    def _grow(self, step: Step, request: Request, num_tokens: int) -> BlockIds | None:
        """Blocks for the next `num_tokens` tokens, preempting worse requests if need be. None if the request
        must sit out this step: it waits for detached blocks or for memory, or was preempted itself."""
        blocks = self._table.blocks
        while True:
            block_ids = blocks.allocate(request, request.num_computed_tokens + num_tokens)
            if block_ids is not None:
                return block_ids
            if blocks.num_detached_blocks or self._is_memory_coming():
                return None
            if self._table.disk is not None and self._table.disk.give_up_load():
                continue
            victim = self._table.running[-1]
            if victim is self._table.running[0]:
                self._starve(victim, step.now)
                return None
            self.preempt(victim)
            if victim is request:
                return None

    # --- prompts ------------------------------------------------------------------------------------------

    def _add_prompts(self, step: Step, prefilling: list[Request]) -> None:
        """Shares the step's prompt tokens out tier by tier, but for the part of one that has aged past better tiers."""
        self._images.begin(prefilling)
        waiting = self.admission.next_to_start(step)
        first = min([*prefilling, waiting] if waiting is not None else prefilling, key=_turn, default=None)
        if first is None:
            return
        most, beside = self._shares(first, prefilling, step.num_decode_tokens)
        if most <= 0:
            return
        aged = self._aged(step, prefilling, first)
        part = 0 if aged is None else self._part(aged, first, most)
        if part and aged is not None and aged.pooling is not None and aged.pooling.is_whole:
            self._give(step, aged, 0)  # nothing of it fits behind what better tiers take of each step
        tiers = {request.priority for request in (*prefilling, *self._table.waiting.heads(step.now))}
        sat_out_for = math.inf
        for kept in dict.fromkeys((part, 0)):
            for priority in sorted(tiers):
                end = most
                if priority > first.priority:
                    end = beside
                    may_sit_out = first.priority < self._sat_out_for and step.given.total() < beside - kept
                    if may_sit_out and any(request.priority <= first.priority for request in step.given):
                        end, sat_out_for = 0, first.priority
                self._serve_tier(step, priority, prefilling, end - kept)
            if kept and aged is not None:
                self._give(step, aged, kept - step.given[aged])
        self._sat_out_for = sat_out_for
        self._settle(step, aged)
        for request, num_tokens in step.given.items():
            step.prompt_cost += self._budget.cost(request.num_computed_tokens, num_tokens)
            self._put(step, request, num_tokens, step.block_ids[request.request_id])

    def _shares(self, first: Request, prefilling: list[Request], num_decodes: int) -> tuple[int, int]:
        """How many prompt tokens the step may have beside those who decode: of the tier of `first`, the best that
        has some, and of worse ones.

        Streams of that tier or a better one have the target kept. Those of worse tiers are held up for as long as
        a step may last at most, which also bounds how long one who arrives meanwhile waits for its first token; prompts
        of worse tiers never make a step as long as that. While prompts of a still better tier come, less
        time goes to those that the next of them would have to wait for.
        """
        room = self._limits.max_num_batched_tokens - num_decodes
        if not self._limits.bound_stalls:
            return room, room
        start, recent, now = first.num_tokens - self._work(first), self._recent, self._last.now
        better = recent.least_of_better(first.priority, now)
        beside = min(room, self._budget.num_tokens(start, num_decodes, self.target_s(), better))
        streams = [request for request in self._table.running if request not in prefilling]
        if self._is_device_shared() or any(stream.priority <= first.priority for stream in streams):
            return beside, beside
        most = room
        if self._budget.is_known:
            most = self._budget.num_tokens(start, num_decodes, self._limits.max_step_s, better)
        return min(room, max(beside, most)), beside

    def target_s(self) -> float:
        """How long a step beside decodes is to take."""
        return self._limits.target_step_s or self._budget.target_s(self._limits.cheap_rows)

    def _serve_tier(self, step: Step, priority: int, prefilling: list[Request], most: int) -> None:
        """Gives tokens to prompts of one tier, until all prompts have `most`.

        The first half goes to those with the least work left, the rest to the oldest. So a prompt waits for at most
        twice the work of those that are shorter than it, or twice the work of those that are older, whichever is less:
        each half by itself is shortest-remaining-work-first, or first-come-first-served, at half the speed.

            400 tokens a step; the oldest has 24,000 left, others come with 200 and 300
            step 1  oldest 200, second 200 (its first token)
            step 2  oldest 200, third 200
            step 3  oldest 300, third 100 (its first token)
        """
        served = [request for request in dict.fromkeys([*prefilling, *step.given]) if request.priority == priority]
        given = step.given.total()
        for find, end in ((self._shortest, given + (most - given) // 2), (self._oldest, most)):
            able = list(served)
            while (num_tokens := end - step.given.total()) > 0 and (request := find(step, priority, able)) is not None:
                if request in able:
                    able.remove(request)
                else:
                    served.append(request)
                self._give(step, request, num_tokens)

    def _oldest(self, step: Step, priority: int, able: list[Request]) -> Request | None:
        """Of a tier's prompts: those of `able`, and those that may start."""
        waiting = self._table.waiting.oldest(priority, step.now) if self.admission.is_open(step) else None
        return min([*able, waiting] if waiting is not None else able, key=_turn, default=None)

    def _shortest(self, step: Step, priority: int, able: list[Request]) -> Request | None:
        """The one with the least work left; the oldest among equals."""
        oldest = self._oldest(step, priority, able)
        if oldest is None:
            return None
        waiting = self.admission.shortest(step, priority) if self.admission.is_open(step) else None
        return min([oldest, *able, waiting] if waiting is not None else [oldest, *able], key=self._work)

    def _give(self, step: Step, request: Request, num_tokens: int) -> None:
        """Up to `num_tokens` more of the step are for a prompt, if it runs or can start; or all that it has left."""
        if request.images and (num_tokens := self._images.allow(step, request, num_tokens)) <= 0:
            return
        if request.request_id in step.block_ids or self._ensure_running(step, request):
            most = request.num_tokens if request.pooling is not None and request.pooling.is_whole else num_tokens
            step.given[request] = with_whole_images(request, min(self._wanted(request), step.given[request] + most))

    def _would_compute(self, request: Request) -> bool:
        """Whether those who run will leave a waiting prompt tokens of the step, or of the next one if one is submitted,
        whose end the blocks of those that it preempts would have to wait for."""
        prefilling = [
            other
            for other in self._table.running
            if not other.num_in_flight and self._is_prefilling(other, other.num_tokens - other.num_computed_tokens)
        ]
        before = [other for other in prefilling if other.priority <= request.priority]
        num_steps = 2 if self._table.submitted else 1
        first = min([*before, request], key=_turn)
        most, _ = self._shares(first, prefilling, len(self._table.running) - len(prefilling))
        wanted = {other: min(self._work(other), num_steps * self._wanted(other)) for other in before}
        left = num_steps * most - sum(wanted[o] for o in before if o.priority < request.priority)
        mates = [other for other in before if other.priority == request.priority]
        before_it = mates if any(_turn(other) <= _turn(request) for other in mates) else []
        shorter = [other for other in mates if self._work(other) < self._work(request)]
        return sum(map(wanted.__getitem__, before_it)) < left or sum(map(wanted.__getitem__, shorter)) < left // 2

    # --- those who have aged past better tiers ----------------------------------------------------------------

    def _aged(self, step: Step, prefilling: list[Request], first: Request) -> Request | None:
        """The prompt that has waited past all of better tiers; None if the oldest is of the best tier."""
        promoted = self.admission.promoted(step.now)
        able = [*prefilling, promoted] if promoted is not None else prefilling
        oldest = min(able, key=self._table.waiting.key, default=first)
        return oldest if oldest.priority > first.priority else None

    def _part(self, aged: Request, first: Request, num_tokens: int) -> int:
        """Tokens that are kept for it of a step's `num_tokens`, once what it is due beyond the credit of the step's
        `first` prompt makes a block. One that waits starts with a token."""
        due = int(self._due) - _AGED_CREDIT * (Priority.LOW - first.priority)
        wanted = self._wanted(aged)
        if due < min(wanted, BLOCK_SIZE):
            return int(aged.status is RequestStatus.WAITING)
        return min(due, wanted, max(num_tokens // 2, 1))

    def _settle(self, step: Step, aged: Request | None) -> None:
        """Books what its tier is due: one prompt token for each `AGED_SHARE - 1` that better tiers get. While one of
        those who were promoted decodes, the next cannot start and what it is due is kept."""
        if aged is None:
            if not any(request.is_promoted for request in self._table.running):
                self._due = 0.0
            return
        num_better = sum([count for request, count in step.given.items() if request.priority < aged.priority])
        due = self._due + num_better / (AGED_SHARE - 1) - (step.given.total() - num_better)
        most = self._limits.max_num_batched_tokens
        credit = _AGED_CREDIT * Priority.LOW  # the most that is kept back: with less, a small step would pay nothing
        self._due = float(min(max(due, -most), credit + most))

    def _ensure_running(self, step: Step, request: Request) -> bool:
        """Whether a request runs now, with the blocks that the step computes it in; it may wait and find no room."""
        blocks = self._table.blocks
        block_ids: BlockIds | None = ()
        if request.status is RequestStatus.WAITING:
            block_ids = self.admission.admit(step, request)
            if block_ids is not None:
                cost = self._budget.cost(request.num_computed_tokens, self._work(request))
                self._recent.add(request.priority, cost, step.now)
                step.new_requests.append(NewRequestData.of(request, blocks.resumed_checkpoint(request)))
        elif blocks.groups.has_windows:
            block_ids = self._move_windows(step, request)
        if block_ids is not None:
            step.block_ids[request.request_id] = block_ids
        return block_ids is not None

    def _move_windows(self, step: Step, request: Request) -> BlockIds | None:
        """Blocks for a running prompt's next chunk where layers see a window only: admission gave it as many as it
        ever holds there. What it has given up since pays for them, unless others hold it, too; then it may have to
        sit out a step (None), or to preempt others if there would be no step otherwise."""
        if step.requests or step.given or self._table.submitted:
            return self._table.blocks.allocate(request, request.num_tokens)
        return self._grow(step, request, request.num_tokens - request.num_computed_tokens)

    def _wanted(self, request: Request) -> int:
        """Tokens that the next step may compute of a request's prompt; fewer if recurrent state is to be kept there."""
        wanted = min(self._work(request), self._limits.max_chunk_tokens or request.num_tokens)
        if request.sampling.prompt_logprobs is not None and not request.output_token_ids:
            wanted = min(wanted, _MAX_SCORED_TOKENS)
        wanted = cut_at_second_image(request, wanted)
        if self._checkpoints is not None and request.status is RequestStatus.RUNNING:
            wanted = self._checkpoints.cut(request, wanted)
        return wanted

    # --- progress -----------------------------------------------------------------------------------------

    def _put(self, step: Step, request: Request, num_tokens: int, block_ids: BlockIds) -> None:
        """Books the next `num_tokens` positions of the request as computed by this step."""
        start = request.num_computed_tokens
        end = start + num_tokens
        num_in_flight = request.num_in_flight
        num_prompt_tokens = len(request.prompt_token_ids)
        num_output_tokens = len(request.output_token_ids) + num_in_flight
        drafts = step.drafts.get(request.request_id, NO_DRAFTS)
        num_drafts = len(drafts.token_ids) if drafts is not NO_DRAFTS else 0
        is_sampling = end == num_prompt_tokens + num_output_tokens + num_drafts
        constraint = request.constraint
        chunk = ScheduledChunk(
            request.request_id,
            start,
            num_tokens,
            None if num_in_flight else (*request.token_ids(start, end), *drafts.token_ids),
            block_ids,
            is_sampling and request.pooling is None,
            num_output_tokens,
            None if constraint is None or not is_sampling else constraint.bitmask(),
            None if self._checkpoints is None else self._checkpoints.save(request, end),
            num_drafts,
            drafts.bitmasks,
            () if self._draft_room is None else recent_tokens(request, start, end - num_drafts),
        )
        step.add(request, chunk)
        if self._draft_room is not None:
            self._draft_room.on_chunk(chunk)
        request.num_computed_tokens = end
        if is_sampling:
            request.num_in_flight = num_in_flight + 1 + num_drafts
        if num_drafts:
            return  # what is computed is known when it is known which of them are right
        self._counters.num_tokens_recomputed += max(0, min(end, request.num_ever_computed) - start)
        request.num_ever_computed = max(request.num_ever_computed, end)
        if start < num_prompt_tokens:
            self._counters.num_prompt_tokens_computed += min(end, num_prompt_tokens) - start
        if start % BLOCK_SIZE == 0 or end // BLOCK_SIZE > start // BLOCK_SIZE:
            step.filled.append(request)


def _turn(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_s
