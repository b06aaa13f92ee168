"""The queue of those who wait: by tier and age, by the work left, or parked until a common prefix is computed."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from itertools import chain

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Request, RequestStatus

MAX_PREFIX_WAIT_S = 60.0
"""Nobody waits for longer than this for a prefix that others compute."""

_Entry = tuple[float, float, int, Request]
"""Key, arrival, number of the push, request."""


class OrderedRequests:
    """Requests by a key, the smallest first; ties go to the earlier arrival, then to the earlier push.

    A sorted list: to push and to remove moves pointers, of which a queue of 10,000 has 80 KB. A heap that drops its
    dead later would need more code for no gain at that length.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._entry_of: dict[str, _Entry] = {}
        self._num_pushes = 0

    def __iter__(self) -> Iterator[Request]:
        """In order. None may come or go meanwhile."""
        return (entry[3] for entry in self._entries)

    def push(self, request: Request, key: float) -> None:
        """Adds a request that is not here."""
        self._num_pushes += 1
        entry = self._entry_of[request.request_id] = (key, request.arrival_s, self._num_pushes, request)
        insort(self._entries, entry)

    def remove(self, request: Request) -> None:
        """Takes a request out wherever it stands."""
        entry = self._entry_of.pop(request.request_id)
        del self._entries[bisect_left(self._entries, entry)]

    def first(self) -> Request | None:
        """The request of the smallest key, left in place."""
        return self._entries[0][3] if self._entries else None

    def check_integrity(self) -> None:
        """Asserts that the order is one, of exactly one entry for each request."""
        assert self._entries == sorted(self._entry_of.values()), "a list of requests is out of order"


