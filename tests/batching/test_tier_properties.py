"""What tiers and age promise whatever arrives: nobody starves, and nobody gives way in vain."""

from __future__ import annotations

import cProfile
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_server.batching.limits import QueueLimits
from mlx_server.outputs import ModelRunnerOutput, SampledToken, SchedulerOutput
from mlx_server.request import Priority, Request
from tests.batching.worlds import chunks, make_request, make_scheduler, make_world, prompt, step_seconds, waiting

TARGET_S, MAX_S = 0.05 + 0.0965, 0.05 + 0.4445
MAX_TOKENS = 444  # what a step of MAX_S leaves beside four decodes, in rows that are a multiple of 16
PART = MAX_TOKENS // 8
CREDIT = 256  # what the oldest is due beside HIGH's prompts before these are made longer for it
LONG_AGO = 30.0  # more than the 20 s by which LOW must be older than HIGH to be as urgent


class Flood:
    """A scheduler on a simulated device, whose clock moves on by what steps take: 50 ms if anyone decodes, and 1 ms
    for each token of a longer chunk."""

    def __init__(self, num_blocks: int = 2000, **limits: Any) -> None:
        self.scheduler = make_scheduler(
            num_blocks, target_step_s=TARGET_S, max_step_s=MAX_S, context_doubling_tokens=1e12, **limits
        )
        self.now = 100.0
        self.requests: dict[str, Request] = {}
        self.first_token_s: dict[str, float] = {}
        self.ended: set[str] = set()

    def add(
        self, priority: Priority, num_tokens: int, max_tokens: int, *, age_s: float = 0.0, first: int | None = None
    ) -> str:
        """Prompts share nothing, or the block that counts up from `first`."""
        name = f"{priority.name}{len(self.requests)}"
        token_ids = prompt(num_tokens - 1, first) if first is not None else [0] * (num_tokens - 1)
        token_ids = [*token_ids, len(self.requests)] if first is not None else [1000 + len(self.requests), *token_ids]
        request = make_request(name, token_ids, max_tokens, priority=priority, arrival_s=self.now - age_s)
        self.scheduler.add_request(request)
        self.requests[name] = request
        return name

    def num_waiting(self, priority: Priority) -> int:
        return sum(request.priority == priority for request in waiting(self.scheduler))

    def step(self) -> SchedulerOutput:
        """Composes a step and runs it."""
        output = self.scheduler.schedule(self.now)
        assert output is not None, "nothing can run"
        seconds = step_seconds(output)
        sampled = {chunk.request_id: SampledToken(7) for chunk in output.chunks if chunk.is_sampling}
        self.now += seconds
        for result in self.scheduler.update(ModelRunnerOutput(output.step_id, sampled, step_time_s=seconds)):
            self.first_token_s.setdefault(result.request_id, self.now)
            if result.finish_reason is not None:
                self.ended.add(result.request_id)
        return output

    def ttft_s(self, name: str) -> float:
        return self.first_token_s[name] - self.requests[name].arrival_s


def flood_of_aged(num_seats: int = 8) -> Flood:
    """Seats are full of LOW requests, and many more have waited for a minute."""
    flood = Flood(max_num_seqs=num_seats)
    for _ in range(4 * num_seats):
        flood.add(Priority.LOW, 30, 1000)
    for _ in range(5):
        flood.step()
    flood.now += 60.0
    return flood


# --- one case each ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [30, 2000])
def test_one_preemption_seats_a_prompt_of_any_length(num_tokens: int) -> None:
    """Whom it takes the seat from has aged past it, and must not take it back in the same step."""
    flood = flood_of_aged()
    name = flood.add(Priority.HIGH, num_tokens, 5)
    flood.step()
    assert name in [request.request_id for request in flood.scheduler.running()]
    while name not in flood.ended:
        flood.step()
    assert flood.scheduler.counters.num_preemptions == 1


