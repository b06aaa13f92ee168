"""Who gives way when blocks or seats run out, in which order, and that nobody does so in turns."""

from __future__ import annotations

import pytest

from mlx_server.request import Priority, Request, RequestStatus
from tests.batching.worlds import World, chunks, make_request, make_world, prompt

BOTH_MODES = pytest.mark.parametrize("is_async", [False, True])


def fill(world: World, *names: str, num_tokens: int = 60, max_tokens: int = 60, **extra: object) -> None:
    """Requests of two blocks each that will grow to four, admitted in this order, one a step."""
    for name in names:
        arrival_s = world.now
        world.add(make_request(name, num_tokens, max_tokens, arrival_s=arrival_s, **extra))  # type: ignore[arg-type]
        world.step()


# --- by memory --------------------------------------------------------------------------------------------


def test_the_lowest_effective_priority_is_preempted() -> None:
    world = make_world(num_blocks=7)
    fill(world, "a", "b", "c")
    preempted = []
    while world.scheduler.num_running and not preempted:
        running = world.running_ids()
        world.step()
        preempted = [name for name in running if name in world.waiting_ids()]
    assert preempted == ["c"]
    assert world.running_ids() == ["a", "b"]
    request = world.requests["c"]
    assert request.status is RequestStatus.WAITING
    assert request.num_preemptions == 1
    assert request.num_computed_tokens == 0
    assert request.output_token_ids == world.tokens["c"] != []
    assert request.arrival_s == 0.1
    world.finish()
    world.check_tokens()


def test_the_worse_tier_is_preempted_though_it_came_first() -> None:
    world = make_world(num_blocks=7)
    fill(world, "low", priority=Priority.LOW)
    fill(world, "a", "b")
    while not world.waiting_ids():
        world.step()
    assert world.waiting_ids() == ["low"]
    world.finish()
    world.check_tokens()


def test_the_latest_admitted_of_equals_is_preempted() -> None:
    world = make_world(num_blocks=7, aging_rate=0.0)
    fill(world, "a", "b", "c")
    while not world.waiting_ids():
        world.step()
    assert world.waiting_ids() == ["c"]
    world.finish()


@BOTH_MODES
def test_a_resumed_request_hits_its_own_blocks(is_async: bool) -> None:
    world = make_world(num_blocks=6, is_async=is_async)
    fill(world, "a", "b", max_tokens=90)
    while not world.waiting_ids():
        world.step()
    while (output := world.step()) is None or "b" not in chunks(output):
        pass
    assert chunks(output)["b"][0] >= 32
    world.finish()
    world.check_tokens()
    assert world.scheduler.counters.num_prompt_tokens_computed == world.runner.num_prompt_tokens_computed


@BOTH_MODES
def test_no_token_is_lost_or_repeated_when_memory_is_short(is_async: bool) -> None:
    world = make_world(num_blocks=6, is_async=is_async, max_num_seqs=6)
    for index in range(12):
        world.add(make_request(f"r{index}", 10 + 7 * index, max_tokens=70, arrival_s=0.01 * index))
    world.finish()
    world.check_tokens()
    assert all(len(tokens) == 70 for tokens in world.tokens.values())
    assert world.scheduler.counters.num_preemptions > 0
    assert world.scheduler.counters.num_generated_tokens == 12 * 70


def test_a_request_may_preempt_itself() -> None:
    """The worst of those who run is the one that needs a block: nobody better is disturbed."""
    world = make_world(num_blocks=6)
    fill(world, "a", num_tokens=94, max_tokens=20)  # takes the last block before `b` needs it
    fill(world, "b", num_tokens=62, max_tokens=20)
    while "b" in world.running_ids():
        world.step()
    assert world.running_ids() == ["a"]
    assert len(world.tokens["b"]) == 3
    world.finish()
    world.check_tokens()


