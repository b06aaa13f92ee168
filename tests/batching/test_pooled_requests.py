"""Requests that end with their prompt: what they take, what they leave behind, and what streams beside them feel."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from typing import Any

import pytest

from mlx_server.outputs import SchedulerOutput
from mlx_server.request import FinishReason, PoolingParams, Priority, Request
from tests.batching.worlds import World, chunks, make_request, make_scheduler, make_world, pooled_vector
from tests.device_worlds import ALL_KINDS, FAST_GPU, DeviceWorld, Kind

WHOLE = PoolingParams(is_whole=True)


def pooled_request(request_id: str, num_tokens: int = 40, pooling: PoolingParams | None = None, **more: Any) -> Request:
    return make_request(request_id, num_tokens, pooling=pooling or PoolingParams(), max_total_tokens=num_tokens, **more)


def check_vectors(world: World, requests: list[Request]) -> None:
    found = {output.request_id: output.pooled for output in world.outputs if output.pooled is not None}
    assert found == {request.request_id: pooled_vector(request.prompt_token_ids) for request in requests}


@pytest.mark.parametrize("is_async", [False, True])
def test_inputs_get_their_vectors_beside_streams(is_async: bool) -> None:
    world = make_world(is_async=is_async, max_num_batched_tokens=96)
    inputs = [pooled_request(f"p{index}", size) for index, size in enumerate((1, 200, 33, 7, 96))]
    world.add(make_request("chat", 20, 30))
    for request in inputs:
        world.add_unchecked(request)
    world.finish()
    check_vectors(world, inputs)
    assert world.reasons == {"chat": FinishReason.LENGTH} | {r.request_id: FinishReason.STOP for r in inputs}
    world.check_tokens()


def test_nothing_of_them_is_cached_and_nothing_that_is_cached_goes_for_them() -> None:
    world = make_world(num_blocks=16)
    chat = make_request("chat", 200, 4)
    world.add(chat)
    world.finish()
    num_cached = world.scheduler.blocks.num_cached_blocks
    assert num_cached == 6
    inputs = [pooled_request(f"p{index}", 150) for index in range(20)]
    for request in inputs:
        world.add_unchecked(request)
        world.finish()
    check_vectors(world, inputs)
    assert world.scheduler.blocks.num_cached_blocks == num_cached
    assert world.scheduler.blocks.counters.num_block_evictions == 0


def test_equal_inputs_are_each_computed_from_their_first_token() -> None:
    world = make_world(max_num_batched_tokens=256)
    shared = make_request("chat", 64, 2)
    world.add(shared)
    world.finish()
    num_computed = world.runner.num_prompt_tokens_computed
    for name in ("a", "b"):
        twin = make_request(name, list(shared.prompt_token_ids), pooling=PoolingParams(), max_total_tokens=64)
        world.add_unchecked(twin)
    world.finish()
    assert world.runner.num_prompt_tokens_computed == num_computed + 128
    assert world.scheduler.counters.num_prefix_hit_tokens == 0


def test_states_are_not_kept_of_recurrent_models() -> None:
    world = World(make_scheduler(64, num_checkpoints=4, deduplicate_prefixes=False))
    world.add(make_request("chat", 100, 2))
    world.finish()
    checkpoints = world.scheduler.blocks.checkpoints
    assert checkpoints is not None
    num_kept = len(checkpoints)
    assert num_kept > 0
    inputs = [pooled_request(f"p{index}", 200) for index in range(6)]
    for request in inputs:
        world.add_unchecked(request)
    world.finish()
    check_vectors(world, inputs)
    assert len(checkpoints) == num_kept


def test_a_preempted_input_begins_again() -> None:
    world = make_world(num_blocks=8, max_num_batched_tokens=64)
    low = pooled_request("low", 200, priority=2)
    world.add_unchecked(low)
    world.step()
    world.add(make_request("high", 100, 8, priority=0))
    world.finish()
    assert low.num_preemptions == 1
    check_vectors(world, [low])
    world.check_tokens()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_input_that_is_aborted_while_its_step_runs_gives_nothing(depth: int) -> None:
    world = make_world(is_async=depth == 2)
    world.add_unchecked(pooled_request("p", 40))
    world.schedule()
    world.scheduler.finish_request("p")
    assert [output.pooled for output in world.deliver()] == []
    world.finish()


def test_inputs_that_must_be_whole_are_never_cut() -> None:
    """A step takes as many as its tokens have room for, though a prompt may be more than half of them."""
    world = make_world(num_blocks=256, max_num_batched_tokens=128, max_step_s=0.01)
    rng = random.Random(1)
    inputs = [pooled_request(f"p{index}", rng.randint(1, 128), WHOLE) for index in range(60)]
    for request in inputs:
        world.add_unchecked(request)
    steps: list[SchedulerOutput] = []
    while world.has_requests:
        step = world.step()
        if step is not None:
            steps.append(step)
    check_vectors(world, inputs)
    for step in steps:
        assert all(start == 0 for start, _ in chunks(step).values())
    assert len(steps) < len(inputs)


@pytest.mark.parametrize(("num_tokens", "num_better"), [(2048, 200), (1700, 200), (1024, 600)])
def test_a_whole_input_of_a_worse_tier_starts_by_its_age_beside_better_ones(num_tokens: int, num_better: int) -> None:
    world = make_world(num_blocks=512, max_num_batched_tokens=2048)
    big = pooled_request("big", num_tokens, WHOLE, priority=Priority.LOW)
    world.add_unchecked(big)
    for index in range(2000):
        for twin in range(2):
            name = f"high{index}-{twin}"
            world.add_unchecked(pooled_request(name, num_better, priority=Priority.HIGH, arrival_s=world.now))
        world.step()
        if big.first_scheduled_s is not None:
            break
    assert big.first_scheduled_s is not None, f"it waits for {world.now:.0f} s"


@ALL_KINDS
def test_two_thousand_inputs_hold_no_stream_up(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four streams, and behind them one client's inputs, 16 at a time as the server lets them in: the longest gap is
    within twice the target of a step, which the prompts' share keeps."""
    world = DeviceWorld(kind, monkeypatch, FAST_GPU)
    rng = random.Random(2)
    target_s = 0.1

    async def main() -> tuple[list[float], float]:
        async with world.model(max_num_seqs=32, max_num_batched_tokens=512, target_step_s=target_s) as model:
            for index in range(4):
                model.add(make_request(f"chat{index}", 50, 1500))
            await asyncio.sleep(5.0)
            began_s = world.threads.now_s
            left = deque(pooled_request(f"p{index}", rng.randint(5, 120)) for index in range(2000))
            num_seen = num_open = 0
            while left or num_open:
                new, num_seen = model.deliveries[num_seen:], len(model.deliveries)
                num_open -= sum(delivery.output.pooled is not None for delivery in new)
                while left and num_open < 16:
                    model.add(left.popleft())
                    num_open += 1
                await asyncio.sleep(0.002)
            ended_s = world.threads.now_s
            gaps = [
                later - earlier
                for index in range(4)
                for earlier, later in itertools.pairwise(model.times(f"chat{index}"))
                if began_s <= later <= ended_s
            ]
            return gaps, ended_s - began_s

    gaps, took_s = world.run(main())
    assert took_s > 10
    assert max(gaps) <= 1.2 * target_s
