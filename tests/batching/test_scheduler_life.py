"""A request's way from arrival to its end, whatever ends it."""

from __future__ import annotations

import pytest

from mlx_server.errors import InvalidRequestError, ServeError
from mlx_server.outputs import NewRequestData, SchedulerOutput
from mlx_server.request import FinishReason, Priority, RequestStatus
from tests.batching.worlds import (
    FakeConstraint,
    chunks,
    expected_tokens,
    make_request,
    make_scheduler,
    make_world,
    prompt,
    prompt_logprob,
)


def test_a_step_says_everything_that_the_runner_needs() -> None:
    scheduler = make_scheduler()
    request = make_request("r", prompt(40), max_tokens=2, temperature=0.5, eos_token_ids=frozenset({900}))
    scheduler.add_request(request)
    output = scheduler.schedule(0.0)
    assert isinstance(output, SchedulerOutput)
    assert output.step_id == 0
    assert output.new_requests == (NewRequestData("r", tuple(prompt(40)), (), request.sampling, frozenset({900})),)
    (chunk,) = output.chunks
    assert chunk.request_id == "r"
    assert chunk.new_block_ids == ((0, 1),)
    assert chunk.token_ids == tuple(prompt(40))


def test_nothing_to_do_is_none() -> None:
    world = make_world()
    assert world.step() is None
    world.add(make_request("r", max_tokens=1))
    assert world.step() is not None
    assert world.step() is None


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64])
def test_one_token_is_one_step(num_tokens: int, is_async: bool) -> None:
    world = make_world(is_async=is_async)
    world.add(make_request("r", num_tokens, max_tokens=1))
    assert chunks(world.schedule()) == {"r": (0, num_tokens)}
    assert world.schedule() is None
    (output,) = world.deliver()
    assert output.finish_reason is FinishReason.LENGTH
    assert output.new_token_ids == tuple(expected_tokens(world.requests["r"].prompt_token_ids, 1))
    assert world.requests["r"].status is RequestStatus.FINISHED
    world.finish()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_end_of_sequence_stops(is_async: bool) -> None:
    tokens = expected_tokens(make_request("r").prompt_token_ids, 5)
    world = make_world(is_async=is_async)
    world.add(make_request("r", max_tokens=50, eos_token_ids=frozenset({tokens[3]})))
    world.finish()
    assert world.tokens["r"] == tokens[:4]
    assert world.reasons == {"r": FinishReason.STOP}
    assert world.requests["r"].finish_reason is FinishReason.STOP
    assert world.outputs[-1].stop_reason is None


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stop_id_stops_and_is_named(is_async: bool) -> None:
    tokens = expected_tokens(make_request("r").prompt_token_ids, 5)
    world = make_world(is_async=is_async)
    world.add(make_request("r", max_tokens=50, stop_token_ids=(tokens[2],)))
    world.finish()
    assert world.tokens["r"] == tokens[:3]
    assert (world.outputs[-1].finish_reason, world.outputs[-1].stop_reason) == (FinishReason.STOP, tokens[2])


def test_a_token_that_breaks_the_grammar_is_an_error_of_that_request_alone() -> None:
    tokens = expected_tokens(make_request("bound").prompt_token_ids, 2)
    world = make_world()
    constraint = FakeConstraint(9, refused=frozenset({tokens[1]}))
    world.add(make_request("bound", max_tokens=9, constraint=constraint), make_request("other"))
    world.finish()
    (failed,) = [output for output in world.outputs if output.finish_reason is FinishReason.ERROR]
    assert failed.request_id == "bound"
    assert isinstance(failed.error, ServeError)
    assert f"Token {tokens[1]} does not fit the request's grammar" in failed.error.message
    assert world.reasons["other"] is FinishReason.LENGTH


def test_a_grammar_that_has_failed_is_named_with_its_reason() -> None:
    tokens = expected_tokens(make_request("bound").prompt_token_ids, 2)
    world = make_world()
    constraint = FakeConstraint(9, refused=frozenset({tokens[1]}), error=InvalidRequestError("too long", "regex"))
    world.add(make_request("bound", max_tokens=9, constraint=constraint))
    world.finish()
    (failed,) = [output for output in world.outputs if output.finish_reason is FinishReason.ERROR]
    assert isinstance(failed.error, InvalidRequestError)
    assert failed.error.message == "The grammar cannot be followed beyond 1 tokens of output: too long."
    assert failed.error.param == "regex"


@pytest.mark.parametrize(
    ("more", "param"), [({"allowed_token_ids": (0,)}, "allowed_token_ids"), ({"min_tokens": 5}, "min_tokens")]
)
def test_a_request_that_bans_what_its_grammar_allows_gets_an_error(more: dict[str, object], param: str) -> None:
    tokens = expected_tokens(make_request("bound").prompt_token_ids, 2)
    world = make_world()
    constraint = FakeConstraint(9, refused=frozenset({tokens[1]}))
    world.add(make_request("bound", max_tokens=9, constraint=constraint, **more))
    world.finish()
    (failed,) = [output for output in world.outputs if output.finish_reason is FinishReason.ERROR]
    assert isinstance(failed.error, InvalidRequestError)
    assert failed.error.param == param
    assert "after 1 tokens" in failed.error.message


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("when", [0, 1, 2, 5])
def test_a_request_can_be_ended_from_outside_at_any_time(when: int, is_async: bool) -> None:
    world = make_world(is_async=is_async, max_num_batched_tokens=64)
    world.add(make_request("r", 100, max_tokens=50), make_request("other", 20))
    for _ in range(when):
        world.step()
    assert world.scheduler.finish_request("r", FinishReason.STOP)
    assert not world.scheduler.finish_request("r")
    assert world.requests["r"].finish_reason is FinishReason.STOP
    world.scheduler.check_integrity()
    world.finish()
    world.check_tokens()
    assert list(world.reasons) == ["other"]
    assert len(world.tokens["other"]) == 4


