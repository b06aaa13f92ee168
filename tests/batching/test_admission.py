"""Who starts, in which order, and who must wait: room, cached prefixes, prefixes on their way."""

from __future__ import annotations

import pytest

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.prefix_cache import CachedPrefix
from mlx_server.batching.policy import headroom
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Priority, Request
from tests.batching.worlds import World, chunks, make_request, make_world, prompt

SHARED = prompt(64)


def shared(request_id: str, num_own_tokens: int, max_tokens: int = 4, **extra: object) -> Request:
    """A request that begins with `SHARED` and goes on with tokens of its own."""
    own = make_request(request_id, num_own_tokens).prompt_token_ids
    return make_request(request_id, SHARED + own, max_tokens, **extra)  # type: ignore[arg-type]


# --- seats and blocks -------------------------------------------------------------------------------------


def test_seats_are_taken_in_order() -> None:
    world = make_world(max_num_seqs=2)
    world.add(*(make_request(f"r{index}", arrival_s=float(index)) for index in range(3)))
    assert chunks(world.step()) == {"r0": (0, 8), "r1": (0, 8)}
    assert world.waiting_ids() == ["r2"]
    world.finish()
    world.check_tokens()


def test_a_better_tier_starts_first() -> None:
    world = make_world(max_num_seqs=1)
    for priority in (Priority.LOW, Priority.HIGH, Priority.NORMAL):
        world.add(make_request(priority.name, priority=priority))
    assert list(chunks(world.step())) == ["HIGH"]
    world.finish()
    assert [o.request_id for o in world.outputs if o.finish_reason] == ["HIGH", "NORMAL", "LOW"]


def test_admission_stops_at_the_oldest_that_does_not_fit_once_it_has_been_overtaken() -> None:
    world = make_world(num_blocks=8)
    world.add(make_request("runs", 90, max_tokens=6))
    world.step()
    world.add(make_request("large", 190, arrival_s=0.1), make_request("small", 60, max_tokens=30, arrival_s=0.2))
    world.add(make_request("next", 140, arrival_s=0.3))
    assert chunks(world.step()) == {"runs": (90, 1), "small": (0, 60)}  # 5 blocks were free; `large` needs 6
    while "runs" not in world.reasons:
        assert list(chunks(world.step())) == ["runs", "small"]
    while "small" not in world.reasons:  # 5 blocks are enough for `next`, but 60 + 150 tokens are more than 190
        assert list(chunks(world.step())) == ["small"]
    assert list(chunks(world.step())) == ["large"]
    world.finish()
    world.check_tokens()


def test_what_has_overtaken_one_is_remembered_when_an_older_one_is_preempted() -> None:
    world = make_world(num_blocks=10)
    world.add(make_request("first", 90, max_tokens=30), make_request("old", 60, max_tokens=30, arrival_s=0.1))
    world.step()
    world.add(make_request("large", 170, arrival_s=1.0), make_request("small", 90, max_tokens=1, arrival_s=2.0))
    assert chunks(world.step())["small"] == (0, 90)  # 5 blocks are free, `large` needs 6
    assert world.scheduler.preempt_lowest()
    world.add(make_request("tiny", 3, max_tokens=1, arrival_s=3.0))
    assert {"old", "tiny"} <= set(chunks(world.step()))
    world.add(make_request("next", 90, max_tokens=1, arrival_s=4.0))
    while "old" not in world.reasons:  # 90 tokens have overtaken `large`, and 180 are more than its 170
        assert "next" not in chunks(world.step())
    world.finish()
    world.check_tokens()


def test_who_runs_keeps_headroom() -> None:
    world = make_world(num_blocks=8)
    world.add(make_request("runs", 90, max_tokens=160), make_request("next", 128, max_tokens=4, arrival_s=0.1))
    # 5 blocks are free and `next` needs 4; a tenth of the 160 tokens that `runs` may add (1 block) stays free
    assert list(chunks(world.step())) == ["runs", "next"]
    world = make_world(num_blocks=8)
    world.add(make_request("runs", 90, max_tokens=160), make_request("next", 129, max_tokens=4, arrival_s=0.1))
    assert list(chunks(world.step())) == ["runs"]
    world.finish()
    world.check_tokens()


def test_nobody_keeps_headroom_for_nobody() -> None:
    world = make_world(num_blocks=4)
    world.add(make_request("whole pool", 120, max_tokens=8))
    assert chunks(world.step()) == {"whole pool": (0, 120)}
    world.finish()


def test_headroom_is_a_tenth_of_what_may_still_come() -> None:
    running = [make_request("a", 10, max_tokens=320), make_request("b", 10, max_tokens=5000)]
    assert headroom(running) == int(0.1 * (320 + 1024)) // BLOCK_SIZE + 1
    assert headroom([]) == 0


