"""Requests in order of a key, and the queue of those who wait, by tier and age."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from mlx_server.request import Request

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

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entry_of

    def __iter__(self) -> Iterator[Request]:
        """In order. None may come or go meanwhile."""
        return (entry[3] for entry in self._entries)

    def push(self, request: Request, key: float) -> None:
        """Adds a request, or moves it to another key."""
        self.remove(request.request_id)
        self._num_pushes += 1
        entry = self._entry_of[request.request_id] = (key, request.arrival_s, self._num_pushes, request)
        insort(self._entries, entry)

    def remove(self, request_id: str) -> bool:
        """Takes a request out wherever it stands; False if it is not here."""
        entry = self._entry_of.pop(request_id, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry)]
        return entry is not None

    def first(self) -> Request | None:
        """The request of the smallest key, left in place."""
        return self._entries[0][3] if self._entries else None

    def check_integrity(self) -> None:
        """Asserts that the order is one, of exactly one entry for each request."""
        assert self._entries == sorted(self._entry_of.values()), "a list of requests is out of order"


class PriorityQueueWithAging:
    """A list for each base priority; their order ages by itself.

    `effective_priority(now) = priority - aging_rate * (now - arrival)`. All requests age at one rate, so the
    order at any moment is that of `priority + aging_rate * arrival`, which never changes: lists keyed at
    push, with no timer and no re-sort. With an aging rate of 0.1, a LOW request (2) of second 0 and a HIGH one (0) of
    second 20 have the key 2.0 both: from then on the LOW one is as urgent.
    """

    def __init__(self, aging_rate: float) -> None:
        assert aging_rate >= 0.0
        self.aging_rate = aging_rate
        self._tiers: dict[int, OrderedRequests] = {}

    def __len__(self) -> int:
        return sum(map(len, self._tiers.values()))

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in tier for tier in self._tiers.values())

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""
        return (request for tier in self._tiers.values() for request in tier)

    def key(self, request: Request) -> float:
        """The time-free order: smaller is sooner, and differences are those of effective priorities."""
        return request.priority + self.aging_rate * request.arrival_s

    def effective_priority(self, request: Request, now: float) -> float:
        """Base priority less what waiting has earned by `now`."""
        return request.priority - self.aging_rate * (now - request.arrival_s)

    def push(self, request: Request) -> None:
        assert request.request_id not in self, f"{request} waits already"
        self._tiers.setdefault(request.priority, OrderedRequests()).push(request, self.key(request))

    def peek(self) -> Request | None:
        """The request of the best effective priority, left in place."""
        firsts = [first for tier in self._tiers.values() if (first := tier.first()) is not None]
        return min(firsts, key=self._turn, default=None)

    def first_by_tier(self) -> Request | None:
        """The one of the best base priority that has waited for the longest, left in place."""
        return self.first_of(min([priority for priority, tier in self._tiers.items() if tier], default=None))

    def first_of(self, priority: int | None) -> Request | None:
        """The one of this base priority that has waited for the longest, left in place."""
        tier = self._tiers.get(priority) if priority is not None else None
        return None if tier is None else tier.first()

    def remove(self, request_id: str) -> bool:
        """Takes a request out wherever it stands; False if it does not wait here."""
        return any(tier.remove(request_id) for tier in self._tiers.values())

    def in_order(self) -> Iterator[Request]:
        """Waiting requests by effective priority, left in place. None may come or go meanwhile."""
        return heapq.merge(*self._tiers.values(), key=self._turn)

    def check_integrity(self) -> None:
        """Asserts that the lists hold exactly one live entry for each waiting request."""
        for tier in self._tiers.values():
            tier.check_integrity()

    def _turn(self, request: Request) -> tuple[float, float]:
        return self.key(request), request.arrival_s
