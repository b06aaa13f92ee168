"""Layer groups with sliding windows: what is behind a window is given up, prefixes hit what the next token sees, and
nobody holds more than a window and a chunk."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_server.batching.blocks.block import Block
from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.layer_groups import LayerGroups, first_seen, num_blocks_for
from mlx_server.batching.blocks.prefix_cache import PrefixCache
from mlx_server.batching.blocks.state_checkpoints import StateCheckpoints
from mlx_server.batching.policy import headroom
from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ContextLengthError
from mlx_server.outputs import ModelRunnerOutput, SampledToken
from mlx_server.request import Priority, Request
from tests.batching.worlds import World, chunks, count_held, make_request, make_scheduler, make_world, num_held, prompt

WINDOWS = st.lists(st.one_of(st.none(), st.integers(1, 200)), min_size=1, max_size=4)

# --- what a request needs -----------------------------------------------------------------------------------------


@given(WINDOWS, st.integers(1, 150), st.integers(1, 40))
@settings(deadline=None)
def test_no_schedule_of_chunks_holds_more_than_is_said(windows: list[int | None], chunk: int, seed: int) -> None:
    """And some schedule holds all of it, or nobody could be admitted by less."""
    groups = LayerGroups(windows, chunk)
    rng = random.Random(seed)
    worst = [0] * len(windows)
    for start in [*range(300), *(rng.randrange(3000) for _ in range(200))]:
        for group, window in enumerate(groups.windows):
            held = num_blocks_for(start + chunk) - first_seen(start, window)
            worst[group] = max(worst[group], held)
            if window is not None:
                assert held <= (groups.most_held[group] or 0)
                visible = range(max(0, start - window + 1), start + 1)
                assert all(position // BLOCK_SIZE >= first_seen(start, window) for position in visible)
    for most, window, found in zip(groups.most_held, windows, worst, strict=True):
        assert (most is None) == (window is None)
        assert most in (None, found)


@given(WINDOWS, st.integers(1, 150), st.integers(0, 60))
@settings(deadline=None)
def test_the_longest_request_that_fits_is_reported(windows: list[int | None], chunk: int, num_blocks: int) -> None:
    groups = LayerGroups(windows, chunk)
    most = groups.max_tokens(num_blocks)
    assert most == 0 or groups.num_needed(most) <= num_blocks
    if most < 2**31:
        assert groups.num_needed(most + 1) > num_blocks


def test_one_group_without_a_window_needs_what_it_needed_before() -> None:
    groups = LayerGroups()
    assert [groups.num_needed(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]
    assert groups.max_tokens(8) == 256
    assert not groups.has_windows
    assert LayerGroups((64,), 32).max_tokens(4) == 2**31, "whatever comes, four blocks do"
    assert LayerGroups((64,), 32).max_tokens(3) == 96


@pytest.fixture
def all_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headroom for all that running requests may still write, rather than a share of it."""
    monkeypatch.setattr("mlx_server.batching.policy._HEADROOM", 1.0)


@pytest.mark.usefixtures("all_that_is_left")
def test_headroom_counts_windows_that_are_not_full_yet() -> None:
    running = [make_request("short", 40, 192), make_request("long", 150, 64)]
    assert headroom(running) == 8  # 256 tokens
    for window, num_blocks in ((103, 2), (104, 2), (105, 3)):  # the short one may still grow by 63, 64 or 65 tokens
        assert headroom(running, (None, window)) == 8 + num_blocks


@pytest.mark.usefixtures("all_that_is_left")
def test_headroom_counts_the_rest_of_an_answer_up_to_a_cap() -> None:
    for max_tokens, num_blocks in ((32, 1), (33, 2), (1024, 32), (1025, 32), (9000, 32)):
        assert headroom([make_request("r", 10, max_tokens)]) == num_blocks


# --- prefixes -------------------------------------------------------------------------------------------------------


@given(
    windows=WINDOWS,
    cached=st.lists(st.sets(st.integers(0, 11)), min_size=4, max_size=4),
    ends=st.one_of(st.none(), st.sets(st.integers(0, 11))),
    most=st.integers(0, 12),
)
@settings(deadline=None)
def test_a_prefix_hits_where_all_that_is_seen_behind_it_is_cached(
    windows: list[int | None], cached: list[set[int]], ends: set[int] | None, most: int
) -> None:
    hashes = [bytes([index]) for index in range(12)]
    cache = PrefixCache(windows)
    for group, indices in enumerate(cached[: len(windows)]):
        for index in indices:
            assert cache.insert(hashes[index], Block(100 * group + index), group)

    def is_whole(length: int) -> bool:
        seen = [set(range(first_seen(length * BLOCK_SIZE, window), length)) for window in windows]
        return all(indices <= have for indices, have in zip(seen, cached, strict=False))

    allowed = [n for n in range(most + 1) if n == 0 or ends is None or n - 1 in ends]
    wanted = max(n for n in allowed if is_whole(n))
    found = cache.longest_prefix(hashes, most, None if ends is None else {hashes[index] for index in ends})
    assert len(found) == wanted
    assert [[block.block_id for block in blocks] for blocks in found.groups] == [
        [100 * group + index for index in range(first_seen(wanted * BLOCK_SIZE, window), wanted)]
        for group, window in enumerate(windows)
    ]


