"""The order of one tier's requests: of each client the oldest first, and of the clients the one that had least."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Client:
    """One client of a tier: its level, how many requests it has that wait or run, and those of them that wait in order,
    by age and by work. Parked ones wait, but are not in order."""

    level: int = 0
    num_open: int = 0
    by_age: OrderedRequests = field(default_factory=OrderedRequests)
    by_work: OrderedRequests = field(default_factory=OrderedRequests)


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
        self.clients: dict[str, Client] = {}  # those with requests, and some that have left
        self._counted: dict[Request, int] = {}  # tokens of each running request when it was counted last
        self._heads: list[Request] | None = None  # the results of `heads` and `first`, until they may change
        self._first: Request | None = None

    def first(self) -> Request | None:
        """The request to serve next. It stays."""
        if self._first is None and (heads := self.heads()):
            self._first = min(heads, key=self.turn)
        return self._first

    def heads(self) -> list[Request]:
        """The oldest request in order of each client."""
        if self._heads is None:
            in_order = [client.by_age for client in self.clients.values() if client.by_age]
            self._heads = [request for by_age in in_order if (request := by_age.first()) is not None]
        return self._heads

    def shortest(self, client: str) -> Request | None:
        """The client's request with the least work, of those in order."""
        return self.clients[client].by_work.first() if client in self.clients else None

    def turn(self, request: Request) -> tuple[int, float]:
        """The order of requests: by their clients' levels (0 if one has left), then by age."""
        client = self.clients.get(request.client)
        return 0 if client is None else client.level, request.arrival_s

    # --- waiting --------------------------------------------------------------------------------------------

    def push(self, request: Request, key: float, work: int) -> None:
        """Puts a waiting request in order. Of one client's, the one with the smallest key comes first."""
        client = self.clients.get(request.client)
        if client is None or not client.by_age:
            client = self._lift(request.client)
        client.by_age.push(request, key)
        client.by_work.push(request, work)
        self._heads = self._first = None

    def remove(self, request: Request) -> None:
        """Takes a waiting request out of the order: it is parked, or will not wait any more."""
        self.clients[request.client].by_age.remove(request)
        self.clients[request.client].by_work.remove(request)
        self._heads = self._first = None

    def set_work(self, request: Request, work: int) -> None:
        """The work of a request in order has changed."""
        by_work = self.clients[request.client].by_work
        by_work.remove(request)
        by_work.push(request, work)

    def begin_to_wait(self, request: Request) -> None:
        """A request waits from now on, after a `push`."""
        self.clients[request.client].num_open += 1

    def end_to_wait(self, request: Request) -> None:
        """A request has left the queue, after a `remove`."""
        self.clients[request.client].num_open -= 1

    # --- running --------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """A request that has waited runs: what is computed for it from now on counts."""
        self.clients[request.client].num_open += 1
        self._counted[request] = _num_tokens(request)

    def stop(self, request: Request) -> None:
        """A request runs no more. (What stands for a load from disk never ran.)"""
        if request in self._counted:
            self.count(request)
            del self._counted[request]
            self.clients[request.client].num_open -= 1

    @property
    def is_shared(self) -> bool:
        """Whether there is more than one client, so that levels matter."""
        return len(self.clients) > 1

    def count(self, request: Request, num_more: int = 0) -> None:
        """Counts what was computed for a running request, and `num_more` prompt tokens that the next step computes."""
        num_tokens = _num_tokens(request, num_more)
        self.clients[request.client].level += num_tokens - self._counted[request]
        self._counted[request] = num_tokens
        self._first = None

    def settle(self) -> None:
        """Counts for all running requests, and forgets clients without requests that have had no more than others."""
        for request in self._counted:
            self.count(request)
        clients = self.clients
        least = min([client.level for client in clients.values() if client.num_open], default=math.inf)
        self.clients = {name: one for name, one in clients.items() if one.num_open or one.level > least}

    def _lift(self, name: str) -> Client:
        """The client, which has no request in order yet."""
        if self.clients.keys() - {name}:
            self.settle()
        client = self.clients.setdefault(name, Client())
        levels = [other.level for other in self.clients.values() if other.by_age]
        most = max([other.level for other in self.clients.values() if other.num_open], default=0)
        client.level = max(client.level, min(levels, default=most))
        return client

    def check_integrity(self) -> None:
        """Asserts that each client's requests are in both orders, the number of its requests, and whose turn it is."""
        for client in self.clients.values():
            client.by_age.check_integrity()
            client.by_work.check_integrity()
            assert set(client.by_age) == set(client.by_work), "the two orders hold different requests"
            assert len(client.by_age) <= client.num_open, "a client's count of requests is wrong"
        assert all(self.clients[request.client].num_open for request in self._counted), "who runs is not counted"
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
