"""Many requests at once: little memory, tiers under pressure, aborts at random."""

from __future__ import annotations

import random

import pytest

from mlx_server.request import Priority, Request
from tests.batching.worlds import chunks, make_request, make_world

BOTH_MODES = pytest.mark.parametrize("is_async", [False, True])


def crowd(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        make_request(
            f"r{index}",
            rng.randint(1, 150),
            rng.randint(1, 60),
            priority=Priority(rng.randrange(3)),
            arrival_s=0.02 * index,
        )
        for index in range(count)
    ]


@BOTH_MODES
@pytest.mark.parametrize("count", [200, pytest.param(500, marks=pytest.mark.full)])
def test_many_requests_in_a_pool_of_eight_percent(count: int, is_async: bool) -> None:
    """All finish, with the tokens that an unconstrained run gives (`check_tokens`: those of each alone)."""
    requests = crowd(count, seed=8)
    wanted = sorted((-(-request.max_total_tokens // 32) for request in requests), reverse=True)
    num_blocks = int(0.08 * sum(wanted[:64]))  # what 64 at once would want
    world = make_world(num_blocks, is_async=is_async)
    waiting = list(requests)
    while waiting or world.has_requests:
        while waiting and waiting[0].arrival_s <= world.now:
            world.add(waiting.pop(0))
        if world.has_requests:
            world.step()
        else:
            world.now = waiting[0].arrival_s
    world.finish()
    world.check_tokens()
    assert len(world.reasons) == count
    assert sum(map(len, world.tokens.values())) == sum(request.sampling.max_tokens or 0 for request in requests)
    assert world.scheduler.counters.num_preemptions > 0


@BOTH_MODES
@pytest.mark.parametrize("count", [400, pytest.param(1000, marks=pytest.mark.full)])
def test_nothing_leaks_from_many_requests_with_random_aborts(count: int, is_async: bool) -> None:
    rng = random.Random(5)
    world = make_world(num_blocks=60, is_async=is_async, max_num_seqs=24)
    for request in crowd(count, seed=6):
        world.add(request)
        while world.scheduler.num_waiting > 20:
            world.step()
            if rng.random() < 0.3:
                alive = [*world.running_ids(), *world.waiting_ids()]
                assert world.scheduler.finish_request(rng.choice(alive))
    world.finish()
    world.check_tokens()
    assert 0 < len(world.reasons) < count


@pytest.mark.parametrize("aging_rate", [0.1, 0.5])
def test_low_under_constant_high_load_starts_in_bounded_time(aging_rate: float) -> None:
    """Two seats, and forever HIGH requests that keep both taken and one more waiting: LOW starts within
    `2 / aging_rate` seconds plus the time that a seat is taken for."""
    world = make_world(num_blocks=64, max_num_seqs=2, aging_rate=aging_rate)
    num_tokens = 20
    service_s = (num_tokens + 1) * world.step_s
    world.add(make_request("low", 8, priority=Priority.LOW))
    num_high = 0
    while world.requests["low"].first_scheduled_s is None:
        while world.scheduler.num_running + world.scheduler.num_waiting < 4:
            world.add(make_request(f"h{num_high}", 8, num_tokens, priority=Priority.HIGH, arrival_s=world.now))
            num_high += 1
        world.step()
    started_s = world.requests["low"].first_scheduled_s
    assert 2 / aging_rate <= started_s <= 2 / aging_rate + service_s
    assert num_high > 2 / aging_rate / service_s


def test_four_streams_are_not_stalled_by_a_long_prompt() -> None:
    """Every step of a long prompt that runs beside streams keeps to the target but for rounding to 16 rows, and
    its steps are as few as the target allows: 50 ms for the decodes, 1 ms a prompt token."""
    world = make_world(200, target_step_s=0.2, context_doubling_tokens=1e12)
    world.add(*(make_request(f"stream{index}", 8, max_tokens=200) for index in range(4)))
    world.step()
    world.step()
    world.add(make_request("long", 4096, max_tokens=2))
    gaps = []
    while not world.tokens["long"]:
        output = world.step()
        assert output is not None
        assert {f"stream{index}" for index in range(4)} <= set(chunks(output))
        gaps.append(world.runner.seconds(output))
    assert max(gaps) <= 0.208
    assert len(gaps) <= 4096 / 142
