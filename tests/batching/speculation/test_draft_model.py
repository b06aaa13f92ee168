"""A draft model over a K/V memory of its own that tells a wrong token, a wrong block and a wrong position."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.layer_groups import LayerGroups
from mlx_server.batching.speculation.draft_burst import NO_BURST, choose_burst
from mlx_server.batching.speculation.draft_costs import Acceptance, RowCosts, StepRoom
from mlx_server.batching.speculation.draft_model import DraftModel
from mlx_server.batching.speculation.drafting import Drafter, Speculation
from mlx_server.batching.speculation.lookup import NgramDrafter
from mlx_server.outputs import ModelRunnerOutput, SampledToken, ScheduledChunk, SchedulerOutput
from mlx_server.request import FinishReason
from tests.batching.worlds import (
    VOCAB_SIZE,
    FakeConstraint,
    FakeRunner,
    RunnerState,
    ScriptedSupply,
    World,
    expected_tokens,
    make_request,
    make_scheduler,
)


class FakeDraftRunner(FakeRunner):
    """Samples what the model will, or with errors: `wrongness` of all. Its steps take 1 ms."""

    def __init__(self, num_blocks: int, wrongness: float, seed: int, **more: Any) -> None:
        super().__init__(num_blocks, seed, **more)
        self.seconds = lambda _: 0.001
        self._wrongness = wrongness

    def _compute(self, chunk: ScheduledChunk, state: RunnerState) -> None:
        super()._compute(chunk, state)
        if chunk.token_ids is not None:
            prompt = state.token_ids[: state.num_prompt_tokens]
            answer = expected_tokens(prompt, len(state.token_ids) - len(prompt))
            assert state.token_ids == [*prompt, *answer], "a wrong draft is taken for computed"

    def sample(self, chunk: ScheduledChunk, state: RunnerState) -> SampledToken:
        token = super().sample(chunk, state)
        state.has_drafted = True
        if self._rng.random() < self._wrongness:
            token = SampledToken((token.token_id + 1) % VOCAB_SIZE)
            state.token_ids[-1] = token.token_id
        return token


class FakeDraftingRunner(FakeRunner):
    """Both models. `bursts` are the steps of each burst."""

    def __init__(self, num_blocks: int, draft: FakeDraftRunner, **more: Any) -> None:
        super().__init__(num_blocks, **more)
        self.bursts: list[tuple[SchedulerOutput, ...]] = []
        self._draft = draft
        self._order: deque[SchedulerOutput] = deque()

    @property
    def num_submitted(self) -> int:
        return len(self._order)

    def submit(self, output: SchedulerOutput) -> None:
        self._order.append(output)
        if not output.draft_steps:
            super().submit(output)
            return
        assert not output.chunks, "a burst and a step"
        assert len(self._order) == 1, "a burst beside a step"
        self.bursts.append(output.draft_steps)
        for step in output.draft_steps:
            self._draft.submit(step)

    def fetch(self) -> ModelRunnerOutput:
        output = self._order.popleft()
        if not output.draft_steps:
            return super().fetch()
        drafts: dict[str, tuple[int, ...]] = {}
        seconds = 0.0
        for _ in output.draft_steps:
            result = self._draft.fetch()
            seconds += result.step_time_s
            for request_id, token in result.sampled.items():
                drafts[request_id] = (*drafts.get(request_id, ()), token.token_id)
        return ModelRunnerOutput(output.step_id, {}, step_time_s=seconds, num_model_calls=0, drafts=drafts)


class DraftingWorld(World):
    runner: FakeDraftingRunner

    def __init__(
        self,
        wrongness: float = 0.0,
        *,
        depth: int = 1,
        most: int = 4,
        seed: int = 0,
        num_draft_blocks: int = 64,
        max_draft_blocks: int | None = None,
        draft_windows: tuple[int | None, ...] = (None,),
        vocab_size: int = VOCAB_SIZE,
        max_tokens: int = 4096,
        drafter: Drafter | None = None,
        num_spares: int | None = None,
        **extra: Any,
    ) -> None:
        """With `num_spares`, the model that is drafted for has recurrent state."""
        self.supply = ScriptedSupply((max_draft_blocks or num_draft_blocks) - num_draft_blocks)
        blocks = PagedBlockManager(
            num_draft_blocks, LayerGroups(draft_windows, 128), max_blocks=max_draft_blocks, supply=self.supply
        )
        self.model = DraftModel(blocks, vocab_size=vocab_size, max_tokens=max_tokens, doubling_tokens=4096.0)
        self.model.learn(64, 0.001, 0.001)
        self.speculation = Speculation(drafter, most, num_spares, self.model)
        costs = self.speculation.costs
        for rows, cost_s in ((1, 0.05), (256, 0.0501)):
            costs.observe(rows, cost_s)
            costs.observe(rows, cost_s)
        costs.observe = lambda *_: None  # type: ignore[method-assign]
        extra.setdefault("target_step_s", 1.0)
        super().__init__(
            make_scheduler(extra.pop("num_blocks", 64), speculation=self.speculation, **extra), depth=depth
        )
        own = self.scheduler.blocks
        num_states = 0 if num_spares is None else self.scheduler.limits.max_num_seqs + num_spares
        if num_spares is not None:
            own.enable_prefix_caching = own.checkpoints is not None
        draft = FakeDraftRunner(num_draft_blocks, wrongness, seed, windows=draft_windows)
        self.runner = FakeDraftingRunner(own.num_blocks, draft, windows=own.groups.windows, num_states=num_states)

    def finish(self, max_steps: int = 10_000) -> None:
        super().finish(max_steps)
        for _ in range(3):  # what is left to be cut
            self.step()
        assert self.supply.num_left + self.model.blocks.num_blocks == self.model.blocks.max_blocks, "memory leaks"
        assert self.model.blocks.num_free_blocks == self.model.blocks.num_blocks, "the draft model's blocks leak"


def test_all_drafts_of_a_model_that_is_always_right_are_accepted() -> None:
    world = DraftingWorld(most=4)
    world.add(make_request("r", 8, max_tokens=21))
    world.finish()
    world.check_tokens()
    counters = world.speculation.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens == 16
    assert world.scheduler.counters.num_steps == 5  # the prompt, and 4 times 4 drafts and one
    fed = [[chunk.num_tokens for step in burst for chunk in step.chunks] for burst in world.runner.bursts]
    assert fed == [[9, 1, 1, 1], [2, 1, 1, 1], [2, 1, 1, 1], [2, 1, 1, 1]]  # the last draft and what came behind it


def test_what_a_wrong_draft_has_left_is_written_over() -> None:
    world = DraftingWorld(1.0, most=4)
    world.add(make_request("r", 8, max_tokens=12))
    world.finish()
    world.check_tokens()
    starts = [burst[0].chunks[0].start for burst in world.runner.bursts]
    assert starts[:3] == [0, 9, 10]


@settings(max_examples=80, deadline=None)
@example(
    wrongness=0.2,
    depth=1,
    most=1,
    windows=(None,),
    draft_windows=(None,),
    num_blocks=9,
    num_draft_blocks=2,
    with_lookup=False,
    states={},
    sizes=[(1, 1), (32, 10), (1, 11), (63, 4)],
    seed=589,
)
@given(
    wrongness=st.sampled_from([0.0, 0.2, 0.6]),
    depth=st.integers(1, 2),
    most=st.integers(1, 31),
    windows=st.sampled_from([(None,), (None, 40), (40,)]),
    draft_windows=st.sampled_from([(None,), (None, 40), (40,)]),
    num_blocks=st.integers(9, 40),
    num_draft_blocks=st.integers(2, 20),
    with_lookup=st.booleans(),
    states=st.sampled_from([{}, {}, {"num_spares": 1}, {"num_spares": 4, "num_checkpoints": 16}]),
    sizes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 60)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_tokens_are_those_without_drafts(
    wrongness: float,
    depth: int,
    most: int,
    windows: tuple[int | None, ...],
    draft_windows: tuple[int | None, ...],
    num_blocks: int,
    num_draft_blocks: int,
    with_lookup: bool,
    states: dict[str, int],
    sizes: list[tuple[int, int]],
    seed: int,
) -> None:
    """In any mix of prompts and decodes, with preemptions, windows, recurrent states, prefix hits, ends from
    outside, one step ahead, and a draft model's pool that is too small, grows, shrinks, or is held under pressure."""
    world = DraftingWorld(
        wrongness,
        depth=depth,
        most=most,
        seed=seed,
        num_blocks=num_blocks * len(windows),
        windows=windows,
        draft_windows=draft_windows,
        num_draft_blocks=num_draft_blocks,
        max_draft_blocks=2 * num_draft_blocks,
        drafter=NgramDrafter() if with_lookup else None,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        **states,
    )
    rng = random.Random(seed)
    for index, (num_prompt, max_tokens) in enumerate(sizes):
        first = 7 if index % 2 else index  # every second one begins alike
        speculate = rng.random() < 0.8
        prompt = [(first + i) % 97 for i in range(num_prompt)]
        world.add(make_request(f"r{index}", prompt, max_tokens, speculate=speculate))
        for _ in range(rng.randrange(1, 6)):
            world.step()
        if depth == 1:
            world.schedule()
        if rng.random() < 0.15:
            world.scheduler.finish_request(rng.choice(sorted(world.requests)), FinishReason.ABORT)
        if rng.random() < 0.15:
            world.scheduler.preempt_lowest()
        if rng.random() < 0.2:
            world.model.shrink(rng.randrange(4))
        world.model.hold_admission(rng.random() < 0.1)
        if depth == 1 and world.runner.num_submitted:
            world.deliver()
    world.model.hold_admission(False)
    world.finish()
    world.check_tokens()


