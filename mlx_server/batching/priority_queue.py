"""Heaps of requests that stay in order by themselves, and the queue of those who wait, by tier and age."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from mlx_server.request import Request

_Entry = tuple[float, float, int, Request]
"""Key, arrival, number of the push, request."""


class RequestHeap:
    """Requests by a key, the smallest first; ties go to the earlier arrival, then to the earlier push.

    Push and `first` are O(log n). `remove` is O(1) amortised: the entry is dropped when it surfaces, or when the dead
    are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._alive: dict[str, int] = {}  # request id to the number of the push that counts
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._alive)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._alive

    def push(self, request: Request, key: float) -> None:
        """Adds a request, or moves it to another key."""
        self.remove(request.request_id)
        self._num_pushes += 1
        self._alive[request.request_id] = self._num_pushes
        heapq.heappush(self._heap, (key, request.arrival_s, self._num_pushes, request))

    def remove(self, request_id: str) -> bool:
        """Takes a request out wherever it stands; False if it is not here."""
        if self._alive.pop(request_id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._alive) + 64:
            self._heap = [entry for entry in self._heap if self._is_alive(entry)]
            heapq.heapify(self._heap)
        return True

    def first(self) -> Request | None:
        """The request of the smallest key, left in place."""
        while self._heap and not self._is_alive(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no particular order."""
        return (entry[3] for entry in self._heap if self._is_alive(entry))

    def in_order(self) -> Iterator[Request]:
        """The smallest key first, left in place; O(log n) at most for each, beside dead entries. None may come or go
        meanwhile."""
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, index = heapq.heappop(frontier)
            if self._is_alive(entry):
                yield entry[3]
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(frontier, (heap[child], child))

    def check_integrity(self) -> None:
        """Asserts that exactly one entry lives for each request."""
        alive = [request.request_id for request in self]
        assert sorted(alive) == sorted(self._alive), "a heap and its index disagree"

    def _is_alive(self, entry: _Entry) -> bool:
        return self._alive.get(entry[3].request_id) == entry[2]


class PriorityQueueWithAging:
    """A heap for each base priority; their order ages by itself.

    `effective_priority(now) = priority - aging_rate * (now - arrival)`. All requests age at one rate, so the
    order at any moment is that of `priority + aging_rate * arrival`, which never changes: heaps keyed at
    push, with no timer and no re-sort. With an aging rate of 0.1, a LOW request (2) of second 0 and a HIGH one (0) of
    second 20 have the key 2.0 both: from then on the LOW one is as urgent.
    """

    def __init__(self, aging_rate: float) -> None:
        assert aging_rate >= 0.0
        self.aging_rate = aging_rate
        self._heaps: dict[int, RequestHeap] = {}

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in heap for heap in self._heaps.values())

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""
        return (request for heap in self._heaps.values() for request in heap)

    def key(self, request: Request) -> float:
        """The time-free order: smaller is sooner, and differences are those of effective priorities."""
        return request.priority + self.aging_rate * request.arrival_s

    def effective_priority(self, request: Request, now: float) -> float:
        """Base priority less what waiting has earned by `now`."""
        return request.priority - self.aging_rate * (now - request.arrival_s)

    def push(self, request: Request) -> None:
        assert request.request_id not in self, f"{request} waits already"
        self._heaps.setdefault(request.priority, RequestHeap()).push(request, self.key(request))

    def peek(self) -> Request | None:
        """The request of the best effective priority, left in place."""
        firsts = [first for heap in self._heaps.values() if (first := heap.first()) is not None]
        return min(firsts, key=self._turn, default=None)

    def first_by_tier(self) -> Request | None:
        """The one of the best base priority that has waited for the longest, left in place."""
        return self.first_of(min([tier for tier, heap in self._heaps.items() if heap], default=None))

    def first_of(self, priority: int | None) -> Request | None:
        """The one of this base priority that has waited for the longest, left in place."""
        heap = self._heaps.get(priority) if priority is not None else None
        return None if heap is None else heap.first()

    def pop(self) -> Request:
        """Takes the request of the best effective priority; the queue must not be empty."""
        request = self.peek()
        assert request is not None, "nobody waits"
        self._heaps[request.priority].remove(request.request_id)
        return request

    def remove(self, request_id: str) -> bool:
        """Takes a request out wherever it stands; False if it does not wait here."""
        return any(heap.remove(request_id) for heap in self._heaps.values())

    def in_order(self) -> Iterator[Request]:
        """Waiting requests by effective priority, left in place. None may come or go meanwhile."""
        return heapq.merge(*[heap.in_order() for heap in self._heaps.values()], key=self._turn)

    def by_tier(self) -> Iterator[Request]:
        """The same, but those of the best base priority first."""
        return (request for priority in sorted(self._heaps) for request in self._heaps[priority].in_order())

    def check_integrity(self) -> None:
        """Asserts that the heaps hold exactly one live entry for each waiting request."""
        for heap in self._heaps.values():
            heap.check_integrity()

    def _turn(self, request: Request) -> tuple[float, float]:
        return self.key(request), request.arrival_s
