"""The waiting requests: by tier, client and age, by the work left, or parked until a shared prefix is computed or an
image is encoded."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import chain

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.fair_order import FairOrder, OrderedRequests
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Request, RequestStatus

MAX_PREFIX_WAIT_S = 60.0
"""The longest that a request stays parked for a prefix that another request computes."""


class PriorityQueueWithAging:
    """The waiting requests of one scheduler.

    Each tier has an order by turn, which is the age of a client's requests, and between clients what was computed for
    them (`FairOrder`). Each of its clients has an order by work, too. The work of a request is what it would compute
    if it started now: its tokens that are not cached. The queue remembers how many blocks of a request were cached at
    the last look. That number is still right, and checked in O(1), if the cached prefix still ends there.

    **Aging.** `effective_priority(now) = priority - aging_rate * (now - arrival)`. All requests age at the same rate,
    so at any moment they are in the order of `key = priority + aging_rate * arrival`, which never changes: aging needs
    no timer and no sorting. Example: with an aging rate of 0.1, a LOW request (2) that arrived at 0 s and a HIGH one
    (0) that arrived at 20 s both have the key 2.0. The LOW one is more urgent than all HIGH ones that arrive later.

    **Parking.** If a running request is computing the next uncached block of a waiting one, the waiting one is parked:
    it is in neither order until the running one has computed what both have in common, ends or is preempted. Then the
    waiting one hits the prefix instead of computing it again. Example: a hundred requests arrive with the same cold
    system prompt of 20 blocks. The first one starts, 99 are parked until it has computed block 20, and the prompt is
    computed once. A request is not parked for one of a worse tier, which may be kept from running, and for at most
    `MAX_PREFIX_WAIT_S` in all. Requests are also parked for images, by their digests, until these are encoded.
    """

    def __init__(self, blocks: PagedBlockManager, aging_rate: float, *, deduplicates: bool = True) -> None:
        assert aging_rate >= 0.0
        self.now = 0.0  # of the step that is composed; set by the composer
        self._aging_rate = aging_rate
        self._blocks = blocks
        self._deduplicates = deduplicates
        self._tiers: defaultdict[int, FairOrder] = defaultdict(FairOrder)
        self._num_cached: dict[str, int] = {}  # cached blocks of each waiting request at the last look
        self._owners: dict[bytes, Request] = {}  # the running request that computes a block, by its hash
        self._owned: dict[Request, deque[tuple[int, bytes]]] = {}  # by owner: index in its prompt and hash
        self._parked: dict[bytes, dict[str, Request]] = {}  # by the block that they wait for, then by id
        self._parked_at: dict[str, bytes] = {}
        self._parked_since: dict[str, float] = {}  # of waiting requests that have ever been parked, in this order
        self._heads: list[Request] | None = None  # the result of `heads`, until the queue changes

    def __len__(self) -> int:
        return len(self._num_cached)

    def __iter__(self) -> Iterator[Request]:
        """By effective priority, parked requests last. The queue must not change during the iteration."""
        by_age = heapq.merge(*self._in_order(), key=self.age)
        return chain(by_age, *[parked.values() for parked in self._parked.values()])

    @property
    def num_parked(self) -> int:
        """Requests that wait for a prefix that another request computes, or for an image."""
        return len(self._parked_at)

    def push(self, request: Request) -> None:
        """Adds a request."""
        assert request.request_id not in self._num_cached, f"{request} waits already"
        self._num_cached[request.request_id] = 0
        self._enter(request)
        self._tiers[request.priority].begin_to_wait(request)

    def remove(self, request: Request) -> None:
        """Removes a request that starts or has ended."""
        self._leave(request)
        self._tiers[request.priority].end_to_wait(request)
        del self._num_cached[request.request_id]
        self._parked_since.pop(request.request_id, None)

    # --- the two orders -------------------------------------------------------------------------------------

    def key(self, request: Request) -> float:
        """The order of effective priorities without the time: a smaller key goes first."""
        return request.priority + self._aging_rate * request.arrival_s

    def age(self, request: Request) -> tuple[float, float]:
        """The order of effective priorities, the earlier arrival first among equals."""
        return self.key(request), request.arrival_s

    def turn(self, request: Request) -> tuple[int, int, float]:
        """The order of waiting and running requests: by tier, then by what their clients have had, then by age."""
        return request.priority, *self._tiers[request.priority].turn(request)

    def oldest_age(self, priority: int) -> tuple[float, float]:
        """The `age` of a tier's oldest request that is not parked; there must be one."""
        return min(map(self.age, self._tiers[priority].heads()))

    def effective_priority(self, request: Request, now: float) -> float:
        """The priority less what the request has gained by waiting until `now`."""
        return request.priority - self._aging_rate * (now - request.arrival_s)

    def work(self, request: Request) -> int:
        """Known tokens left to compute; of a waiting request, those left if it started now."""
        if request.status is RequestStatus.RUNNING:
            return request.num_tokens - request.num_computed_tokens
        num_cached = self._blocks.num_cached(request, self._num_cached[request.request_id])
        return request.num_tokens - num_cached * BLOCK_SIZE

    def heads(self) -> list[Request]:
        """The first request of each tier, the best tier first. Found once a step, and again after each change of the
        queue."""
        if self._heads is None:
            first = [self._find_first(self._tiers[priority]) for priority in sorted(self._tiers)]
            self._heads = [request for request in first if request is not None]
        return self._heads

    def first(self, priority: int) -> Request | None:
        """The request of a tier whose turn it is, of those that are not parked."""
        return next((head for head in self.heads() if head.priority == priority), None)

    def shortest(self, first: Request) -> Request | None:
        """The request with the least work of the tier and client of `first`, the older one among equals; None if all
        are parked."""
        tier = self._tiers[first.priority]
        while (request := tier.shortest(first.client)) is not None and (self._park(request) or self._update(request)):
            pass
        return request

    def parked_at(self, request: Request) -> bytes | None:
        """The hash of the block or the digest of the image for which a request is parked; None if it is not."""
        return self._parked_at.get(request.request_id)

    def parked_for(self, request: Request) -> str | None:
        """The id of the request for whose prefix a parked request waits; None if it waits for an image."""
        owner = self._owners.get(self._parked_at[request.request_id])
        return None if owner is None else owner.request_id

    def parked_behind(self, owner: Request) -> list[Request]:
        """The requests that are parked for what this one computes or loads."""
        hashes = [key for key in self._parked if self._owners.get(key) is owner]
        return list(chain.from_iterable(self._parked[block_hash].values() for block_hash in hashes))

    def park_for_image(self, request: Request, digest: bytes) -> None:
        """Parks a waiting request until `unpark_for_image`."""
        self._leave(request)
        self._park_at(request, digest)

    def unpark_for_image(self, digest: bytes) -> None:
        self._unpark(digest)

    def parked_for_images(self) -> list[Request]:
        """The requests that are parked for images."""
        of_images = [parked.values() for key, parked in self._parked.items() if key not in self._owners]
        return list(chain.from_iterable(of_images))

    def parks(self, request: Request) -> bool:
        """Parks a waiting request if a running one or a load has its next uncached block. Whether it is parked."""
        return request.request_id in self._parked_at or self._park(request)

    # --- parking: prefixes that are being computed ----------------------------------------------------------

    def start(self, request: Request, *, is_load: bool = False) -> None:
        """A request runs. It is as urgent as the oldest one of other clients of its tier, if it goes before older ones.
        It owns each full block of its prompt that no other request owns, until it has computed the block. With
        `is_load` it stands for a load of these blocks from disk, for which requests are parked even if the queue does
        not deduplicate."""
        self._heads = None
        if not is_load:
            tier = self._tiers[request.priority]
            others = [self.key(other) for other in tier.heads() if other.client != request.client]
            request.urgent_key = min([self.key(request), *others])
            tier.start(request)
        if not (self._deduplicates or is_load):
            return
        first, hashes = request.num_computed_tokens // BLOCK_SIZE, request.block_hashes
        mine = deque((index, hashes[index]) for index in range(first, len(hashes)) if hashes[index] not in self._owners)
        if mine:
            self._owners.update((block_hash, request) for _, block_hash in mine)
            self._owned[request] = mine

    def advance(self, request: Request, num_tokens: int) -> None:
        """The full blocks of the first `num_tokens` tokens of a running request are cached now."""
        mine = self._owned.get(request)
        if mine is None:
            return
        num_full = num_tokens // BLOCK_SIZE
        while mine and mine[0][0] < num_full:
            self._release(mine.popleft()[1])
        if not mine:
            del self._owned[request]

    def stop(self, request: Request) -> None:
        """A running request has left, or a load has ended: the requests parked for it may start."""
        self._tiers[request.priority].stop(request)
        for _, block_hash in self._owned.pop(request, ()):
            self._release(block_hash)

    def begin_step(self) -> None:
        """A step is composed while requests wait or prompts run: brings the turns up to date with what was computed
        since the last one, and unparks requests that have waited too long for a prefix."""
        self._heads = None
        for tier in self._tiers.values():
            if tier.is_shared:
                tier.settle()
        first_s = next(iter(self._parked_since.values()), self.now)  # of the one parked first
        if self.now - first_s >= MAX_PREFIX_WAIT_S:
            parked = chain.from_iterable(same.values() for key, same in self._parked.items() if key in self._owners)
            for request in [request for request in parked if self._is_over(request)]:
                self._leave(request)
                self._enter(request)

    def give(self, request: Request, num_tokens: int) -> None:
        """The step being composed computes this many prompt tokens of a running request."""
        tier = self._tiers[request.priority]
        if tier.is_shared:
            self._heads = None
            tier.count(request, num_tokens)

    def check_integrity(self) -> None:
        """Asserts that each waiting request is in order, or parked for a block that has an owner."""
        for tier in self._tiers.values():
            tier.check_integrity()
        ready = {request.request_id for by_age in self._in_order() for request in by_age}
        assert ready | set(self._parked_at) == set(self._num_cached), "a waiting request is in no order and not parked"
        assert not ready & set(self._parked_at), "a parked request may start"
        parked = {name: block_hash for block_hash, names in self._parked.items() for name in names}
        assert parked == self._parked_at, "the two records of parked requests differ"
        for request in self.parked_for_images():
            digests = {image.digest for image in request.images}
            assert self._parked_at[request.request_id] in digests, "a request waits for a block that nobody computes"
        assert set(self._parked_since) <= set(self._num_cached), "a request that left is kept"

    def _find_first(self, tier: FairOrder) -> Request | None:
        while (request := tier.first()) is not None and self._park(request):
            pass
        return request

    def _in_order(self) -> list[OrderedRequests]:
        """The requests of each client that are not parked, by age."""
        return [client.by_age for tier in self._tiers.values() for client in tier.clients.values()]

    def _enter(self, request: Request) -> None:
        self._heads = None
        work = self.work(request)
        self._num_cached[request.request_id] = (request.num_tokens - work) // BLOCK_SIZE
        self._tiers[request.priority].push(request, self.key(request), work)

    def _leave(self, request: Request) -> None:
        self._heads = None
        block_hash = self._parked_at.pop(request.request_id, None)
        if block_hash is None:
            self._tiers[request.priority].remove(request)
            return
        del self._parked[block_hash][request.request_id]
        if not self._parked[block_hash]:
            del self._parked[block_hash]

    def _update(self, request: Request) -> bool:
        """Moves a request whose work has changed since the last look to its new place; whether it has changed."""
        work = self.work(request)
        num_cached = (request.num_tokens - work) // BLOCK_SIZE
        if num_cached == self._num_cached[request.request_id]:
            return False
        self._num_cached[request.request_id] = num_cached
        self._tiers[request.priority].set_work(request, work)
        return True

    def _park(self, request: Request) -> bool:
        """Parks a request whose next uncached block has an owner, until the last block that both have in common is
        computed; whether it is parked."""
        if not self._owners or not self._blocks.may_hit(request) or self._is_over(request):
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
        self._parked_since.setdefault(request.request_id, self.now)
        self._park_at(request, last)
        return True

    def _park_at(self, request: Request, key: bytes) -> None:
        self._parked.setdefault(key, {})[request.request_id] = request
        self._parked_at[request.request_id] = key

    def _release(self, block_hash: bytes) -> None:
        """A block is computed or lost its owner: the requests parked for it wait in both orders again."""
        del self._owners[block_hash]
        self._unpark(block_hash)

    def _unpark(self, key: bytes) -> None:
        for request in self._parked.pop(key, {}).values():
            del self._parked_at[request.request_id]
            self._enter(request)

    def _is_over(self, request: Request) -> bool:
        """Whether a request may not be parked any more."""
        return self.now - self._parked_since.get(request.request_id, math.inf) >= MAX_PREFIX_WAIT_S
