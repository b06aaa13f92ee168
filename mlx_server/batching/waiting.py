"""Everyone who waits to run: by tier and age, by the work left, or parked until a common prefix is computed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain

from mlx_server.batching.block_manager import PagedBlockManager
from mlx_server.batching.priority_queue import OrderedRequests, PriorityQueueWithAging
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Request, RequestStatus

MAX_PREFIX_WAIT_S = 60.0
"""Nobody waits for longer than this for a prefix that others compute."""


class WaitingRequests:
    """The queue of one scheduler.

    Who may start next is found in two orders of each tier: by age and by work. The work of a request is what it would
    compute if it started now: its tokens that are not cached. It is looked up when the request comes, and again when
    the request is looked at: O(log n), however many wait and however long their prefixes are.

    A request whose next uncached block is on its way, computed by one who runs, is parked: it is in neither order
    until that one has computed what both have in common, has ended, or was preempted. Then it hits, instead of
    computing the same blocks beside the first: N cold arrivals of one prefix compute it once. Nobody waits so for an
    owner of a worse tier, which might be kept from running itself, nor for longer than `MAX_PREFIX_WAIT_S` in all.
    """

    def __init__(self, blocks: PagedBlockManager, aging_rate: float, *, deduplicates: bool = True) -> None:
        self.by_age = PriorityQueueWithAging(aging_rate)
        self._blocks = blocks
        self._deduplicates = deduplicates
        self._by_work: dict[int, OrderedRequests] = {}
        self._work: dict[str, int] = {}  # of everyone who waits, when it was last looked at
        self._owners: dict[bytes, Request] = {}  # who computes which block
        self._owned: dict[str, deque[tuple[int, bytes]]] = {}  # places in the prompt and hashes, in order
        self._parked: dict[bytes, dict[str, Request]] = {}  # by the block that they wait for
        self._parked_at: dict[str, bytes] = {}
        self._parked_since: dict[str, float] = {}  # of everyone who waits and ever was parked
        self._to_expire: deque[tuple[float, Request]] = deque()  # since when, of all who were parked of late

    def __len__(self) -> int:
        return len(self._work)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._work

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no particular order."""
        return chain(self.by_age, *[parked.values() for parked in self._parked.values()])

    @property
    def priorities(self) -> set[int]:
        """The tiers of which somebody may start."""
        return {priority for priority, tier in self._by_work.items() if tier}

    def num_ready(self, priority: int) -> int:
        """Requests of a tier that are not parked."""
        return len(self._by_work.get(priority, ()))

    @property
    def num_parked(self) -> int:
        """Requests that wait for a prefix which another one computes."""
        return len(self._parked_at)

    def in_order(self) -> Iterator[Request]:
        """By effective priority, parked ones last. None may come or go meanwhile."""
        return chain(self.by_age.in_order(), *[parked.values() for parked in self._parked.values()])

    def push(self, request: Request) -> None:
        """A request waits."""
        assert request.request_id not in self._work, f"{request} waits already"
        self._enter(request)

    def remove(self, request: Request) -> None:
        """A request starts, or has ended."""
        self._leave(request)
        del self._work[request.request_id]
        self._parked_since.pop(request.request_id, None)

    # --- the two orders ---------------------------------------------------------------------------------------

    def work(self, request: Request) -> int:
        """Known tokens that are left to compute of a request that runs, or of one that waits if it started now."""
        if request.status is RequestStatus.RUNNING:
            return request.num_tokens - request.num_computed_tokens
        return request.num_tokens - self._blocks.num_cached(request) * BLOCK_SIZE

    def first(self, now: float) -> Request | None:
        """The oldest of the best tier that has somebody who is not parked."""
        return self._first(self.by_age.first_by_tier, now)

    def most_urgent(self, now: float) -> Request | None:
        """The one of the best effective priority."""
        return self._first(self.by_age.peek, now)

    def oldest(self, priority: int, now: float) -> Request | None:
        """The oldest of a tier."""
        return self._first(lambda: self.by_age.first_of(priority), now)

    def shortest(self, priority: int, now: float) -> Request | None:
        """The one of a tier that has the least work, the older one among equals."""
        tier = self._by_work.get(priority)
        while tier and (request := tier.first()) is not None:
            if not self._park(request, now) and not self._update(request):
                return request
        return None

    def is_ready(self, request: Request, now: float) -> bool:
        """Whether one who waits has nobody to wait for; it is parked otherwise."""
        return request.request_id not in self._parked_at and not self._park(request, now)

    def parked_for(self, request: Request) -> str | None:
        """The id of the request that computes the prefix which a parked one waits for."""
        block_hash = self._parked_at.get(request.request_id)
        return None if block_hash is None else self._owners[block_hash].request_id

    # --- prefixes that are being computed ---------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """`request` runs: it computes every full block of its prompt that nobody computes already."""
        if not self._deduplicates:
            return
        first, hashes = request.num_computed_tokens // BLOCK_SIZE, request.block_hashes
        mine = deque((index, hashes[index]) for index in range(first, len(hashes)) if hashes[index] not in self._owners)
        if mine:
            self._owners.update((block_hash, request) for _, block_hash in mine)
            self._owned[request.request_id] = mine

    def advance(self, request: Request) -> None:
        """A running request's full blocks are cached now, as far as they are computed."""
        mine = self._owned.get(request.request_id)
        if mine is None:
            return
        num_full = request.num_computed_tokens // BLOCK_SIZE
        while mine and mine[0][0] < num_full:
            self._release(mine.popleft()[1])
        if not mine:
            del self._owned[request.request_id]

    def stop(self, request_id: str) -> None:
        """A running request has left: others compute what it would have."""
        for _, block_hash in self._owned.pop(request_id, ()):
            self._release(block_hash)

    def expire(self, now: float) -> None:
        """Ends the waits for prefixes that have taken too long."""
        while self._to_expire and now - self._to_expire[0][0] >= MAX_PREFIX_WAIT_S:
            _, request = self._to_expire.popleft()
            is_parked = request.status is RequestStatus.WAITING and request.request_id in self._parked_at
            if is_parked and self._is_over(request, now):
                self._leave(request)
                self._enter(request)

    def check_integrity(self) -> None:
        """Asserts that everyone who waits is in both orders, or parked for one who runs."""
        self.by_age.check_integrity()
        ready = {request.request_id for request in self.by_age}
        by_work = [request.request_id for tier in self._by_work.values() for request in tier]
        assert sorted(by_work) == sorted(ready), "the two orders hold different requests"
        assert ready | set(self._parked_at) == set(self._work), "a request that waits is nowhere"
        assert not ready & set(self._parked_at), "a parked request may start"
        parked = {name: block_hash for block_hash, names in self._parked.items() for name in names}
        assert parked == self._parked_at, "a parked request is not where it says"
        assert set(self._parked) <= set(self._owners), "a request waits for a block that nobody computes"

    def _first(self, peek: Callable[[], Request | None], now: float) -> Request | None:
        while (request := peek()) is not None and self._park(request, now):
            pass
        return request

    def _enter(self, request: Request) -> None:
        self.by_age.push(request)
        work = self._work[request.request_id] = self.work(request)
        self._by_work.setdefault(request.priority, OrderedRequests()).push(request, work)

    def _leave(self, request: Request) -> None:
        request_id = request.request_id
        block_hash = self._parked_at.pop(request_id, None)
        if block_hash is None:
            self.by_age.remove(request_id)
            self._by_work[request.priority].remove(request_id)
            return
        del self._parked[block_hash][request_id]
        if not self._parked[block_hash]:
            del self._parked[block_hash]

    def _update(self, request: Request) -> bool:
        """Whether its work has become another since it was last looked at; then it has found its new place."""
        work = self.work(request)
        if work == self._work[request.request_id]:
            return False
        self._work[request.request_id] = work
        self._by_work[request.priority].push(request, work)
        return True

    def _park(self, request: Request, now: float) -> bool:
        """Whether a request waits from now on: for the last block that it has in common with the one who computes its
        next."""
        if not self._owners or not self._blocks.may_hit(request) or self._is_over(request, now):
            return False
        hashes = request.block_hashes
        next_block, end = self._blocks.num_cached(request), min(len(hashes), (request.num_tokens - 1) // BLOCK_SIZE)
        owner = self._owners.get(hashes[next_block]) if next_block < end else None
        if owner is None or owner.priority > request.priority:
            return False
        num_common = bisect_left(range(next_block, end), True, key=lambda i: self._owners.get(hashes[i]) is not owner)
        last = hashes[next_block + num_common - 1]
        self._leave(request)
        if request.request_id not in self._parked_since:
            self._parked_since[request.request_id] = now
            self._to_expire.append((now, request))
        self._parked.setdefault(last, {})[request.request_id] = request
        self._parked_at[request.request_id] = last
        return True

    def _release(self, block_hash: bytes) -> None:
        """Nobody computes the block any more."""
        del self._owners[block_hash]
        for request in self._parked.pop(block_hash, {}).values():
            del self._parked_at[request.request_id]
            self._enter(request)

    def _is_over(self, request: Request, now: float) -> bool:
        return now - self._parked_since.get(request.request_id, math.inf) >= MAX_PREFIX_WAIT_S