def test_of_requests_with_recurrent_state_only_those_with_a_slot_are_drafted_for() -> None:
    """Whose last drafts are undecided keeps its slot; a wrong draft has what is known computed again, and the draft
    model goes on behind what it knows."""
    world = DraftingWorld(0.5, most=4, num_spares=1)
    world.add(*[make_request(name, 8, max_tokens=40, arrival_s=at) for at, name in enumerate("ab")])
    world.finish()
    world.check_tokens()
    sampled = [[c.request_id for c in burst[0].chunks if c.is_sampling] for burst in world.runner.bursts]
    assert {"a", "b"} == {name for names in sampled for name in names}
    assert max(map(len, sampled)) == 1
    assert 0 < world.speculation.counters.num_accepted_tokens < world.speculation.counters.num_draft_tokens


def test_who_waits_again_or_ends_holds_no_blocks_of_it() -> None:
    world = DraftingWorld()
    world.add(make_request("a", 40, max_tokens=40), make_request("b", 40, max_tokens=40, arrival_s=1.0))
    for _ in range(4):
        world.step()
    blocks = world.model.blocks
    assert blocks.block_ids("a")
    assert blocks.block_ids("b")
    world.scheduler.preempt_lowest()
    assert blocks.block_ids("a")
    assert not blocks.block_ids("b")
    world.scheduler.finish_request("a", FinishReason.ABORT)
    assert blocks.num_free_blocks == blocks.num_blocks
    world.finish()
    world.check_tokens()


