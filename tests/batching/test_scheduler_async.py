"""One step ahead: tokens on the device, rows of those who have left, blocks that must not be freed yet."""

from __future__ import annotations

import pytest

from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.outputs import ModelRunnerOutput, SampledToken
from mlx_server.request import FinishReason, Priority
from tests.batching.worlds import FakeConstraint, chunks, expected_tokens, make_request, make_world, prompt


def test_the_next_step_is_scheduled_before_the_last_one_is_known() -> None:
    world = make_world(is_async=True)
    world.add(make_request("r", 8, max_tokens=3))
    first, second, third = world.schedule(), world.schedule(), world.schedule()
    assert first is not None
    assert second is not None
    assert third is not None
    (chunk,) = first.chunks
    assert (chunk.start, chunk.num_tokens, chunk.is_sampling, chunk.num_output_tokens) == (0, 8, True, 0)
    assert chunk.token_ids == tuple(world.requests["r"].prompt_token_ids)
    (chunk,) = second.chunks
    assert (chunk.start, chunk.token_ids, chunk.is_sampling, chunk.num_output_tokens) == (8, None, True, 1)
    (chunk,) = third.chunks
    assert (chunk.start, chunk.token_ids, chunk.is_sampling, chunk.num_output_tokens) == (9, None, True, 2)
    assert world.schedule() is None  # a last token needs no successor
    for _ in range(3):
        world.deliver()
    world.check_tokens()
    assert world.reasons == {"r": FinishReason.LENGTH}


def test_a_chunked_prompt_goes_on_while_its_chunks_run() -> None:
    world = make_world(is_async=True, max_num_batched_tokens=32)
    world.add(make_request("r", 70))
    assert [chunks(world.schedule()) for _ in range(4)] == [
        {"r": (0, 32)},
        {"r": (32, 32)},
        {"r": (64, 6)},
        {"r": (70, 1)},
    ]


def test_the_row_of_one_who_has_finished_is_dropped() -> None:
    world = make_world(is_async=True)
    first = expected_tokens(make_request("r").prompt_token_ids, 1)[0]
    world.add(make_request("r", 8, max_tokens=50, eos_token_ids=frozenset({first})))
    world.schedule()
    world.schedule()
    (output,) = world.deliver()
    assert (output.new_token_ids, output.finish_reason) == ((first,), FinishReason.STOP)
    assert world.deliver() == []
    assert world.scheduler.counters.num_generated_tokens == 1
    assert world.scheduler.blocks.num_free_blocks == world.scheduler.blocks.num_blocks


def test_blocks_stay_until_every_step_that_names_them_has_finished() -> None:
    world = make_world(num_blocks=4, is_async=True)
    world.add(make_request("r", 60))
    world.schedule()
    world.schedule()
    assert world.scheduler.blocks.num_free_blocks == 2
    assert world.scheduler.finish_request("r")
    assert world.scheduler.blocks.num_free_blocks == 2
    world.deliver()
    assert world.scheduler.blocks.num_free_blocks == 2
    world.deliver()
    assert world.scheduler.blocks.num_free_blocks == 4


def test_a_step_that_does_not_name_a_request_does_not_hold_its_blocks() -> None:
    world = make_world(num_blocks=8, is_async=True, max_num_batched_tokens=32)
    world.add(make_request("first", 60, max_tokens=9), make_request("second", 60, arrival_s=1.0))
    assert chunks(world.schedule()) == {"first": (0, 32)}
    assert world.scheduler.finish_request("first")
    assert chunks(world.schedule()) == {"second": (0, 32)}
    world.deliver()
    assert world.scheduler.blocks.num_free_blocks == 6
    world.finish()


def test_the_runner_is_told_who_has_left() -> None:
    world = make_world(is_async=True)
    world.add(make_request("a"), make_request("b", max_tokens=9))
    world.schedule()
    assert world.scheduler.finish_request("a")
    output = world.schedule()
    assert output is not None
    assert output.dropped_request_ids == ("a",)
    assert list(chunks(output)) == ["b"]
    output = world.schedule()
    assert output is not None
    assert output.dropped_request_ids == ()
    world.finish()


def test_a_request_id_may_be_used_again_while_its_old_row_is_in_flight() -> None:
    world = make_world(is_async=True)
    world.add(make_request("r", prompt(8), max_tokens=50))
    world.schedule()
    world.schedule()
    assert world.scheduler.finish_request("r")
    world.add(make_request("r", prompt(9, 100), max_tokens=2))
    output = world.schedule()
    assert output is not None
    assert output.dropped_request_ids == ("r",)
    assert [data.request_id for data in output.new_requests] == ["r"]
    world.finish()
    world.check_tokens()
    assert len(world.tokens["r"]) == 2


def test_tokens_in_flight_of_a_preempted_request_are_void() -> None:
    world = make_world(num_blocks=6, is_async=True, max_num_seqs=1)
    world.add(make_request("low", 40, max_tokens=9, priority=Priority.LOW))
    world.schedule()
    world.schedule()
    world.add(make_request("high", 40, max_tokens=2, priority=Priority.HIGH))
    output = world.schedule()
    assert output is not None
    assert chunks(output) == {"high": (0, 40)}
    assert output.dropped_request_ids == ("low",)
    assert world.requests["low"].num_in_flight == 0
    assert world.deliver() == []  # both rows of `low`
    assert world.deliver() == []
    assert world.requests["low"].output_token_ids == []
    world.finish()
    world.check_tokens()
    assert len(world.tokens["low"]) == 9


