"""What a better tier takes of steps and seats, and what those who have aged past it keep."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_server.request import Priority
from tests.batching.worlds import FakeConstraint, World, chunks, make_request, make_world, prompt

TARGET_S, MAX_S = 0.05 + 0.0965, 0.05 + 0.4445
TOKENS, MAX_TOKENS = 92, 444  # what these leave beside four decodes, in rows that are a multiple of 16


def decoding_world(priority: Priority, **limits: Any) -> World:
    """Four requests that decode on and on, 50 ms a step, and a scheduler that knows it, and 1 ms a prompt token."""
    world = make_world(400, target_step_s=TARGET_S, max_step_s=MAX_S, context_doubling_tokens=1e12, **limits)
    world.add(*(make_request(f"d{index}", 8, max_tokens=500, priority=priority) for index in range(4)))
    world.step()
    world.step()
    return world


# --- steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "prompt", "num_tokens"),
    [
        (Priority.NORMAL, Priority.HIGH, MAX_TOKENS),
        (Priority.LOW, Priority.NORMAL, MAX_TOKENS),
        (Priority.HIGH, Priority.HIGH, TOKENS),
        (Priority.HIGH, Priority.LOW, TOKENS),
    ],
)
def test_a_prompt_holds_up_streams_of_worse_tiers_only(stream: Priority, prompt: Priority, num_tokens: int) -> None:
    world = decoding_world(stream)
    world.now = 100.0  # the streams' own prompts were long ago
    world.add(make_request("prompt", 1000, priority=prompt, arrival_s=100.0))
    step = chunks(world.step())
    assert step["prompt"] == (0, num_tokens)
    assert len(step) == 5, "the streams get their tokens all the same"
    world.finish()
    world.check_tokens()


def test_one_stream_of_the_tier_is_enough_to_keep_the_target() -> None:
    world = decoding_world(Priority.LOW)
    world.add(make_request("stream", 8, max_tokens=500, priority=Priority.HIGH))
    world.step()
    world.add(make_request("prompt", 1000, priority=Priority.HIGH))
    assert chunks(world.step())["prompt"] == (0, 91)  # beside five


def test_prompts_of_worse_tiers_do_not_lengthen_a_better_ones_step() -> None:
    world = decoding_world(Priority.LOW)
    world.add(make_request("normal", 1000), make_request("high", 50, priority=Priority.HIGH, arrival_s=0.1))
    step = chunks(world.step())
    assert step["high"] == (0, 50)
    assert "normal" not in step, "it sits one step out"
    world.add(make_request("next", 50, priority=Priority.HIGH, arrival_s=0.1))
    step = chunks(world.step())
    assert (step["next"], step["normal"]) == ((0, 50), (0, TOKENS - 1 - 50)), "but not two"
    world.add(make_request("long", 300, priority=Priority.HIGH, arrival_s=0.2))
    step = chunks(world.step())
    assert step["long"][1] == TOKENS - 2, "a stream of its own tier is there now"


def test_who_arrives_beside_no_stream_waits_for_one_step_of_bounded_length() -> None:
    world = make_world(400, max_step_s=0.2, context_doubling_tokens=1e12)
    world.add(make_request("first", 64, max_tokens=1))
    world.step()
    world.add(make_request("long", 1000), make_request("late", 1000, arrival_s=0.1))
    assert chunks(world.step()) == {"long": (0, 192)}


def test_worse_prompts_wait_and_the_oldest_gets_its_part() -> None:
    """It starts with a token. From then on it is due one for every seven of HIGH, and gets what goes beyond 256 once
    that makes a block. 444 tokens a step: 443 / 7 - 1 + 4 * 444 / 7 = 315.9; 315.9 - 60 + 384 / 7 = 310.8."""
    world = decoding_world(Priority.LOW)
    world.now = 100.0
    world.add(make_request("aged", 300, priority=Priority.LOW, arrival_s=70.0))
    world.add(make_request("fresh", 300, priority=Priority.NORMAL, arrival_s=100.0))
    world.add(make_request("high", 3000, priority=Priority.HIGH, arrival_s=100.0))
    steps = [chunks(world.step()) for _ in range(7)]
    sizes = [step.get("aged", (0, 0))[1] for step in steps]
    assert sizes == [1, 0, 0, 0, 0, 60, 54]
    assert [step["high"][1] for step in steps[:-1]] == [MAX_TOKENS - size for size in sizes[:-1]]
    assert steps[-1]["high"] == (2603, MAX_TOKENS - 54)
    assert not any("fresh" in step for step in steps)
    world.finish()
    world.check_tokens()


def test_the_part_of_the_oldest_is_taken_out_of_steps_that_better_prompts_fill() -> None:
    """One prompt's worth of a step comes in each, so that HIGH lags behind by what the oldest gets: 1, and then
    5 * 444 / 7 - 1 - 256 = 60. No step is longer for it."""
    world = decoding_world(Priority.LOW)
    world.now = 100.0
    world.add(make_request("aged", 300, priority=Priority.LOW, arrival_s=70.0))
    sizes = []
    for index in range(6):
        world.add(make_request(f"high{index}", MAX_TOKENS, max_tokens=1, priority=Priority.HIGH, arrival_s=world.now))
        step = chunks(world.step())
        assert sum(size for name, (_, size) in step.items() if name[0] != "d") == MAX_TOKENS
        sizes.append(step.get("aged", (0, 0))[1])
    assert sizes == [1, 0, 0, 0, 0, 60]


def test_the_tier_between_pays_what_the_oldest_is_due() -> None:
    """HIGH's prompts, one in every third step, are as long as without it: NORMAL's pay what goes beyond 128."""
    world = decoding_world(Priority.LOW)
    world.now = 100.0
    world.add(make_request("aged", 2000, priority=Priority.LOW, arrival_s=70.0))
    world.add(make_request("normal", 8000, arrival_s=100.0))
    num_better, sizes = 0, []
    for index in range(60):
        if index % 3 == 0:
            world.add(make_request(f"high{index}", 300, max_tokens=1, priority=Priority.HIGH, arrival_s=world.now))
        step = chunks(world.step())
        sizes.append(step.get("aged", (0, 0))[1])
        if index % 3 == 0:
            assert step[f"high{index}"] == (0, 300)
            assert "normal" not in step
            assert sizes[-1] == (1 if index == 0 else 0)
        num_better += 300 if index % 3 == 0 else step["normal"][1]
    assert num_better / 7 - sum(sizes) <= 2 * 128


def test_who_is_promoted_past_one_tier_gets_nothing_of_a_better_ones_steps() -> None:
    """`aged` has waited 15 s longer than the others: it is more urgent than NORMAL, but not than HIGH."""
    world = decoding_world(Priority.LOW)
    world.now = 100.0
    world.add(make_request("high", 3000, priority=Priority.HIGH, arrival_s=100.0))
    world.step()
    world.add(make_request("aged", 300, priority=Priority.LOW, arrival_s=85.0))
    world.add(make_request("normal", 300, arrival_s=100.0))
    step = chunks(world.step())
    assert step["high"][1] == MAX_TOKENS
    assert "aged" not in step
    while "normal" not in step:
        step = chunks(world.step())
    assert "aged" in step, "it has its part beside NORMAL"


def test_the_part_of_a_tier_goes_to_the_client_whose_turn_it_is() -> None:
    """A's request is the oldest, and its streams have had more than B. B's request is young: its part is that of the
    tier's oldest, also once it runs."""
    world = decoding_world(Priority.LOW, max_num_seqs=8)
    world.now = 100.0
    world.schedule()
    world.add(make_request("a", 300, priority=Priority.LOW, arrival_s=70.0))
    world.add(make_request("b", 300, priority=Priority.LOW, arrival_s=99.0, client="B"))
    world.add(make_request("high", 3000, priority=Priority.HIGH, arrival_s=100.0))
    world.deliver()
    steps = [chunks(world.step()) for _ in range(7)]
    assert [step.get("b", (0, 0))[1] for step in steps] == [1, 0, 0, 0, 0, 60, 54]
    assert not any("a" in step for step in steps)
    world.finish()