class PriorityQueueWithAging:
    """The queue of one scheduler.

    Who may start next is found in two orders of each tier: by age and by work. The work of a request is what it would
    compute if it started now: its tokens that are not cached. What is cached is remembered from when the request was
    last looked at, and holds in O(1) as long as the cache still ends there, however long the prefix is.

    `effective_priority(now) = priority - aging_rate * (now - arrival)`. All requests age at one rate, so the order at
    any moment is that of `priority + aging_rate * arrival`, their `key`, which never changes. With an aging rate of
    0.1, a LOW request (2) of second 0 and a HIGH one (0) of second 20 have the key 2.0 both: from then on the LOW one
    is as urgent.

    A request whose next uncached block is on its way, computed by one who runs, is parked: it is in neither order
    until that one has computed what both have in common, has ended, or was preempted. Then it hits, instead of
    computing the same blocks beside the first: N cold arrivals of one prefix compute it once. Nobody waits so for an
    owner of a worse tier, which might be kept from running itself, nor for longer than `MAX_PREFIX_WAIT_S` in all.
    """

    def __init__(self, blocks: PagedBlockManager, aging_rate: float, *, deduplicates: bool = True) -> None:
        assert aging_rate >= 0.0
        self._aging_rate = aging_rate
        self._blocks = blocks
        self._deduplicates = deduplicates
        self._by_age: defaultdict[int, OrderedRequests] = defaultdict(OrderedRequests)
        self._by_work: defaultdict[int, OrderedRequests] = defaultdict(OrderedRequests)
        self._num_cached: dict[str, int] = {}  # blocks of everyone who waits, when it was last looked at
        self._owners: dict[bytes, Request] = {}  # who computes which block
        self._owned: dict[str, deque[tuple[int, bytes]]] = {}  # places in the prompt and hashes, in order
        self._parked: dict[bytes, dict[str, Request]] = {}  # by the block that they wait for
        self._parked_at: dict[str, bytes] = {}
        self._parked_since: dict[str, float] = {}  # of everyone who waits and ever was parked
        self._to_expire: OrderedDict[str, Request] = OrderedDict()  # of those, whose wait has not become too long
        self._heads: list[Request] | None = None  # as they were found, while nobody comes, goes or starts

    def __len__(self) -> int:
        return len(self._num_cached)

    def __iter__(self) -> Iterator[Request]:
        """By effective priority, parked ones last. None may come or go meanwhile."""
        by_age = heapq.merge(*self._by_age.values(), key=self.turn)
        return chain(by_age, *[parked.values() for parked in self._parked.values()])

    @property
    def num_parked(self) -> int:
        """Requests that wait for a prefix which another one computes."""
        return len(self._parked_at)

    def push(self, request: Request) -> None:
        """A request waits."""
        assert request.request_id not in self._num_cached, f"{request} waits already"
        self._num_cached[request.request_id] = 0
        self._enter(request)

    def remove(self, request: Request) -> None:
        """A request starts, or has ended."""
        self._leave(request)
        del self._num_cached[request.request_id]
        if self._parked_since.pop(request.request_id, None) is not None:
            self._to_expire.pop(request.request_id, None)

    # --- the two orders ---------------------------------------------------------------------------------------

    def key(self, request: Request) -> float:
        """The time-free order: smaller is sooner, and differences are those of effective priorities."""
        return request.priority + self._aging_rate * request.arrival_s

    def turn(self, request: Request) -> tuple[float, float]:
        """The order of effective priorities, the earlier arrival first among equals."""
        return self.key(request), request.arrival_s

    def effective_priority(self, request: Request, now: float) -> float:
        """Base priority less what waiting has earned by `now`."""
        return request.priority - self._aging_rate * (now - request.arrival_s)

    def work(self, request: Request) -> int:
        """Known tokens that are left to compute of a request that runs, or of one that waits if it started now."""
        if request.status is RequestStatus.RUNNING:
            return request.num_tokens - request.num_computed_tokens
        num_cached = self._blocks.num_cached(request, self._num_cached[request.request_id])
        return request.num_tokens - num_cached * BLOCK_SIZE

    def heads(self, now: float) -> list[Request]:
        """The oldest of each tier, the best tier first. Looked for once in a step, but again if others come, go or
        start in it."""
        if self._heads is None:
            oldest = [self.oldest(priority, now) for priority in sorted(self._by_age)]
            self._heads = [request for request in oldest if request is not None]
        return self._heads

    def oldest(self, priority: int, now: float) -> Request | None:
        """The oldest of a tier that is not parked."""
        tier = self._by_age[priority]
        while (request := tier.first()) is not None and self._park(request, now):
            pass
        return request

    def shortest(self, priority: int, now: float) -> Request | None:
        """The one of a tier that has the least work, the older one among equals."""
        tier = self._by_work[priority]
        while (request := tier.first()) is not None and (self._park(request, now) or self._update(request)):
            pass
        return request

    def parked_for(self, request: Request) -> str | None:
        """The id of the request that computes the prefix which a parked one waits for."""
        block_hash = self._parked_at.get(request.request_id)
        return None if block_hash is None else self._owners[block_hash].request_id

    # --- prefixes that are being computed ---------------------------------------------------------------------

    def start(self, request: Request, *, is_load: bool = False) -> None:
        """`request` runs: it computes every full block of its prompt that nobody computes already. With `is_load` it
        stands for a load of them, which is waited for where nobody waits for who computes."""
        self._heads = None
        if not (self._deduplicates or is_load):
            return
        first, hashes = request.num_computed_tokens // BLOCK_SIZE, request.block_hashes
        mine = deque((index, hashes[index]) for index in range(first, len(hashes)) if hashes[index] not in self._owners)
        if mine:
            self._owners.update((block_hash, request) for _, block_hash in mine)
            self._owned[request.request_id] = mine

    def advance(self, request: Request, num_tokens: int) -> None:
        """The full blocks of a running request's first `num_tokens` are cached now."""
        mine = self._owned.get(request.request_id)
        if mine is None:
            return
        num_full = num_tokens // BLOCK_SIZE
        while mine and mine[0][0] < num_full:
            self._release(mine.popleft()[1])
        if not mine:
            del self._owned[request.request_id]

    def stop(self, request_id: str) -> None:
        """A running request has left: others compute what it would have."""
        for _, block_hash in self._owned.pop(request_id, ()):
            self._release(block_hash)

    def expire(self, now: float) -> None:
        """A step begins: ends the waits for prefixes that have taken too long."""
        self._heads = None
        while self._to_expire:
            request = next(iter(self._to_expire.values()))
            if not self._is_over(request, now):
                break
            del self._to_expire[request.request_id]
            if request.request_id in self._parked_at:
                self._leave(request)
                self._enter(request)

    def check_integrity(self) -> None:
        """Asserts that everyone who waits is in both orders, or parked for one who runs."""
        for orders in (self._by_age, self._by_work):
            for tier in orders.values():
                tier.check_integrity()
        ready = {request.request_id for tier in self._by_age.values() for request in tier}
        by_work = [request.request_id for tier in self._by_work.values() for request in tier]
        assert sorted(by_work) == sorted(ready), "the two orders hold different requests"
        assert ready | set(self._parked_at) == set(self._num_cached), "a request that waits is nowhere"
        assert not ready & set(self._parked_at), "a parked request may start"
        parked = {name: block_hash for block_hash, names in self._parked.items() for name in names}
        assert parked == self._parked_at, "a parked request is not where it says"
        assert set(self._parked) <= set(self._owners), "a request waits for a block that nobody computes"
        assert set(self._to_expire) <= set(self._parked_since) <= set(self._num_cached), "one that has left is kept"

    def _enter(self, request: Request) -> None:
        self._heads = None
        self._by_age[request.priority].push(request, self.key(request))
        self._enter_by_work(request)

    def _enter_by_work(self, request: Request) -> None:
        work = self.work(request)
        self._num_cached[request.request_id] = (request.num_tokens - work) // BLOCK_SIZE
        self._by_work[request.priority].push(request, work)

    def _leave(self, request: Request) -> None:
        self._heads = None
        block_hash = self._parked_at.pop(request.request_id, None)
        if block_hash is None:
            self._by_age[request.priority].remove(request)
            self._by_work[request.priority].remove(request)
            return
        del self._parked[block_hash][request.request_id]
        if not self._parked[block_hash]:
            del self._parked[block_hash]

    def _update(self, request: Request) -> bool:
        """Whether its work has become another since it was last looked at; then it has found its new place."""
        if self.work(request) == request.num_tokens - self._num_cached[request.request_id] * BLOCK_SIZE:
            return False
        self._by_work[request.priority].remove(request)
        self._enter_by_work(request)
        return True

    def _park(self, request: Request, now: float) -> bool:
        """Whether a request waits from now on: for the last block that it has in common with the one who computes its
        next."""
        if not self._owners or not self._blocks.may_hit(request) or self._is_over(request, now):
            return False
        hashes = request.block_hashes
        next_block = self._blocks.num_cached(request, self._num_cached[request.request_id])
        end = min(len(hashes), (request.num_tokens - 1) // BLOCK_SIZE)
        owner = self._owners.get(hashes[next_block]) if next_block < end else None
        if owner is None or owner.priority > request.priority:
            return False
        num_common = bisect_left(range(next_block, end), True, key=lambda i: self._owners.get(hashes[i]) is not owner)
        last = hashes[next_block + num_common - 1]
        self._leave(request)
        if request.request_id not in self._parked_since:
            self._parked_since[request.request_id] = now
            self._to_expire[request.request_id] = request
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
