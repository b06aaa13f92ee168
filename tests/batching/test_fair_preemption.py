"""Who loses its blocks where keys share a tier: the one that holds much, the youngest of it first."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_server.batching.fair_order import by_holdings
from mlx_server.request import Priority, Request
from tests.batching.worlds import World, make_request, make_world

BOTH_MODES = pytest.mark.parametrize("is_async", [False, True])


def fill(world: World, client: str, *sizes: int, max_tokens: int = 60, priority: Priority = Priority.NORMAL) -> None:
    """Requests of a client, admitted in this order, one a step."""
    for size in sizes:
        name = f"{client}{len(world.requests)}"
        more = {"arrival_s": world.now, "client": client, "priority": priority}
        world.add(make_request(name, size, max_tokens, **more))
        world.step()


def first_preempted(world: World) -> list[str]:
    """Steps until some lose their blocks."""
    while not world.waiting_ids():
        world.step()
    return world.waiting_ids()


@BOTH_MODES
@pytest.mark.parametrize("size", [40, 50, 60])
def test_a_stream_outlives_the_many_of_another_client(size: int, is_async: bool) -> None:
    """Though it is the youngest, and whoever is the first to need a block."""
    world = make_world(num_blocks=9, is_async=is_async)
    fill(world, "A", 60, 60, 60)
    fill(world, "B", size, max_tokens=90)
    assert first_preempted(world) == ["A2"]
    world.finish()
    world.check_tokens()
    assert world.requests["B3"].num_preemptions == 0


def test_what_counts_is_how_much_the_older_ones_of_the_client_hold() -> None:
    world = make_world(num_blocks=36)
    fill(world, "B", 600, 200, max_tokens=200)
    fill(world, "A", 60, 60, 60)
    assert first_preempted(world) == ["B1"]
    world.finish()
    world.check_tokens()


def test_the_oldest_of_each_client_is_taken_last_and_then_by_age() -> None:
    world = make_world(num_blocks=22)
    fill(world, "A", 60)
    fill(world, "B", 500, max_tokens=100)
    fill(world, "C", 40)
    assert first_preempted(world) == ["C2"]
    world.finish()
    world.check_tokens()


def test_a_better_tier_takes_from_the_client_that_holds_much() -> None:
    world = make_world(num_blocks=13, aging_rate=0.0)
    fill(world, "A", 70, 70, 70, max_tokens=20, priority=Priority.LOW)
    fill(world, "B", 70, max_tokens=20, priority=Priority.LOW)
    fill(world, "H", 150, max_tokens=4, priority=Priority.HIGH)
    assert sorted(world.running_ids()) == ["A0", "B3", "H4"]
    world.finish()
    world.check_tokens()


def test_under_pressure_the_client_that_holds_much_gives_way() -> None:
    world = make_world(num_blocks=60)
    fill(world, "A", 60, 60)
    fill(world, "B", 60)
    rank = world.scheduler.lowest_rank()
    assert world.scheduler.preempt_lowest()
    assert world.waiting_ids() == ["A1"]
    assert rank == world.scheduler._table.rank(world.requests["A1"])
    world.finish()
    world.check_tokens()


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 90), st.integers(0, 5)), max_size=20))
def test_with_one_client_the_order_is_that_of_ranks(drawn: list[tuple[int, bool, int, int]]) -> None:
    requests = []
    for index, (tier, is_promoted, size, arrival_s) in enumerate(drawn):
        requests.append(make_request(f"r{index}", size, arrival_s=arrival_s, priority=Priority(tier), client="A"))
        requests[-1].is_promoted = is_promoted
    requests.sort(key=lambda request: (not request.is_promoted, request.priority, request.arrival_s))
    assert by_holdings(requests) == requests


def order(running: list[Request]) -> list[Request]:
    """The order of `by_holdings`, by its definition."""

    def held_before(request: Request) -> int:
        index = running.index(request)
        mates = [one for one in running[:index] if one.client == request.client and one.priority == request.priority]
        return sum(one.num_tokens for one in mates)

    return sorted(running, key=lambda request: (request.priority, held_before(request), running.index(request)))


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.sampled_from([6, 9, 14, 30]),
    clients=st.sampled_from(["A", "AB", "AAAAAAB", "ABCD"]),
    is_async=st.booleans(),
    has_tiers=st.booleans(),
)
def test_in_any_world_those_go_that_hold_much_and_the_first_never(
    seed: int, num_blocks: int, clients: str, is_async: bool, has_tiers: bool
) -> None:
    """Whoever leaves is behind all that stay, in an order in which a client's requests keep their order. So with one
    client it is the youngest, and the first of all goes on. All end, with their own tokens, and nothing is computed
    again more often than there were preemptions."""
    rng = random.Random(seed)
    world = make_world(num_blocks, is_async=is_async, max_num_seqs=8, aging_rate=0.0)
    num_arrivals = 0
    while num_arrivals < 25 or world.has_requests:
        if num_arrivals < 25 and rng.random() < 0.2:
            tier = rng.choice(list(Priority)) if has_tiers else Priority.NORMAL
            more = {"client": rng.choice(clients), "priority": tier, "arrival_s": world.now}
            world.add(make_request(f"r{num_arrivals}", rng.randint(1, 90), rng.randint(1, 90), **more))
            num_arrivals += 1
        before = list(world.scheduler.running())
        num_preemptions = {request: request.num_preemptions for request in before}
        expected = order(before)
        world.step()
        left = [request for request in before if request.num_preemptions > num_preemptions[request]]
        assert set(left) == set(expected[len(expected) - len(left) :]), "out of order"
        if len(before) > 1 and not has_tiers:
            assert expected[0] not in left, "the first of all must go on"
    world.finish()
    world.check_tokens()
    counters = world.scheduler.counters
    assert counters.num_tokens_recomputed <= 180 * counters.num_preemptions


def test_two_clients_do_not_take_blocks_from_each_other_in_turns() -> None:
    """Two streams each, and room for three: one is preempted once, and comes back when another has ended."""
    world = make_world(num_blocks=16)
    fill(world, "A", 60, 60, max_tokens=90)
    fill(world, "B", 60, 60, max_tokens=90)
    world.finish()
    world.check_tokens()
    preempted = Counter({name: request.num_preemptions for name, request in world.requests.items()})
    assert preempted.total() == 1
