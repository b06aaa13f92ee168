"""How long a prompt waits among those of its tier, whatever arrives; and what a step's choice costs the host."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.prefix_cache import PrefixCache
from mlx_server.batching.limits import QueueLimits
from mlx_server.batching.priority_queue import PriorityQueueWithAging
from mlx_server.outputs import ModelRunnerOutput, SampledToken
from tests.batching.worlds import make_request, make_scheduler, prompt

BUDGET = 256
SHORT, LONG = 200, 24_000
SLACK = 3
"""Steps beside the bound: the one that it arrives in, that of its last token, and one for what does not divide."""


class Load:
    """Prompts of one tier, each of which wants one token, and shares nothing. A step has `BUDGET` tokens."""

    def __init__(self, num_blocks: int = 20_000) -> None:
        queue = QueueLimits(max_queued_tokens=10**9)
        self.scheduler = make_scheduler(
            num_blocks, max_num_batched_tokens=BUDGET, max_num_seqs=64, bound_stalls=False, queue=queue
        )
        self.scheduler.blocks.enable_prefix_caching = False
        self.sizes: dict[str, int] = {}
        self.left: dict[str, int] = {}
        self.num_steps: Counter[str] = Counter()
        self.older: dict[str, int] = {}
        self.older_up_to_its_size: dict[str, int] = {}
        self.younger_and_shorter: Counter[str] = Counter()

    def add(self, num_tokens: int) -> str:
        name = f"r{len(self.sizes)}"
        for other in self.left:
            self.younger_and_shorter[other] += num_tokens * (num_tokens <= self.sizes[other])
        self.older[name] = sum(self.left.values())
        self.older_up_to_its_size[name] = sum(min(left, num_tokens) for left in self.left.values())
        self.left[name] = self.sizes[name] = num_tokens
        self.scheduler.add_request(make_request(name, [0] * num_tokens, 1, arrival_s=float(len(self.sizes))))
        return name

    def step(self) -> None:
        output = self.scheduler.schedule(1e6)
        assert output is not None, "nothing can run"
        assert output.num_tokens == min(BUDGET, sum(self.left.values())), "some of the step is wasted"
        self.num_steps.update(list(self.left))
        for chunk in output.chunks:
            self.left[chunk.request_id] -= chunk.num_tokens
        sampled = {chunk.request_id: SampledToken(7) for chunk in output.chunks if chunk.is_sampling}
        for result in self.scheduler.update(ModelRunnerOutput(output.step_id, sampled)):
            assert self.left.pop(result.request_id) == 0

    def finish(self) -> None:
        while self.left:
            self.step()
        self.scheduler.check_integrity()

    def check_bounds(self) -> None:
        """The first token comes after at most twice the prompt's own work and that of those older than it; and at most
        twice its own and that of those shorter, of which older ones count with what they have left up to its size."""
        for name, size in self.sizes.items():
            by_age = size + self.older[name]
            by_work = size + self.older_up_to_its_size[name] + self.younger_and_shorter[name]
            most = 2 * min(by_age, by_work) / BUDGET + SLACK
            assert self.num_steps[name] <= most, f"{name} of {size} tokens: {self.num_steps[name]} steps of {most}"


def test_short_prompts_behind_eight_long_ones_and_long_ones_beside_short_ones() -> None:
    """Each short one has its token after four steps at most, and the long ones take twice their time at most."""
    load = Load()
    for _ in range(8):
        load.add(LONG)
    shorts = []
    for index in range(750):
        if index % 2 == 0:
            shorts.append(load.add(SHORT))
        load.step()
    load.finish()
    load.check_bounds()
    assert max(load.num_steps[name] for name in shorts) <= 4
    assert load.num_steps["r0"] <= 2 * LONG / BUDGET + SLACK


def test_a_burst_of_short_prompts_does_not_keep_a_long_one_from_half_of_each_step() -> None:
    load = Load()
    long = load.add(LONG)
    for _ in range(1000):
        load.add(SHORT)
    load.finish()
    load.check_bounds()
    assert load.num_steps[long] <= 2 * LONG / BUDGET + SLACK


SIZES = st.sampled_from([1, 31, SHORT, SHORT, 300, 900, 3000, LONG])


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(arrivals=st.lists(st.tuples(st.integers(0, 12), SIZES), min_size=1, max_size=40))
def test_a_prompt_waits_for_twice_the_work_of_those_older_or_of_those_shorter(arrivals: list[tuple[int, int]]) -> None:
    """Pairs of steps until the next arrival, and sizes."""
    load = Load()
    for num_steps, num_tokens in arrivals:
        for _ in range(num_steps):
            if load.left:
                load.step()
        load.add(num_tokens)
    load.finish()
    load.check_bounds()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(size=st.sampled_from([SHORT, 900, 3000, LONG]), factor=st.sampled_from([0.3, 0.5, 0.9, 1.0]))
def test_who_always_sends_what_is_just_shorter_does_not_starve_anyone(size: int, factor: float) -> None:
    """The worst arrivals for one prompt: each step another comes that has a little less left than it."""
    load = Load()
    victim = load.add(size)
    while victim in load.left and load.num_steps[victim] < 1000:
        load.add(max(1, int(factor * load.left[victim]) - 1))
        load.step()
    assert victim not in load.left
    assert load.num_steps[victim] <= 2 * size / BUDGET + SLACK


@settings(max_examples=30, deadline=None, derandomize=True)
@given(large=st.sampled_from([2000, 4000]), small=st.sampled_from([SHORT, 500]), num_blocks=st.sampled_from([130, 180]))
def test_one_that_waits_for_blocks_starts_after_as_much_work_as_its_own(
    large: int, small: int, num_blocks: int
) -> None:
    """Small ones come without end, and would always fit."""
    load = Load(num_blocks)
    load.add(num_blocks * 32 // 2)
    load.step()
    waits = load.add(large)
    num_small = 0
    while waits in load.left:
        while sum(name != waits for name in load.left) < 4:
            load.add(small)
            num_small += 1
        load.scheduler.check_integrity()
        output = load.scheduler.schedule(1e6)
        assert output is not None
        for chunk in output.chunks:
            load.left[chunk.request_id] -= chunk.num_tokens
        sampled = {chunk.request_id: SampledToken(7) for chunk in output.chunks if chunk.is_sampling}
        for result in load.scheduler.update(ModelRunnerOutput(output.step_id, sampled)):
            load.left.pop(result.request_id)
        assert num_small * small <= 4 * (large + num_blocks * 32), "it starves"


# --- what a choice costs ----------------------------------------------------------------------------------


def lookups(monkeypatch: pytest.MonkeyPatch, num_waiting: int) -> Counter[str]:
    """How often cached prefixes are looked up in ten steps, while so many wait that have 16,384 cached tokens each."""
    num_calls: Counter[str] = Counter()
    scheduler = make_scheduler(700, max_num_seqs=4, queue=QueueLimits(max_queued_tokens=10**9))
    shared = prompt(16_384)

    def step() -> None:
        output = scheduler.schedule(100.0)
        assert output is not None
        sampled = {chunk.request_id: SampledToken(7) for chunk in output.chunks if chunk.is_sampling}
        scheduler.update(ModelRunnerOutput(output.step_id, sampled, step_time_s=0.1))

    scheduler.add_request(make_request("warm", [*shared, 1], 1))
    while scheduler.num_running + scheduler.num_waiting:
        step()
    for index in range(num_waiting):
        scheduler.add_request(make_request(f"r{index}", [*shared, index, 2, 3], 3, arrival_s=float(index)))
    for name in ("find_prefix", "num_cached"):
        monkeypatch.setattr(PagedBlockManager, name, counted(num_calls, name))
    for _ in range(10):
        step()
    monkeypatch.undo()
    return num_calls


def counted(num_calls: Counter[str], name: str, owner: type = PagedBlockManager):  # type: ignore[no-untyped-def]
    function = getattr(owner, name)

    def call(self: object, *arguments: object) -> object:
        num_calls[name] += 1
        return function(self, *arguments)

    return call


def test_lookups_of_cached_prefixes_do_not_grow_with_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = lookups(monkeypatch, 50), lookups(monkeypatch, 1000)
    assert few == many
    assert many["find_prefix"] <= 10 * 8
    assert many["num_cached"] <= 10 * 50


def test_a_step_walks_no_prefix_that_it_has_walked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine prompts share the steps, and there is room for more: each step asks what the next ones would take, of whose
    prompts 512 blocks are cached. They are walked once, and the first of each tier is looked for once, but for four
    looks by those who choose between the oldest and the shortest; nine if all looked for themselves."""
    num_walks: Counter[str] = Counter()
    queue = QueueLimits(max_queued_tokens=10**9)
    scheduler = make_scheduler(4000, target_step_s=0.1, context_doubling_tokens=1e12, queue=queue)
    shared = prompt(16_384)

    def step() -> None:
        output = scheduler.schedule(100.0)
        assert output is not None
        sampled = {chunk.request_id: SampledToken(7) for chunk in output.chunks if chunk.is_sampling}
        scheduler.update(ModelRunnerOutput(output.step_id, sampled, step_time_s=0.001 * output.num_tokens))

    scheduler.add_request(make_request("warm", [*shared, 1], 1))
    while scheduler.num_running + scheduler.num_waiting:
        step()
    scheduler.add_request(make_request("stream", 8, 1000))
    for index in range(9):
        step()
        scheduler.add_request(make_request(f"runs{index}", 9000 - 300 * index, 3))
    step()
    for index in range(200):
        scheduler.add_request(make_request(f"r{index}", [*shared, *prompt(9500, index)], 3, arrival_s=1.0 + index))
    monkeypatch.setattr(PriorityQueueWithAging, "first", counted(num_walks, "first", PriorityQueueWithAging))
    monkeypatch.setattr(PrefixCache, "longest_prefix", counted(num_walks, "longest_prefix", PrefixCache))
    for _ in range(10):
        step()
        assert scheduler.num_running == 10
    monkeypatch.undo()
    scheduler.check_integrity()
    assert num_walks["longest_prefix"] == 1
    assert num_walks["first"] <= 10 * 5, "who is first is asked again though nobody has come, gone or started"
