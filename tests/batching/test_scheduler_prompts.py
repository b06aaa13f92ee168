"""How prompts share a step: chunks, the budget beside those who decode, and who of a tier gets it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Priority
from tests.batching.worlds import FakeConstraint, World, chunks, make_request, make_scheduler, make_world, prompt

# --- chunks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("size", [1, 7, 512])
def test_chunks_of_any_size_give_the_same_tokens(size: int, is_async: bool) -> None:
    world = make_world(is_async=is_async, max_chunk_tokens=size)
    world.add(*(make_request(f"r{index}", 20 + 45 * index, max_tokens=6) for index in range(4)))
    largest = 0
    while world.has_requests:
        output = world.step()
        if output is not None:
            largest = max(largest, *(chunk.num_tokens for chunk in output.chunks))
    assert largest == min(size, 155)
    assert {request_id: len(tokens) for request_id, tokens in world.tokens.items()} == dict.fromkeys(world.tokens, 6)
    world.check_tokens()


def test_prompts_take_all_that_a_step_has() -> None:
    world = make_world(max_num_batched_tokens=80)
    world.add(make_request("r", 150), make_request("other", 20, arrival_s=1.0, priority=Priority.LOW))
    assert chunks(world.step()) == {"r": (0, 80)}
    assert chunks(world.step()) == {"r": (80, 70)}, "the worse tier sits this one out"
    assert chunks(world.step()) == {"r": (150, 1), "other": (0, 20)}
    world.finish()
    world.check_tokens()


def test_single_tokens_come_first_in_a_step() -> None:
    world = make_world()
    world.add(make_request("old", 40, max_tokens=9, priority=Priority.LOW))
    world.step()
    world.add(make_request("new", 20), make_request("tiny", [5], arrival_s=0.1))
    assert list(chunks(world.step())) == ["old", "tiny", "new"]


def test_a_step_never_holds_more_than_its_budget() -> None:
    """Resumed requests take up to a block each; together no more than the step."""
    world = make_world(num_blocks=40, max_num_batched_tokens=34, max_num_seqs=4)
    low = [make_request(f"low{index}", 40, max_tokens=60, priority=Priority.LOW) for index in range(4)]
    world.add(*low)
    for _ in range(20):
        world.step()
    world.add(make_request("high", 1170, 2, priority=Priority.HIGH, arrival_s=world.now))
    world.finish()  # each step checks its size
    assert world.scheduler.counters.num_preemptions == 3
    world.check_tokens()


# --- beside those who decode ------------------------------------------------------------------------------


def decoding_world(num_decodes: int, *, target_step_s: float | None, **limits: Any) -> World:
    """Requests that decode on and on, 50 ms a step, and a scheduler that knows it, and 1 ms a prompt token."""
    world = make_world(400, target_step_s=target_step_s, context_doubling_tokens=1e12, **limits)
    world.add(*(make_request(f"d{index}", 8, max_tokens=500) for index in range(num_decodes)))
    world.step()
    world.step()
    return world


def test_while_nobody_decodes_a_prompt_gets_the_whole_step() -> None:
    world = make_world(target_step_s=0.001)
    world.add(make_request("r", 1500))
    assert chunks(world.step()) == {"r": (0, 1500)}


def test_while_someone_decodes_a_prompt_gets_what_the_target_leaves() -> None:
    """The rows of a step, four decodes among them, come to a multiple of 16: 96 here, the nearest to 100."""
    world = decoding_world(4, target_step_s=0.05 + 0.0965)
    world.add(make_request("long", 400))
    for start in (0, 92, 184, 276):
        assert chunks(world.step())["long"] == (start, 92)


def test_without_a_target_a_step_follows_the_model_s_speed() -> None:
    """1 ms a prompt token: 300 cheap rows make 0.3 s, of which decodes take 0.05; 128 make 0.128."""
    for cheap_rows, num_tokens in ((300, 252), (128, 76)):
        world = decoding_world(4, target_step_s=None, cheap_rows=cheap_rows)
        world.add(make_request("long", 400))
        assert chunks(world.step())["long"] == (0, num_tokens)


def test_stalls_can_be_left_unbounded() -> None:
    world = decoding_world(4, target_step_s=0.05, bound_stalls=False)
    world.add(make_request("long", 1500))
    assert chunks(world.step())["long"] == (0, 1500)


def test_at_least_a_block_goes_to_prompts() -> None:
    world = decoding_world(4, target_step_s=0.01)
    world.add(make_request("long", 100))
    assert chunks(world.step())["long"] == (0, BLOCK_SIZE)


def test_a_step_is_bounded_where_nobody_decodes_while_another_model_has_requests() -> None:
    is_shared = False
    scheduler = make_scheduler(400, target_step_s=0.001, is_device_shared=lambda: is_shared)
    world = World(scheduler)
    world.add(make_request("long", 300))
    is_shared = True
    assert chunks(world.step()) == {"long": (0, 128)}  # nothing has been measured yet
    assert chunks(world.step()) == {"long": (128, BLOCK_SIZE)}
    is_shared = False
    assert chunks(world.step()) == {"long": (160, 140)}


def test_those_whose_token_is_in_flight_count_as_decoding() -> None:
    """A grammar-bound request takes part in every other step only; it must not be stalled in between."""
    world = make_world(is_async=True, max_num_batched_tokens=1024)
    world.add(make_request("bound", 8, max_tokens=50, constraint=FakeConstraint(50)))
    world.schedule()
    world.deliver()
    world.schedule()
    world.add(make_request("long", 1000))
    assert chunks(world.schedule()) == {"long": (0, 128)}


def test_what_was_measured_at_load_bounds_the_first_step() -> None:
    """128 tokens took half a second: a step that holds up nobody gets 256 tokens, the second that is its aim."""
    sizes = []
    for is_measured in (False, True):
        world = make_world(100, context_doubling_tokens=1e12)
        if is_measured:
            world.scheduler.learn(128, 0.5, 0.02)
        world.add(make_request("long", 2000))
        sizes.append(chunks(world.step())["long"])
    assert sizes == [(0, 2000), (0, 256)]


def test_slow_decodes_leave_prompts_as_much_time_as_they_take() -> None:
    """Four streams take the whole target of 50 ms: prompts get 50 ms, too."""
    world = decoding_world(4, target_step_s=0.05)
    world.add(make_request("long", 400))
    assert chunks(world.step())["long"] == (0, 44)


# --- half to the shortest, half to the oldest --------------------------------------------------------------


def test_a_short_prompt_is_not_parked_behind_a_long_one() -> None:
    world = make_world(max_num_batched_tokens=256, num_blocks=200)
    world.add(make_request("long", 1000), make_request("short", 100, arrival_s=1.0))
    assert chunks(world.step()) == {"short": (0, 100), "long": (0, 156)}
    assert world.scheduler.counters.num_prompt_tokens_computed == 256


def test_half_of_a_step_goes_to_the_shortest_and_half_to_the_oldest() -> None:
    world = make_world(max_num_batched_tokens=256, num_blocks=200)
    world.add(make_request("long", 1000))
    world.add(make_request("half", 129, arrival_s=0.1), make_request("a", 100, arrival_s=0.2))
    world.add(make_request("b", 40, arrival_s=0.3), make_request("c", 28, arrival_s=0.4))
    assert chunks(world.step()) == {"c": (0, 28), "b": (0, 40), "a": (0, 60), "long": (0, 128)}
    step = chunks(world.step())  # beside two that decode, prompts have 190
    assert {name: step[name] for name in ("a", "half", "long")} == {"a": (60, 40), "half": (0, 55), "long": (128, 95)}


def test_prompts_of_one_size_are_computed_in_the_order_of_arrival() -> None:
    world = make_world(max_num_batched_tokens=256, num_blocks=200)
    world.add(*(make_request(f"r{index}", 300, arrival_s=0.1 * index) for index in range(3)))
    assert chunks(world.step()) == {"r0": (0, 256)}


def test_tokens_that_are_cached_are_no_work() -> None:
    """`hit` is the longest, but has the least to compute."""
    world = make_world(max_num_batched_tokens=256, num_blocks=200)
    world.add(make_request("warm", prompt(320), max_tokens=1))
    world.finish()
    world.add(make_request("old", 300), make_request("hit", [*prompt(320), 1, 2, 3], arrival_s=0.1))
    world.add(make_request("short", 125, arrival_s=0.2))
    assert chunks(world.step()) == {"hit": (320, 3), "short": (0, 125), "old": (0, 128)}


def test_worse_tiers_get_nothing_before_the_better_one_has_all() -> None:
    world = make_world(max_num_batched_tokens=256, num_blocks=200)
    world.add(make_request("long", 1000), make_request("short", 10, priority=Priority.LOW))
    assert chunks(world.step()) == {"long": (0, 256)}


def test_a_request_has_one_chunk_in_a_step() -> None:
    """`a` takes the most that one may, and what is left goes on by age."""
    world = make_world(max_num_batched_tokens=250, max_chunk_tokens=120, num_blocks=200)
    world.add(make_request("a", 1000), make_request("b", 1000, arrival_s=0.1), make_request("short", 20, arrival_s=0.2))
    assert chunks(world.step()) == {"short": (0, 20), "a": (0, 120), "b": (0, 110)}


def test_a_running_prompt_that_is_shorter_goes_on_beside_an_older_one() -> None:
    world = make_world(max_num_batched_tokens=64, num_blocks=200)
    world.add(make_request("short", 70, arrival_s=1.0))
    assert chunks(world.step()) == {"short": (0, 64)}
    world.add(make_request("long", 1000))
    assert chunks(world.step()) == {"short": (64, 6), "long": (0, 58)}


# --- who is overtaken -------------------------------------------------------------------------------------


def overtaking(world: World, large: str, num_steps: int, num_tokens: int, *, max_tokens: int = 2) -> list[str]:
    """Those that start before `large`, of one prompt of `num_tokens` that arrives in each step."""
    started: list[str] = []
    for index in range(num_steps):
        name = f"small{index}"
        world.add(make_request(name, num_tokens, max_tokens, arrival_s=world.now + 1.0))
        world.step()
        started += [name for name in world.running_ids() if name not in started]
        if large in world.running_ids():
            break
    return [name for name in started if name.startswith("small")]


def test_one_that_waits_for_blocks_is_overtaken_by_no_more_than_its_own_work() -> None:
    """14 blocks are free beside `long`, `large` needs 15: eleven times 40 tokens are less than its 450."""
    world = make_world(num_blocks=30)
    world.add(make_request("long", 500, max_tokens=40))
    world.step()
    world.add(make_request("large", 450, max_tokens=2, arrival_s=0.1))
    assert overtaking(world, "large", 30, 40) == [f"small{index}" for index in range(11)]
    world.finish()
    world.check_tokens()


def test_one_that_waits_for_a_seat_is_overtaken_once() -> None:
    """Seats are what is short: they go to the shortest and to the oldest in turns."""
    world = make_world(max_num_seqs=2, num_blocks=200)
    world.add(make_request("runs", 8, max_tokens=100))
    world.step()
    world.add(make_request("large", 2500, max_tokens=2, arrival_s=0.1))
    assert overtaking(world, "large", 30, 40, max_tokens=5) == ["small0"]
    world.finish()
    world.check_tokens()


@pytest.mark.parametrize(("num_seats", "starts"), [(2, False), (3, True)])
def test_a_shorter_one_takes_no_seat_from_one_that_has_aged_past_it(num_seats: int, starts: bool) -> None:
    world = make_world(max_num_batched_tokens=256, max_num_seqs=num_seats, num_blocks=200)
    world.add(make_request("runs", 8, 100, arrival_s=20.0))
    world.step()
    world.add(make_request("earlier", 200, arrival_s=5.0, priority=Priority.LOW))
    world.add(make_request("short", 50, arrival_s=22.0))
    world.step()
    assert "earlier" in world.running_ids()
    assert ("short" in world.running_ids()) is starts
    world.finish()
    world.check_tokens()


def test_one_that_fits_is_not_kept_by_a_shorter_one_that_does_not() -> None:
    """`hit` has less to compute, but needs more blocks than the pool has got."""
    world = make_world(num_blocks=10, max_blocks=40)
    world.add(make_request("warm", prompt(256), max_tokens=1))
    world.finish()
    world.add(make_request("fits", 200, max_tokens=2))
    world.add(make_request("hit", [*prompt(256), *prompt(120, first=500)], max_tokens=2, arrival_s=0.1))
    assert chunks(world.step()) == {"fits": (0, 200)}


@pytest.mark.parametrize("budget", [32, 33, 40, 63, 64, 65, 97, 127, 128, 191, 200, 512])
@pytest.mark.parametrize("num_short_tokens", [1, 16, 31, 50, 100])
def test_a_long_prompt_advances_by_at_least_half_of_the_budget(budget: int, num_short_tokens: int) -> None:
    """The rule that no stream of short prompts can starve a long one, step by step: whatever arrives, it takes
    at most twice the steps that the budget would allow it alone."""
    world = make_world(num_blocks=4000, max_num_batched_tokens=budget, max_num_seqs=16, bound_stalls=False)
    num_tokens = 700
    world.add(make_request("long", num_tokens))
    num_steps = 0
    while world.tokens["long"] == []:
        for index in range(4):  # more than there is room for, at every step; each ends with its first token
            short = prompt(num_short_tokens, first=index)
            world.add(make_request(f"s{num_steps}-{index}", short, max_tokens=1, arrival_s=world.now + 1.0))
        size = chunks(world.step()).get("long", (0, 0))[1]
        num_steps += 1
        remaining = num_tokens - world.requests["long"].num_computed_tokens
        assert size >= budget / 2 or remaining == 0
    assert num_steps <= math.ceil(num_tokens / (budget / 2))


def test_a_step_scores_few_prompt_positions_of_a_request() -> None:
    """Their logits are as wide as the vocabulary."""
    world = make_world(max_num_batched_tokens=512)
    world.add(make_request("scored", 300, prompt_logprobs=1), make_request("plain", 300))
    assert chunks(world.step()) == {"scored": (0, 128), "plain": (0, 300)}
    assert chunks(world.step()) == {"plain": (300, 1), "scored": (128, 128)}
    assert chunks(world.step())["scored"] == (256, 44)
