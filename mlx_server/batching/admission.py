"""Who may start: a seat in the batch, and blocks for all of a request's tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from mlx_server.batching.blocks.layer_groups import num_blocks_for
from mlx_server.batching.blocks.prefix_cache import CachedPrefix
from mlx_server.batching.limits import SchedulerCounters, SchedulerLimits
from mlx_server.batching.request_table import RequestTable, Step
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds
from mlx_server.request import Priority, Request

AGED_SHARE = 8
"""One in so many seats, blocks and prompt tokens is for those who have aged past better tiers. With a fourth, an eighth
and a sixteenth, the slowest hundredth of LOW's first tokens under a flood of HIGH came after 43, 46 and 57 s, and that
of NORMAL's after 33, 36 and 43 s; HIGH's median was 1.1, 1.2 and 0.9 s. On a slow machine below saturation (`m2-max`)
LOW's were 116, 226 and 308 s, NORMAL's 91, 64 and 44 s."""

_HEADROOM = 0.1
_MOST_REMAINING = 1024
"""Of the tokens that running requests may still add, a tenth keeps its blocks, of 1,024 at most for each, since most
clients leave `max_tokens` open. With none, twice as much is computed again and all takes up to 3 % longer; with a fifth
or more, seats stay empty where answers end early. A share that falls with steps and jumps with preemptions, as SGLang
has it, kept too much: up to 15 % more steps."""

_HELD = "memory is short: nobody starts beside those who run"
_NO_SEAT = "no seat: the last is kept for one who has aged past better tiers"
_NO_BLOCKS = "no room: too few blocks are free"
_NO_TOKENS = "too few tokens are left of the step for an input that must be whole"


def headroom(running: Sequence[Request], windows: Sequence[int | None] = (None,), share: float = _HEADROOM) -> int:
    """Blocks to keep free beside `running`. `windows` are those of the layer groups: where layers see a window only, a
    request whose window is full gives up as much as it takes."""
    remaining = [0] * len(windows)
    for request in running:
        num_tokens = request.num_tokens
        num_left = min(request.max_total_tokens - num_tokens, _MOST_REMAINING)
        for group, window in enumerate(windows):
            remaining[group] += num_left if window is None else min(num_left, max(0, window - num_tokens))
    return sum([num_blocks_for(int(share * num_tokens)) for num_tokens in remaining])


class Admission:
    """Moves requests from waiting to running.

    A request starts if there is a seat, and blocks for all its tokens beside the headroom that those who run will need
    (but not those that would give way to it). The first that finds no room closes the door for the step. While
    admission `is_held`, nobody starts beside one who runs.

    The oldest of a tier may be overtaken by those with less work, as long as theirs comes to no more than its own in
    all and it loses no more than one last seat: so it waits for room at most about twice as long as in the order of
    arrival. While 24,000 tokens wait for blocks, 120 prompts of 200 tokens may start before them.

    Who has aged past all who wait of better tiers is promoted: it takes the next seat, or keeps its own against them.
    Promoted requests hold a share of the seats and of the blocks, no more. One that needs n shares by itself comes
    after n - 1 starts of better tiers: with 8 seats, a share is one seat, and every LOW request that is old enough is
    promoted while no other is; with 4 seats, a seat is two shares, so it waits for one start of a better tier first.
    """

    def __init__(self, table: RequestTable, limits: SchedulerLimits, counters: SchedulerCounters) -> None:
        self.is_held = False
        self._table = table
        self._limits = limits
        self._counters = counters
        self._started = Counter({Priority.HIGH: AGED_SHARE})  # by tier, since the last promotion

    def is_open(self, step: Step) -> bool:
        """Whether somebody may start yet in this step."""
        return not self._is_closed(step) and len(self._table.running) < self._limits.max_num_seqs

    def why_not(self, request: Request, step: Step) -> str | None:
        """What kept a waiting request from starting in a step; None if that had no tokens for it."""
        if (owner := self._table.waiting.parked_for(request)) is not None:
            return f"is parked: {owner} computes the prefix that it begins with"
        if len(self._table.running) >= self._limits.max_num_seqs:
            return f"no seat: {len(self._table.running)} run"
        if step.closed_because is None:
            return None
        first = "" if step.closed_by in (None, request) else f"; {step.closed_by.request_id} comes first"
        return f"{step.closed_because} ({self._table.blocks.num_free_blocks}){first}"

    def promoted(self, now: float) -> Request | None:
        """The oldest waiting request, if it is of a worse tier than the next and the share for aged requests has room
        for it."""
        heads = self._table.waiting.heads(now)
        if len(heads) < 2:
            return None
        oldest = min(heads, key=self._table.waiting.turn)
        return None if oldest is heads[0] or not self._may_promote(oldest) else oldest

    def next_to_start(self, step: Step) -> Request | None:
        """The waiting request whose start a step is made for, if any can start: the oldest of the best tier, or else
        its shortest. The pool grows for it if it must."""
        heads = self._table.waiting.heads(step.now) if self.is_open(step) else []
        if not heads:
            return None
        first, promoted = heads[0], self.promoted(step.now)
        find = self._table.blocks.find_prefix
        for request in dict.fromkeys((first, self.shortest(step, first.priority))):
            if request is not None and (lack := self._make_room(request, find(request), promoted)) is None:
                return request
        step.closed_because, step.closed_by = lack, first
        return None if promoted is None else first

    def shortest(self, step: Step, priority: int) -> Request | None:
        """The waiting request of a tier that has the least work, if it is the oldest or may overtake that one."""
        waiting = self._table.waiting
        oldest, shortest = waiting.oldest(priority, step.now), waiting.shortest(priority, step.now)
        if oldest is None or shortest is None or shortest is oldest:
            return oldest
        if step.is_overtaking_over:
            return None
        if oldest.has_lost_seat and self._is_last_seat(step.now):
            return None
        return shortest if oldest.num_tokens_overtaken + waiting.work(shortest) <= waiting.work(oldest) else None

    def admit(self, step: Step, request: Request) -> BlockIds | None:
        """Lets the oldest or the shortest of a tier run, if it can: its block tables, the cached prefix included and
        counted as computed."""
        if not self._fits(step, request):
            step.closed_because, step.closed_by = _NO_TOKENS, request
            return None
        promoted = self.promoted(step.now)
        if self._is_closed(step) and (request is not promoted or step.closed_because is _HELD):
            return None
        oldest = self._table.waiting.oldest(request.priority, step.now)
        if self._table.waiting.parked_for(request) is not None:
            return None
        prefix = self._table.blocks.find_prefix(request)
        if (lack := self._make_room(request, prefix, promoted)) is not None:
            if request is oldest:
                step.closed_because, step.closed_by = lack, request
            step.is_overtaking_over = True
            return None
        if oldest is not None and oldest is not request:
            oldest.num_tokens_overtaken += request.num_tokens - len(prefix) * BLOCK_SIZE
            oldest.has_lost_seat |= self._is_last_seat(step.now)
        block_ids = self._table.admit(request, prefix, is_promoted=request is promoted)
        self._book_start(request, prefix, step.now)
        return block_ids

    def _fits(self, step: Step, request: Request) -> bool:
        """Whether the step has the tokens of a prompt that must not be cut into chunks."""
        if request.pooling is None or not request.pooling.is_whole:
            return True
        given = step.num_decode_tokens + step.given.total()
        return given + request.num_tokens <= self._limits.max_num_batched_tokens

    def preemptions(self, step: Step, would_compute: Callable[[Request], bool]) -> list[Request]:
        """If the next waiting request finds no room: the fewest running requests of worse tiers whose preemption
        makes it; none if all of them would not, or if the step has no tokens for it (`would_compute`). The next is the
        oldest of the best tier, or else the shortest."""
        heads, running = self._table.waiting.heads(step.now), self._table.running
        if not heads or not running or running[-1].priority <= heads[0].priority or self.is_held:
            return []
        able = (heads[0], self.shortest(step, heads[0].priority))
        request = next((request for request in able if request and would_compute(request)), None)
        if request is None:
            return []
        preempted = self._fewest_preempted(request, step.now)
        if preempted and self._promote_aged(request, step.now):
            preempted = self._fewest_preempted(request, step.now)
        return preempted

    def _is_closed(self, step: Step) -> bool:
        """While admission is held, someone must run, or the memory that is waited for would never come back."""
        if self.is_held and self._table.running:
            step.closed_because, step.closed_by = _HELD, None
        return step.closed_because is not None

    def _fewest_preempted(self, request: Request, now: float) -> list[Request]:
        """The pool grows if that spares one of them."""
        prefix = self._table.blocks.find_prefix(request)
        worse = self._worse_tiers(request)
        num_seats, num_blocks = self._needs(request, prefix, self.promoted(now))
        num_freed = self._table.blocks.num_freed_in_turn((other.request_id for other in worse), prefix)
        for count, num_freed_blocks in enumerate(num_freed):
            if num_seats <= count and self._table.blocks.make_room(num_blocks - num_freed_blocks):
                return worse[:count]
        return []

    def _promote_aged(self, request: Request, now: float) -> bool:
        """Running requests that `request` may preempt, but that have aged past it and past all others who wait, keep
        their seats, as far as the share goes. Whether there is one."""
        key = self._table.waiting.key
        least = min(map(key, (request, *self._table.waiting.heads(now))))
        aged = sorted((other for other in self._worse_tiers(request) if key(other) <= least), key=key)
        for count, other in enumerate(aged):
            if not self._may_promote(other):
                return count > 0
            self._table.promote(other)
            self._started.clear()
        return bool(aged)

    def _may_promote(self, request: Request) -> bool:
        """Whether the share has room for one more, or this one's turn has come if it is more than a share alone."""
        blocks = self._table.blocks
        beside = [other for other in self._table.running if other.is_promoted]
        num_blocks = sum([blocks.groups.num_needed(other.num_tokens) for other in [*beside, request]])
        num_shares = AGED_SHARE * max((len(beside) + 1) / self._limits.max_num_seqs, num_blocks / blocks.num_blocks)
        num_better = sum([count for priority, count in self._started.items() if priority < request.priority])
        return num_shares <= 1.0 or (not beside and num_better >= min(math.ceil(num_shares), AGED_SHARE) - 1)

    def _worse_tiers(self, request: Request) -> list[Request]:
        """Running requests that `request` may preempt, the worst first: the last that run."""
        worse: list[Request] = []
        for other in reversed(self._table.running):
            if other.is_promoted or other.priority <= request.priority:
                break
            worse.append(other)
        return worse

    def _make_room(self, request: Request, prefix: CachedPrefix, promoted: Request | None) -> str | None:
        """Has the pool grow for a request's start if it must; what is missing all the same, None if nothing."""
        num_seats, num_blocks = self._needs(request, prefix, promoted)
        if num_seats > 0:
            return _NO_SEAT
        return None if self._table.blocks.make_room(num_blocks) else _NO_BLOCKS

    def _needs(self, request: Request, prefix: CachedPrefix, promoted: Request | None) -> tuple[int, int]:
        """How many more seats must become free for a request to start, and how many blocks be free: its own, those of
        `promoted`, which waits for its seat beside, and the headroom of those that it cannot preempt."""
        blocks, running = self._table.blocks, self._table.running
        num_seats = len(running) + 1 - self._limits.max_num_seqs
        num_blocks = blocks.num_new_blocks(request, request.num_tokens, prefix)
        if promoted is not None and promoted is not request:
            num_seats += 1
            num_blocks += blocks.num_new_blocks(promoted, promoted.num_tokens, blocks.find_prefix(promoted))
        worse = self._worse_tiers(request)
        kept = headroom(running[: len(running) - len(worse)], blocks.groups.windows)
        return num_seats, num_blocks + kept

    def _is_last_seat(self, now: float) -> bool:
        return len(self._table.running) + 1 + (self.promoted(now) is not None) >= self._limits.max_num_seqs

    def _book_start(self, request: Request, prefix: CachedPrefix, now: float) -> None:
        if request.is_promoted:
            self._started.clear()
        else:
            self._started[request.priority] += 1
        request.num_rounded_tokens = max(request.num_rounded_tokens, prefix.num_rounded * BLOCK_SIZE)
        if request.first_scheduled_s is not None:
            return
        request.first_scheduled_s = now
        request.num_cached_tokens = num_cached = request.num_computed_tokens
        if self._table.blocks.may_hit(request):
            self._counters.num_prefix_query_tokens += request.num_prompt_tokens
            self._counters.num_prefix_hit_tokens += num_cached
            self._counters.num_prompt_tokens_cached += num_cached
            self._counters.num_prompt_tokens_from_disk += min(request.num_loaded_tokens, num_cached)