def test_the_best_request_always_advances() -> None:
    """However short memory is: the first of all never loses its blocks."""
    world = make_world(num_blocks=5, max_num_seqs=4)
    fill(world, "first", max_tokens=90)
    fill(world, "b", "c", "d", max_tokens=90)
    while "first" not in world.reasons:
        output = world.step()
        assert "first" in chunks(output)
    assert world.requests["first"].num_preemptions == 0
    world.finish()
    world.check_tokens()


# --- by tier ----------------------------------------------------------------------------------------------


def test_a_better_tier_takes_a_seat() -> None:
    world = make_world(max_num_seqs=2)
    fill(world, "normal")
    fill(world, "low", priority=Priority.LOW)
    fill(world, "high", priority=Priority.HIGH)
    assert world.running_ids() == ["high", "normal"]
    assert world.waiting_ids() == ["low"]
    world.finish()
    world.check_tokens()
    assert world.requests["low"].num_preemptions == 1


def test_a_better_tier_takes_blocks_from_as_few_as_it_needs() -> None:
    world = make_world(num_blocks=13)
    fill(world, "low a", "low b", "low c", "low d", num_tokens=70, max_tokens=20, priority=Priority.LOW)
    fill(world, "high", num_tokens=150, max_tokens=4, priority=Priority.HIGH)
    assert world.running_ids() == ["high", "low a", "low b"]
    world.finish()
    world.check_tokens()


def test_nobody_is_preempted_in_vain() -> None:
    """All that LOW holds would not be enough for HIGH, so LOW goes on."""
    world = make_world(num_blocks=12)
    fill(world, "first", num_tokens=180, max_tokens=12, priority=Priority.HIGH)
    fill(world, "low", num_tokens=70, max_tokens=20, priority=Priority.LOW)
    world.add(make_request("high", 200, max_tokens=4, priority=Priority.HIGH, arrival_s=world.now))
    assert world.step() is not None
    assert world.running_ids() == ["first", "low"]
    assert world.waiting_ids() == ["high"]
    world.finish()
    world.check_tokens()


def test_no_headroom_is_kept_for_those_who_would_give_way() -> None:
    """`high` fits beside `low`, but not beside what `low` may need: so it starts, and nobody is preempted yet."""
    for priority, starts in ((Priority.LOW, True), (Priority.HIGH, False)):
        world = make_world(num_blocks=16)
        fill(world, "runs", num_tokens=60, max_tokens=400, priority=priority)
        fill(world, "high", num_tokens=390, max_tokens=2, priority=Priority.HIGH)
        assert ("high" in world.running_ids()) is starts
        assert world.requests["runs"].num_preemptions == 0
        world.finish()
        world.check_tokens()


def test_shared_blocks_are_no_reason_to_preempt() -> None:
    """What LOW holds is held by another too: its preemption would free one block, and HIGH needs three."""
    world = make_world(num_blocks=7)
    shared = prompt(128)
    world.add(make_request("first", [*shared, 1], max_tokens=20, priority=Priority.HIGH))
    world.step()
    world.add(make_request("low", [*shared, 2], max_tokens=30, priority=Priority.LOW))
    world.step()
    world.add(make_request("high", 90, max_tokens=2, priority=Priority.HIGH, arrival_s=world.now))
    assert world.step() is not None
    assert world.running_ids() == ["first", "low"]
    world.finish()
    world.check_tokens()


def test_an_equal_or_better_tier_is_never_preempted_for_a_seat() -> None:
    for priority in (Priority.NORMAL, Priority.HIGH):
        world = make_world(max_num_seqs=1)
        fill(world, "runs", priority=priority)
        world.add(make_request("waits", priority=Priority.NORMAL))
        world.step()
        assert world.running_ids() == ["runs"]
        world.finish()


def test_who_has_aged_enough_is_not_preempted() -> None:
    """A LOW request that arrived 20 s before a HIGH one has its effective priority. Until then it gives way,
    and does not come back at once though its prefix is cached and its priority almost as good."""
    for wait_s, preempted in ((19.9, True), (20.1, False)):
        world = make_world(max_num_seqs=1)
        fill(world, "low", priority=Priority.LOW)
        world.now = wait_s
        world.add(make_request("high", priority=Priority.HIGH, arrival_s=world.now))
        world.step()
        assert (world.running_ids() == ["high"]) is preempted
        world.finish()