# --- seats ------------------------------------------------------------------------------------------------


def flood(world: World, count: int, priority: Priority, *, prefix: str = "", max_tokens: int = 3) -> None:
    for index in range(count):
        name = f"{prefix or priority.name}{len(world.requests)}.{index}"
        world.add(make_request(name, 8, max_tokens, priority=priority, arrival_s=world.now))


def test_a_flood_that_has_aged_does_not_stand_before_the_next_of_a_better_tier() -> None:
    world = make_world(400, max_num_seqs=8)
    flood(world, 100, Priority.LOW, max_tokens=30)
    world.step()
    world.now = 60.0
    world.add(make_request("person", 8, max_tokens=2, priority=Priority.NORMAL, arrival_s=world.now))
    assert "person" in chunks(world.step())
    assert world.scheduler.counters.num_preemptions == 1
    world.finish()
    world.check_tokens()


@pytest.mark.parametrize(("num_seats", "share"), [(16, 2), (8, 1), (1, 1)])
def test_those_who_have_aged_past_a_flood_of_a_better_tier_hold_a_share_of_the_seats(
    num_seats: int, share: int
) -> None:
    world = make_world(800, max_num_seqs=num_seats)
    flood(world, 6, Priority.LOW, max_tokens=20)
    world.now = 30.0
    most, num_left = 0, 6
    while num_left:
        flood(world, num_seats, Priority.HIGH, max_tokens=5)
        world.step()
        running = [request.priority for request in world.scheduler.running()]
        most = max(most, running.count(Priority.LOW))
        num_left = sum(name.startswith("LOW") and name not in world.reasons for name in world.requests)
        assert len(world.reasons) < 2000, "they starve"
    assert most == share
    assert world.scheduler.counters.num_preemptions == 0
    world.finish()
    world.check_tokens()


