"""A model's own head as a drafter: from which hidden state on it reads a request, without a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.prefix_cache import extend_block_hashes, root_hash
from mlx_server.batching.speculation import draft_burst
from mlx_server.batching.speculation.draft_burst import NO_BURST, Burst
from mlx_server.batching.speculation.draft_costs import RowCosts, StepRoom
from mlx_server.batching.speculation.draft_heads import HeadDrafts
from mlx_server.outputs import HELD_STATES, ScheduledChunk, SchedulerOutput
from mlx_server.request import Request
from tests.batching.worlds import make_request, prompt


@pytest.fixture(autouse=True)
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token for each request, whatever it costs."""

    def always(rates: Mapping[str, float], *more: object) -> Burst:
        return Burst(1, frozenset(rates), 1e9) if rates else NO_BURST

    monkeypatch.setattr(draft_burst, "choose_burst", always)


def make_heads(num_blocks: int = 64, max_tokens: int = 2048) -> HeadDrafts:
    heads = HeadDrafts(PagedBlockManager(num_blocks), vocab_size=10_000, max_tokens=max_tokens, doubling_tokens=1e12)
    heads.learn(1000, 0.001, 0.001)  # so fast that a step reads any prompt
    return heads


def compute(
    heads: HeadDrafts, request: Request, start: int, end: int, drafts: tuple[int, ...] = (), sampled: int | None = 7
) -> None:
    """A step of the model computes known tokens [start, end), and drafts after them, and gives a token."""
    token_ids = (*request.token_ids(start, end), *drafts)
    heads.on_chunk(
        ScheduledChunk(
            request.request_id, start, len(token_ids), token_ids, (), sampled is not None, 0, num_drafts=len(drafts)
        )
    )
    extend_block_hashes(request, root_hash("model"), end)
    if sampled is not None:
        request.output_token_ids.append(sampled)


def burst(heads: HeadDrafts, *requests: Request) -> tuple[SchedulerOutput, ...]:
    steps = heads.compose(dict.fromkeys(requests, 1), 1, StepRoom(len(requests), RowCosts(), limit_s=1.0))
    heads.check_integrity()
    return steps


def read_by(steps: tuple[SchedulerOutput, ...]) -> tuple[int, int, int]:
    """What the only request of a burst has read: the first hidden state of its pairs, and the first and the end of the
    hidden states read with this step."""
    (chunk,) = steps[0].chunks
    return chunk.hidden_offset, chunk.hidden_offset + chunk.start, chunk.hidden_offset + chunk.start + chunk.num_tokens


def test_it_begins_at_the_first_block_boundary_of_the_hidden_states_that_are_held() -> None:
    heads, request = make_heads(), make_request("a", 300, 50)
    compute(heads, request, 0, 300)
    steps = burst(heads, request)
    assert read_by(steps) == (64, 64, 300)  # of 300 tokens, the hidden states of 44 to 299 are held
    assert steps[0].chunks[0].token_ids == tuple(request.token_ids(65, 301))
    compute(heads, request, 300, 301)
    steps = burst(heads, request)
    assert read_by(steps) == (64, 300, 301)
    assert steps[0].chunks[0].is_sampling


def test_hidden_states_that_begin_at_a_boundary_are_all_read() -> None:
    heads, request = make_heads(), make_request("a", HELD_STATES + 64, 50)
    compute(heads, request, 0, HELD_STATES + 64)
    assert read_by(burst(heads, request)) == (64, 64, HELD_STATES + 64)


def test_a_prompt_in_chunks_is_held_as_one() -> None:
    heads, request = make_heads(), make_request("a", 100, 50)
    compute(heads, request, 0, 60, sampled=None)
    assert burst(heads, request) == (), "the last known token has no hidden state before it yet"
    compute(heads, request, 60, 100)
    assert read_by(burst(heads, request)) == (0, 0, 100)


def test_after_a_gap_only_the_new_hidden_states_are_held() -> None:
    heads, request = make_heads(), make_request("a", 200, 50)
    compute(heads, request, 0, 50, sampled=None)
    compute(heads, request, 60, 200)
    assert read_by(burst(heads, request)) == (64, 64, 200)


def test_nothing_is_drafted_without_hidden_states() -> None:
    heads, request = make_heads(), make_request("a", 40, 50)
    assert burst(heads, request) == ()
    compute(heads, request, 0, 40)
    heads.release(request)
    assert burst(heads, request) == ()