def test_one_who_needs_a_block_sits_out_until_detached_ones_are_back() -> None:
    world = make_world(num_blocks=5, is_async=True)
    world.add(make_request("a", 62, max_tokens=30), make_request("b", 63, max_tokens=30, arrival_s=1.0))
    assert [list(chunks(world.step())) for _ in range(3)] == [["a", "b"]] * 3
    assert world.scheduler.blocks.num_free_blocks == 0
    # The third block of `a` is its token 64; `b` gives way, but its blocks are written by a submitted step.
    assert world.schedule() is None
    assert world.waiting_ids() == ["b"]
    assert world.scheduler.blocks.num_free_blocks == 0
    assert world.scheduler.blocks.num_detached_blocks == 3
    world.deliver()
    assert chunks(world.schedule()) == {"a": (64, 1)}
    world.finish()
    world.check_tokens()


def test_a_grammar_bound_request_waits_alone_for_its_token() -> None:
    world = make_world(is_async=True)
    world.add(make_request("free", max_tokens=20))
    world.add(make_request("bound", 8, max_tokens=20, constraint=FakeConstraint(20)))
    turns = [list(chunks(world.step())) for _ in range(7)]
    assert turns == [
        ["free", "bound"],
        ["free"],
        ["free", "bound"],
        ["free"],
        ["free", "bound"],
        ["free"],
        ["free", "bound"],
    ]


def test_a_mask_is_that_of_the_tokens_before() -> None:
    world = make_world(is_async=True)
    world.add(make_request("bound", 40, max_tokens=4, constraint=FakeConstraint(4)))
    masks = []
    while world.has_requests:
        output = world.step()
        masks.extend(chunk.allowed_bitmask for chunk in (output.chunks if output is not None else ()))
    assert masks == [b"\0", b"\1", b"\2", b"\3"]
    assert world.reasons == {"bound": FinishReason.STOP}


def test_a_mask_is_made_only_for_chunks_that_sample() -> None:
    world = make_world(max_num_batched_tokens=32)
    world.add(make_request("bound", 40, constraint=FakeConstraint(4)))
    first, second = world.step(), world.step()
    assert first is not None
    assert second is not None
    assert [chunk.allowed_bitmask for chunk in first.chunks] == [None]
    assert [chunk.allowed_bitmask for chunk in second.chunks] == [b"\0"]


@pytest.mark.parametrize("is_async", [False, True])
def test_forced_tokens_are_computed_together(is_async: bool) -> None:
    world = make_world(is_async=is_async)
    forced = tuple(prompt(10, 500))
    world.add(make_request("bound", 8, max_tokens=20, constraint=FakeConstraint(12, forced={1: forced})))
    world.add(make_request("other", max_tokens=9))
    assert chunks(world.step())["bound"] == (0, 8)
    if is_async:
        world.step()
    output = world.step()
    assert output is not None
    assert chunks(output)["bound"] == (8, 11)
    (chunk,) = [chunk for chunk in output.chunks if chunk.request_id == "bound"]
    assert chunk.token_ids == (*world.tokens["bound"][:1], *forced)
    world.finish()
    assert world.tokens["bound"][1:11] == list(forced)
    assert len(world.tokens["bound"]) == 12
    assert world.outputs[0].new_token_ids == tuple(world.tokens["bound"][:11])
    assert world.scheduler.counters.num_generated_tokens == 12 + 9


def test_many_forced_tokens_are_computed_a_block_at_a_time() -> None:
    for max_chunk_tokens, sizes in ((None, [8, 32, 32, 7]), (10, [8, 10, 10, 10])):
        world = make_world(max_chunk_tokens=max_chunk_tokens)
        constraint = FakeConstraint(80, forced={1: tuple(prompt(70, 500))})
        world.add(make_request("bound", 8, max_tokens=90, constraint=constraint))
        assert [chunks(world.step())["bound"][1] for _ in range(4)] == sizes
        world.finish()


def test_forced_tokens_share_the_step_with_everyone() -> None:
    """Forced tokens get what is left of the step beside a token for everyone who runs."""
    world = make_world(max_num_batched_tokens=40, max_num_seqs=30)
    forced = tuple(prompt(30, 500))
    constraint = FakeConstraint(40, forced={1: forced})
    world.add(make_request("bound", 8, max_tokens=50, constraint=constraint))
    world.add(*(make_request(f"r{index}", 1, max_tokens=50) for index in range(29)))
    world.step()
    assert chunks(world.step())["bound"] == (8, 11)
    assert chunks(world.step())["bound"] == (19, 11)
    world.finish()


@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_are_shared_as_soon_as_they_are_full(is_async: bool) -> None:
    """Not only when their request has ended: generated ones too."""
    world = make_world(is_async=is_async)
    world.add(make_request("r", 30, max_tokens=40))
    for num_tokens, num_cached_blocks in ((31, 0), (32, 0), (34, 1), (63, 1), (66, 2)):
        while world.requests["r"].num_tokens < num_tokens:
            world.step()
        assert world.scheduler.blocks.num_cached_blocks == num_cached_blocks
    world.finish()


@pytest.mark.parametrize("is_async", [False, True])
def test_both_modes_cache_the_same_blocks(is_async: bool) -> None:
    for num_tokens in (30, 31, 32, 33):
        world = make_world(is_async=is_async)
        world.add(make_request("r", num_tokens, max_tokens=33))
        world.finish()
        assert world.scheduler.blocks.num_cached_blocks == (num_tokens + 33 - 1) // 32


def test_results_must_come_in_order_and_whole() -> None:
    def submitted() -> ContinuousBatchingScheduler:
        world = make_world(is_async=True)
        world.add(make_request("r"))
        world.schedule()
        return world.scheduler

    with pytest.raises(AssertionError, match="order of submission"):
        submitted().update(ModelRunnerOutput(1, {"r": SampledToken(1)}))
    with pytest.raises(AssertionError, match="what it was asked to"):
        submitted().update(ModelRunnerOutput(0, {}))