def test_what_ends_while_a_burst_runs_gets_no_drafts_of_it() -> None:
    world = DraftingWorld()
    world.add(make_request("r", 40, max_tokens=40))
    world.step()
    burst = world.schedule()
    assert burst is not None
    assert burst.draft_steps
    assert world.scheduler.finish_request("r")
    world.deliver()
    world.add(make_request("r", 30, max_tokens=20))  # another one of the same name
    world.finish()
    world.check_tokens()


def test_a_token_is_computed_again_where_nothing_new_is_known() -> None:
    """Its logits are gone."""
    world = DraftingWorld()
    request = make_request("r", 8, max_tokens=40)
    world.add(request)
    world.step()
    for start in (0, 8):
        (first, *_) = world.speculation.compose_burst({request: 4}, StepRoom(1, world.speculation.costs))
        assert first.chunks[0].start == start


def test_a_pool_without_room_means_fewer_drafts() -> None:
    world = DraftingWorld(num_draft_blocks=2)
    world.add(make_request("r", 8, max_tokens=80))
    world.finish()
    world.check_tokens()
    assert world.tokens["r"] == expected_tokens(world.requests["r"].prompt_token_ids, 80)
    counters = world.speculation.counters
    assert 0 < counters.num_draft_tokens == counters.num_accepted_tokens < 64


