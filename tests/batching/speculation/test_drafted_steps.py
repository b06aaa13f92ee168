"""Steps with drafts over a K/V memory that tells a wrong token, a wrong block and a wrong position."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.batching.speculation import drafting
from mlx_server.batching.speculation.drafting import Speculation
from mlx_server.batching.speculation.lookup import NgramDrafter
from mlx_server.outputs import RequestOutput, SchedulerOutput
from mlx_server.request import FinishReason, Request
from tests.batching.worlds import (
    FakeConstraint,
    FakeExecutor,
    FakeRunner,
    World,
    chunks,
    expected_tokens,
    make_request,
    make_scheduler,
)
from tests.drafters import always


class Oracle:
    """Drafts what the fake model will answer, with errors at random places: `wrongness` of all."""

    def __init__(self, wrongness: float, seed: int = 0) -> None:
        self._wrongness = wrongness
        self._rng = random.Random(seed)
        self.forgotten: list[str] = []

    def propose(self, request: Request, most: int) -> Sequence[int]:
        tokens = expected_tokens(request.prompt_token_ids, request.num_output_tokens + most)
        return [t if self._rng.random() >= self._wrongness else t + 1 for t in tokens[request.num_output_tokens :]]

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.request_id)


def drafting_world(
    wrongness: float, *, depth: int = 1, most: int = 7, seed: int = 0, num_spares: int | None = None, **extra: Any
) -> World:
    """Rows of decodes cost next to nothing beyond the first, so that every draft is worth a try. With `num_spares`, of
    a model with recurrent state."""
    speculation = Speculation(Oracle(wrongness, seed), most, num_spares)
    for rows, cost_s in ((1, 0.05), (256, 0.0501)):
        speculation.costs.observe(rows, cost_s)
        speculation.costs.observe(rows, cost_s)
    speculation.costs.observe = lambda *_: None  # type: ignore[method-assign]
    extra.setdefault("target_step_s", 1.0)
    scheduler = make_scheduler(extra.pop("num_blocks", 64), speculation=speculation, **extra)
    if num_spares is not None:
        scheduler.blocks.enable_prefix_caching = scheduler.blocks.checkpoints is not None
    return World(scheduler, depth=depth)


def test_right_drafts_are_put_out_in_one_step() -> None:
    world = drafting_world(0.0)
    world.add(make_request("r", 8, max_tokens=20))
    world.step()
    assert chunks(world.step()) == {"r": (8, 8)}
    assert len(world.tokens["r"]) == 1 + 8
    world.finish()
    world.check_tokens()
    assert world.scheduler.counters.num_steps == 4  # the prompt, 8 + 8 tokens, and 3 that are left
    speculation = world.scheduler.speculation
    assert speculation is not None
    assert speculation.counters.num_accepted_tokens == speculation.counters.num_draft_tokens == 16


def test_drafts_count_in_a_step_that_is_full() -> None:
    """A token, its 7 drafts, and of 31 known tokens of another as many as the step has left."""
    world = drafting_world(0.0, max_num_batched_tokens=34)
    world.add(make_request("drafting", 8, max_tokens=20))
    forced = FakeConstraint(60, forced={1: tuple(range(500, 530))})
    world.add_unchecked(make_request("forced", 8, max_tokens=60, constraint=forced, speculate=False))
    world.step()
    assert chunks(world.step()) == {"drafting": (8, 8), "forced": (8, 26)}


def test_wrong_drafts_cost_rows_and_nothing_else() -> None:
    world = drafting_world(1.0)
    world.add(make_request("r", 8, max_tokens=20))
    world.finish()
    world.check_tokens()
    assert world.tokens["r"] == expected_tokens(world.requests["r"].prompt_token_ids, 20)


@settings(max_examples=60, deadline=None)
@given(
    wrongness=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    depth=st.integers(1, 2),
    most=st.integers(1, 31),
    windows=st.sampled_from([(None,), (None, 40), (40,)]),
    num_blocks=st.integers(9, 40),
    states=st.sampled_from(
        [{}, {}, {"num_spares": 1}, {"num_spares": 2, "num_checkpoints": 3}, {"num_spares": 4, "num_checkpoints": 16}]
    ),
    sizes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 60)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_tokens_are_those_without_drafts(
    wrongness: float,
    depth: int,
    most: int,
    windows: tuple[int | None, ...],
    num_blocks: int,
    states: dict[str, int],
    sizes: list[tuple[int, int]],
    seed: int,
) -> None:
    """In any mix of prompts and decodes, with preemptions, windows, recurrent states, prefix hits, ends from outside
    and one step ahead."""
    world = drafting_world(
        wrongness,
        depth=depth,
        most=most,
        seed=seed,
        num_blocks=num_blocks * len(windows),
        windows=windows,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        **states,
    )
    rng = random.Random(seed)
    for index, (num_prompt, max_tokens) in enumerate(sizes):
        first = 7 if index % 2 else index  # every second one begins alike
        world.add(make_request(f"r{index}", [(first + i) % 97 for i in range(num_prompt)], max_tokens))
        world.step()
        if rng.random() < 0.15:
            world.scheduler.finish_request(rng.choice(sorted(world.requests)), FinishReason.ABORT)
    world.finish()
    world.check_tokens()


def test_drafts_never_end_beyond_the_last_token() -> None:
    world = drafting_world(0.0, most=31)
    world.add(make_request("r", 8, max_tokens=5))
    world.finish()
    assert world.tokens["r"] == expected_tokens(world.requests["r"].prompt_token_ids, 5)


def test_a_stop_id_among_the_drafts_ends_the_output_there() -> None:
    prompt = make_request("r", 8).prompt_token_ids
    answer = expected_tokens(prompt, 8)
    world = drafting_world(0.0)
    world.add(make_request("r", prompt, 30, stop_token_ids=(answer[4],)))
    world.finish()
    assert world.tokens["r"] == answer[: answer.index(answer[4]) + 1]
    assert world.reasons["r"] is FinishReason.STOP


def test_nothing_wrong_or_undecided_is_shared() -> None:
    """While a step with drafts runs, no block that they fill can be hit; afterwards those of right ones can."""
    world = drafting_world(0.0, most=31, depth=2)
    world.add(make_request("r", 30, max_tokens=60))
    world.step()
    world.deliver()
    before = world.scheduler.blocks.num_cached_blocks
    world.schedule()
    assert world.scheduler.blocks.num_cached_blocks == before
    world.deliver()
    assert world.scheduler.blocks.num_cached_blocks == before + 1
    world.finish()


def test_while_drafts_are_in_flight_no_step_is_composed() -> None:
    world = drafting_world(0.0, depth=2, max_num_seqs=8)
    world.add(make_request("drafts", 8, max_tokens=40), make_request("plain", 8, max_tokens=40, speculate=False))
    world.schedule()
    world.deliver()
    assert chunks(world.schedule())["drafts"][1] > 1
    assert world.schedule() is None
    world.finish()
    world.check_tokens()


def test_drafts_end_where_a_grammar_does_or_forbids_them() -> None:
    prompt = make_request("r", 8).prompt_token_ids
    answer = expected_tokens(prompt, 12)
    world = drafting_world(0.0)
    world.add_unchecked(make_request("r", prompt, 30, constraint=FakeConstraint(12)))
    while world.has_requests:
        output = world.step()
        for chunk in () if output is None else output.chunks:
            assert len(chunk.draft_bitmasks) == chunk.num_drafts
    assert world.tokens["r"] == answer
    assert world.reasons["r"] is FinishReason.STOP


def test_a_forced_token_other_than_the_draft_voids_what_follows() -> None:
    prompt = make_request("r", 8).prompt_token_ids
    forced = (990, 991)
    with_drafts, without = drafting_world(0.0), drafting_world(0.0)
    for world, speculate in ((with_drafts, True), (without, False)):
        constraint = FakeConstraint(12, forced={3: forced})
        world.add_unchecked(make_request("r", prompt, 30, constraint=constraint, speculate=speculate))
        world.finish()
    assert with_drafts.tokens == without.tokens
    assert with_drafts.tokens["r"][3:5] == list(forced)


def test_nobody_is_preempted_for_a_draft() -> None:
    world = drafting_world(0.0, num_blocks=4, most=31)
    world.add(make_request("a", 30, max_tokens=30), make_request("b", 30, max_tokens=30))
    world.finish()
    world.check_tokens()
    assert world.scheduler.counters.num_preemptions == 0


def test_all_are_forgotten_at_their_end() -> None:
    world = drafting_world(0.5)
    world.add(*(make_request(f"r{i}", 8, max_tokens=20) for i in range(5)))
    world.step()
    world.scheduler.finish_request("r3")
    world.finish()
    speculation = world.scheduler.speculation
    assert speculation is not None
    oracle = speculation._drafter
    assert isinstance(oracle, Oracle)
    assert sorted(oracle.forgotten) == [f"r{i}" for i in range(5)]
    assert not speculation._acceptances._by_request


@pytest.mark.parametrize("wrongness", [0.0, 0.5])
async def test_the_loop_waits_for_drafts_and_goes_ahead_without(wrongness: float) -> None:
    num_ahead: dict[bool, int] = {}
    for speculate in (True, False):
        world = drafting_world(wrongness, is_async=True)
        executor = FakeExecutor(world.runner)
        request = make_request("r", 8, max_tokens=30, speculate=speculate)
        tokens, ahead = list[int](), list[int]()

        def submit(output: SchedulerOutput, world: World = world, ahead: list[int] = ahead) -> None:
            ahead.append(world.runner.num_submitted > 0)
            FakeRunner.submit(world.runner, output)

        def deliver(outputs: list[RequestOutput], tokens: list[int] = tokens, world: World = world) -> None:
            for output in outputs:
                tokens.extend(output.new_token_ids)
                if output.finish_reason is not None:
                    world.scheduler.stop()

        world.runner.seconds = lambda _: 0.001  # too short to compose the next one late
        world.runner.submit = submit  # type: ignore[method-assign]
        world.scheduler.add_request(request)
        await asyncio.wait_for(world.scheduler.run(executor, lambda: 0.0, deliver), 10)
        assert tokens == expected_tokens(request.prompt_token_ids, 30)
        num_ahead[speculate] = sum(ahead)
    assert num_ahead[True] <= 2  # before there is an output to draft behind
    assert num_ahead[False] > 10


@pytest.mark.parametrize("seed", range(6))
def test_states_are_kept_at_block_boundaries_and_have_seen_no_wrong_draft(seed: int) -> None:
    world = drafting_world(0.3, seed=seed, num_spares=1, num_checkpoints=8)
    first = make_request("r", 20, max_tokens=80)
    world.add(first)
    world.finish()
    world.add(make_request("next", [*first.prompt_token_ids, *world.tokens["r"]], max_tokens=4))
    assert chunks(world.step()) == {"next": (96, 4)}
    world.finish()  # the runner compares the state that is resumed
    world.check_tokens()


def test_a_wrong_draft_has_right_ones_before_it_computed_again() -> None:
    """The third draft of each step is wrong: with four drafts a step, what is known grows until it ends a block."""

    class ThirdWrong(Oracle):
        def propose(self, request: Request, most: int) -> Sequence[int]:
            tokens = expected_tokens(request.prompt_token_ids, request.num_output_tokens + most)
            return [t + (place == 2) for place, t in enumerate(tokens[request.num_output_tokens :])]

    world = drafting_world(0.0, num_spares=1, num_checkpoints=8, most=4)
    assert world.scheduler.speculation is not None
    world.scheduler.speculation._drafter = ThirdWrong(0.0)
    world.add(make_request("r", 20, max_tokens=30))
    world.step()
    steps = [chunks(world.step())["r"] for _ in range(5)]
    assert steps == [(20, 5), (20, 8), (20, 11), (20, 12), (32, 5)]
    world.finish()
    world.check_tokens()
    assert world.scheduler.counters.num_tokens_recomputed == 0  # by preemptions, it means


class CountedConstraint(FakeConstraint):
    """A grammar that forces two tokens in its middle; `alive` are those that somebody refers to, forks included."""

    alive: ClassVar[weakref.WeakSet[CountedConstraint]] = weakref.WeakSet()

    def __init__(self, length: int) -> None:
        super().__init__(length, forced={length // 2: (990, 991)})
        self.alive.add(self)

    def fork(self) -> CountedConstraint:
        other = CountedConstraint(self._length)
        other.accepted = list(self.accepted)
        return other


class LookingOracle(NgramDrafter):
    """An oracle that keeps what a real drafter keeps."""

    def __init__(self) -> None:
        super().__init__()
        self._oracle = Oracle(0.3)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        super().propose(request, most)
        return self._oracle.propose(request, most)


@pytest.mark.parametrize("count", [3000, pytest.param(10_000, marks=pytest.mark.full)])
def test_thousands_of_drafted_requests_leave_nothing_behind(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No block, slot for a state, grammar or history, after aborts in every state, preemptions and prefix hits."""
    monkeypatch.setattr(drafting, "choose_depths", always)
    rng = random.Random(5)
    world = drafting_world(0.0, num_blocks=30, num_spares=6, num_checkpoints=16, max_num_seqs=64)
    scheduler, runner = world.scheduler, world.runner
    speculation, states = scheduler.speculation, runner.recurrent
    assert speculation is not None
    assert states is not None
    drafter = speculation._drafter = LookingOracle()
    num_ended: Counter[FinishReason] = Counter()
    waiting_ids: list[str] = []

    def turn() -> None:
        output = scheduler.schedule(0.0)
        if output is not None:
            runner.submit(output)
        most_ahead = 1 if output is None else rng.choice((1, 1, 2))
        while runner.num_submitted >= most_ahead:
            outputs = scheduler.update(runner.fetch())
            num_ended.update(one.finish_reason for one in outputs if one.finish_reason is not None)

    for index in range(count):
        head = rng.choice((0, 3, 7, 33))
        prompt = [*range(head), index % 997, *range(rng.randrange(8))]
        constraint = CountedConstraint(rng.randrange(2, 12)) if index % 3 == 0 else None
        request = make_request(f"r{index}", prompt, rng.randrange(4, 14), constraint=constraint)
        scheduler.add_request(request)
        waiting_ids.append(request.request_id)
        if rng.random() < 0.3:
            gone = waiting_ids.pop(rng.randrange(len(waiting_ids)))
            num_ended[FinishReason.ABORT] += scheduler.finish_request(gone, FinishReason.ABORT)
        if rng.random() < 0.05:
            scheduler.preempt_lowest()
        del request, constraint, waiting_ids[:-20]
        while scheduler.num_running + scheduler.num_waiting > 10:
            turn()
    scheduler.check_integrity()
    while scheduler.num_running or runner.num_submitted:
        turn()

    scheduler.check_integrity()
    assert num_ended.total() == count
    assert (
        min(num_ended[reason] for reason in (FinishReason.ABORT, FinishReason.STOP, FinishReason.LENGTH)) > count // 10
    )
    assert scheduler.counters.num_preemptions > 100
    assert speculation.counters.num_drafts > count
    assert 0 < speculation.counters.num_accepted_tokens < speculation.counters.num_draft_tokens
    blocks = scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_blocks
    assert not blocks.checkpoints._requests  # type: ignore[union-attr]
    scheduler.schedule(0.0)
    assert not speculation._acceptances._by_request
    assert not drafter._own
    gc.collect()
    assert len(CountedConstraint.alive) <= 1  # a queue may remember its head, which has left, until the next one comes
    world.add(make_request("last", max_tokens=1))  # has the runner forget the others, and cannot draft
    world.finish()
    slots = states.tables._states
    assert set(states.tables._rows) <= {"last"}
    assert not slots._undecided
    assert sorted([*slots._slots.tolist(), *slots._spares]) == list(range(slots._num_slots))
    assert slots._num_slots <= 11 + 6