def test_nobody_is_preempted_for_one_who_waits_for_a_prefix() -> None:
    world = make_world(max_num_seqs=2, max_num_batched_tokens=32)
    fill(world, "low", num_tokens=8, priority=Priority.LOW)
    world.add(make_request("owner", prompt(100), max_tokens=30, priority=Priority.HIGH, arrival_s=world.now))
    world.add(make_request("waits", prompt(100), max_tokens=2, priority=Priority.HIGH, arrival_s=world.now))
    while len(world.tokens["owner"]) == 0:
        world.step()
        assert world.running_ids() == ["owner", "low"]
    assert chunks(world.step())["waits"] == (96, 4)
    assert world.running_ids() == ["owner", "waits"]
    world.finish()
    world.check_tokens()


@BOTH_MODES
def test_two_requests_do_not_evict_each_other_in_turns(is_async: bool) -> None:
    """Both fit alone and not together. The worse one is preempted for the better one, once, and waits for it
    to end: every later preemption of it is by a request that is better still."""
    world = make_world(num_blocks=6, is_async=is_async)
    fill(world, "low", num_tokens=100, max_tokens=90, priority=Priority.LOW)
    fill(world, "high", num_tokens=100, max_tokens=90, priority=Priority.HIGH)
    order: list[str] = []
    while len(world.reasons) < 2:
        output = world.step()
        for name in chunks(output) if output is not None else ():
            if order[-1:] != [name]:
                order.append(name)
    assert world.requests["high"].num_preemptions == 0
    assert world.requests["low"].num_preemptions == 1
    assert order == ["high", "low"]
    world.check_tokens()


@pytest.mark.parametrize("num_blocks", [4, 6, 9, 14])
def test_a_preemption_is_always_for_a_better_request(num_blocks: int) -> None:
    """Watches every step of a crowded world: whoever leaves is worse than everybody who stays or comes."""
    world = make_world(num_blocks=num_blocks, max_num_seqs=4)

    def rank(request: Request) -> tuple[bool, int, float]:
        return not request.is_promoted, request.priority, world.scheduler.effective_priority(request, 0.0)

    num_arrivals = 0
    for step in range(3000):
        if step % 12 == 0 and num_arrivals < 60:
            tier = Priority((num_arrivals * 7) % 3)
            world.add(make_request(f"r{num_arrivals}", 40, 50, arrival_s=world.now, priority=tier))
            num_arrivals += 1
        before = list(world.scheduler.running())
        num_preemptions = {request.request_id: request.num_preemptions for request in before}
        world.schedule()
        left = [request for request in before if request.num_preemptions > num_preemptions[request.request_id]]
        for request in left:
            # It may come back at once, when its own blocks were all that was missing.
            stay = [other for other in world.scheduler.running() if other not in left]
            assert all(rank(other) <= rank(request) for other in stay if other in before)
        if world.runner.num_submitted:
            world.deliver()
        elif num_arrivals == 60:
            break
    world.finish()
    world.check_tokens()
    assert len(world.reasons) == 60


def test_what_is_computed_again_after_a_preemption_is_counted() -> None:
    """`low` has 40 tokens of prompt and 5 of output when it loses its seat; its one full block is still cached."""
    world = make_world(max_num_seqs=1)
    world.add(make_request("low", 40, max_tokens=20, priority=Priority.LOW))
    while len(world.tokens["low"]) < 5:
        world.step()
    assert world.scheduler.counters.num_tokens_recomputed == 0
    num_computed = world.requests["low"].num_computed_tokens
    world.add(make_request("high", 8, max_tokens=2, priority=Priority.HIGH))
    world.finish()
    world.check_tokens()
    assert world.scheduler.counters.num_preemptions == 1
    num_outputs = num_computed - 40
    assert num_outputs >= 4
    assert world.scheduler.counters.num_tokens_recomputed == (40 - 32) + num_outputs
