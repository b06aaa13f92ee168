"""Waiting requests are seen in the order of their effective priority at any moment, and in that of their tiers."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.priority_queue import PriorityQueueWithAging
from mlx_server.request import Priority, Request
from tests.batching.worlds import make_request

AGING_RATE = 0.1


def arrival(request_id: str, priority: int, arrival_s: float) -> Request:
    return make_request(request_id, 1, arrival_s=arrival_s, priority=Priority(priority))


def make_queue(*requests: Request, aging_rate: float = AGING_RATE) -> PriorityQueueWithAging:
    queue = PriorityQueueWithAging(PagedBlockManager(1), aging_rate)
    for request in requests:
        queue.push(request)
    return queue


def most_urgent(queue: PriorityQueueWithAging) -> Request | None:
    return min(queue.heads(), key=queue.age, default=None)


def drain(queue: PriorityQueueWithAging) -> list[str]:
    names = []
    while (request := most_urgent(queue)) is not None:
        names.append(request.request_id)
        queue.remove(request)
    return names


def test_better_tiers_come_first() -> None:
    assert drain(make_queue(*(arrival(f"{p}", p, 0.0) for p in (2, 0, 1)))) == ["0", "1", "2"]


def test_low_equals_high_after_twenty_seconds() -> None:
    queue = make_queue(arrival("low", 2, 0.0), arrival("before", 0, 19.9), arrival("after", 0, 20.1))
    assert drain(queue) == ["before", "low", "after"]
    low = arrival("low", 2, 0.0)
    assert [queue.effective_priority(low, now) for now in (0.0, 10.0, 20.0, 30.0)] == [2.0, 1.0, 0.0, -1.0]


def test_differences_of_keys_are_those_of_effective_priorities() -> None:
    queue = make_queue()
    first, second = arrival("a", 2, 3.0), arrival("b", 0, 5.0)
    for now in (5.0, 50.0, 5000.0):
        difference = queue.effective_priority(first, now) - queue.effective_priority(second, now)
        assert difference == pytest.approx(queue.key(first) - queue.key(second))


def test_without_aging_tiers_are_strict_and_arrivals_in_order() -> None:
    requests = [arrival("late high", 0, 9e6), arrival("low", 2, 0.0), arrival("early high", 0, 1.0)]
    assert drain(make_queue(*requests, aging_rate=0.0)) == ["early high", "late high", "low"]


def test_ties_go_to_the_earlier_arrival_then_to_the_earlier_push() -> None:
    # 1 + 0.5 * 0 = 0 + 0.5 * 2: equal keys, the earlier arrival first
    queue = make_queue(arrival("high", 0, 2.0), arrival("normal", 1, 0.0), aging_rate=0.5)
    assert drain(queue) == ["normal", "high"]
    names = [f"r{index}" for index in range(50)]
    assert drain(make_queue(*(arrival(name, 1, 7.0) for name in names))) == names


def test_the_order_is_the_brute_force_aging_order_of_ten_thousand_arrivals() -> None:
    """Arrivals and pops mixed; at each pop, the brute force recomputes everyone's effective priority."""
    rng = random.Random(42)
    queue = make_queue()
    waiting: list[Request] = []
    now, num_arrived = 0.0, 0
    while num_arrived < 10_000 or waiting:
        now += rng.expovariate(20.0)
        if num_arrived < 10_000 and (len(waiting) < 50 or rng.random() < 0.5):
            request = arrival(f"r{num_arrived}", rng.randrange(3), now)
            num_arrived += 1
            queue.push(request)
            waiting.append(request)
        else:
            best = min(waiting, key=lambda r: r.priority - AGING_RATE * (now - r.arrival_s))
            waiting.remove(best)
            assert most_urgent(queue) is best
            queue.remove(best)
    assert len(queue) == 0


def test_a_request_can_be_removed_from_anywhere() -> None:
    requests = [arrival(f"r{index}", 1, float(index)) for index in range(6)]
    queue = make_queue(*requests)
    queue.remove(requests[0])
    queue.remove(requests[3])
    assert len(queue) == 4
    assert most_urgent(queue) is not None
    queue.check_integrity()
    assert drain(queue) == ["r1", "r2", "r4", "r5"]
    assert most_urgent(queue) is None


def test_a_removed_request_may_come_back() -> None:
    first, second = arrival("first", 1, 0.0), arrival("second", 1, 1.0)
    queue = make_queue(first, second)
    queue.remove(first)
    queue.push(first)
    queue.check_integrity()
    assert len(queue) == 2
    assert [request.request_id for request in queue] == ["first", "second"]
    assert drain(queue) == ["first", "second"]


def test_a_request_waits_once() -> None:
    queue = make_queue(arrival("r", 1, 0.0))
    with pytest.raises(AssertionError, match="waits already"):
        queue.push(arrival("r", 1, 0.0))


def test_requests_are_seen_in_order_without_being_taken() -> None:
    rng = random.Random(3)
    requests = [arrival(f"r{index}", rng.randrange(3), rng.uniform(0, 30)) for index in range(200)]
    queue = make_queue(*requests)
    for request in rng.sample(requests, 80):
        queue.remove(request)
        requests.remove(request)
    in_order = sorted(requests, key=lambda request: (queue.key(request), request.arrival_s))
    assert list(queue) == in_order
    assert list(islice(queue, 7)) == in_order[:7]
    by_tier = sorted(requests, key=lambda request: (request.priority, request.arrival_s))
    assert queue.heads() == [next(r for r in by_tier if r.priority == priority) for priority in range(3)]
    assert queue.first(1) is queue.heads()[1]
    assert len(queue) == 120
    assert drain(queue) == [request.request_id for request in in_order]
    assert list(queue) == []