def num_preemptions(num_requests: int) -> int:
    world = make_world(num_blocks=40, max_num_seqs=32)
    world.add(*(make_request(f"r{i}", 20 + i, max_tokens=200, arrival_s=0.01 * i) for i in range(num_requests)))
    world.finish()
    world.check_tokens()
    return world.scheduler.counters.num_preemptions


@pytest.mark.slow
def test_headroom_spares_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    with_headroom = num_preemptions(30)
    monkeypatch.setattr("mlx_server.batching.policy.headroom", lambda running, windows: 0)
    without = num_preemptions(30)
    assert 0 < with_headroom < 0.75 * without, (with_headroom, without)


# --- cached prefixes --------------------------------------------------------------------------------------


def warm(world: World) -> None:
    """Leaves the two blocks of `SHARED` in the cache."""
    world.add(shared("warm", 1, max_tokens=1))
    world.finish()


def test_a_hit_is_not_computed_again() -> None:
    world = make_world()
    warm(world)
    computed = world.runner.num_prompt_tokens_computed
    world.add(shared("r", 10))
    assert chunks(world.step()) == {"r": (64, 10)}
    assert world.runner.num_prompt_tokens_computed - computed == 10
    world.finish()
    world.check_tokens()
    counters = world.scheduler.counters
    assert counters.num_prompt_tokens_computed == world.runner.num_prompt_tokens_computed == 65 + 10
    assert counters.num_prompt_tokens == 65 + 74
    assert counters.num_prefix_hit_tokens == 64
    assert counters.num_prefix_query_tokens == 65 + 74
    assert {output.num_cached_tokens for output in world.outputs if output.request_id == "r"} == {64}


def test_generated_blocks_hit_too() -> None:
    """A chat's next turn finds the answer of the turn before."""
    world = make_world()
    world.add(make_request("first turn", prompt(40), max_tokens=60))
    world.finish()
    world.add(make_request("second turn", [*prompt(40), *world.tokens["first turn"], 1, 2, 3]))
    assert chunks(world.step()) == {"second turn": (96, 7)}
    world.finish()
    world.check_tokens()


def test_without_prefix_caching_nothing_is_queried() -> None:
    world = make_world()
    world.scheduler.blocks.enable_prefix_caching = False
    world.add(shared("a", 1), shared("b", 1))
    assert chunks(world.step()) == {"a": (0, 65), "b": (0, 65)}
    world.finish()
    assert world.scheduler.counters.num_prefix_query_tokens == 0


def test_of_one_tier_those_who_have_less_left_to_compute_start_first_however_many_wait() -> None:
    world = make_world(max_num_batched_tokens=64, max_num_seqs=32)
    warm(world)
    world.add(*(make_request(f"cold{index}", 80) for index in range(40)), shared("hit", 1, arrival_s=5.0))
    step = chunks(world.step())
    assert step == {"hit": (64, 1), "cold0": (0, 63)}


def test_hits_and_the_oldest_take_turns_for_a_seat() -> None:
    world = make_world(max_num_seqs=1)
    warm(world)
    world.add(make_request("cold", 80, max_tokens=1))
    started: list[str] = []
    for index in range(4):
        world.add(shared(f"hit{index}", 1, max_tokens=1, arrival_s=0.01 * index))
        started.extend(chunks(world.step()))
    assert started == ["hit0", "cold", "hit1", "hit2"]
    world.finish()


def test_an_evicted_prefix_is_no_longer_a_hit() -> None:
    """What is cached of a request that waits is looked up again when its turn comes."""
    world = make_world(num_blocks=4, max_num_seqs=1)
    warm(world)
    world.add(make_request("runs", 100, max_tokens=1, priority=Priority.HIGH))
    world.add(make_request("cold", 60, arrival_s=0.1), shared("hit", 1, arrival_s=0.2))
    assert list(chunks(world.step())) == ["runs"]
    assert list(chunks(world.step())) == ["cold"]


def test_a_longer_prefix_does_not_overtake_a_better_tier() -> None:
    world = make_world(max_num_seqs=1)
    warm(world)
    world.add(make_request("cold", 80, priority=Priority.HIGH, arrival_s=19.0), shared("hit", 1, priority=Priority.LOW))
    assert list(chunks(world.step())) == ["cold"]


def test_nobody_waits_for_room_for_one_that_only_a_prefix_puts_before_it() -> None:
    """`hit` would come first, but does not fit beside `runs`; `cold` does."""
    world = make_world(num_blocks=16)
    warm(world)
    world.add(make_request("runs", 100, max_tokens=20))
    world.step()
    world.add(make_request("cold", 80, arrival_s=0.1), shared("hit", 400, arrival_s=0.2))
    assert chunks(world.step()).keys() == {"runs", "cold"}
    world.finish()
    world.check_tokens()