def test_blocks_of_one_that_is_not_drafted_for_serve_another() -> None:
    world = DraftingWorld(num_draft_blocks=3)
    world.add(make_request("a", 40, max_tokens=90))
    world.step()
    world.step()
    world.step()
    assert len(world.model.blocks.block_ids("a")) == 2
    world.model.acceptances._by_request["a"] = Acceptance(0.0, 1e9)  # it was wrong throughout
    world.add(make_request("b", 40, max_tokens=20))
    world.finish()
    world.check_tokens()
    drafted = {chunk.request_id for burst in world.runner.bursts for chunk in burst[0].chunks}
    assert drafted == {"a", "b"}


def test_prompts_that_begin_alike_are_computed_once() -> None:
    world = DraftingWorld()
    world.add(make_request("a", list(range(100)), max_tokens=8))
    world.finish()
    world.add(make_request("b", list(range(100)), max_tokens=8))
    world.finish()
    assert [burst[0].chunks[0].start for burst in world.runner.bursts if burst[0].new_requests] == [0, 96]


def test_tenants_share_nothing() -> None:
    world = DraftingWorld()
    for name in ("a", "b"):
        world.add(make_request(name, list(range(100)), max_tokens=8, extra_keys=(name,)))
        world.finish()
    starts = [burst[0].chunks[0].start for burst in world.runner.bursts if burst[0].new_requests]
    assert starts == [0, 0]


def test_lookups_go_first_and_the_model_drafts_for_the_rest() -> None:
    """One repeats itself, and the other does not."""

    class Repeats(NgramDrafter):
        def propose(self, request: Any, most: int) -> tuple[int, ...]:
            return (1,) * most if request.request_id == "a" else ()

    world = DraftingWorld(drafter=Repeats())
    world.add(make_request("a", 40, max_tokens=4), make_request("b", 40, max_tokens=4))
    world.step()
    world.step()
    (burst,) = world.runner.bursts
    assert [chunk.request_id for chunk in burst[0].chunks] == ["b"]
    world.finish()
    world.check_tokens()


def test_one_that_does_not_draft_gets_its_tokens_beside_one_that_does() -> None:
    world = DraftingWorld()
    world.add(make_request("a", 8, max_tokens=20), make_request("b", 8, max_tokens=20, speculate=False))
    world.finish()
    world.check_tokens()
    assert {chunk.request_id for burst in world.runner.bursts for chunk in burst[0].chunks} == {"a"}


def test_ids_that_the_draft_model_does_not_know_are_never_fed() -> None:
    world = DraftingWorld(vocab_size=50)
    world.add(
        make_request("known", list(range(40)), max_tokens=4), make_request("unknown", list(range(20, 60)), max_tokens=4)
    )
    world.finish()
    world.check_tokens()
    fed = [t for burst in world.runner.bursts for chunk in burst[0].chunks for t in chunk.token_ids or ()]
    assert max(fed, default=0) < 50


def test_no_draft_goes_beyond_the_context_of_the_draft_model() -> None:
    world = DraftingWorld(max_tokens=64)
    world.add(make_request("r", 8, max_tokens=100))
    world.finish()
    ends = [chunk.start + chunk.num_tokens for burst in world.runner.bursts for step in burst for chunk in step.chunks]
    assert 30 < max(ends) <= 64


def test_a_grammar_cuts_drafts() -> None:
    """Grammars say what may come first; what they forbid later is found when the drafts are there."""
    world = DraftingWorld()
    prompt = make_request("r", 8).prompt_token_ids
    answer = expected_tokens(prompt, 6)
    constraint = FakeConstraint(6, refused=frozenset({answer[3] + 1}))
    world.add(make_request("r", prompt, 30, constraint=constraint))
    world.finish()
    assert world.tokens["r"] == answer
    assert world.runner.bursts[0][0].chunks[0].allowed_bitmask == bytes([1])


def test_a_long_prompt_is_brought_up_in_pieces_once_that_is_paid_for() -> None:
    """What drafts would have saved so far is held against what its prompt takes; and no burst takes longer than the
    target."""
    world = DraftingWorld(target_step_s=0.1, num_blocks=128, num_draft_blocks=128)
    world.model._budget._speed = 0.0005  # seconds a token: 800 tokens take 0.4 s, and so ten steps or so save
    world.add(make_request("r", 800, max_tokens=100))
    while not world.runner.bursts:
        world.step()
    assert 5 <= len(world.tokens["r"]) <= 20
    world.finish()
    world.check_tokens()
    pieces = [burst[0].num_tokens for burst in world.runner.bursts if not burst[0].chunks[0].is_sampling]
    assert len(pieces) > 2
    assert max(pieces) <= 128