def test_who_is_promoted_waits_for_a_prefix_like_others() -> None:
    """`aged` and `second` wait for what `first` computes in this step: the step comes to its end without them."""
    world = make_world(100)
    world.now = 100.0
    shared = prompt(100)
    for name in ("first", "second"):
        world.add(make_request(name, [*shared, 1], 5, priority=Priority.HIGH, arrival_s=100.0))
    world.add(make_request("aged", [*shared, 2], 5, priority=Priority.LOW, arrival_s=100.0 - LONG_AGO))
    assert chunks(world.step()) == {"first": (0, 101)}
    assert chunks(world.step()).keys() == {"first", "second", "aged"}
    world.finish()
    world.check_tokens()


def beside_streams() -> Flood:
    """LOW streams, so that steps of better tiers' prompts may be long ones."""
    flood = Flood(max_num_seqs=8)
    for _ in range(4):
        flood.add(Priority.LOW, 8, 4000)
    flood.step()
    flood.step()
    return flood


@pytest.mark.parametrize("num_tokens", [200, MAX_TOKENS - 4, MAX_TOKENS, 1000])
def test_prompts_that_leave_no_stream_behind_leave_the_oldest_its_part(num_tokens: int) -> None:
    """Each is computed in a step or a few and wants one token: there is never a stream of their tier, whose target
    would keep a part of the step for the oldest. It gets an eighth of all prompt tokens, or a ninth where
    HIGH's end in their steps, but for two steps' worth and the credit."""
    flood = beside_streams()
    counters = flood.scheduler.counters
    before = counters.num_prompt_tokens_computed
    name = flood.add(Priority.LOW, 10 * PART, 1, age_s=LONG_AGO)
    while name not in flood.ended:
        flood.add(Priority.HIGH, num_tokens, 1)
        flood.step()
        num_computed = counters.num_prompt_tokens_computed - before
        assert num_computed <= 9 * 10 * PART + 2 * (MAX_TOKENS + PART) + 7 * CREDIT, "it starves"


def test_the_oldest_lengthens_a_better_prompts_step_by_what_it_is_due() -> None:
    """A token, then nothing until it is due a block beyond the credit: 7 * 300 / 7 - 1 - 256 = 43."""
    flood = beside_streams()
    aged = flood.add(Priority.LOW, 300, 1, age_s=LONG_AGO)
    sizes = []
    for _ in range(10):
        name = flood.add(Priority.HIGH, 300, 1)
        step = chunks(flood.step())
        assert step[name] == (0, 300)
        sizes.append(step.get(aged, (0, 0))[1])
    assert sizes == [1, 0, 0, 0, 0, 0, 0, 42, 43, 43]