def test_equal_blocks_of_two_groups_are_two() -> None:
    cache = PrefixCache((None, 40))
    blocks = [Block(0), Block(1)]
    assert all(cache.insert(b"hash", block, group) for group, block in enumerate(blocks))
    assert [cache.get(b"hash", group) for group in (0, 1)] == blocks
    assert len(cache) == 2
    cache.remove(blocks[1])
    assert [cache.get(b"hash", group) for group in (0, 1)] == [blocks[0], None]


# --- the manager ----------------------------------------------------------------------------------------------------


def make_manager(num_blocks: int, windows: tuple[int | None, ...] = (None, 40), chunk: int = 64) -> PagedBlockManager:
    return PagedBlockManager(num_blocks, LayerGroups(windows, chunk))


def compute(blocks: PagedBlockManager, request: Request, end: int) -> None:
    """The request's tokens up to `end` are computed by one step."""
    request.num_computed_tokens = end
    blocks.cache_full_blocks(request, end)
    blocks.give_up_unseen(request)
    blocks.check_integrity()


def test_a_window_takes_blocks_for_a_chunk_and_gives_up_what_is_behind_it() -> None:
    blocks = make_manager(20)
    request = make_request("r", 320)
    assert blocks.num_new_blocks(request, 320) == 10 + 5
    assert blocks.allocate(request, 320) == (tuple(range(10)), (10, 11, 12, 13, 14))
    assert blocks.holds(request, 320)
    compute(blocks, request, 64)
    assert blocks.block_ids("r", 1) == (10, 11, 12, 13, 14), "position 64 sees 25 to 64"
    compute(blocks, request, 128)
    assert blocks.block_ids("r", 1) == (0, 0, 12, 13, 14)
    assert blocks.holds(request, 320), "what comes next is paid for"
    assert blocks.allocate(request, 320) == ((), (15, 16))
    for end in (192, 256, 320):
        assert blocks.allocate(request, 320) is not None
        compute(blocks, request, end)
    assert blocks.block_ids("r", 1)[:8] == (0,) * 8, "position 320 sees 281 to 320"
    assert (num_held(blocks, "r"), num_held(blocks, "r", 1)) == (10, 2)
    new_ids = blocks.allocate(request, 321)
    assert new_ids is not None
    assert [len(ids) for ids in new_ids] == [1, 1]


def test_what_is_given_up_stays_cached_and_goes_first() -> None:
    blocks = make_manager(17, (None, 33), 32)
    first = make_request("first", prompt(160))
    assert blocks.allocate(first, 160) == ((0, 1, 2, 3, 4), (5, 6, 7))
    for end in (32, 64, 96, 128, 160):
        assert blocks.allocate(first, 160) is not None
        compute(blocks, first, end)
    blocks.free("first")
    assert blocks.num_cached_blocks == 10
    # What is not cached, what was given up in its order, then what was held to the end, the tail before the head.
    assert blocks.allocate(make_request("all", 1), 14 * BLOCK_SIZE) == (
        (10, 11, 12, 13, 14, 15, 16, 5, 6, 7, 8, 9, 4, 3),
        (2, 1, 0),
    )


def test_a_prefix_needs_the_window_before_its_end_only() -> None:
    blocks = make_manager(40, (None, 40), 320)
    request = make_request("first", prompt(320))
    assert blocks.allocate(request, 320) is not None
    compute(blocks, request, 320)
    blocks.free("first")
    again = make_request("again", [*prompt(200), 5])
    prefix = blocks.find_prefix(again)
    assert len(prefix) == 6
    assert [[block.block_id for block in group] for group in prefix.groups] == [[0, 1, 2, 3, 4, 5], [14, 15]]
    assert blocks.num_new_blocks(again, 201, prefix) == 8 + 2, "eight revived, and two"
    assert blocks.allocate(again, 201, prefix) == ((0, 1, 2, 3, 4, 5, 20), (0, 0, 0, 0, 14, 15, 21))
    assert num_held(blocks, "again", 1) == 3
    blocks.check_integrity()