# --- what looking costs -----------------------------------------------------------------------------------


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets the id of each request whose cached prefix is looked up."""
    request_ids: list[str] = []
    find_prefix = PagedBlockManager.find_prefix

    def counted(self: PagedBlockManager, request: Request) -> CachedPrefix:
        request_ids.append(request.request_id)
        return find_prefix(self, request)

    monkeypatch.setattr(PagedBlockManager, "find_prefix", counted)
    return request_ids


def test_nothing_is_looked_up_for_a_seat_that_is_not_there(looked_up: list[str]) -> None:
    world = make_world(max_num_seqs=2)
    world.add(*(make_request(f"r{index}", 40, max_tokens=9) for index in range(20)))
    world.step()
    looked_up.clear()
    world.step()
    assert looked_up == []


def test_one_is_looked_up_for_blocks_that_are_not_there(looked_up: list[str]) -> None:
    """Whoever comes behind it would not start before it."""
    world = make_world(num_blocks=12)
    world.add(make_request("runs", 200, max_tokens=90))
    world.step()
    world.add(*(make_request(f"r{index}", 300, max_tokens=9, arrival_s=0.1 * index) for index in range(20)))
    looked_up.clear()
    for _ in range(10):
        assert chunks(world.step()).keys() == {"runs"}
    assert looked_up == ["r0"] * 10
    world.finish()
    world.check_tokens()


# --- prefixes on their way --------------------------------------------------------------------------------


def test_a_prefix_on_its_way_is_waited_for() -> None:
    world = make_world(max_num_batched_tokens=64)
    world.add(shared("first", 10), shared("second", 10, arrival_s=0.1))
    assert chunks(world.step()) == {"first": (0, 64)}
    assert (world.scheduler.num_waiting, world.scheduler.num_deferred) == (1, 0)  # nobody has asked for it yet
    assert chunks(world.step()) == {"first": (64, 10), "second": (64, 10)}
    assert (world.scheduler.num_waiting, world.scheduler.num_deferred) == (0, 0)
    world.finish()
    world.check_tokens()


def test_what_a_step_computes_is_shared_from_the_next_step_on() -> None:
    """Never inside one step: a model may run the step's requests one after the other, in any order."""
    world = make_world()
    world.add(make_request("first", prompt(33)), make_request("second", prompt(33)))
    assert chunks(world.step()) == {"first": (0, 33)}
    assert chunks(world.step()) == {"first": (33, 1), "second": (32, 1)}
    assert world.scheduler.blocks.block_ids("first")[0] == world.scheduler.blocks.block_ids("second")[0]
    world.finish()
    world.check_tokens()


def test_an_independent_request_does_not_wait_for_those_that_do() -> None:
    world = make_world(max_num_batched_tokens=128)
    world.add(shared("first", 40), shared("second", 40), make_request("other", 8))
    assert chunks(world.step()) == {"first": (0, 104), "other": (0, 8)}


def test_those_who_wait_for_a_prefix_do_not_hide_others() -> None:
    world = make_world(num_blocks=200, max_num_batched_tokens=256)
    world.add(*(make_request(f"r{index}", [*prompt(600), index]) for index in range(100)))
    world.add(make_request("other", 8, arrival_s=1.0))
    assert chunks(world.step()) == {"r0": (0, 248), "other": (0, 8)}


def test_a_step_starts_as_many_as_it_has_room_for() -> None:
    world = make_world(num_blocks=200)
    world.add(*(make_request(f"r{index}", [index, 5]) for index in range(100)))
    assert len(chunks(world.step())) == 64


def test_when_the_owner_is_aborted_the_next_computes() -> None:
    world = make_world(max_num_batched_tokens=32)
    world.add(shared("first", 10), shared("second", 10), shared("third", 10))
    assert chunks(world.step()) == {"first": (0, 32)}
    assert world.scheduler.finish_request("first")
    assert chunks(world.step()) == {"second": (32, 32)}
    assert chunks(world.step()) == {"second": (64, 10), "third": (64, 10)}
    world.finish()
    world.check_tokens()


def test_when_the_owner_is_preempted_the_next_computes() -> None:
    world = make_world(max_num_batched_tokens=32, max_num_seqs=1)
    world.add(shared("low", 40, priority=Priority.LOW))
    assert chunks(world.step()) == {"low": (0, 32)}
    world.add(shared("high", 10, priority=Priority.HIGH))
    assert chunks(world.step()) == {"high": (32, 32)}
    world.finish()
    world.check_tokens()
    assert world.scheduler.counters.num_preemptions == 1
    assert world.runner.num_prompt_tokens_computed == 64 + 10 + 40