def test_the_oldest_gets_on_where_steps_leave_prompts_less_than_eight_tokens() -> None:
    """Ten streams of sixteen tokens: what is left goes to prompts of a better tier, which end in each step."""
    flood = Flood(max_num_seqs=12, max_num_batched_tokens=16)
    for _ in range(10):
        flood.add(Priority.LOW, 8, 4000)
    for _ in range(10):
        flood.step()
    name = flood.add(Priority.LOW, 20, 1, age_s=LONG_AGO)
    for _ in range(7 * (CREDIT + 20) // 6):
        if not flood.num_waiting(Priority.HIGH):
            flood.add(Priority.HIGH, 6, 1)
        flood.step()
    assert name in flood.ended, "it starves"


def test_what_better_prompts_find_no_room_to_use_goes_to_the_oldest() -> None:
    """HIGH waits for the memory of one that has aged past it: the sooner that ends, the better for both."""
    flood = Flood(40, max_num_seqs=8)
    flood.add(Priority.LOW, 64, 1)
    flood.step()
    aged = flood.add(Priority.LOW, 992, 20, age_s=LONG_AGO)
    flood.step()
    high = flood.add(Priority.HIGH, 900, 1)
    assert chunks(flood.step())[aged] == (496, 496), "as if nobody waited"
    while high not in flood.ended:
        flood.step()
    assert flood.scheduler.counters.num_preemptions == 0


def test_the_ninth_of_a_better_tier_starts_in_the_step_of_the_eighth() -> None:
    """Candidates come eight at a time: that the last of them is of a worse tier does not end the step."""
    flood = Flood(max_num_seqs=32)
    for _ in range(4):
        flood.add(Priority.LOW, 8, 4000)
    flood.step()
    flood.step()
    flood.add(Priority.LOW, 300, 1, age_s=LONG_AGO)
    names = [flood.add(Priority.HIGH, 20, 1) for _ in range(12)]
    assert set(names) <= chunks(flood.step()).keys()


@pytest.mark.parametrize(("num_seats", "num_blocks", "num_better"), [(1, 2000, 7), (64, 50, 6)])
def test_who_needs_more_than_the_share_alone_takes_turns(num_seats: int, num_blocks: int, num_better: int) -> None:
    """The only seat, or 38 blocks of 50: it comes after seven of the better tier, or six, however many have aged."""
    flood = Flood(num_blocks, max_num_seqs=num_seats)
    for _ in range(40):
        flood.add(Priority.LOW, 1200, 3, age_s=LONG_AGO)
    started: list[str] = []
    while len(started) < 50:
        if not flood.num_waiting(Priority.HIGH):
            flood.add(Priority.HIGH, 1200, 3)
        started += [data.request_id[:3] for data in flood.step().new_requests]
    turns = "".join(name[0] for name in started).split("L")
    assert len(turns) > 5
    assert {len(others) for others in turns[1:-1]} == {num_better}
    assert flood.scheduler.counters.num_preemptions == 0


def test_a_better_tier_gets_no_less_than_a_worse_one_where_the_target_is_longer_than_the_longest_step() -> None:
    sizes = []
    for priority in (Priority.HIGH, Priority.LOW):
        world = make_world(100, target_step_s=TARGET_S, max_step_s=TARGET_S / 2, context_doubling_tokens=1e12)
        world.add(*(make_request(f"d{index}", 8, max_tokens=500, priority=Priority.LOW) for index in range(4)))
        world.step()
        world.step()
        world.add(make_request("prompt", 1000, priority=priority))
        sizes.append(chunks(world.step())["prompt"][1])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("tier", [Priority.HIGH, Priority.NORMAL])
def test_what_is_due_outgrows_the_credit_however_small_a_step_is(tier: Priority) -> None:
    """A step of 64 tokens, and prompts that take one and a half: LOW sits out the half, and has only what it is due."""
    flood = Flood(max_num_seqs=2, max_num_batched_tokens=64)
    name = flood.add(Priority.LOW, 40, 1, age_s=LONG_AGO)
    for _ in range(2 * (7 * (CREDIT + 2 * 40) // 90)):
        if not flood.num_waiting(tier):
            flood.add(tier, 90, 1)
        flood.step()
    assert name in flood.ended, "it starves"


# --- whatever arrives -------------------------------------------------------------------------------------

PROMPTS = st.sampled_from([4, 20, 90, 300, MAX_TOKENS, 600, 1500])
OUTPUTS = st.sampled_from([1, 3, 30])


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_seats=st.sampled_from([1, 2, 3, 8, 17, 64]),
    num_blocks=st.sampled_from([50, 70, 150, 2000]),
    max_num_batched_tokens=st.sampled_from([64, 256, 2048]),
    max_chunk_tokens=st.sampled_from([None, None, 64]),
    high=st.tuples(PROMPTS, OUTPUTS),
    low=st.tuples(PROMPTS, OUTPUTS),
    num_most_waiting=st.sampled_from([1, 3, 40]),
    has_normal=st.booleans(),
    is_shared=st.booleans(),
)
def test_low_ends_under_an_endless_flood_of_better_tiers(
    num_seats: int,
    num_blocks: int,
    max_num_batched_tokens: int,
    max_chunk_tokens: int | None,
    high: tuple[int, int],
    low: tuple[int, int],
    num_most_waiting: int,
    has_normal: bool,
    is_shared: bool,
) -> None:
    """Seats, memory or tokens may be what is short: as many HIGH requests as may wait always do. Each LOW one has its
    part of every other step at least, once those before it have ended and memory has come back."""
    flood = Flood(
        num_blocks,
        max_num_seqs=num_seats,
        max_num_batched_tokens=max_num_batched_tokens,
        max_chunk_tokens=max_chunk_tokens,
    )
    names = [flood.add(Priority.LOW, *low, age_s=LONG_AGO) for _ in range(3)]
    part = min(min(max_num_batched_tokens - num_seats, 64) // 8 or 1, max_chunk_tokens or 64)
    num_steps_alone = 2 * (-(-low[0] // part)) + low[1]
    num_steps_of_a_high = 2 * num_seats * (-(-high[0] // min(max_num_batched_tokens, 64))) + high[1]
    for _ in range(len(names) * (num_steps_alone + 8 * num_steps_of_a_high)):
        for _ in range(num_most_waiting - flood.num_waiting(Priority.HIGH)):
            flood.add(Priority.HIGH, *high, first=5 if is_shared else None)
        if has_normal and not flood.num_waiting(Priority.NORMAL):
            flood.add(Priority.NORMAL, *high)
        flood.step()
        if flood.ended.issuperset(names):
            break
    flood.scheduler.check_integrity()
    assert flood.ended.issuperset(names), "they starve"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    low=st.sampled_from([90, 600, 1500]),
    normal=PROMPTS,
    high=st.sampled_from([4, 20, 90, 300]),
    num_between=st.sampled_from([1, 2, 3, 10]),
    stream=st.sampled_from(list(Priority)),
)
def test_who_has_aged_waits_at_most_sixteen_times_its_work(
    low: int, normal: int, high: int, num_between: int, stream: Priority
) -> None:
    """One prompt token in eight is its, and prompts have half of the time at least, however short those of HIGH are
    that are expected all the time and sat out for. Beside that it waits for the credit, a block and two steps."""
    flood = Flood(max_num_seqs=8)
    for _ in range(4):
        flood.add(stream, 8, 4000)
    flood.step()
    flood.step()
    name, start_s = flood.add(Priority.LOW, low, 1, age_s=LONG_AGO), flood.now
    max_s = 0.001 * 2 * (8 * low + 7 * (CREDIT + 32)) + 2 * MAX_S
    for index in range(10_000):
        while flood.num_waiting(Priority.NORMAL) < 8:
            flood.add(Priority.NORMAL, normal, 1)
        if index % num_between == 0:
            flood.add(Priority.HIGH, high, 1)
        flood.step()
        if name in flood.ended:
            break
        assert flood.now - start_s <= max_s, "it waits for too long"
    assert name in flood.ended


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_seats=st.sampled_from([2, 3, 8, 17, 64]),
    num_blocks=st.sampled_from([50, 70, 150, 2000]),
    max_num_batched_tokens=st.sampled_from([64, 2048]),
    high=st.tuples(PROMPTS, OUTPUTS),
    low=st.tuples(PROMPTS, OUTPUTS),
    num_steps=st.sampled_from([1, 5, 40]),
)
def test_a_better_tier_starts_beside_an_endless_flood_that_has_aged(
    num_seats: int,
    num_blocks: int,
    max_num_batched_tokens: int,
    high: tuple[int, int],
    low: tuple[int, int],
    num_steps: int,
) -> None:
    """It waits for one promoted request at most, whatever is short, and takes no more from others than it needs."""
    flood = Flood(num_blocks, max_num_seqs=num_seats, max_num_batched_tokens=max_num_batched_tokens)

    def step() -> None:
        for _ in range(num_seats + 5 - flood.num_waiting(Priority.LOW)):
            flood.add(Priority.LOW, *low, age_s=LONG_AGO)
        flood.step()

    for _ in range(num_steps):
        step()
    for _ in range(4):
        name = flood.add(Priority.HIGH, *high)
        num_running = flood.scheduler.num_running
        num_preemptions = flood.scheduler.counters.num_preemptions
        most_at_once = min(max_num_batched_tokens - num_seats, 64) or 1
        num_steps_of_a_low = -(-low[0] // max(most_at_once // 8, 1)) + low[1]
        for _ in range(2 * num_steps_of_a_low + 2 * (-(-high[0] // most_at_once)) + high[1]):
            step()
            if name in flood.ended:
                break
        assert name in flood.ended, "it starves"
        assert flood.scheduler.counters.num_preemptions - num_preemptions <= num_running
    flood.scheduler.check_integrity()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_seats=st.sampled_from([1, 2, 5, 16]),
    max_num_batched_tokens=st.sampled_from([64, 256, 2048]),
    max_chunk_tokens=st.sampled_from([None, None, 64]),
    arrivals=st.lists(st.tuples(st.integers(0, 30), PROMPTS, OUTPUTS, st.booleans()), min_size=1, max_size=12),
)
def test_who_loses_its_seat_loses_it_to_one_that_starts_in_the_same_step(
    num_seats: int,
    max_num_batched_tokens: int,
    max_chunk_tokens: int | None,
    arrivals: list[tuple[int, int, int, bool]],
) -> None:
    """Whatever prompts are computed before it, and whether or not it waits for the prefix of one of them."""
    flood = Flood(
        4000,
        max_num_seqs=num_seats,
        max_num_batched_tokens=max_num_batched_tokens,
        max_chunk_tokens=max_chunk_tokens,
        aging_rate=0.0,
    )
    for _ in range(num_seats):
        flood.add(Priority.LOW, 8, 1000)
    counters = flood.scheduler.counters
    for index in range(60):
        for at_step, num_tokens, max_tokens, is_shared in arrivals:
            if at_step == index:
                flood.add(Priority.HIGH, num_tokens, max_tokens, first=5 if is_shared else None)
        num_preemptions = counters.num_preemptions
        started = [data.request_id for data in flood.step().new_requests]
        num_high = sum(flood.requests[name].priority is Priority.HIGH for name in started)
        assert counters.num_preemptions - num_preemptions <= num_high
    flood.scheduler.check_integrity()


@pytest.mark.parametrize("num_tokens", [40, 128])
@pytest.mark.parametrize("num_between", [1, 3])
@pytest.mark.parametrize(
    "crowd",
    [
        [(Priority.NORMAL, 300, 3)],
        [(Priority.NORMAL, 600, 30), (Priority.LOW, 1500, 3), (Priority.NORMAL, 90, 1)],
        [(Priority.LOW, 600, 30)],
        [(Priority.NORMAL, 4, 1), (Priority.LOW, 20, 1), (Priority.LOW, 4, 1)],
    ],
)
def test_the_step_of_a_prompt_of_the_best_tier_that_comes_now_and_then_is_its_own(
    num_tokens: int, crowd: list[tuple[Priority, int, int]], num_between: int
) -> None:
    """Though others have aged past it, and are as many as seats again: they decode, and one may start with a token."""
    flood = Flood(max_num_seqs=8)
    for _ in range(8):
        for _ in range(num_between):
            while flood.scheduler.num_waiting < 8:
                for priority, size, max_tokens in crowd:
                    flood.add(priority, size, max_tokens, age_s=LONG_AGO)
            flood.step()
        name = flood.add(Priority.HIGH, num_tokens, 1)
        while name not in (sizes := {other: size for other, (_, size) in chunks(flood.step()).items()}):
            pass
        assert sizes.pop(name) == num_tokens
        assert set(sizes.values()) <= {1}
        assert name in flood.ended


def test_a_step_looks_at_no_more_of_a_longer_queue() -> None:
    """Function calls of a step beside 500 who wait in three tiers, and beside 10,000."""
    counts = []
    for num_waiting in (500, 10_000):
        queue = QueueLimits(max_num_waiting=num_waiting, max_queued_tokens=1_000_000)
        flood = Flood(max_num_seqs=16, queue=queue)
        for index in range(num_waiting):
            flood.add(list(Priority)[index % 3], 40, 5, age_s=LONG_AGO * (index % 7) / 7)
        flood.step()
        profile = cProfile.Profile()
        with profile:
            for _ in range(20):
                flood.step()
        counts.append(sum(entry.callcount for entry in profile.getstats()))
    assert counts[1] <= 1.2 * counts[0]
