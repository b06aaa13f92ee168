"""A block drafter as a draft model: what it is given in a step, without a device."""

from __future__ import annotations

import pytest

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.speculation.draft_burst import choose_burst
from mlx_server.batching.speculation.draft_costs import RowCosts, StepRoom
from mlx_server.batching.speculation.draft_heads import BlockDrafts
from mlx_server.outputs import HELD_FEATURES, ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from mlx_server.request import Request
from tests.batching.worlds import make_request

_MASK = 9


def costs(*rows_and_seconds: tuple[int, float]) -> RowCosts:
    found = RowCosts()
    for num_rows, seconds in rows_and_seconds:
        for _ in range(3):
            found.observe(num_rows, seconds)
    return found


_TARGET = costs((1, 0.040), (2, 0.041), (3, 0.042), (4, 0.043), (8, 0.047))


def make_drafts(num_blocks: int = 64, block_size: int = 16, max_held: int | None = None) -> BlockDrafts:
    drafts = BlockDrafts(
        PagedBlockManager(num_blocks),
        vocab_size=10_000,
        max_tokens=4096,
        doubling_tokens=1e12,
        block_size=block_size,
        mask_token_id=_MASK,
        max_held=max_held,
    )
    drafts.learn(1000, 0.001, 0.001)
    return drafts


def compute(drafts: BlockDrafts, request: Request, start: int, end: int, sampled: int = 7) -> None:
    """A step of the model computes known tokens [start, end) and gives a token."""
    token_ids = tuple(request.token_ids(start, end))
    drafts.on_chunk(ScheduledChunk(request.request_id, start, end - start, token_ids, (), True, 0))
    request.output_token_ids.append(sampled)


def burst(drafts: BlockDrafts, *requests: Request, most: int = 3) -> tuple[SchedulerOutput, ...]:
    for request in requests:
        for _ in range(50):
            drafts.acceptances.add(request.request_id, most, most)
    steps = drafts.compose(dict.fromkeys(requests, most), most, StepRoom(len(requests), _TARGET, limit_s=1.0))
    drafts.check_integrity()
    return steps


def test_a_burst_is_one_step_over_features_and_a_block() -> None:
    """The example of the module."""
    drafts, request = make_drafts(), make_request("a", 299, 50)
    compute(drafts, request, 0, 299)
    assert burst(drafts, request)[0].chunks[0].num_block == 0, "a long prompt is read when that has been paid for"
    request.output_token_ids.append(8)
    drafts.on_chunk(ScheduledChunk("a", 299, 1, (7,), (), True, 1))
    ((chunk,),) = [step.chunks for step in burst(drafts, request)]
    assert (chunk.hidden_offset, chunk.start, chunk.num_tokens) == (0, 299, 1 + 4)
    assert chunk.token_ids == (8, 8, _MASK, _MASK, _MASK)
    assert (chunk.num_block, chunk.num_drafts, chunk.is_sampling) == (4, 2, True)
    drafts.take(ModelRunnerOutput(-1, {}, num_model_calls=0, drafts={"a": (1, 2, 3)}, step_time_s=0.004))
    assert drafts.drafts(request) == (1, 2, 3)


def test_no_more_is_drafted_than_the_block_that_it_was_made_for() -> None:
    drafts, request = make_drafts(block_size=4), make_request("a", 20, 50)
    compute(drafts, request, 0, 20)
    ((chunk,),) = [step.chunks for step in burst(drafts, request, most=8)]
    assert chunk.num_block == 4


def test_a_block_has_room_in_the_pool() -> None:
    """Of three requests, the first gets both blocks that 34 rows need, the second drafts the one token for which its
    block has room, and none is left for the third."""
    drafts = make_drafts(num_blocks=3)
    requests = [make_request(name, 30, 50) for name in "abc"]
    for request in requests:
        compute(drafts, request, 0, 30)
    (step,) = burst(drafts, *requests, most=3)
    assert [(chunk.request_id, chunk.num_block) for chunk in step.chunks] == [("a", 4), ("b", 2)]


def test_features_are_held_of_the_first_requests_only() -> None:
    drafts = make_drafts(max_held=1)
    first, second = (make_request(name, 20, 50) for name in "ab")
    for request in (first, second):
        compute(drafts, request, 0, 20)
    (step,) = burst(drafts, first, second)
    assert [chunk.request_id for chunk in step.chunks] == ["a"]
    drafts.forget(first)
    assert burst(drafts, second) == (), "its features were not kept"
    compute(drafts, second, 20, 21)
    assert burst(drafts, second) == (), "no block boundary is among them yet"
    for position in range(21, 34):
        compute(drafts, second, position, position + 1)
    (step,) = burst(drafts, second)
    assert [(chunk.hidden_offset, chunk.start) for chunk in step.chunks] == [(32, 0)]


def test_the_last_features_of_a_long_prompt_are_held() -> None:
    drafts, request = make_drafts(), make_request("a", 3000, 50)
    compute(drafts, request, 0, 3000)
    for output in range(200):
        request.output_token_ids.append(output)
    drafts.on_chunk(ScheduledChunk("a", 3000, 200, (7,) * 200, (), True, 1))
    steps = burst(drafts, request)
    assert steps[0].chunks[0].hidden_offset == 2176  # 3,200 - 1,024 is a boundary
    assert HELD_FEATURES == 1024


def test_the_time_of_a_burst_does_not_grow_with_its_drafts() -> None:
    """The example of `choose_burst`."""
    best = choose_burst({"r": 0.8}, 4, StepRoom(1, _TARGET), costs((1, 0.004)), is_one_step=True)
    assert best.depth == 4
    assert best.saved_s == pytest.approx(0.040 - 0.048 / 3.3616, rel=0.02)
    slow = choose_burst({"r": 0.8}, 4, StepRoom(1, _TARGET), costs((1, 0.030)), is_one_step=True)
    assert slow.depth == 4, "30 ms pay for four drafts at once, and not for four steps"
    drafts, request = make_drafts(), make_request("a", 20, 50)
    compute(drafts, request, 0, 20)
    for _ in range(50):
        drafts.costs.observe(1, 0.060)
        drafts.acceptances.add("a", 4, 4)
    assert drafts.choose({request: 4}, 4, StepRoom(1, _TARGET, limit_s=1.0)).depth == 4
