"""The order of one tier's requests: of each client the oldest first, and of the clients the one that had least."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence

from mlx_server.request import Request

_Entry = tuple[float, float, int, Request]
"""Key, arrival, push number, request."""


class OrderedRequests:
    """Requests ordered by a key, the smallest first; ties go to the earlier arrival, then to the earlier push.

    A sorted list, because `push` and `remove` only move pointers: 80 KB of them in a queue of 10,000. A heap with lazy
    deletion would need more code for no gain at that length.
    """

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._entry_of: dict[str, _Entry] = {}
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """In order. The list must not change during the iteration."""
        return (entry[3] for entry in self._entries)

    def push(self, request: Request, key: float) -> None:
        """Adds a request, which must not be in the list."""
        self._num_pushes += 1
        entry = self._entry_of[request.request_id] = (key, request.arrival_s, self._num_pushes, request)
        insort(self._entries, entry)

    def remove(self, request: Request) -> None:
        """Removes a request from any place."""
        entry = self._entry_of.pop(request.request_id)
        del self._entries[bisect_left(self._entries, entry)]

    def first(self) -> Request | None:
        """The request with the smallest key, which stays in the list."""
        return self._entries[0][3] if self._entries else None

    def check_integrity(self) -> None:
        """Asserts that the list is sorted and has exactly one entry for each request."""
        assert self._entries == sorted(self._entry_of.values()), "a list of requests is out of order"


class FairOrder:
    """The waiting requests of one tier, in the order in which its clients share it (the Virtual Token Counter of Sheng
    et al., "Fairness in Serving Large Language Models", OSDI 2024).

    Each client has a level: the tokens that were computed for it, and one more for each token of output, since a step
    computes many prompt tokens in the time of a few outputs. The first request is the oldest one of the client with the
    lowest level.

    A client that had no request in order, and now has one, is lifted to the lowest level of those that have, or to the
    highest of all if none has: what it did not use is not saved up. A client without requests is forgotten once no
    other one has less, so that it gains nothing by leaving.

    With a single client this is the order by age, and nothing is counted.

        A keeps 100 requests open, of 200 tokens each. B sends two of 300 tokens when A has the level 50,000, and is
        lifted to it. A's streams go on for 10 tokens, so B comes first. Before each of five starts in one step:
        level A   50,010  50,010  50,210  50,410  50,410
        level B   50,000  50,300  50,300  50,300  50,600
        start     B       A       A       B       A
    """

    def __init__(self) -> None:
        self._by_age: dict[str, OrderedRequests] = {}  # by client
        self._num_waiting: Counter[str] = Counter()  # of each client, parked requests included
        self._counted: dict[Request, int] = {}  # tokens of each running request when it was counted last
        self._levels: dict[str, int] = {}  # of clients with requests, and of some that have left
        self._heads: list[Request] | None = None  # the results of `heads` and `first`, until they may change
        self._first: Request | None = None

    def by_client(self) -> Iterator[OrderedRequests]:
        """The requests in order of each client, the oldest first."""
        return iter(self._by_age.values())

    def first(self) -> Request | None:
        """The request to serve next. It stays."""
        if self._first is None and (heads := self.heads()):
            self._first = min(heads, key=self.turn)
        return self._first

    def heads(self) -> list[Request]:
        """The oldest request in order of each client."""
        if self._heads is None:
            self._heads = [request for same in self._by_age.values() if (request := same.first()) is not None]
        return self._heads

    def turn(self, request: Request) -> tuple[int, float]:
        """The order of requests: by their clients' levels (0 if one has left), then by age."""
        return self._levels.get(request.client, 0), request.arrival_s

    # --- waiting --------------------------------------------------------------------------------------------

    def begin_to_wait(self, request: Request) -> None:
        """A request waits from now on, after a `push`."""
        self._num_waiting[request.client] += 1

    def end_to_wait(self, request: Request) -> None:
        """A request has left the queue, after a `remove`."""
        self._num_waiting[request.client] -= 1
        if not self._num_waiting[request.client]:
            del self._num_waiting[request.client]

    def push(self, request: Request, key: float) -> None:
        """Puts a waiting request in order. Of one client's, the one with the smallest key comes first."""
        if request.client not in self._by_age:
            self._lift(request.client)
            self._by_age[request.client] = OrderedRequests()
        self._by_age[request.client].push(request, key)
        self._heads = self._first = None

    def remove(self, request: Request) -> None:
        """Takes a waiting request out of the order: it is parked, or will not wait any more."""
        of_client = self._by_age[request.client]
        of_client.remove(request)
        self._heads = self._first = None
        if not of_client:
            del self._by_age[request.client]

    # --- running --------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """A request that has waited runs: what is computed for it from now on counts."""
        self._counted[request] = _num_tokens(request)

    def stop(self, request: Request) -> None:
        """A request runs no more. (What stands for a load from disk never ran.)"""
        if request in self._counted:
            self.count(request)
            del self._counted[request]

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one client, so that levels matter."""
        return len(self._levels) > 1

    def count(self, request: Request, num_more: int = 0) -> None:
        """Counts what was computed for a running request, and `num_more` prompt tokens that the next step computes."""
        num_tokens = _num_tokens(request, num_more)
        self._levels[request.client] += num_tokens - self._counted[request]
        self._counted[request] = num_tokens
        self._first = None

    def settle(self) -> None:
        """Counts for all running requests, and forgets clients without requests that have had no more than others."""
        for request in self._counted:
            self.count(request)
        active, levels = self._active(), self._levels
        least = min([levels[client] for client in active], default=math.inf)
        self._levels = {client: level for client, level in levels.items() if client in active or level > least}

    def _lift(self, client: str) -> None:
        if self._levels.keys() - {client}:
            self.settle()
        levels = [self._levels[other] for other in self._by_age]
        floor = min(levels) if levels else max([self._levels[other] for other in self._active()], default=0)
        self._levels[client] = max(self._levels.get(client, 0), floor)

    def _active(self) -> set[str]:
        return {request.client for request in self._counted}.union(self._num_waiting)

    def check_integrity(self) -> None:
        """Asserts that each client with requests has a level, that its requests are in order, and whose turn it is."""
        for client, of_client in self._by_age.items():
            of_client.check_integrity()
            assert 0 < len(of_client) <= self._num_waiting[client], "a client's count of waiting requests is wrong"
        assert all(count > 0 for count in self._num_waiting.values()), "a client without requests is kept"
        assert self._active() <= self._levels.keys(), "a client has no level"
        first, self._heads, self._first = self._first, None, None
        assert first is None or first is self.first(), "it is another request's turn"


def by_holdings(running: Sequence[Request]) -> list[Request]:
    """Running requests, sorted by rank, in the order in which they keep their blocks. Of those of one tier, a request
    goes before another if the older requests of its client hold fewer tokens, so the last one is the youngest of a
    client that holds much, and the oldest of each client is taken last. With one client this is the order by rank.

    Example: A runs three requests of 400 tokens, then B one of 2,000 and one of 300. A's oldest and B's have nothing
    before them, A's others 400 and 800, and B's second 2,000: it is the first to go, then A's youngest, and B's oldest,
    which is younger than A's, goes before that.
    """
    if len({request.client for request in running}) < 2:
        return list(running)
    held: Counter[tuple[bool, int, str]] = Counter()
    before: dict[Request, int] = {}
    for request in running:
        client = request.is_promoted, request.priority, request.client
        before[request] = held[client]
        held[client] += request.num_tokens
    return sorted(running, key=lambda request: (not request.is_promoted, request.priority, before[request]))


def _num_tokens(request: Request, num_more: int = 0) -> int:
    """The tokens computed for a request, and one more for each of its output; cached ones count as computed."""
    num_computed = max(request.num_computed_tokens + num_more, request.num_ever_computed)
    return num_computed + len(request.output_token_ids)
