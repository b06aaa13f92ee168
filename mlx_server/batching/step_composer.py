"""Which requests a step computes, and how many tokens of each."""

from __future__ import annotations

from collections.abc import Callable

from mlx_server.batching.admission import AGED_SHARE, Admission
from mlx_server.batching.limits import SchedulerCounters, SchedulerLimits
from mlx_server.batching.request_table import RequestTable, Step
from mlx_server.batching.step_budget import PromptBudget
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds, NewRequestData, ScheduledChunk, SchedulerOutput
from mlx_server.request import FinishReason, Request, RequestStatus

_STRETCH = 1.25
"""What a prompt has left after so much more than a step's share would cost it a step of its own."""

_MAX_SCORED_TOKENS = 4 * BLOCK_SIZE
"""Prompt positions of one request whose logits a step may hold at once: each is as wide as the vocabulary."""


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
        self.starved: list[Request] = []
        self.starving_since: float | None = None  # there is no memory for one who is alone
        self._work = table.waiting.work
        self._is_short = False
        self._due = 0.0  # prompt tokens that those who have aged are due
        self._now = 0.0

    def compose(self, now: float) -> Step:
        """The next step, its effects on blocks and progress already booked; empty if nothing can run now."""
        self._now = now
        self._is_short = False
        step = Step()
        self._table.waiting.expire(now)
        self.admission.open(now)
        for request in self.admission.preemptions(self._would_compute):
            self.preempt(request)
        self._add_prompts(step, self._add_decodes(step))
        if step.requests:
            self._publish(step)
            self.admission.headroom.on_step()
        elif not self._table.running and not self._table.submitted:
            heads = self._table.waiting.heads(now)
            if first := self.admission.promoted() or next(iter(heads), None):
                self._starve(first)
        if not self._is_short:
            self.starving_since = None
        return step

    def explain(self, request: Request, step: SchedulerOutput) -> str:
        """How many tokens `step`, the last that was composed, gives a request that has no output yet, and what kept it
        from more."""
        given = {chunk.request_id: chunk.num_tokens for chunk in step.chunks}
        others = ", ".join(f"{name} {num_tokens}" for name, num_tokens in given.items() if name != request.request_id)
        if request.request_id in given:
            num_tokens, num_left = given[request.request_id], self._work(request)
            return f"gets {num_tokens} tokens and has {num_left} left; others: {others or '-'}"
        admission = self.admission
        if request.status is RequestStatus.WAITING:
            if (owner := self._table.waiting.parked_for(request)) is not None:
                return f"is parked: {owner} computes the prefix that it begins with"
            if len(self._table.running) >= self._limits.max_num_seqs:
                return f"no seat: {len(self._table.running)} run"
            if admission.closed_because is not None:
                first = (
                    "" if admission.closed_by in (None, request) else f"; {admission.closed_by.request_id} comes first"
                )
                return f"{admission.closed_because} ({self._table.blocks.num_free_blocks}){first}"
        return f"no tokens are left: {others or 'none for prompts'}"

    def preempt(self, request: Request) -> None:
        """Makes a running request wait."""
        self._table.preempt(request)
        self._counters.preemptions_by_tier[request.tier] += 1

    def _starve(self, request: Request) -> None:
        """There is no memory for one who is alone. It may come back, but is not waited for without end."""
        self._is_short = True
        if self.starving_since is None:
            self.starving_since = self._now
        if self._now - self.starving_since >= self._limits.memory_wait_s:
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
            self.preempt(victim)
            self.admission.headroom.on_preemption()
            if victim is request:
                return None

    # --- prompts ------------------------------------------------------------------------------------------

    def _add_prompts(self, step: Step, prefilling: list[Request]) -> None:
        """Shares the step's prompt tokens out tier by tier, but for the part of one that has aged past better tiers.
        The part is on top of a prompt that ends in the step."""
        waiting = self.admission.next_to_start()
        first = min([*prefilling, waiting] if waiting is not None else prefilling, key=_turn, default=None)
        if first is None:
            return
        most, most_of_worse = self._shares(first, prefilling, step.num_decode_tokens)
        if most <= 0:
            return
        aged = self._aged(prefilling, first)
        part = 0 if aged is None else self._part(aged, most)
        if self._wanted(first) <= most:
            room = self._limits.max_num_batched_tokens - step.num_decode_tokens
            most, most_of_worse = min(most + part, room), min(most_of_worse + part, room)
        tiers = {request.priority for request in (*prefilling, *self._table.waiting.heads(self._now))}
        for kept in dict.fromkeys((part, 0)):
            for priority in sorted(tiers):
                end = most if priority <= first.priority else most_of_worse
                self._serve_tier(step, priority, prefilling, end - kept)
            if kept and aged is not None:
                self._give(step, aged, kept - step.given[aged])
        self._settle(step, aged)
        for request, num_tokens in step.given.items():
            step.prompt_cost += self._budget.cost(request.num_computed_tokens, num_tokens)
            self._put(step, request, num_tokens, step.block_ids[request.request_id])

    def _shares(self, first: Request, prefilling: list[Request], num_decodes: int) -> tuple[int, int]:
        """How many prompt tokens the step may have beside those who decode: of the tier of `first`, the best that
        has some, and of worse ones.

        Streams of that tier or a better one have the target kept. Those of worse tiers are held up for as long as
        a step may last at most, which also bounds how long one who arrives meanwhile waits for its first token; prompts
        of worse tiers never make a step as long as that.
        """
        room = self._limits.max_num_batched_tokens - num_decodes
        if not self._limits.bound_stalls:
            return room, room
        start = first.num_tokens - self._work(first)
        target_s = self._limits.target_step_s or self._budget.target_s(self._limits.cheap_rows)
        beside = min(room, self._budget.num_tokens(start, num_decodes, target_s))
        streams = [request for request in self._table.running if request not in prefilling]
        if self._is_device_shared() or any(stream.priority <= first.priority for stream in streams):
            return beside, beside
        most = room
        if self._budget.is_known:
            most = self._budget.num_tokens(start, num_decodes, self._limits.max_step_s)
            most = wanted if most < (wanted := self._wanted(first)) <= _STRETCH * most else most
        return min(room, max(beside, most)), beside

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
            while (num_tokens := end - step.given.total()) > 0 and (request := find(priority, able)) is not None:
                if request in able:
                    able.remove(request)
                else:
                    served.append(request)
                self._give(step, request, num_tokens)

    def _oldest(self, priority: int, able: list[Request]) -> Request | None:
        """Of a tier's prompts: those of `able`, and those that may start."""
        waiting = self._table.waiting.oldest(priority, self._now) if self.admission.is_open else None
        return min([*able, waiting] if waiting is not None else able, key=_turn, default=None)

    def _shortest(self, priority: int, able: list[Request]) -> Request | None:
        """The one with the least work left; the oldest among equals."""
        oldest = self._oldest(priority, able)
        if oldest is None:
            return None
        waiting = self.admission.shortest(priority) if self.admission.is_open else None
        return min([oldest, *able, waiting] if waiting is not None else [oldest, *able], key=self._work)

    def _give(self, step: Step, request: Request, num_tokens: int) -> None:
        """Up to `num_tokens` more of the step are for a prompt, if it runs or can start."""
        if request.request_id in step.block_ids or self._ensure_running(step, request):
            step.given[request] += min(self._wanted(request) - step.given[request], num_tokens)

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

    def _aged(self, prefilling: list[Request], first: Request) -> Request | None:
        """The prompt that has waited past all of better tiers; None if the oldest is of the best tier."""
        promoted = self.admission.promoted()
        able = [*prefilling, promoted] if promoted is not None else prefilling
        oldest = min(able, key=self._table.waiting.key, default=first)
        return oldest if oldest.priority > first.priority else None

    def _part(self, aged: Request, num_tokens: int) -> int:
        """Tokens that are kept for it of a step's `num_tokens`: all that it is due, once that makes a block. One that
        may start by its age does so, with a block in advance."""
        least = min(self._wanted(aged), BLOCK_SIZE)
        if aged.status is RequestStatus.RUNNING and self._due < least:
            return 0
        return min(max(int(self._due), least), self._wanted(aged), max(num_tokens // 2, 1))

    def _settle(self, step: Step, aged: Request | None) -> None:
        """Books what its tier is due: one prompt token for each `AGED_SHARE - 1` that better tiers get."""
        if aged is None:
            self._due = 0.0
            return
        num_better = sum([count for request, count in step.given.items() if request.priority < aged.priority])
        due = self._due + num_better / (AGED_SHARE - 1) - (step.given.total() - num_better)
        most = self._limits.max_num_batched_tokens
        self._due = float(min(max(due, -most), most))

    def _ensure_running(self, step: Step, request: Request) -> bool:
        """Whether a request runs now, with the blocks that the step computes it in; it may wait and find no room."""
        blocks = self._table.blocks
        block_ids: BlockIds | None = ()
        if request.status is RequestStatus.WAITING:
            block_ids = self.admission.admit(request)
            if block_ids is not None:
                token_ids = tuple(request.prompt_token_ids), tuple(request.output_token_ids)
                sampling = request.sampling, request.eos_token_ids
                checkpoint = blocks.resumed_checkpoint(request)
                new = NewRequestData(request.request_id, *token_ids, *sampling, checkpoint, request.adapter)
                step.new_requests.append(new)
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
        return self._grow(request, request.num_tokens - request.num_computed_tokens)

    def _wanted(self, request: Request) -> int:
        """Tokens that the next step may compute of a request's prompt; fewer if recurrent state is to be kept there."""
        wanted = min(self._work(request), self._limits.max_chunk_tokens or request.num_tokens)
        if request.sampling.prompt_logprobs is not None and not request.output_token_ids:
            wanted = min(wanted, _MAX_SCORED_TOKENS)
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
        self._counters.num_tokens_recomputed += max(0, min(end, request.num_ever_computed) - start)
        request.num_ever_computed = max(request.num_ever_computed, end)
        if start < num_prompt_tokens:
            self._counters.num_prompt_tokens_computed += min(end, num_prompt_tokens) - start
        if start % BLOCK_SIZE == 0 or end // BLOCK_SIZE > start // BLOCK_SIZE:
            step.filled.append(request)

    def _publish(self, step: Step) -> None:
        """Lets later steps hit what this one computes. Not earlier: inside one step a model may run its
        requests one after the other, in any order."""
        table = self._table
        for request in step.filled:
            table.blocks.cache_full_blocks(request, min(request.num_computed_tokens, request.num_tokens))
            table.blocks.give_up_unseen(request)
            table.waiting.advance(request)


def _turn(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_s


def _needs_no_result(request: Request) -> bool:
    """Whether the next token of a request can be computed while its last one is in flight: a last token
    needs no successor, and a grammar's next mask depends on the token."""
    is_last = request.num_tokens + request.num_in_flight >= request.max_total_tokens
    return not is_last and request.constraint is None
