"""Waiting requests, in the order of their effective priority and in that of their tiers."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from mlx_server.request import Request

_Entry = tuple[float, float, int, Request]
"""Key, arrival, number of the push, request."""


class PriorityQueueWithAging:
    """A heap for each base priority; their order ages by itself.

    `effective_priority(now) = priority - aging_rate * (now - arrival)`. All requests age at one rate, so the
    order at any moment is that of `priority + aging_rate * arrival`, which never changes: heaps keyed at
    push, with no timer and no re-sort. Ties go to the earlier arrival, then to the earlier push. Push and
    pop are O(log n); `remove` is O(1) amortised: its entry is dropped when it surfaces, or when the dead are
    the majority.
    """

    def __init__(self, aging_rate: float) -> None:
        assert aging_rate >= 0.0
        self.aging_rate = aging_rate
        self._heaps: dict[int, list[_Entry]] = {}
        self._entries: dict[str, int] = {}  # request id to the push number that is alive
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no particular order."""
        return (entry[3] for heap in self._heaps.values() for entry in heap if self._is_alive(entry))

    def key(self, request: Request) -> float:
        """The time-free order: smaller is sooner, and differences are those of effective priorities."""
        return request.priority + self.aging_rate * request.arrival_s

    def effective_priority(self, request: Request, now: float) -> float:
        """Base priority less what waiting has earned by `now`."""
        return request.priority - self.aging_rate * (now - request.arrival_s)

    def push(self, request: Request) -> None:
        assert request.request_id not in self._entries, f"{request} waits already"
        number = self._num_pushes
        self._num_pushes += 1
        self._entries[request.request_id] = number
        heap = self._heaps.setdefault(request.priority, [])
        heapq.heappush(heap, (self.key(request), request.arrival_s, number, request))

    def peek(self) -> Request | None:
        """The request of the best effective priority, left in place."""
        self._drop_dead_heads()
        return min([heap[0] for heap in self._heaps.values() if heap])[3] if self._entries else None

    def first_by_tier(self) -> Request | None:
        """The one of the best base priority that has waited for the longest, left in place."""
        self._drop_dead_heads()
        return self._heaps[min([tier for tier, heap in self._heaps.items() if heap])][0][3] if self._entries else None

    def pop(self) -> Request:
        """Takes the request of the best effective priority; the queue must not be empty."""
        request = self.peek()
        assert request is not None, "nobody waits"
        heapq.heappop(self._heaps[request.priority])
        del self._entries[request.request_id]
        return request

    def remove(self, request_id: str) -> bool:
        """Takes a request out wherever it stands; False if it does not wait here."""
        if self._entries.pop(request_id, None) is None:
            return False
        if sum(map(len, self._heaps.values())) > 2 * len(self._entries) + 64:
            for priority, heap in self._heaps.items():
                self._heaps[priority] = [entry for entry in heap if self._is_alive(entry)]
                heapq.heapify(self._heaps[priority])
        return True

    def in_order(self) -> Iterator[Request]:
        """Waiting requests by effective priority, left in place; O(log n) at most for each, beside dead
        entries. Requests may be removed meanwhile, but not pushed."""
        return (entry[3] for entry in heapq.merge(*map(self._in_order, self._heaps.values())))

    def by_tier(self) -> Iterator[Request]:
        """The same, but those of the best base priority first."""
        return (entry[3] for priority in sorted(self._heaps) for entry in self._in_order(self._heaps[priority]))

    def check_integrity(self) -> None:
        """Asserts that the heaps hold exactly one live entry for each waiting request."""
        alive = [request.request_id for request in self]
        assert sorted(alive) == sorted(self._entries), "a heap and the index disagree"

    def _in_order(self, heap: list[_Entry]) -> Iterator[_Entry]:
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, index = heapq.heappop(frontier)
            if self._is_alive(entry):
                yield entry
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(frontier, (heap[child], child))

    def _is_alive(self, entry: _Entry) -> bool:
        return self._entries.get(entry[3].request_id) == entry[2]

    def _drop_dead_heads(self) -> None:
        for heap in self._heaps.values():
            while heap and not self._is_alive(heap[0]):
                heapq.heappop(heap)