def test_nobody_waits_for_a_worse_tier() -> None:
    world = make_world(max_num_batched_tokens=32)
    world.add(shared("low", 40, priority=Priority.LOW))
    assert chunks(world.step()) == {"low": (0, 32)}
    world.add(shared("high", 40, priority=Priority.HIGH))
    assert chunks(world.step()) == {"high": (32, 32)}


def test_the_wait_for_a_prefix_is_bounded() -> None:
    world = make_world(max_chunk_tokens=1)
    world.add(shared("first", 40), shared("second", 40))
    for now, started in ((0.0, ["first"]), (59.9, ["first"]), (60.1, ["first", "second"])):
        world.now = now
        assert list(chunks(world.step())) == started


def test_the_wait_is_bounded_after_another_one_has_ended() -> None:
    """Who waited before and has left keeps nobody's time from running out."""
    world = make_world(max_chunk_tokens=1)
    world.add(shared("first", 40), shared("second", 40))
    world.step()
    assert world.scheduler.finish_request("second")
    world.now = 1.0
    world.add(shared("third", 40, arrival_s=1.0))
    world.step()
    for now, started in ((60.9, ["first"]), (61.1, ["first", "third"])):
        world.now = now
        assert list(chunks(world.step())) == started


def test_each_wait_is_bounded_by_its_own_begin() -> None:
    world = make_world(max_chunk_tokens=1)
    world.add(shared("first", 40), shared("second", 40))
    world.step()
    world.now = 30.0
    world.add(shared("third", 40, arrival_s=30.0))
    world.step()
    seconds_and_started = (
        (59.9, ["first"]),
        (60.1, ["first", "second"]),
        (89.9, ["first", "second"]),
        (90.1, ["first", "second", "third"]),
    )
    for now, started in seconds_and_started:
        world.now = now
        assert list(chunks(world.step())) == started


def test_the_bound_of_a_wait_is_not_inherited_by_the_next_request_of_an_id() -> None:
    world = make_world(max_chunk_tokens=1)
    world.add(shared("first", 40), shared("second", 40))
    world.step()
    assert world.scheduler.finish_request("second")
    world.now = 50.0
    world.add(shared("second", 40, arrival_s=50.0))
    world.step()
    world.now = 70.0
    assert list(chunks(world.step())) == ["first"]


def test_deduplication_can_be_turned_off() -> None:
    world = make_world(deduplicate_prefixes=False)
    world.add(shared("first", 10), shared("second", 10))
    assert chunks(world.step()) == {"first": (0, 74), "second": (0, 74)}
    world.finish()
    world.check_tokens()


@pytest.mark.parametrize("is_async", [False, True])
def test_sixteen_cold_requests_compute_their_prefix_once(is_async: bool) -> None:
    world = make_world(num_blocks=200, is_async=is_async)
    prefix = prompt(1024)
    for index in range(16):
        own = make_request(f"r{index}", 32).prompt_token_ids
        world.add(make_request(f"r{index}", prefix + own, 32))
    world.finish()
    world.check_tokens()
    assert world.runner.num_prompt_tokens_computed == 1024 + 16 * 32
    counters = world.scheduler.counters
    assert counters.num_prompt_tokens_computed == world.runner.num_prompt_tokens_computed
    assert counters.num_prefix_hit_tokens == 15 * 1024
    assert counters.num_prefix_query_tokens == 16 * 1056


# --- why a request waits ----------------------------------------------------------------------------------


def test_the_reason_to_wait_is_short_memory() -> None:
    world = make_world()
    world.add(make_request("runs", 8, max_tokens=20))
    world.step()
    world.scheduler.hold_admission(True)
    late = make_request("late", arrival_s=1.0)
    world.add(late)
    world.step()
    assert world.scheduler.explain(late).startswith("memory is short")
    world.scheduler.hold_admission(False)
    world.finish()


def test_who_may_not_have_the_seat_of_one_who_has_aged_gets_the_reason() -> None:
    """`old` computes its prompt with all tokens of LOW, so `aged` does not start, but the last seat is kept for it."""
    world = make_world(1000, max_num_seqs=16, max_num_batched_tokens=32)
    world.add(make_request("old", 2000, priority=Priority.LOW))
    world.step()
    for index in range(14):
        world.add(make_request(f"runs{index}", 8, 200, priority=Priority.HIGH, arrival_s=50.0))
    while len(world.running_ids()) < 15:
        world.step()
    world.now = 60.0
    high = make_request("high", 8, priority=Priority.HIGH, arrival_s=60.0)
    world.add(make_request("aged", 150, priority=Priority.LOW, arrival_s=1.0), high)
    world.step()
    assert world.scheduler.explain(high).startswith("no seat: the last is kept")
    world.finish()
