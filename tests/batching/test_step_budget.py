"""How large a prompt's chunk may be beside those who decode, from the speed of the steps before."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mlx_server.batching.step_budget import PromptBudget, RecentPrompts, StepShape
from mlx_server.config import BLOCK_SIZE

FLAT = 1e12  # context that never makes a token dearer


def shape(budget: PromptBudget, num_decodes: int, num_prompt_tokens: int, start: int = 0) -> StepShape:
    return StepShape(num_decodes, num_prompt_tokens, budget.cost(start, num_prompt_tokens))


def test_it_begins_small() -> None:
    assert PromptBudget(FLAT).num_tokens(0, 0, 0.2) == 4 * BLOCK_SIZE


def test_cost_is_the_sum_over_positions() -> None:
    budget = PromptBudget(context_doubling_tokens=1000.0)
    assert budget.cost(0, 1) == pytest.approx(1.0, rel=1e-3)
    assert budget.cost(1000, 1) == pytest.approx(2.0, rel=1e-3)
    by_token = sum(1.0 + (position + 0.5) / 1000.0 for position in range(300, 800))
    assert budget.cost(300, 500) == pytest.approx(by_token)
    assert budget.cost(0, 300) + budget.cost(300, 500) == pytest.approx(budget.cost(0, 800))


def test_it_fills_what_decodes_leave_of_the_target() -> None:
    budget = PromptBudget(FLAT)
    budget.observe(shape(budget, 0, 100), 0.1)  # 1 ms a token
    assert budget.num_tokens(0, 0, 0.2) == 192  # 200 lies between two multiples of 16
    budget.observe(shape(budget, 8, 0), 0.05)
    assert budget.num_tokens(0, 8, 0.2) == 152
    budget.observe(shape(budget, 8, 100), 0.15)  # as expected: nothing changes
    assert budget.num_tokens(0, 8, 0.2) == 152


@pytest.mark.parametrize(
    ("num_rows", "tokens_per_s", "target_s"),
    [(128, 1500, 0.1), (128, 500, 0.256), (128, 100, 0.4), (32, 500, 0.1), (32, 200, 0.16)],
)
def test_a_target_of_its_own_is_the_time_of_cheap_rows_in_bounds(
    num_rows: int, tokens_per_s: float, target_s: float
) -> None:
    budget = PromptBudget(FLAT)
    budget.observe(shape(budget, 0, 100), 100 / tokens_per_s)
    assert budget.target_s(num_rows) == pytest.approx(target_s)


@pytest.mark.parametrize("num_decodes", [0, 1, 7, 16, 33, 64])
def test_the_rows_of_a_step_are_a_multiple_of_16(num_decodes: int) -> None:
    budget = PromptBudget(FLAT)
    for prompt_s in (0.0001, 0.0007, 0.001, 0.0031):
        learn(budget, num_decodes, 0.05, prompt_s, 20)
        num_tokens = budget.num_tokens(0, num_decodes, 0.2)
        assert (num_decodes + num_tokens) % 16 == 0
        assert 0.05 * bool(num_decodes) + prompt_s * num_tokens == pytest.approx(0.2, rel=0.1, abs=9 * prompt_s)


@pytest.mark.parametrize("start", [0, 500, 4096, 30_000])
def test_a_chunk_of_that_size_costs_what_there_is(start: int) -> None:
    budget = PromptBudget(context_doubling_tokens=4096.0)
    budget.observe(shape(budget, 0, 64), 64 * 0.0001 * (1 + 32 / 4096))  # 0.1 ms at position 0: a cost of 2,000
    num_tokens = budget.num_tokens(start, 0, 0.2)
    assert budget.cost(start, num_tokens) == pytest.approx(2000, rel=0.01)


def test_a_prompt_always_advances_by_a_block() -> None:
    budget = PromptBudget(FLAT)
    budget.observe(shape(budget, 0, 100), 10.0)
    assert budget.num_tokens(0, 0, 0.2) == BLOCK_SIZE
    budget.observe(shape(budget, 4, 0), 1.0)  # decodes alone miss the target
    assert budget.num_tokens(0, 0, 0.2) == BLOCK_SIZE


def learn(budget: PromptBudget, num_decodes: int, decode_s: float, prompt_s: float, num_steps: int) -> list[int]:
    """Sizes of the chunks that the budget gives, one after the other, on a machine of this speed."""
    sizes = []
    for _ in range(num_steps):
        num_tokens = budget.num_tokens(0, num_decodes, 0.2)
        sizes.append(num_tokens)
        step_s = (decode_s if num_decodes else 0.0) + prompt_s * num_tokens
        budget.observe(shape(budget, num_decodes, num_tokens), step_s)
    return sizes


def test_it_follows_a_machine_that_slows_down() -> None:
    budget = PromptBudget(FLAT)
    assert learn(budget, 0, 0.0, 0.001, 4) == [128, 192, 192, 192]
    sizes = learn(budget, 0, 0.0, 0.002, 8)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] in (96, 112)


@pytest.mark.parametrize("stale_s", [0.005, 0.05, 0.3, 2.0])
def test_a_stale_decode_time_is_corrected_by_mixed_steps(stale_s: float) -> None:
    """Under load every step carries a prompt: what was learnt of decodes before must not pin the budget."""
    budget = PromptBudget(FLAT)
    budget.observe(shape(budget, 0, 500), 0.5)
    budget.observe(shape(budget, 8, 0), stale_s)
    sizes = learn(budget, 8, 0.05, 0.001, 30)
    assert max(sizes) * 0.001 <= 0.22, "the target bounds what prompts add"
    assert all(0.05 + 0.001 * size == pytest.approx(0.2, rel=0.1) for size in sizes[-10:])


def test_a_hiccup_is_soon_forgotten() -> None:
    budget = PromptBudget(FLAT)
    budget.observe(shape(budget, 8, 0), 0.05)
    before = learn(budget, 8, 0.05, 0.001, 20)[-1]
    budget.observe(shape(budget, 8, before), 5.0)
    sizes = learn(budget, 8, 0.05, 0.001, 10)
    assert min(sizes) >= BLOCK_SIZE
    assert sizes[-1] == pytest.approx(150, rel=0.15)


def test_tiny_prompts_do_not_outweigh_a_real_chunk() -> None:
    """A prompt of two tokens takes as long as a step does at least, which says little about speed."""
    budget = PromptBudget(FLAT)
    budget.observe(shape(budget, 0, 2), 0.02)
    assert budget.num_tokens(0, 0, 0.2) == 128  # too little to know anything
    budget.observe(shape(budget, 0, 2048), 2.048)
    for _ in range(5):
        budget.observe(shape(budget, 0, 2), 0.02)
    assert budget.num_tokens(0, 0, 0.2) > 180


def test_the_first_prompt_beside_decodes_does_not_come_for_free() -> None:
    """A decode time of a full batch says nothing about the one request that decodes now."""
    budget = PromptBudget(FLAT)
    budget.observe(shape(budget, 64, 0), 0.15)
    budget.observe(shape(budget, 1, 100), 0.1)
    assert budget.num_tokens(0, 1, 0.2) == 95  # 100 ms beside 100: the decode time is no longer than the step was


@pytest.mark.parametrize(("decode_s", "num_tokens"), [(0.03, 168), (0.12, 120), (0.18, 184), (0.25, 200), (1.0, 200)])
def test_prompts_get_as_long_as_decoding_takes_up_to_the_target(decode_s: float, num_tokens: int) -> None:
    """Streams that take the whole target by themselves leave prompts as much again, at 1 ms a token."""
    budget = PromptBudget(FLAT)
    budget.observe(shape(budget, 0, 500), 0.5)
    for _ in range(8):
        budget.observe(shape(budget, 8, 0), decode_s)
    assert budget.num_tokens(0, 8, 0.2) == num_tokens


def test_a_step_without_time_teaches_nothing() -> None:
    budget = PromptBudget(FLAT)
    budget.observe(shape(budget, 0, 100), 0.0)
    budget.observe(shape(budget, 4, 0), 0.0)
    assert budget.num_tokens(0, 0, 0.2) == 4 * BLOCK_SIZE


def test_what_a_better_tier_s_next_prompt_waits_for_is_bounded_by_its_size() -> None:
    """Decodes of 30 ms, 1 ms a token and 200 ms of target: 0.45 of 300 ms less 30; twice 30."""
    budget = PromptBudget(1e12)
    budget.observe(StepShape(0, 1000, 1000.0), 1.0)
    budget.observe(StepShape(16, 0, 0.0), 0.03)
    found = [budget.num_tokens(0, 16, 0.2, next_cost) for next_cost in (math.inf, 1000.0, 300.0, 20.0)]
    assert found == [176, 176, 112, 64]


def test_short_prompts_of_a_better_tier_leave_the_others_steps_worth_their_weights() -> None:
    """A device that takes 10 ms for the weights and 50 us for a token, nobody decoding, and chats of HIGH with 20
    tokens that are not cached: NORMAL's prompts keep more than half of it."""
    budget = PromptBudget(1e12)
    budget.observe(StepShape(0, 512, 512.0), 0.0356)
    budget.observe(StepShape(1, 0, 0.0), 0.01)
    num_tokens, seconds = 0, 0.0
    for _ in range(200):
        count = budget.num_tokens(0, 0, 0.4, 20.0)
        step_s = 0.01 + 50e-6 * count
        budget.observe(StepShape(0, count, float(count)), step_s)
        num_tokens, seconds = num_tokens + count, seconds + step_s
    assert num_tokens / seconds > 0.5 / 50e-6


