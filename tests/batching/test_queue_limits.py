"""What is refused on arrival, with which numbers; and who waits for too long."""

from __future__ import annotations

import pytest

from mlx_server.batching.limits import QueueLimits
from mlx_server.errors import ContextLengthError, QueueFullError, QueueTimeoutError, QuotaExceededError
from mlx_server.request import FinishReason, Priority
from tests.batching.worlds import make_request, make_scheduler, make_world, waiting


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(num_blocks=2)
    with pytest.raises(ContextLengthError) as caught:
        scheduler.add_request(make_request(prompt_token_ids=60, max_tokens=5))
    assert "may grow to 65 tokens" in caught.value.message
    assert "the KV pool holds 64" in caught.value.message
    assert "--kv-cache-memory" in caught.value.message
    scheduler.add_request(make_request(prompt_token_ids=60, max_tokens=4))
    assert scheduler.num_waiting == 1


def test_a_full_queue_refuses_by_count() -> None:
    scheduler = make_scheduler(queue=QueueLimits(max_num_waiting=2))
    scheduler.add_request(make_request("a"))
    scheduler.add_request(make_request("b"))
    with pytest.raises(QueueFullError) as caught:
        scheduler.add_request(make_request("c"))
    assert caught.value.message == "Waiting requests: 2; the limit is 2. Try again later."
    assert caught.value.reason == "max_num_queued_reqs"
    assert caught.value.retry_after_s > 0
    assert scheduler.num_waiting == 2
    assert scheduler.counters.num_prompt_tokens == 16
    scheduler.check_integrity()


def test_a_full_queue_refuses_by_tokens() -> None:
    scheduler = make_scheduler(queue=QueueLimits(max_queued_tokens=100))
    scheduler.add_request(make_request("a", 60))
    with pytest.raises(QueueFullError) as caught:
        scheduler.add_request(make_request("b", 41))
    assert caught.value.message == (
        "Waiting prompt tokens: 60; this request has 41, and the limit is 100. Try again later."
    )
    assert caught.value.reason == "max_num_queued_tokens"
    scheduler.add_request(make_request("c", 40))


def test_a_tier_has_limits_of_its_own() -> None:
    scheduler = make_scheduler(tiers={"free": QueueLimits(max_num_waiting=1, max_queued_tokens=50)})
    scheduler.add_request(make_request("a", 20, tier="free"))
    with pytest.raises(QuotaExceededError, match=r"Waiting requests of tier free: 1; the limit is 1\."):
        scheduler.add_request(make_request("b", 20, tier="free"))
    scheduler.add_request(make_request("c", 60, tier="paid"))
    assert scheduler.finish_request("a")
    scheduler.add_request(make_request("e", 50, tier="free"))


def test_a_prompt_that_no_queue_could_take_is_not_told_to_come_again() -> None:
    """Not while the queue is full, either."""
    tiers = {"free": QueueLimits(max_num_waiting=1, max_queued_tokens=50)}
    scheduler = make_scheduler(queue=QueueLimits(max_queued_tokens=100), tiers=tiers)
    scheduler.add_request(make_request("a", 20, tier="free"))
    for tier, num_tokens, whose, limit in (("free", 51, " of tier free", 50), ("paid", 101, "", 100)):
        request = make_request("long", num_tokens, tier=tier)
        for add in (scheduler.add_request, scheduler.check):
            with pytest.raises(ContextLengthError) as caught:
                add(request)
            assert caught.value.message == (
                f"The prompt has {num_tokens} tokens, but all waiting prompts{whose} together may have {limit}. "
                f"Shorten the prompt, or raise max_queued_tokens{whose}."
            )
    assert scheduler.num_waiting == 1


def test_those_who_run_do_not_count_as_waiting() -> None:
    world = make_world(queue=QueueLimits(max_num_waiting=1))
    world.add(make_request("a"))
    world.step()
    world.add(make_request("b"))
    world.step()
    assert world.running_ids() == ["a", "b"]


def test_a_preempted_request_waits_again_and_counts() -> None:
    world = make_world(max_num_seqs=1, queue=QueueLimits(max_num_waiting=1))
    world.add(make_request("low", 40, 20, priority=Priority.LOW))
    world.step()
    world.add(make_request("high", 8, priority=Priority.HIGH))
    world.step()
    assert world.waiting_ids() == ["low"]
    with pytest.raises(QueueFullError):
        world.add(make_request("c"))
    world.finish()