def test_too_few_hidden_states_for_a_boundary_are_not_read() -> None:
    heads, request = make_heads(), make_request("a", 40, 50)
    compute(heads, request, 33, 40)  # the next boundary is 64
    assert burst(heads, request) == ()


def test_after_wrong_drafts_the_hidden_states_are_read_up_to_the_first_of_them() -> None:
    heads, request = make_heads(), make_request("a", 40, 50)
    compute(heads, request, 0, 40)
    burst(heads, request)
    compute(heads, request, 40, 41, drafts=(8, 9), sampled=8)
    request.output_token_ids.append(5)  # 8 was right, and 9 was not
    assert read_by(burst(heads, request)) == (0, 40, 42)
    request.output_token_ids.append(6)  # nothing has computed the hidden state before it
    assert burst(heads, request) == ()


def test_one_that_was_left_behind_begins_again() -> None:
    heads, request = make_heads(), make_request("a", 40, 600)
    compute(heads, request, 0, 40)
    assert read_by(burst(heads, request)) == (0, 0, 40)
    for position in range(40, 40 + HELD_STATES + 10):
        compute(heads, request, position, position + 1)
    assert read_by(burst(heads, request)) == (64, 64, 50 + HELD_STATES)


def turn(heads: HeadDrafts, request: Request, num_cached: int) -> tuple[int, int, int]:
    """A request of which the model has the beginning cached."""
    compute(heads, request, num_cached, request.num_tokens)
    return read_by(burst(heads, request))


def first_turn(heads: HeadDrafts, **more: Any) -> Request:
    """A prompt of 300 tokens and 21 of output, read from 64 on up to the pair of hidden state 319 and token 320."""
    request = make_request("first", prompt(300), 50, **more)
    compute(heads, request, 0, 300)
    for position in range(300, 320):
        burst(heads, request)
        compute(heads, request, position, position + 1)
    assert read_by(burst(heads, request)) == (64, 319, 320)
    heads.forget(request)
    return request


def next_turn(first: Request, num_new: int = 79, **more: Any) -> Request:
    tokens = [*first.token_ids(0, first.num_tokens), *prompt(num_new, 500)]
    return make_request("second", tokens, 50, **more)


def test_the_next_turn_goes_on_from_its_own_pairs() -> None:
    heads = make_heads()
    second = next_turn(first_turn(heads))
    assert turn(heads, second, 320) == (64, 320, 400)


@pytest.mark.parametrize("more", [{"extra_keys": ("bob",)}, {"adapter": "tuned"}], ids=["tenant", "adapter"])
def test_another_s_pairs_are_not_gone_on_from(more: dict[str, Any]) -> None:
    heads = make_heads()
    second = next_turn(first_turn(heads), **more)
    assert turn(heads, second, 320) == (320, 320, 400)


def test_pairs_that_are_no_longer_cached_are_not_gone_on_from() -> None:
    heads = make_heads()
    second = next_turn(first_turn(heads))
    assert heads.blocks.reset_prefix_cache()
    assert turn(heads, second, 320) == (320, 320, 400)


def test_pairs_that_are_lost_before_the_burst_are_not_needed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for another request of the same burst may have been made of them."""
    heads = make_heads()
    second = next_turn(first_turn(heads))
    compute(heads, second, 320, 400)
    admit = HeadDrafts._admit

    def late(self: HeadDrafts, *args: object) -> bool:
        self.blocks.reset_prefix_cache()
        return admit(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(HeadDrafts, "_admit", late)
    assert burst(heads, second) == ()


def test_the_next_turn_begins_again_where_its_own_pairs_would_leave_the_context_of_the_head() -> None:
    heads = make_heads(max_tokens=512)
    second = next_turn(first_turn(heads), num_new=235)  # from 64 on it would be 491 pairs
    assert turn(heads, second, 320) == (320, 320, 556)


@pytest.mark.parametrize("max_tokens", [100, 300, 600])
def test_one_that_has_read_as_much_as_its_context_begins_again_within_it(max_tokens: int) -> None:
    heads, request = make_heads(max_tokens=max_tokens), make_request("a", 69, 700)
    compute(heads, request, 0, 69)
    begun = set()
    for position in range(69, 700):
        first, start, end = read_by(burst(heads, request))
        assert end - first < max_tokens
        assert start == first or end - start == 1, "it reads nothing again that it need not"
        begun.add(first)
        compute(heads, request, position, position + 1)
    assert len(begun) <= 1 + 700 // (max_tokens // 4), "it does not begin again all the time"
