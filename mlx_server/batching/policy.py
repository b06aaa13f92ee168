"""Who gets what of a step: the rules of docs/scheduling.md, one section each.

`Policy` has what is remembered between steps, `Step` what has been decided in one. The functions here decide, and note
why not (`Step.closed_because`, `Step.no_overtaking`), which is all that `why_not` knows. What follows from a decision
is done by `RequestTable` and its blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import takewhile

from mlx_server.batching.blocks.prefix_cache import CachedPrefix
from mlx_server.batching.image_bounds import ImageTurns, cut_at_second_image, with_whole_images
from mlx_server.batching.limits import SchedulerLimits
from mlx_server.batching.request_table import RequestTable, Step, headroom
from mlx_server.batching.step_budget import PromptBudget, RecentPrompts
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds
from mlx_server.request import Priority, Request, RequestStatus

AGED_SHARE = 8
"""One in so many seats, blocks and prompt tokens is for those who have aged past better tiers. With a fourth, an eighth
and a sixteenth, the slowest hundredth of LOW's first tokens under a flood of HIGH came after 43, 46 and 57 s, and that
of NORMAL's after 33, 36 and 43 s; HIGH's median was 1.1, 1.2 and 0.9 s. On a slow machine below saturation (`m2-max`)
LOW's were 116, 226 and 308 s, NORMAL's 91, 64 and 44 s."""

_AGED_CREDIT = 4 * BLOCK_SIZE
"""What those who have aged are due waits for steps of worse prompts: HIGH's pay for what is beyond twice this, NORMAL's
for what is beyond once. Without it, one HIGH prompt of 256 tokens in three was a ninth longer, or a fifth; half of it
spares those of 256 tokens, and of 512 not all. LOW gets as much as without."""

_MAX_SCORED_TOKENS = 4 * BLOCK_SIZE
"""Prompt positions of one request whose logits a step may hold at once: each is as wide as the vocabulary."""

_HELD = "memory is short: nobody starts beside those who run"
_ALL_SEATS = "no seat: all are taken"
_KEPT_SEAT = "no seat: the last is kept for one who has aged past better tiers"
_NO_BLOCKS = "no room: too few blocks are free"
_NO_TOKENS = "too few tokens are left of the step for an input that must be whole"


class Policy:
    """Who computes prompts in a step and with how many tokens, who starts, and who is preempted.

    Ranks are a total order that only a promotion changes, and a request is preempted only for one of a better rank, so
    two requests cannot preempt each other in turns. Who is preempted gives up its blocks (they stay cached), keeps its
    arrival time and output, and starts again in its turn.
    """

    def __init__(
        self,
        table: RequestTable,
        limits: SchedulerLimits,
        budget: PromptBudget,
        is_device_shared: Callable[[], bool],
    ) -> None:
        self.is_held = False  # nobody starts beside one who runs
        self._table = table
        self._blocks = table.blocks
        self._waiting = table.waiting
        self._limits = limits
        self._budget = budget
        self._is_device_shared = is_device_shared
        self._work = table.waiting.work
        self._recent, self._images = RecentPrompts(), ImageTurns()
        self._sat_out_for = math.inf  # the tier for whose prompts worse ones have sat the last step out
        self._due = 0.0  # prompt tokens that those who have aged are due
        self._started = Counter({Priority.HIGH: AGED_SHARE})  # by tier, since the last promotion

    def share_out(self, step: Step, prefilling: list[Request]) -> None:
        """Gives the prompts' tokens of a step (`step.given`) to those who run and have prompt to compute, and to those
        who start."""
        self._images.begin(prefilling)
        self._share_out(step, prefilling)
        if not step.given and not step.requests and self._images.pass_turn(step):
            self._share_out(step, prefilling)

    def _share_out(self, step: Step, prefilling: list[Request]) -> None:
        first = min(_some(*prefilling, self._next_to_start(step)), key=_turn, default=None)
        if first is None:
            return
        most, beside = self._shares(step.now, first, prefilling, step.num_decode_tokens)
        if most <= 0:
            return
        aged = self._aged(step, prefilling, first)
        part = 0 if aged is None else self._part(aged, first, most)
        if part and aged is not None and aged.pooling is not None and aged.pooling.is_whole:
            self._give(step, aged, 0)  # nothing of it fits behind what better tiers take of each step
        tiers = sorted({request.priority for request in (*prefilling, *self._waiting.heads(step.now))})
        sat_out_for = math.inf
        for kept in dict.fromkeys((part, 0)):
            for priority in tiers:
                end = (most if priority <= first.priority else beside) - kept
                if priority > first.priority and self._sits_out(step, first, end):
                    sat_out_for = first.priority
                else:
                    self._serve_tier(step, priority, prefilling, end)
            if kept and aged is not None:
                self._give(step, aged, kept - step.given[aged])
        self._sat_out_for = sat_out_for
        self._settle(step, aged)

    def why_not(self, request: Request, step: Step) -> str | None:
        """What kept a waiting request from starting in a step; None if there were no tokens for it."""
        if (owner := self._waiting.parked_for(request)) is not None:
            return f"is parked: {owner} computes the prefix that it begins with"
        why = self._door(step) or step.no_overtaking
        first = "" if why is None or step.closed_by in (None, request) else f"; {step.closed_by.request_id} comes first"
        return why and f"{why} ({self._blocks.num_free_blocks} blocks are free){first}"

    def _door(self, step: Step) -> str | None:
        """Why nobody starts any more in a step; None while somebody may. While admission is held someone must run, or
        the memory that is waited for would never come back."""
        if self.is_held and self._table.running:
            return _HELD
        return _ALL_SEATS if len(self._table.running) >= self._limits.max_num_seqs else step.closed_because

    def _give(self, step: Step, request: Request, num_tokens: int) -> None:
        """Up to `num_tokens` more of the step are for a prompt, if it runs or can start; or all that it has left."""
        if request.images and (num_tokens := self._images.allow(step, request, num_tokens)) <= 0:
            return
        if request.request_id not in step.block_ids:
            block_ids: BlockIds | None = ()
            if request.status is RequestStatus.WAITING:
                block_ids = self._start(step, request)
            elif self._blocks.groups.has_windows:
                block_ids = self._move_windows(step, request)
            if block_ids is None:
                return
            step.block_ids[request.request_id] = block_ids
        most = request.num_tokens if request.pooling is not None and request.pooling.is_whole else num_tokens
        step.given[request] = with_whole_images(request, min(self._wanted(request), step.given[request] + most))

    def _wanted(self, request: Request) -> int:
        """Tokens that the next step may compute of a request's prompt; fewer if recurrent state is to be kept there."""
        wanted = min(self._work(request), self._limits.max_chunk_tokens or request.num_tokens)
        if request.sampling.prompt_logprobs is not None and not request.output_token_ids:
            wanted = min(wanted, _MAX_SCORED_TOKENS)
        wanted = cut_at_second_image(request, wanted)
        if self._blocks.checkpoints is not None and request.status is RequestStatus.RUNNING:
            wanted = self._blocks.checkpoints.cut(request, wanted)
        return wanted

    # --- rules 2 and 3: how many tokens prompts have ----------------------------------------------------------

    def target_s(self) -> float:
        """How long a step beside decodes is to take."""
        return self._limits.target_step_s or self._budget.target_s(self._limits.cheap_rows)

    def _shares(self, now: float, first: Request, prefilling: list[Request], num_decodes: int) -> tuple[int, int]:
        """How many prompt tokens a step may have beside those who decode: of the tier of `first`, the best that has
        some, and of worse ones.

        Streams of that tier or a better one have the target kept. Those of worse tiers are held up for as long as
        a step may last at most, which also bounds how long one who arrives meanwhile waits for its first token; prompts
        of worse tiers never make a step as long as that. While prompts of a still better tier come, less
        time goes to those that the next of them would have to wait for.
        """
        room = self._limits.max_num_batched_tokens - num_decodes
        if not self._limits.bound_stalls:
            return room, room
        start, better = first.num_tokens - self._work(first), self._recent.least_of_better(first.priority, now)
        beside = min(room, self._budget.num_tokens(start, num_decodes, self.target_s(), better))
        streams = [request for request in self._table.running if request not in prefilling]
        if self._is_device_shared() or any(stream.priority <= first.priority for stream in streams):
            return beside, beside
        if not self._budget.is_known:
            return room, beside
        most = self._budget.num_tokens(start, num_decodes, self._limits.max_step_s, better)
        return min(room, max(beside, most)), beside

    def _sits_out(self, step: Step, first: Request, end: int) -> bool:
        """Whether worse tiers than that of `first` leave the step to its prompts, though they might have tokens."""
        may_sit_out = first.priority < self._sat_out_for and step.given.total() < end
        return may_sit_out and any(request.priority <= first.priority for request in step.given)

    # --- rule 4: a share for those who have aged past better tiers --------------------------------------------

    def _promoted(self, now: float) -> Request | None:
        """The oldest waiting request, if it is of a worse tier than the next and the share for aged requests has room
        for it."""
        heads = self._waiting.heads(now)
        if len(heads) < 2:
            return None
        oldest = min(heads, key=self._waiting.turn)
        return None if oldest is heads[0] or not self._may_promote(oldest) else oldest

    def _may_promote(self, request: Request) -> bool:
        """Whether the share has room for one more. One that needs n shares by itself comes after n - 1 starts of better
        tiers: with 8 seats, a share is one seat, and every LOW request that is old enough is promoted while no other
        is; with 4 seats, a seat is two shares, so it waits for one start of a better tier first."""
        blocks = self._blocks
        beside = [other for other in self._table.running if other.is_promoted]
        num_blocks = sum([blocks.groups.num_needed(other.num_tokens) for other in [*beside, request]])
        num_shares = AGED_SHARE * max((len(beside) + 1) / self._limits.max_num_seqs, num_blocks / blocks.num_blocks)
        num_better = sum([count for priority, count in self._started.items() if priority < request.priority])
        return num_shares <= 1.0 or (not beside and num_better >= min(math.ceil(num_shares), AGED_SHARE) - 1)

    def _aged(self, step: Step, prefilling: list[Request], first: Request) -> Request | None:
        """The prompt that has waited past all of better tiers; None if the oldest is of the best tier."""
        oldest = min(_some(*prefilling, self._promoted(step.now)), key=self._waiting.key, default=first)
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

    # --- rule 5: half of a tier's tokens for the least work, half for the oldest ------------------------------

    def _serve_tier(self, step: Step, priority: int, prefilling: list[Request], most: int) -> None:
        """Gives tokens to prompts of one tier, until all prompts have `most`.

        The first half goes to those with the least work left, the rest to the oldest. So a prompt waits for at most
        twice the work of those that are shorter than it, or twice the work of those that are older, whichever is less:
        each half by itself is shortest-remaining-work-first, or first-come-first-served, at half the speed.
        """
        served = [request for request in dict.fromkeys([*prefilling, *step.given]) if request.priority == priority]
        given = step.given.total()
        for by_work, end in ((True, given + (most - given) // 2), (False, most)):
            able = list(served)
            while (num_tokens := end - step.given.total()) > 0:
                request = self._next(step, priority, able, by_work=by_work)
                if request is None:
                    break
                if request in able:
                    able.remove(request)
                else:
                    served.append(request)
                self._give(step, request, num_tokens)

    def _next(self, step: Step, priority: int, able: list[Request], *, by_work: bool) -> Request | None:
        """Of those of a tier who run and are `able`, and those who may start: the oldest, or the one with the least
        work left, the oldest among equals."""
        is_open = self._door(step) is None
        waiting = self._waiting.oldest(priority, step.now) if is_open else None
        oldest = min(_some(*able, waiting), key=_turn, default=None)
        if oldest is None or not by_work:
            return oldest
        return min(_some(oldest, *able, self._shortest(step, priority) if is_open else None), key=self._work)

    # --- rule 6: who starts -----------------------------------------------------------------------------------

    def _next_to_start(self, step: Step) -> Request | None:
        """The waiting request whose start a step is made for, if any can start: the oldest of the best tier, or else
        its shortest. The pool grows for it if it must."""
        heads = self._waiting.heads(step.now) if self._door(step) is None else []
        if not heads:
            return None
        promoted, why = self._promoted(step.now), None
        for request in dict.fromkeys(_some(heads[0], self._shortest(step, heads[0].priority))):
            if (why := self._lack(request, self._blocks.find_prefix(request), promoted)) is None:
                return request
        step.closed_because, step.closed_by = why, heads[0]
        return None if promoted is None else heads[0]

    def _shortest(self, step: Step, priority: int) -> Request | None:
        """The waiting request of a tier that has the least work, if it is the oldest or may overtake that one.

        The oldest may be overtaken by those with less work, as long as theirs comes to no more than its own in all and
        it loses no more than one last seat: so it waits for room at most about twice as long as in the order of
        arrival. While 24,000 tokens wait for blocks, 120 prompts of 200 tokens may start before them.
        """
        oldest, shortest = self._waiting.oldest(priority, step.now), self._waiting.shortest(priority, step.now)
        if oldest is None or shortest is None or shortest is oldest:
            return oldest
        if step.no_overtaking is not None or (oldest.has_lost_seat and self._is_last_seat(step.now)):
            return None
        num_tokens = oldest.num_tokens_overtaken + self._work(shortest)
        return shortest if num_tokens <= self._work(oldest) else None

    def _is_last_seat(self, now: float) -> bool:
        return len(self._table.running) + 1 + (self._promoted(now) is not None) >= self._limits.max_num_seqs

    def _start(self, step: Step, request: Request) -> BlockIds | None:
        """Lets the oldest or the shortest of a tier run, if it can: its block tables, the cached prefix included and
        counted as computed. The oldest that finds no room closes the door for the step."""
        is_whole = request.pooling is not None and request.pooling.is_whole
        num_given = step.num_decode_tokens + step.given.total()
        if is_whole and num_given + request.num_tokens > self._limits.max_num_batched_tokens:
            step.closed_because, step.closed_by = _NO_TOKENS, request
            return None
        promoted, why = self._promoted(step.now), self._door(step)
        if why is not None and (request is not promoted or why is _HELD):
            return None
        oldest = self._waiting.oldest(request.priority, step.now)
        if self._waiting.parked_for(request) is not None:
            return None
        prefix = self._blocks.find_prefix(request)
        if (why := self._lack(request, prefix, promoted)) is not None:
            if request is oldest:
                step.closed_because, step.closed_by = why, request
            step.no_overtaking = why
            return None
        if oldest is not None and oldest is not request:
            oldest.num_tokens_overtaken += request.num_tokens - len(prefix) * BLOCK_SIZE
            oldest.has_lost_seat |= self._is_last_seat(step.now)
        block_ids = self._table.admit(step, request, prefix, is_promoted=request is promoted)
        if request is promoted:
            self._started.clear()
        else:
            self._started[request.priority] += 1
        cost = self._budget.cost(request.num_computed_tokens, self._work(request))
        self._recent.add(request.priority, cost, step.now)
        return block_ids

    def _lack(self, request: Request, prefix: CachedPrefix, promoted: Request | None) -> str | None:
        """What is missing for a request's start, None if nothing is. Has the pool grow if it must."""
        num_seats, num_blocks = self._needs(request, prefix, promoted)
        if num_seats > 0:
            return _KEPT_SEAT
        return None if self._blocks.make_room(num_blocks) else _NO_BLOCKS

    def _needs(self, request: Request, prefix: CachedPrefix, promoted: Request | None) -> tuple[int, int]:
        """How many more seats must become free for a request to start, and how many blocks be free: its own, those of
        `promoted`, which waits for its seat beside, and the headroom of those that it cannot preempt."""
        blocks, running = self._blocks, self._table.running
        num_seats = len(running) + 1 - self._limits.max_num_seqs
        num_blocks = blocks.num_new_blocks(request, request.num_tokens, prefix)
        if promoted is not None and promoted is not request:
            num_seats += 1
            num_blocks += blocks.num_new_blocks(promoted, promoted.num_tokens, blocks.find_prefix(promoted))
        num_kept = len(running) - len(self._worse_tiers(request))
        return num_seats, num_blocks + headroom(running[:num_kept], blocks.groups.windows)

    # --- rule 7: who is preempted -----------------------------------------------------------------------------

    def preempt_worse(self, step: Step) -> None:
        """If the next waiting request finds no room: preempts the fewest running requests of worse tiers that make it;
        none if all of them would not, or if the step has no tokens for it. The next is the oldest of the best tier, or
        else the shortest."""
        heads, running = self._waiting.heads(step.now), self._table.running
        if not heads or not running or running[-1].priority <= heads[0].priority or self.is_held:
            return
        able = _some(heads[0], self._shortest(step, heads[0].priority))
        request = next((request for request in able if self._would_compute(step, request)), None)
        if request is None:
            return
        preempted = self._fewest_preempted(request, step.now)
        if preempted and self._promote_aged(request, step.now):
            preempted = self._fewest_preempted(request, step.now)
        for other in preempted:
            self._table.preempt(other)

    def _fewest_preempted(self, request: Request, now: float) -> list[Request]:
        """The pool grows if that spares one of them."""
        prefix, worse = self._blocks.find_prefix(request), self._worse_tiers(request)
        num_seats, num_blocks = self._needs(request, prefix, self._promoted(now))
        num_freed = self._blocks.num_freed_in_turn((other.request_id for other in worse), prefix)
        for count, num_freed_blocks in enumerate(num_freed):
            if num_seats <= count and self._blocks.make_room(num_blocks - num_freed_blocks):
                return worse[:count]
        return []

    def _promote_aged(self, request: Request, now: float) -> bool:
        """Running requests that `request` may preempt, but that have aged past it and past all others who wait, keep
        their seats, as far as the share goes. Whether there is one."""
        key = self._waiting.key
        least = min(map(key, (request, *self._waiting.heads(now))))
        aged = sorted((other for other in self._worse_tiers(request) if key(other) <= least), key=key)
        for count, other in enumerate(aged):
            if not self._may_promote(other):
                return count > 0
            self._table.promote(other)
            self._started.clear()
        return bool(aged)

    def _worse_tiers(self, request: Request) -> list[Request]:
        """Running requests that `request` may preempt, the worst first: the last that run."""

        def may_go(other: Request) -> bool:
            return other.priority > request.priority and not other.is_promoted

        return list(takewhile(may_go, reversed(self._table.running)))

    def _would_compute(self, step: Step, request: Request) -> bool:
        """Whether those who run will leave a waiting prompt tokens of the step, or of the next one if one is submitted,
        whose end the blocks of those that it preempts would have to wait for."""
        running, is_prefilling = self._table.running, self._table.is_prefilling
        prefilling = [other for other in running if not other.num_in_flight and is_prefilling(other)]
        before = [other for other in prefilling if other.priority <= request.priority]
        num_steps = 2 if self._table.submitted else 1
        first = min([*before, request], key=_turn)
        most, _ = self._shares(step.now, first, prefilling, len(running) - len(prefilling))
        wanted = {other: min(self._work(other), num_steps * self._wanted(other)) for other in before}
        left = num_steps * most - sum(wanted[o] for o in before if o.priority < request.priority)
        mates = [other for other in before if other.priority == request.priority]
        before_it = mates if any(_turn(other) <= _turn(request) for other in mates) else []
        shorter = [other for other in mates if self._work(other) < self._work(request)]
        return sum(map(wanted.__getitem__, before_it)) < left or sum(map(wanted.__getitem__, shorter)) < left // 2

    def grow(self, step: Step, request: Request, num_tokens: int) -> BlockIds | None:
        """Blocks for the next `num_tokens` tokens, preempting worse requests if need be. None if the request
        must sit out this step: it waits for detached blocks or for memory, or was preempted itself."""
        table = self._table
        while True:
            block_ids = self._blocks.allocate(request, request.num_computed_tokens + num_tokens)
            if block_ids is not None:
                return block_ids
            if self._blocks.num_detached_blocks or table.is_memory_coming():
                return None
            if table.disk is not None and table.disk.give_up_load():
                continue
            victim = table.running[-1]
            if victim is table.running[0]:
                table.starve(victim, step.now)
                return None
            table.preempt(victim)
            if victim is request:
                return None

    def _move_windows(self, step: Step, request: Request) -> BlockIds | None:
        """Blocks for a running prompt's next chunk where layers see a window only: admission gave it as many as it
        ever holds there. What it has given up since pays for them, unless others hold it, too; then it may have to
        sit out a step (None), or to preempt others if there would be no step otherwise."""
        if step.requests or step.given or self._table.submitted:
            return self._blocks.allocate(request, request.num_tokens)
        return self.grow(step, request, request.num_tokens - request.num_computed_tokens)

    def next_of_all(self, now: float) -> Request:
        """Who would start next of those who wait, if there were memory for it."""
        return self._promoted(now) or self._waiting.heads(now)[0]


def _some(*requests: Request | None) -> list[Request]:
    return [request for request in requests if request is not None]


def _turn(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_s
