"""Prefixes of recurrent models: kept states decide how far a prompt hits, and the answers stay plain mlx-lm's."""

from __future__ import annotations

import pytest

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.state_checkpoints import INTERVAL_BLOCKS, StateCheckpoints
from mlx_server.batching.limits import SchedulerLimits
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Priority, Request
from mlx_server.sampling_params import SamplingParams
from tests.batching.worlds import World
from tests.batching.worlds import make_request as make_world_request
from tests.conformance import Subject, answer, worst_error
from tests.engine_worlds import random_prompts

HYBRIDS = ("qwen3_5", "lfm2")


def make_request(name: str, num_tokens: int) -> Request:
    """With hashes made of the block and the length of the prompt."""
    request = Request(
        name, list(range(num_tokens)), SamplingParams(max_tokens=9), arrival_s=0.0, max_total_tokens=10**6
    )
    request.block_hashes = [bytes([block]) for block in range(num_tokens // BLOCK_SIZE)]
    return request


def num_kept(checkpoints: StateCheckpoints, block_hashes: list[bytes]) -> int:
    """How many of these blocks, from the first, end at the last kept state among them."""
    return max((n for n, block_hash in enumerate(block_hashes, 1) if block_hash in checkpoints), default=0)


def compute(checkpoints: StateCheckpoints, request: Request, chunk: int = 10**6) -> list[tuple[int, int]]:
    """Runs a prompt to its end; the (end, slot) of every kept state."""
    kept = []
    while request.num_computed_tokens < request.num_tokens:
        left = request.num_tokens - request.num_computed_tokens
        request.num_computed_tokens += checkpoints.cut(request, min(left, chunk))
        slot = checkpoints.save(request, request.num_computed_tokens)
        if slot is not None:
            kept.append((request.num_computed_tokens, slot))
        checkpoints.commit(request, request.num_computed_tokens // BLOCK_SIZE)
        checkpoints.check_integrity()
    return kept


# --- which states are kept --------------------------------------------------------------------------------------


def test_a_prompt_is_cut_at_its_last_block_boundary() -> None:
    checkpoints = StateCheckpoints(4)
    request = make_request("a", 70)
    checkpoints.start(request, 0, 0)
    assert checkpoints.cut(request, 50) == 50
    assert compute(checkpoints, request) == [(64, 0)]
    assert num_kept(checkpoints, request.block_hashes) == 2
    assert num_kept(checkpoints, request.block_hashes[:1]) == 0


def test_a_prompt_of_whole_blocks_serves_its_repetition_and_its_continuation() -> None:
    checkpoints = StateCheckpoints(4)
    request = make_request("a", 96)
    checkpoints.start(request, 0, 0)
    assert [end for end, _ in compute(checkpoints, request)] == [64, 96]


def test_where_a_prompt_leaves_a_cached_one_its_state_is_kept() -> None:
    checkpoints = StateCheckpoints(4)
    request = make_request("a", 300)
    checkpoints.start(request, 1, 5)
    request.num_computed_tokens = 32
    assert [end for end, _ in compute(checkpoints, request, chunk=100)] == [160, 288]


def test_long_prompts_have_states_on_the_way() -> None:
    checkpoints = StateCheckpoints(4)
    interval = INTERVAL_BLOCKS * BLOCK_SIZE
    request = make_request("a", 2 * interval + 40)
    request.block_hashes = [block.to_bytes(2) for block in range(2 * INTERVAL_BLOCKS + 1)]
    checkpoints.start(request, 0, 0)
    ends = [end for end, _ in compute(checkpoints, request)]
    assert ends == [interval, 2 * interval, 2 * interval + 32]


def test_of_an_output_only_the_latest_boundary_stays() -> None:
    checkpoints = StateCheckpoints(8)
    request = make_request("a", 40)
    checkpoints.start(request, 0, 0)
    compute(checkpoints, request)
    request.block_hashes += [b"x", b"y", b"z"]
    for end in range(41, 129):
        checkpoints.save(request, end)
    checkpoints.commit(request, 2)
    assert num_kept(checkpoints, request.block_hashes) == 2
    checkpoints.commit(request, 4)
    assert len(checkpoints) == 2
    assert num_kept(checkpoints, request.block_hashes) == 4
    assert num_kept(checkpoints, request.block_hashes[:3]) == 1
    checkpoints.check_integrity()


def test_the_least_recently_used_state_goes_first() -> None:
    checkpoints = StateCheckpoints(2)
    requests = []
    for name, first in (("a", b"A"), ("b", b"B"), ("c", b"C")):
        request = make_request(name, 40)
        request.block_hashes = [first]
        requests.append(request)
    for request in requests[:2]:
        checkpoints.start(request, 0, 0)
        compute(checkpoints, request)
    assert checkpoints.slot(b"A") == 0
    checkpoints.start(requests[2], 0, 0)
    compute(checkpoints, requests[2])
    assert [num_kept(checkpoints, [h]) for h in (b"A", b"B", b"C")] == [1, 0, 1]


def test_slots_of_requests_that_leave_unfinished_are_free_again() -> None:
    checkpoints = StateCheckpoints(1)
    first, second = make_request("a", 40), make_request("b", 40)
    for request in (first, second):
        checkpoints.start(request, 0, 0)
    assert checkpoints.save(first, 32) == 0
    assert checkpoints.save(second, 32) is None
    checkpoints.stop("a")
    checkpoints.check_integrity()
    assert num_kept(checkpoints, [b"\0"]) == 0


# --- what they are good for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_a_chat_computes_what_is_new_and_less_than_two_blocks_more(architecture: str) -> None:
    """Ten turns: each prompt is the last one, its answer, and 20 new tokens."""
    subject = Subject(architecture)
    turns = random_prompts([20] * 10)
    prompts, wanted, prompt = [], [], list[int]()
    for turn in turns:
        prompt = prompt + turn
        prompts.append(prompt)
        wanted += subject.wanted([prompt], [15])
        prompt = prompt + wanted[-1].token_ids
    computed = []
    with subject.make_llm(max_model_len=512) as llm:
        for prompt, reference in zip(prompts, wanted, strict=True):
            before = llm.stats().num_prompt_tokens_computed
            assert worst_error(answer(llm, [prompt], [15]), [reference]) < 1e-4
            computed.append(llm.stats().num_prompt_tokens_computed - before)
    lengths = [len(prompt) for prompt in prompts]
    # What precedes the new turn was computed but for its last token; a state of it is kept at its last boundary.
    cached = [0] + [(length - 20 - 1) // BLOCK_SIZE * BLOCK_SIZE for length in lengths[1:]]
    assert computed == [length - hit for length, hit in zip(lengths, cached, strict=True)]
    assert max(computed) < 20 + 15 + BLOCK_SIZE


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_the_third_prompt_with_a_head_hits_it(architecture: str) -> None:
    subject = Subject(architecture)
    head = random_prompts((100,))[0]
    prompts = [head + tail for tail in random_prompts((40, 33, 50), seed=1)]
    wanted = subject.wanted(prompts, (4, 4, 4))
    with subject.make_llm() as llm:
        results = [answer(llm, [prompt], [4]) for prompt in prompts]
    assert [result.completions[0].num_cached_tokens for result in results] == [0, 0, 96]
    for result, reference in zip(results, wanted, strict=True):
        assert worst_error(result, [reference]) < 1e-4


@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_request_resumes_from_its_latest_state(is_async: bool) -> None:
    """LOW has 70 prompt tokens and about 40 more when HIGH takes the only seat; its state is kept after 96."""
    blocks = PagedBlockManager(64, checkpoints=StateCheckpoints(4))
    scheduler = ContinuousBatchingScheduler(blocks, SchedulerLimits(max_num_seqs=1), is_async=is_async)
    world = World(scheduler, depth=2 if is_async else 1)
    kept: dict[int, tuple[str, int]] = {}
    resumed: list[tuple[str, int]] = []

    def step() -> None:
        output = world.step()
        for data in () if output is None else output.new_requests:
            start = next(chunk.start for chunk in output.chunks if chunk.request_id == data.request_id)
            assert (data.checkpoint is None) == (start == 0)
            if data.checkpoint is not None:
                assert kept[data.checkpoint] == (data.request_id, start)
                resumed.append((data.request_id, start))
        for chunk in () if output is None else output.chunks:
            if chunk.checkpoint is not None:
                kept[chunk.checkpoint] = (chunk.request_id, chunk.start + chunk.num_tokens)

    world.add(make_world_request("low", 70, max_tokens=60, priority=Priority.LOW))
    for _ in range(40):
        step()
    world.add(make_world_request("high", 40, max_tokens=4, priority=Priority.HIGH, arrival_s=world.now))
    while world.has_requests or world.runner.num_submitted:
        step()
    world.check_tokens()
    assert resumed == [("low", 96)]


def test_without_prefix_caching_no_prompt_is_cut() -> None:
    subject = Subject("lfm2")
    prompts = random_prompts((70,))
    for prefix_caching, num_steps in ((False, 3), (True, 4)):
        with subject.make_llm(prefix_caching=prefix_caching) as llm:
            assert answer(llm, prompts, (3,)).num_steps == num_steps