def test_without_aging_a_flood_of_a_better_tier_is_all_that_runs() -> None:
    world = make_world(400, max_num_seqs=8, aging_rate=0.0)
    flood(world, 1, Priority.LOW)
    for _ in range(100):
        flood(world, 8, Priority.HIGH)
        world.step()
    assert not any(world.tokens[name] for name in world.requests if name.startswith("LOW"))


def test_who_has_aged_keeps_its_seat_while_it_runs() -> None:
    """The oldest of the eight is as urgent as a new HIGH request: the others give way before it does."""
    world = make_world(400, max_num_seqs=4)
    for index in range(4):
        world.add(make_request(f"low{index}", 8, 400, priority=Priority.LOW, arrival_s=world.now))
        world.step()
    world.now = 40.0
    flood(world, 6, Priority.HIGH, max_tokens=40)
    for _ in range(4):
        world.step()
    assert sorted(name[:4] for name in world.running_ids()) == ["HIGH", "HIGH", "HIGH", "low0"]
    world.finish()
    world.check_tokens()
    assert world.requests["low0"].num_preemptions == 0


def test_only_the_oldest_of_all_keeps_its_seat_by_its_age() -> None:
    """`low` has aged past HIGH, but not past the one that is promoted to its seat."""
    world = make_world(400, max_num_seqs=2)
    for name, arrival_s in (("low", 30.0), ("late", 59.0)):
        world.add(make_request(name, 8, 400, priority=Priority.LOW, arrival_s=arrival_s))
    world.step()
    world.now = 60.0
    world.add(make_request("aged", 8, 20, priority=Priority.LOW, arrival_s=10.0))
    world.add(make_request("high", 8, 20, priority=Priority.HIGH, arrival_s=60.0))
    world.step()
    assert sorted(world.running_ids()) == ["aged", "high"]
    world.finish()
    world.check_tokens()


def test_a_better_tier_takes_its_seat_beside_the_one_that_is_promoted() -> None:
    """In one step: the aged request takes the seat that is free, and HIGH that of a running one."""
    world = make_world(400, max_num_seqs=2)
    world.add(make_request("low", 8, 400, priority=Priority.LOW, arrival_s=59.0))
    world.step()
    world.add(make_request("ends", 8, 1, priority=Priority.LOW, arrival_s=59.5))
    world.step()
    world.now = 60.0
    world.add(make_request("aged", 8, 20, priority=Priority.LOW, arrival_s=10.0))
    world.add(make_request("high", 8, 20, priority=Priority.HIGH, arrival_s=60.0))
    world.step()
    assert sorted(world.running_ids()) == ["aged", "high"]
    world.finish()
    world.check_tokens()


@pytest.mark.parametrize("num_next_tokens", [3000, 700])
def test_a_better_tier_takes_its_seat_in_the_step_that_has_tokens_for_it(num_next_tokens: int) -> None:
    """`long` fills steps. A longer `next` behind it starts when `long` ends, a shorter one in half of what is there:
    until then nobody loses its seat for it."""
    world = decoding_world(Priority.LOW, max_num_seqs=4)
    world.add(make_request("long", 2000, max_tokens=50, priority=Priority.HIGH, arrival_s=world.now))
    world.step()
    world.add(make_request("next", num_next_tokens, max_tokens=50, priority=Priority.HIGH, arrival_s=world.now))
    world.step()
    assert ("next" in world.running_ids()) is (num_next_tokens == 700)
    while "next" not in world.running_ids():
        assert world.scheduler.counters.num_preemptions == 1
        world.step()
    assert world.requests["long"].num_computed_tokens == 2000 or num_next_tokens == 700
    assert world.scheduler.counters.num_preemptions == 2
    world.finish()
    world.check_tokens()


def test_blocks_that_a_submitted_step_writes_are_taken_one_step_before() -> None:
    """So `next` starts in the step that `long` ends in, as if the blocks had been free."""
    world = make_world(100, is_async=True, target_step_s=TARGET_S, max_step_s=MAX_S, context_doubling_tokens=1e12)
    world.add(*(make_request(f"d{index}", 150, max_tokens=300, priority=Priority.LOW) for index in range(4)))
    while not world.tokens["d0"]:
        world.step()
    world.add(make_request("long", 1200, max_tokens=9, priority=Priority.HIGH, arrival_s=world.now))
    world.add(make_request("next", 1500, max_tokens=9, priority=Priority.HIGH, arrival_s=world.now))
    preempted_at, started_at = [], 0
    for index in range(20):
        num_preemptions = world.scheduler.counters.num_preemptions
        step = chunks(world.step())
        preempted_at += [index] * (world.scheduler.counters.num_preemptions - num_preemptions)
        if "next" in step:
            started_at = index
            break
    assert sum(step["long"]) == 1200
    assert set(preempted_at) == {started_at - 1}
    world.finish()
    world.check_tokens()