def test_prompts_of_a_tier_are_expected_for_half_a_minute() -> None:
    recent = RecentPrompts()
    recent.add(0, 100.0, 10.0)
    recent.add(0, 500.0, 11.0)
    recent.add(1, 50.0, 20.0)
    assert [recent.least_of_better(priority, 20.0) for priority in range(3)] == [math.inf, 200.0, 50.0]
    assert [recent.least_of_better(2, now) for now in (41.0, 45.0, 51.0)] == [50.0, 50.0, math.inf]
    recent.add(0, 700.0, 60.0)
    assert recent.least_of_better(2, 60.0) == 700.0, "what was forgotten does not count"


@given(
    decode_s=st.floats(0.001, 0.3),
    next_cost=st.floats(1.0, 2000.0),
    target_s=st.sampled_from([0.05, 0.1, 0.4, 1.0]),
    start=st.sampled_from([0, 5000]),
)
def test_a_step_keeps_the_next_prompt_of_a_better_tier_waiting_for_a_share_of_its_time(
    decode_s: float, next_cost: float, target_s: float, start: int
) -> None:
    """At 1 ms a token: 0.45 of its own time, or 0.025 s, or decodes and twice as long for prompts, or decodes and a
    block; rows come to a multiple of 16. And never more than without it."""
    budget = PromptBudget(4096.0)
    budget.observe(StepShape(0, 1000, 1000.0), 1.0)
    budget.observe(StepShape(8, 0, 0.0), decode_s)
    num_tokens = budget.num_tokens(start, 8, target_s, next_cost)
    step_s = decode_s + 0.001 * budget.cost(start, num_tokens)
    slack_s = 0.001 * budget.cost(start + num_tokens, 9)
    block_s = decode_s + 0.001 * budget.cost(start, BLOCK_SIZE)
    assert step_s <= max(0.45 * 0.001 * next_cost + slack_s, 0.025 + slack_s, 3.0 * decode_s + slack_s, block_s)
    assert num_tokens <= budget.num_tokens(start, 8, target_s)