def test_under_pressure_it_holds_nothing_and_gives_its_blocks_back() -> None:
    world = DraftingWorld()
    world.add(make_request("r", 40, max_tokens=60))
    for _ in range(4):
        world.step()
    world.model.hold_admission(True)
    world.schedule()
    blocks = world.model.blocks
    assert blocks.num_free_blocks == blocks.num_blocks == 64
    num_bursts = len(world.runner.bursts)
    world.scheduler._wake.clear()
    assert world.model.shrink(60) == 60
    assert world.scheduler._wake.is_set(), "an idle loop changes no pool"
    assert world.scheduler._draft_room.waits(), "a busy loop changes no pool"
    world.finish()
    world.check_tokens()
    (change,) = world.runner.bursts[num_bursts:]
    assert change[0].pool_change is not None
    assert not change[0].chunks
    assert world.supply.num_left == 60


def test_of_two_that_need_the_last_block_one_gets_it() -> None:
    """Each holds half of the pool, and neither could go on while the other waits."""
    world = DraftingWorld(num_draft_blocks=4)
    world.add(*[make_request(name, 50, max_tokens=60, arrival_s=at) for at, name in enumerate("ab")])
    world.finish()
    world.check_tokens()
    drafted = [chunk for burst in world.runner.bursts for chunk in burst[0].chunks if chunk.start >= 64]
    assert [chunk.request_id for chunk in drafted[:9]] == ["a"] * 9


@pytest.mark.parametrize("settings", [{"num_draft_blocks": 2}, {"num_draft_blocks": 64}], ids=["room", "time"])
def test_no_step_waits_for_drafts_that_cannot_come(settings: dict[str, int]) -> None:
    """The pool is too small for the prompt, or it takes longer to read than drafts have saved."""
    world = DraftingWorld(depth=2, num_blocks=128, **settings)
    world.model._budget._speed = 0.01  # seconds a token
    request = make_request("r", 200, max_tokens=30)
    world.add(request)
    for _ in range(5):
        world.schedule()
        assert not world.scheduler._draft_room.waits()
        world.deliver()
    assert world.model.choose({request: 4}, 4, StepRoom(1, world.speculation.costs)).depth > 0
    world.finish()
    world.check_tokens()


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("fault", ["slow", "wrong"])
def test_a_draft_model_that_was_given_up_is_tried_again(is_ahead: bool, fault: str) -> None:
    """Its steps took long while the machine had other work, or what it drafted was wrong for a while."""
    world = DraftingWorld(depth=2, num_blocks=128)

    def step() -> None:
        """As the loop does it, which composes a step while one runs."""
        num_submitted = world.runner.num_submitted
        if num_submitted > is_ahead or world.schedule() is None:
            world.deliver()

    world.add(make_request("r", 8, max_tokens=2500))
    while len(world.runner.bursts) < 5:
        step()
    for _ in range(80):
        if fault == "slow":
            world.model.costs.observe(1, 0.5)
        else:
            world.model.acceptances.add("r", 4, 0)
    before = world.scheduler.counters.num_steps
    while len(world.runner.bursts) == 5:
        step()
    assert 20 < world.scheduler.counters.num_steps - before < 800
    while len(world.runner.bursts) < 100:  # and is believed then
        step()
    assert world.scheduler.counters.num_steps - before < 1500


def test_a_burst_that_changes_the_pool_says_nothing_of_what_drafts_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    world = DraftingWorld(num_draft_blocks=1, max_draft_blocks=64)
    world.add(make_request("r", 8, max_tokens=200))
    seen: list[int] = []
    monkeypatch.setattr(world.model.costs, "observe", lambda *_: seen.append(1))
    monkeypatch.setattr(world.model._budget, "observe", lambda *_: seen.append(1))
    for _ in range(40):
        world.step()
    is_plain = [burst[0].pool_change is None for burst in world.runner.bursts]
    assert is_plain.count(False) >= 2
    assert len(seen) == is_plain.count(True)