def test_blocks_that_others_hold_are_not_free_when_they_are_given_up() -> None:
    blocks = make_manager(40, (64,), 32)
    first, second = make_request("first", prompt(97)), make_request("second", [*prompt(96), 7])
    assert blocks.allocate(first, 97) is not None
    compute(blocks, first, 96)
    assert blocks.allocate(second, 97, blocks.find_prefix(second)) == ((0, 1, 2, 4),)
    second.num_computed_tokens = 96
    num_free = blocks.num_free_blocks
    first.num_computed_tokens = 97 + 63
    blocks.give_up_unseen(first)
    assert blocks.num_free_blocks == num_free
    assert [block.ref_cnt for block in blocks.find_prefix(make_request("probe", [*prompt(96), 9]))] == [1, 1]
    blocks.free("second")
    assert blocks.num_free_blocks == num_free + 3
    blocks.check_integrity()


def test_recurrent_state_and_windows_both_decide_where_a_prefix_ends() -> None:
    blocks = PagedBlockManager(60, LayerGroups((None, 40), 320), checkpoints=StateCheckpoints(8))
    request = make_request("first", prompt(330))
    assert blocks.allocate(request, 330) is not None
    assert blocks.checkpoints is not None
    assert blocks.checkpoints.save(request, 320) is not None
    compute(blocks, request, 320)
    assert len(blocks.find_prefix(make_request("probe", [*prompt(320), 1]))) == 10
    assert len(blocks.find_prefix(make_request("probe", [*prompt(319), 1]))) == 0, "no state is kept before"


def check_tables(blocks: PagedBlockManager, request: Request) -> None:
    """Every token that may still be seen has a block, which is held."""
    for group, window in enumerate(blocks.groups.windows):
        table = blocks.block_ids(request.request_id, group)
        assert len(table) >= num_blocks_for(request.num_computed_tokens)
        seen = table[first_seen(request.num_computed_tokens, window) :]
        assert len(set(seen)) == len(seen) <= num_held(blocks, request.request_id, group)


@pytest.mark.parametrize("windows", [(None, 40), (24, 100), (None, None, 1, 64)])
def test_random_use_keeps_the_books(windows: tuple[int | None, ...]) -> None:
    rng = random.Random(2)
    blocks = make_manager(16 * len(windows), windows, 50)
    running: dict[str, Request] = {}
    detached = []
    for index in range(1500):
        verb = rng.choice(["add", "step", "step", "step", "free", "detach", "free_detached"])
        if verb == "add":
            request = make_request(f"r{index}", prompt(rng.randint(1, 300), rng.choice([0, 300])), max_tokens=200)
            prefix = blocks.find_prefix(request)
            if blocks.allocate(request, request.num_tokens, prefix) is not None:
                request.num_computed_tokens = len(prefix) * BLOCK_SIZE
                running[request.request_id] = request
        elif verb == "step" and running:
            request = rng.choice(list(running.values()))
            if request.num_computed_tokens == request.num_tokens:
                request.output_token_ids.append(rng.randrange(5))
            end = min(request.num_tokens, request.num_computed_tokens + rng.randint(1, 50))
            if blocks.allocate(request, request.num_tokens) is not None:
                compute(blocks, request, end)
        elif verb in ("free", "detach") and running:
            request = running.pop(rng.choice(list(running)))
            if verb == "free":
                blocks.free(request.request_id)
            else:
                detached.append(blocks.detach(request.request_id))
        elif verb == "free_detached" and detached:
            blocks.free_detached(detached.pop(rng.randrange(len(detached))))
        blocks.check_integrity()
        for request in running.values():
            check_tables(blocks, request)
    assert blocks.counters.num_block_evictions > 40


# --- the scheduler --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_of_32k_tokens_windows_hold_a_window_and_a_chunk(is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted whenever blocks are taken for a prompt of 32,768 tokens and 100 tokens of output."""
    held = count_held(monkeypatch)
    window, chunk = 1024, 512
    windows = (None, window, window, 128)
    scheduler = make_scheduler(1500, is_async=is_async, windows=windows, max_num_batched_tokens=chunk)
    request = make_request("long", prompt(2**15), 100)
    scheduler.add_request(request)
    submitted, num_steps = [], 0
    while request.finish_reason is None:
        output = scheduler.schedule(0.05 * num_steps)
        num_steps += 1
        if output is not None:
            submitted.append(output)
        if output is None or len(submitted) > is_async:
            first = submitted.pop(0)
            sampled = {c.request_id: SampledToken(7) for c in first.chunks if c.is_sampling}
            scheduler.update(ModelRunnerOutput(first.step_id, sampled))
    wide, narrow = num_blocks_for(window + chunk) + 1, num_blocks_for(128 + chunk) + 1  # wherever a window begins
    assert [max(column) for column in zip(*held, strict=True)] == [num_blocks_for(2**15 + 99), wide, wide, narrow]
    assert len(held) == 2**15 // chunk + 4, "each chunk and each block of the output"


