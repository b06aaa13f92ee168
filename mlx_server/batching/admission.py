"""Whether, and in which order, waiting requests start."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

from mlx_server.batching.headroom import AdmissionHeadroom
from mlx_server.batching.limits import SchedulerCounters, SchedulerLimits
from mlx_server.batching.prefix_cache import CachedPrefix
from mlx_server.batching.request_table import RequestTable
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds
from mlx_server.request import Priority, Request, RequestStatus

MAX_DEFERRALS = 8
"""How often others may be taken before a request because more of their prefix is cached."""

CACHE_ORDER_WINDOW = 0.5
"""Effective priorities closer than this count as equal for the cache-aware order (5 s of waiting at the
default aging rate)."""

MAX_CANDIDATES = 8
"""Waiting requests that are put in order at a time."""

MAX_LOOKED_AT = 32
"""Waiting requests looked at for as many candidates: those who wait for a prefix are passed by."""


AGED_SHARE = 8
"""One in so many seats, and of a step's prompt tokens, is for those who have aged past better tiers."""


class AdmissionControl:
    """Moves requests from waiting to running, at two gates: a seat in the batch, and blocks for all of the
    request's tokens beside the headroom that those who run will need (unless they would give way to it).

    While it `is_held`, nobody starts beside one who runs.

    Better tiers come first, and within one the longest wait. Who has aged past all who wait of better tiers is
    promoted: it takes the next seat, or keeps its own against them. A share of the seats and of the blocks may be held
    so, and who needs n times the share by itself comes after n - 1 of better tiers. That share is what aging is worth,
    not the whole server: a thousand batch requests that have waited for a minute do not stand before the next one of a
    person.

    Admission stops at the first request that finds no room, and those that are passed over for want of
    tokens keep their room, so that nobody is overtaken for being large.
    """

    def __init__(self, table: RequestTable, limits: SchedulerLimits, counters: SchedulerCounters) -> None:
        self.headroom = AdmissionHeadroom(table.blocks.groups)
        self._table = table
        self._limits = limits
        self._counters = counters
        self.is_held = False
        self._is_closed = False
        self._reserved: dict[str, int] = {}
        self._started = Counter({Priority.HIGH: AGED_SHARE})  # by tier, since the last promotion

    def open(self) -> None:
        """A new step begins: try again from the first waiting request."""
        self._is_closed = False
        self._reserved.clear()

    def promoted(self) -> Request | None:
        """The waiting request that has aged past all better tiers', if one more may have its seat by its age."""
        oldest, first = self._table.waiting.peek(), self._table.waiting.first_by_tier()
        if oldest is None or first is None or oldest.priority == first.priority:
            return None
        return oldest if self._may_promote(oldest) else None

    def first(self) -> Request | None:
        """The waiting request that starts before all others, or keeps them from starting."""
        return self.promoted() or self._table.waiting.first_by_tier()

    def may_come_first(self, request: Request) -> bool:
        """Whether a candidate may have its part of a step before those of better tiers: it runs, or takes no seat that
        one of these waits for, or is promoted."""
        if request.status is RequestStatus.RUNNING or request is self.promoted():
            return True
        first = self._table.waiting.first_by_tier()
        return first is not None and first.priority == request.priority

    def candidates(self, now: float) -> list[Request]:
        """The next few waiting requests that may start now, in the order in which to try them; none if there
        is no seat, or no room for the first."""
        if self._is_closed or self._is_holding() or len(self._table.running) >= self._limits.max_num_seqs:
            return []
        waiting = self._table.waiting
        found: list[tuple[float, Request, int]] = []
        for request in islice(waiting.by_tier(), MAX_LOOKED_AT):
            prefix = self._find_prefix(request)
            if self._waits_for_prefix(request, prefix, now):
                continue
            if not found and not self._has_room(request, prefix):
                break
            found.append((waiting.key(request), request, len(prefix)))
            if len(found) == MAX_CANDIDATES:
                break
        order = [request for _, request, _ in found]
        if len(found) > 1 and self._limits.cache_aware_order:
            by_prefix = cache_aware_order(found)
            if by_prefix[0] is order[0] or self._has_room(by_prefix[0], self._find_prefix(by_prefix[0])):
                order = by_prefix
        promoted = self.promoted()
        if promoted is None or self._waits_for_prefix(promoted, self._find_prefix(promoted), now):
            return order
        return [promoted, *(request for request in order if request is not promoted)]

    def first_token(self, request: Request) -> int:
        """Position at which computing goes on, or would start if the request were admitted now."""
        if request.status is RequestStatus.RUNNING:
            return request.num_computed_tokens
        return len(self._find_prefix(request)) * BLOCK_SIZE

    def admit(self, request: Request, now: float) -> BlockIds | None:
        """Lets a waiting request run, if it can: its block tables, the cached prefix included and counted as
        computed. Once one has found no room, nobody is admitted until `open` but those it was kept for."""
        if self._is_holding() or (self._is_closed and request.request_id not in self._reserved):
            return None
        prefix = self._find_prefix(request)
        if self._waits_for_prefix(request, prefix, now):
            return None
        promoted = self._keep_room_for_promoted(now)
        if not self._has_room(request, prefix):
            self._is_closed = True
            return None
        self._reserved.pop(request.request_id, None)
        is_promoted = request is promoted
        if not is_promoted:
            self._count_deferrals(request)
        block_ids = self._table.admit(request, prefix, is_promoted=is_promoted)
        if is_promoted:
            self._started.clear()
        self._started[request.priority] += not is_promoted
        if request.first_scheduled_s is None:
            self._count_first_admission(request, now)
        self._table.prefixes.start(request)
        return block_ids

    def reserve(self, request: Request, now: float) -> None:
        """A waiting request is passed over for now: those admitted until `open` leave it a seat and
        blocks, unless it waits for its prefix anyway."""
        prefix = self._find_prefix(request)
        if not self._is_closed and not self._waits_for_prefix(request, prefix, now):
            num_blocks = self._table.blocks.num_new_blocks(request, request.num_tokens, prefix)
            self._reserved[request.request_id] = num_blocks

    def preemptions_for_better_tier(self, now: float, has_tokens_for: Callable[[Request], bool]) -> list[Request]:
        """If the first waiting request that could start finds no room beside one that is to be promoted: the fewest
        running requests, of worse tiers, whose preemption makes it; none if all of them would not, or if the step
        has no tokens for it."""
        request = self._first_of_better_tier(now)
        if request is None or self._is_holding() or not has_tokens_for(request):
            return []
        if self._fewest_preempted(request):
            self._promote_aged(request)
        self._keep_room_for_promoted(now)
        return self._fewest_preempted(request)

    def _first_of_better_tier(self, now: float) -> Request | None:
        """The first waiting request of a better tier than the worst that runs, but for those that wait for a prefix."""
        running = self._table.running
        for request in islice(self._table.waiting.by_tier(), MAX_LOOKED_AT if running else 0):
            if running[-1].priority <= request.priority:
                break
            if not self._waits_for_prefix(request, self._find_prefix(request), now):
                return request
        return None

    def _is_holding(self) -> bool:
        """Someone must run, or the memory that is waited for would never come back."""
        return self.is_held and bool(self._table.running)

    def _fewest_preempted(self, request: Request) -> list[Request]:
        prefix = self._find_prefix(request)
        worse = self._worse_tiers(request)
        num_seats, num_blocks = self._needs(request, prefix)
        num_freed = self._table.blocks.num_freed_in_turn((other.request_id for other in worse), prefix)
        for count, num_freed_blocks in enumerate(num_freed):
            if num_seats <= count and self._table.blocks.make_room(num_blocks - num_freed_blocks):
                return worse[:count]
        return []

    def _promote_aged(self, request: Request) -> None:
        """Running requests that `request` may preempt, but that have aged past it and past all others who wait, keep
        their seats, as far as the share goes."""
        key = self._table.waiting.key
        least = min(map(key, (request, self._table.waiting.peek() or request)))
        aged = sorted((other for other in self._worse_tiers(request) if key(other) <= least), key=key)
        for other in aged:
            if not self._may_promote(other):
                break
            self._table.promote(other)
            self._started.clear()

    def _keep_room_for_promoted(self, now: float) -> Request | None:
        promoted = self.promoted()
        if promoted is not None:
            self.reserve(promoted, now)
        return promoted

    def _may_promote(self, request: Request) -> bool:
        """Whether the share has room for one more, or this one's turn has come if it is more than a share alone."""
        blocks = self._table.blocks
        beside = [other for other in self._table.running if other.is_promoted]
        num_blocks = sum(blocks.groups.num_needed(other.num_tokens) for other in [*beside, request])
        num_shares = AGED_SHARE * max((len(beside) + 1) / self._limits.max_num_seqs, num_blocks / blocks.num_blocks)
        num_better = sum(count for priority, count in self._started.items() if priority < request.priority)
        return num_shares <= 1.0 or (not beside and num_better >= min(math.ceil(num_shares), AGED_SHARE) - 1)

    def _worse_tiers(self, request: Request) -> list[Request]:
        """Running requests that `request` may preempt, the worst first: the last that run."""
        worse: list[Request] = []
        for other in reversed(self._table.running):
            if other.is_promoted or other.priority <= request.priority:
                break
            worse.append(other)
        return worse

    def _find_prefix(self, request: Request) -> CachedPrefix:
        blocks = self._table.blocks
        return blocks.find_prefix(request) if _may_hit(request) else blocks.no_prefix

    def _waits_for_prefix(self, request: Request, prefix: CachedPrefix, now: float) -> bool:
        if not self._limits.deduplicate_prefixes or not _may_hit(request):
            return False
        return self._table.prefixes.should_wait(request, len(prefix), now)

    def _has_room(self, request: Request, prefix: CachedPrefix) -> bool:
        """Whether seats and blocks suffice."""
        num_seats, num_blocks = self._needs(request, prefix)
        return num_seats <= 0 and self._table.blocks.make_room(num_blocks)

    def _needs(self, request: Request, prefix: CachedPrefix) -> tuple[int, int]:
        """How many more seats must become free for a request to start, and how many blocks be free. Nothing is kept
        free for requests that it may preempt, nor for those who wait if it is promoted."""
        running = self._table.running
        reserved = [count for request_id, count in self._reserved.items() if request_id != request.request_id]
        if reserved and request is self.promoted():
            reserved = []
        num_seats = len(running) + len(reserved) + 1 - self._limits.max_num_seqs
        worse = self._worse_tiers(request)
        headroom = self.headroom.num_blocks(running[: len(running) - len(worse)])
        num_new_blocks = self._table.blocks.num_new_blocks(request, request.num_tokens, prefix)
        return num_seats, num_new_blocks + sum(reserved) + headroom

    def _count_deferrals(self, admitted: Request) -> None:
        """Counts it for those of its tier that come before `admitted` and are passed over."""
        admitted.num_deferrals = 0
        for other in self._table.waiting.by_tier():
            if other is admitted:
                break
            other.num_deferrals += other.priority == admitted.priority

    def _count_first_admission(self, request: Request, now: float) -> None:
        num_cached = request.num_computed_tokens
        request.first_scheduled_s = now
        request.num_cached_tokens = num_cached
        if _may_hit(request) and self._table.blocks.enable_prefix_caching:
            self._counters.num_prefix_query_tokens += request.num_prompt_tokens
            self._counters.num_prefix_hit_tokens += num_cached
            self._counters.num_prompt_tokens_cached += num_cached


def cache_aware_order(candidates: Sequence[tuple[float, Request, int]]) -> list[Request]:
    """Candidates (key, request, cached prefix blocks), sorted by tier and key, in the order in which to try them.

    Among those of the first one's base priority whose keys lie within `CACHE_ORDER_WINDOW` of it, longer
    cached prefixes come first, while they are still cached (SGLang's longest-prefix-match policy). It
    differs in that priority comes before, and in that a request that was passed over `MAX_DEFERRALS` times
    takes its own turn, so that nobody starves. A tier never profits at a better one's cost: one that was
    preempted has much cached, and would take back at once the room that it made.
    """
    first_key, first, _ = candidates[0]

    def turn(candidate: tuple[float, Request, int]) -> tuple[int, int]:
        key, request, num_cached = candidate
        if request.priority != first.priority or key > first_key + CACHE_ORDER_WINDOW:
            return 2, 0
        return (0, 0) if request.num_deferrals >= MAX_DEFERRALS else (1, -num_cached)

    return [request for _, request, _ in sorted(candidates, key=turn)]


def _may_hit(request: Request) -> bool:
    """A cached block gives no logits: whoever wants those of the prompt computes it."""
    return request.sampling.prompt_logprobs is None or bool(request.output_token_ids)
