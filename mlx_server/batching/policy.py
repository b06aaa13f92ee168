"""Decides which requests start, how many tokens of a step each prompt gets, and who is preempted: the rules of
docs/scheduling.md, one section for each; rule 4 is in aged_share.py, rule 5 in fair_order.py.

`Policy` keeps what must be remembered between steps, `Step` what has been decided in one step. The policy decides, and
notes in the step why a request may not start (`closed_because`, `no_overtaking`); `why_not` reads these notes.
`RequestTable` and its blocks carry the decisions out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile

from mlx_server.batching.aged_share import AgedShare
from mlx_server.batching.blocks.layer_groups import num_blocks_for
from mlx_server.batching.blocks.prefix_cache import CachedPrefix
from mlx_server.batching.fair_order import by_holdings
from mlx_server.batching.image_turns import ImageTurns, with_whole_images
from mlx_server.batching.request_table import RequestTable, Step
from mlx_server.batching.step_budget import PromptBudget, RecentPrompts
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds
from mlx_server.request import Request, RequestStatus

_MAX_SCORED_TOKENS = 4 * BLOCK_SIZE
"""Prompt positions of one request whose logits a step may hold: each row is as wide as the vocabulary."""

_HEADROOM = 0.1
_MAX_REMAINING = 1024
"""Blocks are kept free for a tenth of the tokens that running requests may still add. At most 1,024 tokens of each
count, because most clients leave `max_tokens` open. Without this headroom, twice as many tokens are computed again and
the whole load takes up to 3 % longer; with a fifth or more, seats stay empty if answers end early. A share that falls
with each step and rises at preemptions, as in SGLang, kept too much free: up to 15 % more steps."""

_HELD = "memory is short: no request starts beside running ones"
_ALL_SEATS = "no seat: all are taken"
_KEPT_SEAT = "no seat: the last is kept for a request that has aged past better tiers"
_NO_BLOCKS = "no room: too few blocks are free"
_MANY_LOADS = "many prefixes of other requests are to be loaded from disk first"
_NO_TOKENS = "the step has too few tokens left for an input that must be computed whole"


class Policy:
    """Decides which prompts a step computes and how many tokens of each, which requests start, and which are preempted.

    Requests have a rank (promoted by age, then tier, then age), a total order that only a promotion changes. Where
    clients share a tier, `by_holdings` says who is preempted: never the first of all, which goes on to its end. A
    preempted request gives up its blocks, which stay cached, keeps its arrival time and output, and waits for its turn
    again.
    """

    def __init__(self, table: RequestTable, budget: PromptBudget, is_device_shared: Callable[[], bool]) -> None:
        self.is_held = False  # no request starts beside a running one
        self._table = table
        self._blocks = table.blocks
        self._waiting = table.waiting
        self._limits = table.limits
        self._budget = budget
        self._is_device_shared = is_device_shared
        self._work, self._turn = table.waiting.work, table.waiting.turn
        self._recent, self.images = RecentPrompts(), ImageTurns(table)
        self._aged = AgedShare(table)
        self._sat_out_for = math.inf  # the tier for whose prompts worse tiers sat out the last step

    def share_out(self, step: Step, prefilling: list[Request]) -> None:
        """Shares the prompt tokens of a step (`step.given`) out to running requests with prompt left to compute and to
        waiting requests, which it starts: tier by tier, the best first. The aged prompt's part is kept free and given
        to it; if it does not use all of its part, the tiers share the rest in a second pass."""
        running, prefilling = prefilling, self.images.hold(prefilling)
        first = min(_some(*prefilling, self._next_to_start(step)), key=self._turn, default=None)
        if first is None:
            return
        most, beside = self._shares(first, running, step.num_decode_tokens)
        if most <= 0:
            return
        aged = self._aged.most_urgent(prefilling, first)
        part = 0 if aged is None else self._aged.num_kept(aged, self._wanted(aged), first, most)
        if part and aged is not None and _is_whole(aged):
            self._give(step, aged, 0)  # all of it: it would not fit after what better tiers take of each step
        tiers = sorted({request.priority for request in (*prefilling, *self._waiting.heads())})
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
        self._aged.settle(step, aged)

    def why_not(self, request: Request, step: Step) -> str | None:
        """Why a waiting request did not start in a step; None if the step had no tokens for it."""
        if self._waiting.parked_at(request) is not None:
            owner = self._waiting.parked_for(request)
            return "is parked: " + (
                f"{owner} computes the prefix that it begins with" if owner else "its next image is not encoded yet"
            )
        why = self._why_closed(step) or step.no_overtaking
        if why is None:
            return None
        first = "" if step.closed_by in (None, request) else f"; {step.closed_by.request_id} comes first"
        return f"{why} ({self._blocks.num_free_blocks} blocks are free){first}"

    def _why_closed(self, step: Step) -> str | None:
        """Why no request may start any more in a step; None while one may. Even if admission is held, one starts when
        none is running, or the memory that it waits for would never come back."""
        if self.is_held and self._table.running:
            return _HELD
        return _ALL_SEATS if len(self._table.running) >= self._limits.max_num_seqs else step.closed_because

    def _give(self, step: Step, request: Request, num_tokens: int) -> None:
        """Gives a prompt up to `num_tokens` more of the step, or all that it has left if it must be computed whole.
        Does nothing if it cannot start, or has no blocks."""
        if request.request_id not in step.block_ids:
            block_ids: BlockIds | None = ()
            if request.status is RequestStatus.WAITING:
                block_ids = self._start(step, request)
            elif self._blocks.groups.has_windows:
                block_ids = self._move_windows(step, request)
            if block_ids is None:
                return
            step.block_ids[request.request_id] = block_ids
        most = request.num_tokens if _is_whole(request) else num_tokens
        step.given[request] = with_whole_images(request, min(self._wanted(request), step.given[request] + most))
        self._waiting.give(request, step.given[request])

    def _wanted(self, request: Request) -> int:
        """How many prompt tokens of a request the next step may compute at most; a chunk ends where recurrent state is
        to be kept."""
        wanted = min(self._work(request), self._limits.max_chunk_tokens or request.num_tokens)
        if request.sampling.prompt_logprobs is not None and not request.output_token_ids:
            wanted = min(wanted, _MAX_SCORED_TOKENS)
        if request.images:
            wanted = self.images.cut(request, request.num_tokens - self._work(request), wanted)
        if self._blocks.checkpoints is not None and request.status is RequestStatus.RUNNING:
            wanted = self._blocks.checkpoints.cut(request, wanted)
        return wanted

    # --- rules 2 and 3: how many tokens prompts get ---------------------------------------------------------

    def target_s(self) -> float:
        """The target time of a step while requests decode."""
        return self._limits.target_step_s or self._budget.target_s(self._limits.cheap_rows)

    def _shares(self, first: Request, prefilling: list[Request], num_decodes: int) -> tuple[int, int]:
        """How many prompt tokens a step may have beside its decodes: for the tier of `first`, the best tier with a
        prompt, and for worse tiers.

        - If streams of that tier or a better one decode, or another model shares the device, all keep to the target.
        - If only streams of worse tiers decode, or none, the best tier's prompts may take up to the longest step. That
          also bounds how long a request that arrives meanwhile waits. Prompts of worse tiers still keep to the target.
        - While prompts of a still better tier are expected, both get less (rule 3).

        Example: 30 ms of decodes, 1 ms a token, target 200 ms, longest step 1 s. A HIGH prompt gets about 170
        tokens beside HIGH streams (168, since the rows of a step are rounded) and 970 beside LOW streams; a NORMAL
        prompt in the same step gets 168 at most, less what HIGH got.
        """
        room = self._limits.max_num_batched_tokens - num_decodes
        if not self._limits.bound_stalls:
            return room, room
        start = first.num_tokens - self._work(first)
        better = self._recent.least_of_better(first.priority, self._waiting.now)
        beside = min(room, self._budget.num_tokens(start, num_decodes, self.target_s(), better))
        streams = [request for request in self._table.running if request not in prefilling]
        if self._is_device_shared() or any(stream.priority <= first.priority for stream in streams):
            return beside, beside
        if not self._budget.is_known:
            return room, beside
        most = self._budget.num_tokens(start, num_decodes, self._limits.max_step_s, better)
        return min(room, max(beside, most)), beside

    def _sits_out(self, step: Step, first: Request, end: int) -> bool:
        """Whether tiers worse than that of `first` leave this step to its prompts, although tokens are left: a request
        of the better tier gets its first token sooner. They do not sit out two steps in a row for the same tier."""
        may_sit_out = first.priority < self._sat_out_for and step.given.total() < end
        return may_sit_out and any(request.priority <= first.priority for request in step.given)

    # --- rule 6: half of a tier's tokens for the least work, half for the oldest ----------------------------

    def _serve_tier(self, step: Step, priority: int, prefilling: list[Request], most: int) -> None:
        """Gives tokens to prompts of one tier, until all prompts of the step have `most`.

        The first half goes to the least work left, the rest to the oldest, both of the client whose turn it is. Each
        half alone is a known rule at half the speed: shortest remaining work first, and first come first served. So a
        prompt waits for at most twice the work of the shorter ones, or twice the work of the older ones, whichever is
        less.

        Example: 400 tokens; a prompt with 24,000 left runs, prompts of 200 and 300 wait. The one of 200 has the least
        work and gets its 200, the oldest gets the other 200.
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
        """The next prompt of a tier to get tokens, of the running ones that are `able` and the waiting ones that may
        start: the first in turn, or of the same client the one with the least work left, the oldest among equals."""
        waiting = None if self._why_closed(step) else self._waiting.first(priority)
        first = min(_some(*able, waiting), key=self._turn, default=None)
        if first is None or not by_work:
            return first
        shortest = None if waiting is None else self._shortest(step, waiting)
        return min([other for other in _some(first, *able, shortest) if other.client == first.client], key=self._work)

    # --- rule 7: which requests start -----------------------------------------------------------------------

    def _next_to_start(self, step: Step) -> Request | None:
        """The waiting request for whose start a step is composed: the oldest of the best tier, or else its shortest;
        None if neither can start. Grows the pool if necessary."""
        heads = self._waiting.heads() if self._why_closed(step) is None else []
        if not heads:
            return None
        promoted, why = self._aged.promoted(), None
        for request in dict.fromkeys(_some(heads[0], self._shortest(step, heads[0]))):
            if (why := self._what_lacks(request, self._blocks.find_prefix(request), promoted)) is None:
                return request
        step.closed_because, step.closed_by = why, heads[0]
        return None if promoted is None else heads[0]

    def _shortest(self, step: Step, oldest: Request) -> Request | None:
        """The waiting request with the least work of the client of `oldest`, the first of its tier, if it is `oldest`
        or may overtake it.

        Requests with less work may start before the oldest, while their work in all is no more than the oldest's own
        and may take the last free seat ahead of it only once. So it waits for room at most about twice as long as in
        order of arrival. Example: while 24,000 tokens wait for blocks, 120 prompts of 200 tokens may start first.
        Other clients' requests may not: with short prompts and long outputs, they would have every other seat.
        """
        shortest = self._waiting.shortest(oldest)
        if shortest is None or shortest is oldest:
            return oldest
        if step.no_overtaking is not None or (oldest.has_lost_seat and self._is_last_seat()):
            return None
        num_tokens = oldest.num_tokens_overtaken + self._work(shortest)
        return shortest if num_tokens <= self._work(oldest) else None

    def _is_last_seat(self) -> bool:
        return len(self._table.running) + 1 + (self._aged.promoted() is not None) >= self._limits.max_num_seqs

    def _start(self, step: Step, request: Request) -> BlockIds | None:
        """Starts the oldest or the shortest request of a tier if there is room, and returns its block tables; its
        cached prefix counts as computed. If there is no room for the oldest, no request starts after it in this
        step."""
        num_given = step.num_decode_tokens + step.given.total()
        if _is_whole(request) and num_given + request.num_tokens > self._limits.max_num_batched_tokens:
            step.closed_because, step.closed_by = _NO_TOKENS, request
            return None
        promoted, why = self._aged.promoted(), self._why_closed(step)
        if why is not None and (request is not promoted or why is _HELD):
            return None
        oldest = self._waiting.first(request.priority)
        if self._waiting.parked_at(request) is not None:
            return None
        prefix = self._blocks.find_prefix(request)
        why = self._what_lacks(request, prefix, promoted)
        if why is None and self._is_deferred(request):
            if self._waiting.parked_at(request) is not None:
                return None
            why = _MANY_LOADS
        elif why is None and self._table.disk is not None:  # a load may have begun, and taken blocks of the prefix
            prefix = self._blocks.find_prefix(request)
            why = self._what_lacks(request, prefix, promoted)
        if why is not None:
            if request is oldest:
                step.closed_because, step.closed_by = why, request
            step.no_overtaking = why
            return None
        if oldest is not None and oldest is not request:
            oldest.num_tokens_overtaken += request.num_tokens - len(prefix) * BLOCK_SIZE
            oldest.has_lost_seat |= self._is_last_seat()
        block_ids = self._table.admit(step, request, prefix, is_promoted=request is promoted)
        self._aged.on_start(request)
        cost = self._budget.cost(request.num_computed_tokens, self._work(request))
        self._recent.add(request.priority, cost, self._waiting.now)
        return block_ids

    def _is_deferred(self, request: Request) -> bool:
        """Whether a request that could start waits for a prefix on disk, or for its next image, instead."""
        if self._table.disk is not None and self._table.disk.defers(request):
            return True
        return bool(request.images) and self.images.parks(request)

    def _what_lacks(self, request: Request, prefix: CachedPrefix, promoted: Request | None) -> str | None:
        """What is missing for a request to start; None if nothing is. Grows the pool if necessary."""
        num_seats, num_blocks = self._needs(request, prefix, promoted)
        if num_seats > 0:
            return _KEPT_SEAT
        return None if self._blocks.make_room(num_blocks) else _NO_BLOCKS

    def _needs(self, request: Request, prefix: CachedPrefix, promoted: Request | None) -> tuple[int, int]:
        """How many more seats and how many free blocks a request needs to start. The blocks are its own, those of
        `promoted` if another request waits for its aged share, and the headroom of running requests that it cannot
        preempt."""
        blocks, running = self._blocks, self._table.running
        num_seats = len(running) + 1 - self._limits.max_num_seqs
        num_blocks = blocks.num_new_blocks(request, request.num_tokens, prefix)
        if promoted is not None and promoted is not request:
            num_seats += 1
            num_blocks += blocks.num_new_blocks(promoted, promoted.num_tokens, blocks.find_prefix(promoted))
        num_kept = len(running) - len(self._worse_tiers(request))
        return num_seats, num_blocks + headroom(running[:num_kept], blocks.groups.windows)

    # --- rule 8: which requests are preempted ---------------------------------------------------------------

    def preempt_worse(self, step: Step) -> None:
        """Preempts the fewest running requests of worse tiers that make room for the next waiting request: the oldest
        of the best tier, or else the shortest. Preempts none if all of them would not make enough room, or if the step
        has no tokens for the request."""
        heads, running = self._waiting.heads(), self._table.running
        if not heads or not running or running[-1].priority <= heads[0].priority or self.is_held:
            return
        able = _some(heads[0], self._shortest(step, heads[0]))
        request = next((request for request in able if self._would_compute(step, request)), None)
        if request is None or self._is_deferred(request):
            return
        preempted = self._fewest_preempted(request)
        if preempted and self._promote_aged(request):
            preempted = self._fewest_preempted(request)
        for other in preempted:
            self._table.preempt(other)

    def _fewest_preempted(self, request: Request) -> list[Request]:
        """The last requests in `by_holdings` whose seats and blocks are enough for `request`. Grows the pool if that
        spares one."""
        prefix, worse = self._blocks.find_prefix(request), by_holdings(self._worse_tiers(request)[::-1])[::-1]
        num_seats, num_blocks = self._needs(request, prefix, self._aged.promoted())
        num_freed = self._blocks.num_freed_in_turn((other.request_id for other in worse), prefix)
        for count, num_freed_blocks in enumerate(num_freed):
            if num_seats <= count and self._blocks.make_room(num_blocks - num_freed_blocks):
                return worse[:count]
        return []

    def _promote_aged(self, request: Request) -> bool:
        """Promotes running requests that `request` may preempt although they have aged past it and past all waiting
        ones, while the aged share has room: they keep their seats. Whether there is such a request."""
        key = self._waiting.key
        least = min(key(request), *[self._waiting.oldest_age(head.priority)[0] for head in self._waiting.heads()])
        aged = sorted((other for other in self._worse_tiers(request) if key(other) <= least), key=key)
        for count, other in enumerate(aged):
            if not self._aged.may_promote(other):
                return count > 0
            self._aged.promote(other)
        return bool(aged)

    def _worse_tiers(self, request: Request) -> list[Request]:
        """Running requests that `request` may preempt, the worst rank first."""

        def may_go(other: Request) -> bool:
            return other.priority > request.priority and not other.is_promoted

        return list(takewhile(may_go, reversed(self._table.running)))

    def _would_compute(self, step: Step, request: Request) -> bool:
        """Whether a waiting prompt would get tokens in this step, or in the next one if a step is submitted (blocks of
        preempted requests are free only when that has ended)."""
        running, is_prefilling = self._table.running, self._table.is_prefilling
        prefilling = [other for other in running if not other.num_in_flight and is_prefilling(other)]
        before = [other for other in prefilling if other.priority <= request.priority]
        num_steps = 2 if self._table.submitted else 1
        first = min([*before, request], key=self._turn)
        most, _ = self._shares(first, prefilling, len(running) - len(prefilling))
        wanted = {other: min(self._work(other), num_steps * self._wanted(other)) for other in before}
        left = num_steps * most - sum(wanted[o] for o in before if o.priority < request.priority)
        mates = [other for other in before if other.priority == request.priority]
        before_it = [other for other in mates if self._turn(other) <= self._turn(request)]
        if sum(map(wanted.__getitem__, mates if before_it else [])) < left:
            return True
        shorter = [other for other in mates if self._work(other) < self._work(request)]
        is_its_turn = all(other.client == request.client for other in before_it)
        return is_its_turn and sum(map(wanted.__getitem__, shorter)) < left // 2

    def grow(self, step: Step, request: Request, num_tokens: int) -> BlockIds | None:
        """Blocks for the next `num_tokens` tokens, preempting those last in `by_holdings` if necessary. None if the
        request must sit out this step: it waits for detached blocks or for memory, or was preempted itself."""
        table = self._table
        while True:
            block_ids = self._blocks.allocate(request, request.num_computed_tokens + num_tokens)
            if block_ids is not None:
                return block_ids
            if self._blocks.num_detached_blocks or table.is_memory_coming():
                return None
            if table.disk is not None and table.disk.give_up_load():
                continue
            victim = by_holdings(table.running)[-1]
            if len(table.running) == 1:
                step.starving = victim
                return None
            table.preempt(victim)
            if victim is request:
                return None

    def _move_windows(self, step: Step, request: Request) -> BlockIds | None:
        """Blocks for the next chunk of a running prompt in layers with a window. On admission it got as many as it ever
        holds there, and the blocks that it has given up since pay for the new ones, unless other requests hold them. In
        that case it may have to sit out a step (None), or preempt others if there would be no step otherwise."""
        if step.requests or step.given or self._table.submitted:
            return self._blocks.allocate(request, request.num_tokens)
        return self.grow(step, request, request.num_tokens - request.num_computed_tokens)

    def next_of_all(self) -> Request | None:
        """The waiting request that would start next if there were memory for it; None if all are parked."""
        return self._aged.promoted() or next(iter(self._waiting.heads()), None)


def headroom(running: Sequence[Request], windows: Sequence[int | None] = (None,)) -> int:
    """The number of blocks to keep free for the `running` requests. `windows` are those of the layer groups: in a group
    with a window, a request whose window is full gives up as many blocks as it takes.

    Example: 8 running requests with `max_tokens` open count 1,024 tokens each. A tenth of 8,192 is 819: 26 blocks of
    32.
    """
    remaining = [0] * len(windows)
    for request in running:
        num_tokens = request.num_tokens
        num_left = min(request.max_total_tokens - num_tokens, _MAX_REMAINING)
        for group, window in enumerate(windows):
            remaining[group] += num_left if window is None else min(num_left, max(0, window - num_tokens))
    return sum([num_blocks_for(int(_HEADROOM * num_tokens)) for num_tokens in remaining])


def _some(*requests: Request | None) -> list[Request]:
    return [request for request in requests if request is not None]


def _is_whole(request: Request) -> bool:
    """Whether an input must be computed in one step."""
    return request.pooling is not None and request.pooling.is_whole