@pytest.mark.parametrize("num_requests", [1, 2])
def test_its_pool_gives_way_to_the_model_s(num_requests: int) -> None:
    """Nobody is preempted, nor ended for want of memory, while the draft model keeps what it does not need."""
    supply = ScriptedSupply(0)
    world = DraftingWorld(num_draft_blocks=24, num_blocks=8, max_blocks=32, supply=supply)
    world.supply.give_back = supply.give_back  # type: ignore[method-assign]
    world.add(make_request("before", 40, max_tokens=100))
    World.finish(world)
    names = "ab"[:num_requests]
    world.add(*[make_request(name, 40, max_tokens=260, arrival_s=at) for at, name in enumerate(names)])
    World.finish(world)
    world.check_tokens()
    assert [world.reasons[name] for name in names] == [FinishReason.LENGTH] * num_requests
    assert world.scheduler.counters.num_preemptions == 0
    own, drafts = world.scheduler.blocks, world.model.blocks
    assert own.num_blocks > 8
    assert own.num_blocks + drafts.num_blocks + supply.num_left == 32
    assert drafts.num_free_blocks == drafts.num_blocks


def test_behind_an_error_of_the_draft_model_its_blocks_are_given_back() -> None:
    world = DraftingWorld(num_draft_blocks=8, max_draft_blocks=16)
    world.add(make_request("r", 40, max_tokens=100))
    fetch = world.runner.fetch

    def failing() -> ModelRunnerOutput:
        output = fetch()
        return replace(output, drafts={}, draft_error="it is broken") if len(world.runner.bursts) == 4 else output

    world.runner.fetch = failing  # type: ignore[method-assign]
    world.finish()
    world.check_tokens()
    assert len(world.runner.bursts) == 4
    assert world.speculation.counters.num_draft_errors == 1
    assert world.model.blocks.num_blocks == 1


def curve(**seconds: float) -> RowCosts:
    costs = RowCosts()
    for rows, cost_s in seconds.items():
        costs.observe(int(rows[1:]), cost_s)
        costs.observe(int(rows[1:]), cost_s)
    return costs


def test_the_burst_with_most_tokens_a_second_is_chosen() -> None:
    """The example of the docstring."""
    target = curve(_1=0.040, _2=0.041, _3=0.042, _4=0.043, _8=0.047)
    best = choose_burst({"r": 0.8}, 4, StepRoom(1, target), curve(_1=0.004))
    assert (best.depth, best.request_ids) == (4, {"r"})
    assert best.saved_s == pytest.approx(0.040 - 0.060 / 3.3616)
    assert choose_burst({"r": 0.8}, 4, StepRoom(1, target), curve(_1=0.030)) is NO_BURST


def test_what_a_wrong_draft_of_a_burst_has_computed_again_counts() -> None:
    """The example of `choose_depths`, behind a burst that takes next to nothing."""
    target, draft = curve(_1=0.010, _2=0.011, _3=0.012, _4=0.013, _8=0.020), curve(_1=1e-9)
    assert choose_burst({"r": 0.8}, 7, StepRoom(1, target), draft).depth == 4
    assert choose_burst({"r": 0.8}, 7, StepRoom(1, target, num_known={"r": 1}), draft).depth == 3


def test_those_whose_drafts_are_wrong_are_left_out() -> None:
    target = curve(_2=0.040, _32=0.070)
    rates = {"good": 0.9, "bad": 0.02}
    assert choose_burst(rates, 4, StepRoom(2, target), curve(_1=0.004)).request_ids == {"good"}
    assert choose_burst({"bad": 0.02}, 4, StepRoom(2, target), curve(_1=0.004)) is NO_BURST


def test_no_step_gets_longer_than_its_target_by_a_burst() -> None:
    target = curve(_1=0.040, _8=0.047)
    best = choose_burst({"r": 0.9}, 8, StepRoom(1, target, limit_s=0.06), curve(_1=0.004))
    assert best.depth == 4  # 16 ms of the draft model and 44 of the model


def test_nothing_is_drafted_before_anything_was_measured() -> None:
    assert choose_burst({"r": 1.0}, 8, StepRoom(1, RowCosts()), curve(_1=0.004)) is NO_BURST
    assert choose_burst({"r": 1.0}, 8, StepRoom(1, curve(_1=0.04)), RowCosts()) is NO_BURST