def test_a_request_may_wait_for_a_bounded_time() -> None:
    world = make_world(max_num_seqs=1, queue_timeout_s=0.02)
    world.add(make_request("runs", 8, max_tokens=100), make_request("first"), make_request("second", arrival_s=0.5))
    world.step()
    scheduler = world.scheduler
    assert scheduler.expire(0.02) == []
    (output,) = scheduler.expire(0.025)
    assert output.request_id == "first"
    assert output.finish_reason is FinishReason.ERROR
    assert isinstance(output.error, QueueTimeoutError)
    assert output.error.message == (
        "The request waited 0.025 s for its first step; the limit is 0.02 s (--queue-timeout-s). "
        "Try again when the server is less busy."
    )
    assert scheduler.num_waiting == 1
    assert [expired.request_id for expired in scheduler.expire(50.0)] == ["second"]
    assert scheduler.num_running == 1
    scheduler.check_integrity()


def test_a_request_that_has_run_does_not_time_out() -> None:
    world = make_world(max_num_seqs=1, queue_timeout_s=1.0)
    world.add(make_request("low", 40, 20, priority=Priority.LOW))
    world.step()
    world.add(make_request("high", 8, priority=Priority.HIGH))
    world.step()
    assert world.waiting_ids() == ["low"]
    assert world.scheduler.expire(100.0) == []
    world.finish()
    world.check_tokens()


def test_without_a_bound_nobody_times_out() -> None:
    scheduler = make_scheduler(queue_timeout_s=None)
    scheduler.add_request(make_request("r"))
    assert scheduler.expire(1e9) == []
    assert scheduler.num_waiting == 1


def test_a_better_tier_takes_the_newest_place_of_the_worst() -> None:
    scheduler = make_scheduler(queue=QueueLimits(max_num_waiting=4))
    for index, priority in enumerate([Priority.LOW, Priority.LOW, Priority.NORMAL, Priority.NORMAL]):
        assert scheduler.add_request(make_request(f"r{index}", priority=priority, arrival_s=index)) == []
    ended = []
    for index in range(4):
        ended += scheduler.add_request(make_request(f"h{index}", priority=Priority.HIGH, arrival_s=10 + index))
    assert [output.request_id for output in ended] == ["r1", "r0", "r3", "r2"]
    assert {output.finish_reason for output in ended} == {FinishReason.ERROR}
    error = ended[0].error
    assert isinstance(error, QueueFullError)
    assert error.message == (
        "The queue is full (waiting requests: 4), and a request of a better tier has taken this one's place. "
        "Try again later."
    )
    assert (error.reason, error.retry_after_s) == ("displaced", 5.0)
    with pytest.raises(QueueFullError, match="Waiting requests: 4"):
        scheduler.add_request(make_request("h4", priority=Priority.HIGH))
    assert {request.request_id for request in waiting(scheduler)} == {"h0", "h1", "h2", "h3"}
    scheduler.check_integrity()


def test_nobody_is_displaced_by_their_own_tier_or_in_vain() -> None:
    scheduler = make_scheduler(num_blocks=64, queue=QueueLimits(max_queued_tokens=100))
    scheduler.add_request(make_request("high", 50, priority=Priority.HIGH))
    scheduler.add_request(make_request("a", 20, priority=Priority.LOW))
    scheduler.add_request(make_request("b", 20, priority=Priority.LOW))
    with pytest.raises(QueueFullError):
        scheduler.add_request(make_request("low", 20, priority=Priority.LOW))
    with pytest.raises(QueueFullError, match="Waiting prompt tokens: 90; this request has 60"):
        scheduler.add_request(make_request("large", 60, priority=Priority.HIGH))
    assert scheduler.num_waiting == 3
    ended = scheduler.add_request(make_request("fits", 40, priority=Priority.NORMAL))
    assert sorted(output.request_id for output in ended) == ["a", "b"]
    scheduler.check_integrity()


def test_who_has_run_before_is_not_displaced() -> None:
    """Its client has a part of the answer."""
    world = make_world(max_num_seqs=1, queue=QueueLimits(max_num_waiting=1))
    world.add(make_request("low", 40, 20, priority=Priority.LOW))
    world.step()
    world.add(make_request("high", 8, 20, priority=Priority.HIGH))
    world.step()
    assert world.waiting_ids() == ["low"]
    with pytest.raises(QueueFullError):
        world.add(make_request("second", priority=Priority.HIGH))
    world.finish()
