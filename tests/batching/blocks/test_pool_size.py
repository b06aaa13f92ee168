"""A pool that grows when it runs low and is cut when its memory is needed elsewhere; nothing of it shows in tokens."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_server.batching.blocks.block_pool import plan_compaction
from mlx_server.errors import ContextLengthError, OverloadedError
from mlx_server.outputs import BlockMove, PoolChange
from mlx_server.request import FinishReason, Priority
from tests.batching.worlds import ScriptedSupply, World, is_starving, make_request, make_scheduler, make_world, prompt

# --- the plan ---------------------------------------------------------------------------------------------------


@given(st.data())
@settings(deadline=None)
def test_a_compaction_keeps_what_it_must_and_as_much_as_it_can(data):
    before = data.draw(st.integers(1, 40))
    ids = data.draw(st.permutations(range(before)))
    num_referenced = data.draw(st.integers(0, before))
    num_cached = data.draw(st.integers(0, before - num_referenced))
    referenced, cached = ids[:num_referenced], ids[num_referenced : num_referenced + num_cached]
    after = data.draw(st.integers(num_referenced, before))

    plan = plan_compaction(after, referenced, cached)

    room = after - num_referenced
    assert list(plan.evicted) == cached[: max(0, num_cached - room)]
    place = {block_id: block_id for block_id in {*referenced, *cached} - set(plan.evicted)}
    num_above = sum(block_id >= after for block_id in place)
    assert len(plan.moves) == num_above
    place |= dict(plan.moves)
    assert len(set(place.values())) == len(place) <= after
    assert all(place_after < after for place_after in place.values())
    assert all(source >= after > destination for source, destination in plan.moves)


def test_the_least_recently_used_blocks_are_given_up():
    plan = plan_compaction(4, referenced=[1, 6], cached=[4, 5, 7])
    assert plan.evicted == (4,)
    assert plan.moves == (BlockMove(5, 0), BlockMove(6, 2), BlockMove(7, 3))


# --- growth -----------------------------------------------------------------------------------------------------


def make_growing(num_blocks: int, max_blocks: int, *, depth: int = 1, **limits: int) -> tuple[World, ScriptedSupply]:
    supply = ScriptedSupply(max_blocks - num_blocks)
    scheduler = make_scheduler(num_blocks, max_blocks=max_blocks, supply=supply, is_async=depth > 1, **limits)
    return World(scheduler, depth=depth), supply


def test_a_pool_doubles_before_anyone_waits_or_loses_blocks():
    world, supply = make_growing(2, 64)
    world.add(make_request("a", 100, 10), make_request("b", 200, 4))
    step = world.step()
    assert step is not None
    assert supply.taken == [2, 8], "a needs four; b seven, beside one for the tokens that a may still have"
    assert step.pool_change == PoolChange(12)
    world.finish()
    assert world.step() is None
    world.check_tokens()
    assert world.scheduler.counters.num_preemptions == 0
    assert world.scheduler.blocks.counters.num_block_evictions == 0


def test_a_pool_grows_rather_than_forget_what_is_cached():
    world, supply = make_growing(4, 64)
    for index in range(6):
        world.add(make_request(f"r{index}", 64, 1))
        world.finish()
    assert world.scheduler.blocks.counters.num_block_evictions == 0
    supply.is_open = False
    for index in range(6, 12):
        world.add(make_request(f"r{index}", 64, 1))
        world.finish()
    assert world.scheduler.blocks.num_blocks == 16
    assert supply.taken == [4, 8]
    assert world.scheduler.blocks.counters.num_block_evictions == 12 * 2 - 16


def test_a_pool_does_not_grow_when_what_was_cached_is_forgotten():
    world, supply = make_growing(4, 64)
    world.add(make_request("before", 100, 1))
    world.finish()
    assert world.scheduler.blocks.reset_prefix_cache()
    world.add(make_request("after", 100, 1))
    world.finish()
    assert supply.taken == []
    assert world.scheduler.blocks.counters.num_block_evictions == 0


def test_ids_are_stable_while_a_pool_grows():
    world, _ = make_growing(4, 64)
    world.add(make_request("a", 60, 90))
    world.step()
    before = world.scheduler.blocks.block_ids("a")
    for _ in range(80):
        world.step()
    after = world.scheduler.blocks.block_ids("a")
    assert len(after) == 5
    assert after[: len(before)] == before


def test_a_pool_does_not_outgrow_its_limit():
    world, _ = make_growing(2, 8)
    with pytest.raises(ContextLengthError, match="holds 256"):
        world.add(make_request("big", 250, 7))
    for index in range(6):
        world.add(make_request(f"r{index}", 80, 40, arrival_s=index * 0.1))
    world.finish()
    world.check_tokens()
    assert world.scheduler.blocks.num_blocks == 8


def test_a_pool_may_begin_with_one_block():
    world, supply = make_growing(1, 8)
    world.add(make_request("small", 20, 10))
    world.finish()
    assert supply.taken == []
    world.add(make_request("large", 200, 10))
    world.finish()
    world.check_tokens()
    assert world.scheduler.blocks.num_blocks == 7


# --- the cut ----------------------------------------------------------------------------------------------------


def test_a_cut_moves_running_requests_and_keeps_the_prefixes_used_last():
    world, supply = make_growing(16, 16)
    for name in ("old", "young"):
        world.add(make_request(name, 96, 1))
        world.finish()
    world.add(make_request("runs", 40, 30))
    world.step()
    held = world.scheduler.blocks.block_ids("runs")

    assert world.scheduler.shrink(11) == 11
    assert supply.num_left == 0, "not before the device has done it"
    step = world.step()
    assert step is not None
    assert step.pool_change is not None
    assert step.pool_change.num_blocks == 5
    moves = dict(step.pool_change.moves)
    assert world.scheduler.blocks.block_ids("runs") == tuple(moves.get(block_id, block_id) for block_id in held)
    assert supply.num_left == 11
    world.finish()

    supply.is_open = False
    again = [make_request(f"{name} again", prompt_of(name), 1) for name in ("young", "old")]
    world.add(*again)
    world.finish()
    assert [request.num_cached_tokens for request in again] == [64, 0]
    world.check_tokens()


def prompt_of(name: str) -> list[int]:
    return list(make_request(name, 96, 1).prompt_token_ids)


def test_referenced_blocks_are_never_cut():
    world, _ = make_growing(16, 16)
    world.add(make_request("a", 100, 20))
    world.step()
    assert world.scheduler.shrink(100) == 12
    assert world.scheduler.shrink(1) == 0, "the first cut has not been taken yet"
    world.step()
    assert world.scheduler.shrink(1) == 0, "nothing is idle"
    world.finish()
    world.check_tokens()


def test_an_idle_pool_is_cut_by_a_step_without_requests():
    world, supply = make_growing(16, 16)
    assert world.scheduler.shrink(6) == 6
    step = world.step()
    assert step is not None
    assert step.chunks == ()
    assert step.pool_change == PoolChange(10, num_blocks_cut=6)
    assert supply.num_left == 6


def test_blocks_that_a_submitted_step_still_writes_are_moved_with_the_others():
    world, _ = make_growing(16, 16, depth=2)
    world.add(make_request("gone", 90, 30), make_request("stays", 90, 30))
    for _ in range(3):
        world.step()
    assert world.runner.num_submitted == 1
    world.scheduler.finish_request("gone", FinishReason.ABORT)
    assert world.scheduler.blocks.num_detached_blocks > 0
    world.scheduler.shrink(16)
    world.finish()
    world.check_tokens()


# --- short of memory --------------------------------------------------------------------------------------------


def test_one_who_runs_alone_and_cannot_grow_ends_with_an_error_and_others_go_on():
    world, supply = make_growing(4, 64)
    supply.is_open = False
    world.add(make_request("hungry", 100, 100), make_request("small", 20, 4, arrival_s=1.0))
    world.finish()
    assert world.reasons == {"hungry": FinishReason.ERROR, "small": FinishReason.LENGTH}
    assert len(world.tokens["hungry"]) == 29, "up to the last slot of the pool"
    error = next(output.error for output in world.outputs if output.error is not None)
    assert isinstance(error, OverloadedError)
    assert "the KV pool holds 128 and could not grow for 10 s" in error.message
    world.check_tokens()


def test_memory_that_comes_back_in_time_is_used():
    world, supply = make_growing(4, 64)
    supply.is_open = False
    world.add(make_request("runs", 100, 100), make_request("waits", 200, 4, arrival_s=1.0))
    while world.now < 9.0:
        world.step()
    assert is_starving(world.scheduler)
    assert world.running_ids() == ["runs"]
    supply.is_open = True
    world.finish()
    assert not is_starving(world.scheduler)
    world.check_tokens()
    assert set(world.reasons.values()) == {FinishReason.LENGTH}


def test_the_next_one_who_starves_has_all_of_its_time():
    world, supply = make_growing(4, 64)
    supply.is_open = False
    for name in ("first", "second"):
        world.add(make_request(name, 200, 4))
        start_s = world.now
        while world.now < start_s + 9.0:
            world.step()
        assert is_starving(world.scheduler)
        assert world.scheduler.finish_request(name)
        world.schedule()
        assert not is_starving(world.scheduler)
    assert world.reasons == {}


def test_one_who_waits_and_would_not_fit_alone_ends_with_an_error():
    world, supply = make_growing(4, 64)
    supply.is_open = False
    world.add(make_request("huge", 200, 4), make_request("small", 20, 4, arrival_s=1.0))
    world.finish()
    assert world.reasons == {"huge": FinishReason.ERROR, "small": FinishReason.LENGTH}


def test_a_prompt_that_does_not_get_back_what_it_gave_up_behind_its_window_ends_with_an_error():
    """Its idle blocks were cut from the pool. Others that wait are served."""
    supply = ScriptedSupply(8)
    world = make_world(4, max_blocks=12, supply=supply, windows=(40,), max_num_batched_tokens=64, memory_wait_s=0.3)
    world.add(make_request("long", 400, 4))
    for _ in range(2):
        world.step()
    supply.is_open = False
    assert world.scheduler.shrink(99)
    world.add(make_request("small", 20, 4, arrival_s=1.0))
    world.finish()
    assert world.reasons == {"long": FinishReason.ERROR, "small": FinishReason.LENGTH}
    world.check_tokens()


def test_who_ends_for_want_of_memory_is_the_one_that_it_is_too_small_for():
    """`aged` has waited for longer and would fit, but its turn comes after seven of the better tier."""
    world, supply = make_growing(4, 64, max_num_seqs=1)
    supply.is_open = False
    world.now = 100.0
    for name, priority, arrival_s in (("promoted", Priority.LOW, 10.0), ("high", Priority.HIGH, 100.0)):
        world.add(make_request(name, 20, 2, priority=priority, arrival_s=arrival_s))
    world.add(make_request("huge", 200, 4, priority=Priority.HIGH, arrival_s=101.0))
    world.add(make_request("aged", 20, 2, priority=Priority.LOW, arrival_s=20.0))
    world.finish()
    assert [output.request_id for output in world.outputs if output.finish_reason] == [
        "promoted",
        "high",
        "huge",
        "aged",
    ]
    assert [name for name, reason in world.reasons.items() if reason is FinishReason.ERROR] == ["huge"]


def test_while_admission_is_held_nobody_starts_beside_one_who_runs():
    world, _ = make_growing(16, 16)
    world.add(make_request("a", 20, 3))
    world.step()
    world.scheduler.hold_admission(True)
    world.add(make_request("b", 20, 3), make_request("c", 20, 3, priority=Priority.HIGH))
    world.step()
    assert world.running_ids() == ["a"]
    world.step()
    world.step()
    assert world.running_ids() == ["c"], "someone must run"
    world.scheduler.hold_admission(False)
    world.step()
    assert world.running_ids() == ["c", "b"]
    world.finish()
    world.check_tokens()


def test_the_lowest_is_preempted_but_not_the_last_one():
    world, _ = make_growing(16, 16)
    world.add(make_request("a", 20, 9), make_request("b", 20, 9, priority=Priority.LOW))
    world.step()
    world.step()  # b has sat the first out
    assert world.running_ids() == ["a", "b"]
    assert world.scheduler.preempt_lowest()
    assert world.running_ids() == ["a"]
    assert not world.scheduler.preempt_lowest()
    world.finish()
    world.check_tokens()


# --- churn ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [1, 2])
def test_churn_changes_no_token(seed, depth):
    rng = random.Random(seed)
    world, supply = make_growing(2, 48, depth=depth, max_num_batched_tokens=128)
    shared = prompt(70)
    for index in range(60):
        own = [rng.randrange(997) for _ in range(rng.randrange(1, 90))]
        tokens = shared + own if rng.random() < 0.5 else own
        world.add(make_request(f"r{index}", tokens, rng.randrange(1, 60), arrival_s=world.now))
        supply.is_open = rng.random() < 0.9 or world.scheduler.blocks.num_blocks < 12
        for _ in range(rng.randrange(12)):
            if rng.random() < 0.2:
                world.scheduler.shrink(rng.randrange(1, 30))
            world.step()
    supply.is_open = True
    world.finish()
    world.check_tokens()
    blocks = world.scheduler.blocks
    assert min(blocks.counters.num_pool_growths, blocks.counters.num_pool_cuts, blocks.counters.num_blocks_moved) >= 10
    if world.schedule() is not None:
        world.deliver()
    assert supply.num_left + blocks.num_blocks == 48