def test_once_a_prompt_is_computed_windows_hold_a_window() -> None:
    world = make_world(200, windows=(None, 100), max_num_batched_tokens=512)
    world.add(make_request("r", 1000, 200))
    world.step()
    world.step()
    held = []
    for _ in range(150):
        world.step()
        held.append(num_held(world.scheduler.blocks, "r", 1))
    assert max(held) == 5
    assert min(held) == 4
    world.finish()
    world.check_tokens()


def test_a_prompt_that_is_longer_than_the_pool_fits_where_all_layers_have_windows() -> None:
    world = make_world(8, windows=(64,), max_num_batched_tokens=96)
    world.add(make_request("long", 3000, 500))
    world.finish()
    world.check_tokens()
    with pytest.raises(ContextLengthError, match="may grow to 3500 tokens, but the KV pool holds 96"):
        make_world(7, windows=(64, None), max_num_batched_tokens=288).add(make_request("long", 3000, 500))


def test_admission_counts_what_windows_take_at_a_time() -> None:
    """Each request needs ten blocks of the first group, and of the second four instead of ten."""
    world = make_world(32, windows=(None, 64), max_num_batched_tokens=256, max_chunk_tokens=32)
    world.add(*(make_request(f"r{index}", 310, 4) for index in range(5)))
    world.step()
    assert world.running_ids() == ["r0", "r1"]
    world.finish()
    world.check_tokens()
    assert world.scheduler.counters.num_preemptions == 0


def test_the_next_turn_of_a_chat_hits_all_of_the_last_one() -> None:
    world = make_world(200, windows=(None, 48, 200), max_num_batched_tokens=128)
    world.add(make_request("first", prompt(700), 60))
    world.finish()
    known = [*prompt(700), *world.tokens["first"]]
    again = make_request("second", [*known, *prompt(50, 500)], 4)
    world.add(again)
    world.finish()
    assert again.num_cached_tokens == (700 + 59) // BLOCK_SIZE * BLOCK_SIZE
    world.check_tokens()


def test_a_preempted_request_resumes_behind_its_window() -> None:
    world = make_world(64, windows=(None, 40), max_num_seqs=1)
    world.add(make_request("low", 300, 60, priority=Priority.LOW))
    for _ in range(40):
        world.step()
    world.add(make_request("high", 40, 4, priority=Priority.HIGH, arrival_s=world.now))
    resumed = None
    while world.has_requests or world.runner.num_submitted:
        step = world.step()
        if step is not None and any(data.request_id == "low" for data in step.new_requests):
            resumed = chunks(step)["low"]
    assert resumed is not None
    assert resumed[0] == 320
    world.check_tokens()


def cold_pair(**more: Any) -> World:
    """Two prompts that share a head, in a pool that holds one of them and what the other has besides."""
    world = make_world(max_num_batched_tokens=64, windows=(96,), aging_rate=0.0, **more)
    world.add(make_request("a", prompt(640), 40))
    world.step()
    world.step()
    return world


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_blocks", [6, 7, 8, 9, 10, 12])
def test_who_shares_a_window_with_others_may_wait_but_comes_to_its_end(num_blocks: int, is_async: bool) -> None:
    """What it gives up frees nothing while others hold it, too."""
    world = cold_pair(num_blocks=num_blocks, is_async=is_async)
    world.add(*(make_request(f"b{index}", [*prompt(128), *prompt(300, 91 * index)], 30) for index in range(3)))
    world.finish()
    world.check_tokens()
    assert set(world.reasons) == {"a", "b0", "b1", "b2"}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 9))])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("windows", [(None, 24), (50,), (None, 30, 30, 130)])
def test_churn_changes_no_token(windows: tuple[int | None, ...], is_async: bool, seed: int) -> None:
    rng = random.Random(seed)
    world = make_world(12 * len(windows), is_async=is_async, windows=windows, max_num_batched_tokens=100)
    shared = prompt(170)
    for index in range(60):
        own = [rng.randrange(997) for _ in range(rng.randrange(1, 90))]
        tokens = shared + own if rng.random() < 0.5 else own
        priority = rng.choice(list(Priority))
        world.add(make_request(f"r{index}", tokens, rng.randrange(1, 60), arrival_s=world.now, priority=priority))
        for _ in range(rng.randrange(12)):
            world.step()
        if rng.random() < 0.05:
            world.scheduler.shrink(1)
    world.finish()
    world.check_tokens()
    assert world.scheduler.counters.num_prefix_hit_tokens > 0
    assert world.scheduler.blocks.counters.num_block_evictions > 0