def test_the_step_that_takes_blocks_starts_who_they_are_for() -> None:
    """When `a` and `b` come, both clients have the same, and `a` is older. In the next step A's stream has had more, so
    the blocks are taken for `b`, which needs those of both."""
    world = make_world(20, max_num_seqs=8)
    world.add(make_request("stream", 8, 50, priority=Priority.HIGH, client="A"))
    world.add(*(make_request(f"low{index}", 230, 20, priority=Priority.LOW) for index in range(2)))
    while not world.tokens["low0"] or not world.tokens["low1"]:
        world.step()
    world.schedule()
    world.add(make_request("a", 230, 20, priority=Priority.HIGH, client="A", arrival_s=world.now))
    world.add(make_request("b", 380, 4, priority=Priority.HIGH, client="B", arrival_s=world.now + 0.01))
    world.deliver()
    step = chunks(world.schedule())
    assert world.scheduler.counters.num_preemptions == 2
    assert "b" in step
    world.finish()
    world.check_tokens()


def test_nobody_loses_its_seat_for_a_client_whose_turn_it_is_not() -> None:
    """Tokens of B's `short` prompt would come after A's `long` one, since B has had more."""
    world = decoding_world(Priority.LOW, max_num_seqs=5)
    world.add(make_request("long", 4000, 5, priority=Priority.HIGH, client="A", arrival_s=world.now))
    world.step()
    world.add(make_request("short", 100, 5, priority=Priority.HIGH, client="B", arrival_s=world.now))
    world.scheduler._table.waiting._tiers[Priority.HIGH].clients["B"].level += 2000
    for _ in range(4):
        assert "short" not in chunks(world.step())
        assert world.scheduler.counters.num_preemptions == 0
    while "short" not in chunks(world.step()):
        pass
    assert world.requests["long"].num_computed_tokens < 4000
    assert world.scheduler.counters.num_preemptions == 1
    world.finish()


def test_who_waits_for_a_prefix_keeps_nobody_behind_it_from_a_seat() -> None:
    """`second` waits for what `first` computes; `other` takes the seat of a LOW request meanwhile."""
    world = make_world(200, max_num_seqs=4, max_num_batched_tokens=64)
    flood(world, 4, Priority.LOW, max_tokens=200)
    world.step()
    shared = prompt(600)
    for name in ("first", "second"):
        world.add(make_request(name, [*shared, 1], 50, priority=Priority.HIGH, arrival_s=world.now))
    world.step()
    assert world.scheduler.counters.num_preemptions == 1
    world.add(make_request("other", 8, 50, priority=Priority.HIGH, arrival_s=world.now))
    world.step()
    assert {"first", "other"} <= set(world.running_ids())
    assert (world.scheduler.num_deferred, world.scheduler.counters.num_preemptions) == (1, 2)
    world.finish()
    world.check_tokens()


def test_the_part_of_the_oldest_never_makes_a_step_larger_than_its_budget() -> None:
    """HIGH's prompts take nearly all of each."""
    budget = 4 + MAX_TOKENS
    world = decoding_world(Priority.LOW, max_num_batched_tokens=budget, max_num_seqs=16)
    world.now = 100.0
    world.add(make_request("aged", 300, priority=Priority.LOW, arrival_s=70.0))
    sizes = []
    for index in range(14):
        world.add(make_request(f"high{index}", 420, max_tokens=1, priority=Priority.HIGH, arrival_s=world.now))
        step = chunks(world.step())
        assert sum(num_tokens for _, num_tokens in step.values()) <= budget
        sizes.append(step.get("aged", (0, 0))[1])
    assert sizes[0] == 1
    assert sum(sizes) > 200


def test_a_step_that_those_who_decode_fill_has_no_part_for_the_oldest() -> None:
    """The tokens that a grammar forces take the whole step."""
    world = make_world(max_num_batched_tokens=16, max_num_seqs=4)
    constraint = FakeConstraint(length=60, forced={2: tuple(prompt(40))})
    world.add_unchecked(make_request("forced", 8, max_tokens=80, constraint=constraint))
    world.step()
    world.now = 100.0
    world.step()
    world.add(make_request("aged", 30, priority=Priority.LOW, arrival_s=70.0))
    world.add(make_request("high", 30, priority=Priority.HIGH, arrival_s=100.0))
    assert chunks(world.step()) == {"forced": (9, 16)}
    world.finish()
    world.check_tokens()