def test_an_unknown_request_cannot_be_ended() -> None:
    assert not make_scheduler().finish_request("nobody")


def test_a_preempted_request_can_be_aborted() -> None:
    world = make_world(max_num_seqs=1)
    world.add(make_request("low", priority=Priority.LOW))
    world.step()
    world.add(make_request("high", priority=Priority.HIGH))
    world.step()
    assert world.waiting_ids() == ["low"]
    assert world.scheduler.finish_request("low")
    world.finish()
    assert world.requests["low"].finish_reason is FinishReason.ABORT


def test_when_the_executor_dies_everyone_ends() -> None:
    world = make_world(is_async=True, max_num_seqs=2)
    world.add(*(make_request(f"r{index}", 60, arrival_s=float(index)) for index in range(3)))
    world.schedule()
    world.schedule()
    assert sorted(world.scheduler.fail_all()) == ["r0", "r1", "r2"]
    assert {request.finish_reason for request in world.requests.values()} == {FinishReason.ERROR}
    assert world.scheduler.num_running == world.scheduler.num_waiting == 0
    assert world.scheduler.blocks.num_free_blocks == world.scheduler.blocks.num_blocks
    world.scheduler.check_integrity()
    assert world.scheduler.fail_all() == []


def test_the_first_admission_is_remembered() -> None:
    world = make_world(max_num_seqs=1)
    world.add(make_request("low", 40, max_tokens=9, priority=Priority.LOW))
    world.now = 1.0
    world.step()
    world.add(make_request("high", priority=Priority.HIGH, arrival_s=1.0))
    world.finish()
    assert world.requests["low"].first_scheduled_s == 1.0
    assert world.requests["low"].num_preemptions == 1
    assert world.requests["low"].num_cached_tokens == 0
    assert world.requests["high"].first_scheduled_s == pytest.approx(1.05)


def test_counters_count() -> None:
    world = make_world()
    world.add(make_request("a", 40, max_tokens=3), make_request("b", 10, max_tokens=2))
    world.finish()
    counters = world.scheduler.counters
    assert counters.num_steps == counters.num_model_calls == 3
    assert counters.num_prompt_tokens == counters.num_prompt_tokens_computed == 50
    assert counters.num_generated_tokens == 5
    assert counters.num_preemptions == 0
    assert counters.busy_time_s == pytest.approx(0.05 + 0.05 + 0.05)
    assert counters.idle_time_s == 0.0


# --- prompt logprobs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("size", [1, 7, 512])
def test_prompt_logprobs_come_whole_with_the_first_token(size: int, is_async: bool) -> None:
    world = make_world(is_async=is_async, max_chunk_tokens=size)
    world.add(make_request("r", 50, max_tokens=3, prompt_logprobs=0), make_request("other"))
    world.finish()
    mine = [output.prompt_logprobs for output in world.outputs if output.request_id == "r"]
    prompt_token_ids = world.requests["r"].prompt_token_ids
    assert mine == [tuple(prompt_logprob(token_id) for token_id in prompt_token_ids[1:]), (), ()]
    assert all(output.prompt_logprobs == () for output in world.outputs if output.request_id == "other")
    assert all(output.logprobs == () for output in world.outputs), "nobody asked for those of the output"


def test_who_wants_prompt_logprobs_neither_hits_nor_waits_nor_counts_as_a_query() -> None:
    world = make_world()
    world.add(make_request("first", prompt(64), max_tokens=1))
    world.finish()
    world.add(
        make_request("second", [*prompt(64), 1], max_tokens=9), make_request("r", [*prompt(64), 2], prompt_logprobs=1)
    )
    assert chunks(world.step()) == {"second": (64, 1), "r": (0, 65)}
    assert world.scheduler.counters.num_prefix_query_tokens == 64 + 65
    assert world.requests["r"].num_cached_tokens == 0
    world.finish()
    world.check_tokens()


def test_prompt_logprobs_begin_anew_after_a_preemption() -> None:
    for num_steps in (1, 4):  # while the prompt is computed, and when its logprobs have been delivered
        world = make_world(max_num_seqs=1, max_num_batched_tokens=32)
        world.add(make_request("low", 70, max_tokens=9, prompt_logprobs=0, priority=Priority.LOW))
        for _ in range(num_steps):
            world.step()
        world.add(make_request("high", priority=Priority.HIGH))
        world.finish()
        delivered = [logprobs for output in world.outputs for logprobs in output.prompt_logprobs]
        assert delivered == [prompt_logprob(token_id) for token_id in world.requests["low"].prompt_token_ids[1:]]
        assert world.requests["low"].num_preemptions == 1
        world.check_tokens()


def test_prompt_logprobs_of_an_aborted_request_are_forgotten() -> None:
    world = make_world(max_num_batched_tokens=32)
    world.add(make_request("r", prompt(70), prompt_logprobs=0))
    world.step()
    assert world.scheduler.finish_request("r")
    world.add(make_request("r", prompt(33, 500), max_tokens=1, prompt_logprobs=0))
    world.finish()
    assert len(world.outputs[-1].prompt_logprobs) == 32


def test_the_token_that_is_computed_to_score_a_prompt_is_not_counted() -> None:
    world = make_world()
    world.add(make_request("scored", 40, 1, is_scoring=True, prompt_logprobs=0), make_request("other", 40, 3))
    world.finish()
    assert world.scheduler.counters.num_generated_tokens == 3
