"""Who holds which block: exact ids, orders and reference counts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlx_server.batching.blocks.block_manager import PagedBlockManager
from mlx_server.batching.blocks.layer_groups import num_blocks_for
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Request
from tests.batching.worlds import make_request, make_world, prompt


def hold(blocks: PagedBlockManager, request: Request) -> tuple[int, ...]:
    """Admits a request as the scheduler does, and computes all of its tokens; its block table."""
    prefix = blocks.find_prefix(request)
    assert blocks.allocate(request, request.num_tokens, prefix) is not None
    blocks.cache_full_blocks(request, request.num_tokens)
    blocks.check_integrity()
    return blocks.block_ids(request.request_id)


def free_ids(blocks: PagedBlockManager) -> list[int]:
    """Empties the free queue to see its order; the manager is of no use afterwards."""
    request = make_request("all", 1)
    taken = blocks.allocate(request, blocks.num_free_blocks * BLOCK_SIZE)
    assert taken is not None
    return list(taken[0])


def cached_prefix(blocks: PagedBlockManager, token_ids: list[int], **extra: Any) -> list[int]:
    return [block.block_id for block in blocks.find_prefix(make_request("probe", token_ids, **extra))]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_tokens_fill_blocks(num_tokens: int, num_blocks: int) -> None:
    assert num_blocks_for(num_tokens) == num_blocks


def test_a_table_grows_by_what_is_missing() -> None:
    blocks = PagedBlockManager(8)
    request = make_request(prompt_token_ids=40)
    assert blocks.block_ids("r") == ()
    assert blocks.allocate(request, 40) == ((0, 1),)
    assert blocks.allocate(request, 64) == ()
    assert blocks.allocate(request, 65) == ((2,),)
    assert blocks.block_ids("r") == (0, 1, 2)
    assert blocks.num_new_blocks(request, 97) == 1
    assert blocks.num_new_blocks(request, 10) == 0
    assert blocks.num_free_blocks == 5
    assert [blocks.holds(request, num_tokens) for num_tokens in (1, 96, 97)] == [True, True, False]
    assert not blocks.holds(make_request("other"), 1)
    blocks.check_integrity()


def test_without_enough_blocks_nothing_changes() -> None:
    blocks = PagedBlockManager(3)
    request = make_request(prompt_token_ids=40)
    assert blocks.allocate(request, 40) == ((0, 1),)
    assert blocks.allocate(request, 129) is None
    assert blocks.block_ids("r") == (0, 1)
    assert blocks.num_free_blocks == 1
    other = make_request("other", 64)
    assert blocks.allocate(other, 64) is None
    assert blocks.block_ids("other") == ()
    blocks.check_integrity()


def test_two_requests_with_one_prefix_hold_the_same_blocks() -> None:
    blocks = PagedBlockManager(10)
    first = make_request("first", [*prompt(70), 7])
    second = make_request("second", [*prompt(70), 8])
    assert hold(blocks, first) == (0, 1, 2)
    prefix = blocks.find_prefix(second)
    assert [block.block_id for block in prefix] == [0, 1]
    assert blocks.num_new_blocks(second, second.num_tokens, prefix) == 1
    assert blocks.allocate(second, second.num_tokens, prefix) == ((0, 1, 3),)
    assert [block.ref_cnt for block in prefix] == [2, 2]
    assert blocks.num_free_blocks == 6
    blocks.free("first")
    assert [block.ref_cnt for block in prefix] == [1, 1]
    assert blocks.num_free_blocks == 7
    blocks.check_integrity()


def test_block_y_of_a_is_not_block_y_of_b() -> None:
    blocks = PagedBlockManager(10)
    a, b, y = prompt(32, 0), prompt(32, 100), prompt(33, 200)
    hold(blocks, make_request("a", a + y))
    hold(blocks, make_request("b", b + y[:1]))
    assert cached_prefix(blocks, b + y) == [3]
    assert cached_prefix(blocks, a + y) == [0, 1]


@pytest.mark.parametrize(("num_tokens", "num_hits"), [(31, 0), (32, 0), (33, 1), (64, 1), (65, 2), (96, 2), (97, 3)])
def test_a_hit_never_covers_the_last_token(num_tokens: int, num_hits: int) -> None:
    blocks = PagedBlockManager(10)
    hold(blocks, make_request("long", prompt(128)))
    assert len(cached_prefix(blocks, prompt(num_tokens))) == num_hits


def test_salt_and_model_separate_caches() -> None:
    blocks = PagedBlockManager(10, model_key="a")
    hold(blocks, make_request("r", prompt(64), extra_keys=("salt",)))
    assert cached_prefix(blocks, prompt(64)) == []
    assert cached_prefix(blocks, prompt(64), extra_keys=("pepper",)) == []
    assert cached_prefix(blocks, prompt(64), extra_keys=("salt",)) == [0]
    roots = [PagedBlockManager(1, model_key=key) for key in ("a", "b")]
    requests = [make_request("r", prompt(32)) for _ in roots]
    for manager, request in zip(roots, requests, strict=True):
        manager.find_prefix(request)
    assert requests[0].block_hashes != requests[1].block_hashes


def test_freed_blocks_leave_the_tail_before_the_head() -> None:
    blocks = PagedBlockManager(7)
    hold(blocks, make_request("r", prompt(96)))
    blocks.free("r")
    assert free_ids(blocks) == [3, 4, 5, 6, 2, 1, 0]


def test_blocks_that_hold_nothing_cached_go_first() -> None:
    blocks = PagedBlockManager(6)
    hold(blocks, make_request("r", prompt(70)))
    blocks.free("r")
    assert free_ids(blocks) == [2, 3, 4, 5, 1, 0]


def test_the_least_recently_used_block_is_evicted() -> None:
    blocks = PagedBlockManager(4)
    for name, first in (("a", 0), ("b", 100)):
        hold(blocks, make_request(name, prompt(64, first)))
    blocks.free("a")
    blocks.free("b")
    assert blocks.num_cached_blocks == 4
    hold(blocks, make_request("a again", [*prompt(64), 5]))  # uses a's two, and must evict one of b's
    assert blocks.block_ids("a again") == (0, 1, 3)
    assert blocks.counters.num_block_evictions == 1
    assert cached_prefix(blocks, prompt(65, 100)) == [2]
    assert blocks.num_cached_blocks == 3


def test_a_cached_block_that_is_held_cannot_be_evicted() -> None:
    blocks = PagedBlockManager(3)
    hold(blocks, make_request("a", prompt(64)))
    assert blocks.allocate(make_request("b", 65), 65) is None
    assert cached_prefix(blocks, prompt(65)) == [0, 1]


def test_a_revived_block_counts_as_taken() -> None:
    blocks = PagedBlockManager(3)
    hold(blocks, make_request("a", prompt(64)))
    blocks.free("a")
    again = make_request("b", [*prompt(64), 1])
    prefix = blocks.find_prefix(again)
    assert len(prefix) == 2
    assert blocks.num_new_blocks(again, 65, prefix) == 3
    assert blocks.allocate(again, 65, prefix) == ((0, 1, 2),)
    assert blocks.num_free_blocks == 0
    assert blocks.counters.num_block_evictions == 0


def test_too_little_beside_a_revived_prefix_changes_nothing() -> None:
    blocks = PagedBlockManager(3)
    hold(blocks, make_request("a", prompt(64)))
    blocks.free("a")
    again = make_request("b", [*prompt(64), *prompt(40, 500)])
    assert blocks.allocate(again, 104, blocks.find_prefix(again)) is None
    assert blocks.num_free_blocks == 3
    blocks.check_integrity()


def test_equal_blocks_computed_twice_are_cached_once() -> None:
    blocks = PagedBlockManager(4)
    first, second = make_request("first", prompt(32)), make_request("second", prompt(32))
    for request in (first, second):
        assert blocks.allocate(request, 32) is not None
    for request in (first, second):
        blocks.cache_full_blocks(request, 32)
    blocks.check_integrity()
    assert blocks.num_cached_blocks == 1
    blocks.free("second")
    blocks.free("first")
    assert free_ids(blocks) == [1, 2, 3, 0]


def test_a_prefix_that_was_looked_up_is_looked_up_again_when_it_changes() -> None:
    blocks = PagedBlockManager(8)
    tokens = prompt(128)
    computes, waits = make_request("computes", tokens, 1), make_request("waits", [*tokens, 1], 1)
    blocks.allocate(computes, 128)
    found = []
    for num_tokens in (0, 64, 128):
        blocks.cache_full_blocks(computes, num_tokens)
        found.append(blocks.find_prefix(waits))
        assert blocks.find_prefix(waits) is found[-1], "it is walked again although nothing has changed"
    assert [(len(prefix), prefix.num_idle) for prefix in found] == [(0, 0), (2, 0), (4, 0)]
    blocks.free("computes")
    assert blocks.find_prefix(waits).num_idle == 4
    blocks.allocate(make_request("other"), 5 * BLOCK_SIZE)
    assert len(blocks.find_prefix(waits)) == 3


def broken_prefix() -> tuple[PagedBlockManager, Request]:
    """A request of which blocks 2 and 3 are cached, and no longer 0 and 1: two requests have computed all of them, and
    the one whose first two were registered was let go first."""
    blocks = PagedBlockManager(12)
    tokens = prompt(128)
    first, second = make_request("first", tokens[:64], 1), make_request("second", tokens, 1)
    blocks.allocate(first, 64)
    blocks.allocate(second, 128)
    blocks.cache_full_blocks(first, 64)
    blocks.cache_full_blocks(second, 128)
    blocks.free("first")
    blocks.free("second")
    waits = make_request("waits", [*tokens, 1])
    assert (blocks.num_cached(waits), len(blocks.find_prefix(waits))) == (4, 4)
    assert blocks.allocate(make_request("other", 10 * 32), 10 * 32)
    blocks.check_integrity()
    return blocks, waits


def test_of_a_prefix_whose_head_was_evicted_nothing_is_hit_whatever_was_remembered() -> None:
    blocks, waits = broken_prefix()
    assert [block_hash in blocks._cache for block_hash in waits.block_hashes] == [False, False, True, True]
    assert len(blocks.find_prefix(waits)) == 0
    assert blocks.num_new_blocks(waits, 129, blocks.find_prefix(waits)) == 5


@pytest.mark.parametrize(("guess", "num_cached"), [(0, 0), (1, 4), (2, 4), (3, 4), (4, 4)])
def test_the_length_of_a_broken_prefix_is_one_of_its_boundaries(guess: int, num_cached: int) -> None:
    """An estimate of work, and not more: what a request starts with is what `find_prefix` finds."""
    blocks, waits = broken_prefix()
    assert blocks.num_cached(waits, guess) == num_cached


def test_a_request_whose_prefix_is_broken_while_it_waits_computes_all_of_it() -> None:
    world = make_world(num_blocks=12, max_num_seqs=1, deduplicate_prefixes=False)
    blocks, tokens = world.scheduler.blocks, prompt(128)
    world.add(make_request("first", tokens[:65], 1))
    world.finish()
    twin = make_request("twin", tokens, 1)  # as if it had computed its own beside the first
    assert blocks.allocate(twin, 128)
    blocks.cache_full_blocks(twin, 128)
    blocks.free("twin")
    world.add(make_request("runs", 7 * 32, 90))
    world.step()
    world.add(make_request("waits", [*tokens, 1], 2, arrival_s=1.0))
    assert blocks.num_cached(world.requests["waits"]) == 4
    while "runs" not in world.reasons:
        world.step()
    hashes = world.requests["waits"].block_hashes
    assert [block_hash in blocks._cache for block_hash in hashes] == [False, False, True, True]
    world.step()
    assert world.requests["waits"].num_cached_tokens == 0
    world.finish()
    world.check_tokens()


def test_full_blocks_are_cached_as_they_fill() -> None:
    blocks = PagedBlockManager(8)
    request = make_request("r", prompt(30), max_tokens=50)
    assert blocks.allocate(request, 30) == ((0,),)
    blocks.cache_full_blocks(request, 30)
    assert blocks.num_cached_blocks == 0
    request.output_token_ids.extend(prompt(3, 30))
    blocks.cache_full_blocks(request, 32)
    assert cached_prefix(blocks, prompt(33)) == [0]
    blocks.cache_full_blocks(request, 32)
    assert blocks.num_cached_blocks == 1


def test_detached_blocks_stay_held_until_they_are_given_back() -> None:
    blocks = PagedBlockManager(4)
    hold(blocks, make_request("r", prompt(70)))
    detached = blocks.detach("r")
    assert [block.block_id for block in detached] == [0, 1, 2]
    assert blocks.block_ids("r") == ()
    assert blocks.num_free_blocks == 1
    assert blocks.num_detached_blocks == 3
    blocks.check_integrity()
    blocks.free_detached(detached)
    blocks.check_integrity()
    assert blocks.num_detached_blocks == 0
    assert free_ids(blocks) == [2, 3, 1, 0]


def test_what_becomes_free_counts_shared_blocks_right() -> None:
    blocks = PagedBlockManager(16)
    shared = prompt(64)
    for name in ("a", "b", "c"):
        hold(blocks, make_request(name, [*shared, *prompt(10, ord(name))]))  # two shared, one own
    hold(blocks, make_request("d", prompt(96, 700)))
    assert list(blocks.num_freed_in_turn(["a", "b", "c", "d"])) == [0, 1, 2, 5, 8]
    assert list(blocks.num_freed_in_turn(["d", "a"])) == [0, 3, 4]
    keep = blocks.find_prefix(make_request("probe", [*shared, 1]))
    assert list(blocks.num_freed_in_turn(["a", "b", "c"], keep)) == [0, 1, 2, 3]
    blocks.detach("c")
    assert blocks.num_detached_blocks == 1
    assert list(blocks.num_freed_in_turn(["a", "b"])) == [1, 2, 5]


def test_the_cache_can_be_forgotten_while_nobody_holds_blocks() -> None:
    blocks = PagedBlockManager(4)
    hold(blocks, make_request("r", prompt(64)))
    assert not blocks.reset_prefix_cache()
    assert blocks.num_cached_blocks == 2
    blocks.free("r")
    assert blocks.reset_prefix_cache()
    assert blocks.num_cached_blocks == 0
    assert cached_prefix(blocks, prompt(64)) == []
    assert blocks.counters.num_block_evictions == 0
    blocks.check_integrity()


def test_without_prefix_caching_nothing_is_cached_or_hashed() -> None:
    blocks = PagedBlockManager(4, enable_prefix_caching=False)
    request = make_request("r", prompt(64))
    hold(blocks, request)
    assert len(blocks.find_prefix(request)) == 0
    assert blocks.num_cached_blocks == 0
    assert request.block_hashes == []


def test_misuse_and_damage_are_caught() -> None:
    with pytest.raises(AssertionError):
        PagedBlockManager(0)
    blocks = PagedBlockManager(4)
    hold(blocks, make_request("a", prompt(64)))
    other = make_request("b", [*prompt(64), 1])
    assert blocks.allocate(other, 1) is not None
    with pytest.raises(AssertionError, match="before anything else"):
        blocks.allocate(other, 65, blocks.find_prefix(other))
    held = next(iter(blocks.find_prefix(make_request("probe", prompt(64)))))
    held.ref_cnt += 1
    with pytest.raises(AssertionError, match="1 holders"):
        blocks.check_integrity()


def test_freeing_what_holds_nothing_is_harmless() -> None:
    blocks = PagedBlockManager(2)
    blocks.free("nobody")
    blocks.check_integrity()
    assert blocks.num_free_blocks == 2


def test_random_use_keeps_the_books() -> None:
    rng = random.Random(1)
    blocks = PagedBlockManager(12)
    running: dict[str, Request] = {}
    detached = []
    for index in range(3000):
        verb = rng.choice(["add", "add", "grow", "free", "detach", "free_detached"])
        if verb == "add":
            request = make_request(f"r{index}", prompt(rng.randint(1, 150), rng.choice([0, 300])), max_tokens=200)
            if blocks.allocate(request, request.num_tokens, blocks.find_prefix(request)) is not None:
                blocks.cache_full_blocks(request, request.num_tokens)
                running[request.request_id] = request
        elif verb == "grow" and running:
            request = rng.choice(list(running.values()))
            request.output_token_ids.append(rng.randrange(5))
            if blocks.allocate(request, request.num_tokens) is None:
                request.output_token_ids.pop()
            blocks.cache_full_blocks(request, request.num_tokens)
        elif verb in ("free", "detach") and running:
            request = running.pop(rng.choice(list(running)))
            if verb == "free":
                blocks.free(request.request_id)
            else:
                detached.append(blocks.detach(request.request_id))
        elif verb == "free_detached" and detached:
            blocks.free_detached(detached.pop(rng.randrange(len(detached))))
        blocks.check_integrity()
        held = {block_id for request_id in running for block_id in blocks.block_ids(request_id)}
        held |= {block.block_id for group in detached for block in group}
        assert blocks.num_free_blocks == 12 - len(held)
    assert blocks.counters.num_block_evictions > 100


def test_a_beginning_that_two_clients_use_outlives_what_follows_it() -> None:
    """A computed it, and has most of the pool, so A's own blocks go first; B's end would be of no use without it."""
    blocks = PagedBlockManager(40)
    beginning, own = prompt(64), prompt(64, first=300)
    first, second = make_request("a", [*beginning, 1], client="A"), make_request("b", [*beginning, *own, 1], client="B")
    for request in (first, second):
        hold(blocks, request)
        blocks.free(request.request_id)
    for number in range(60):
        request = make_request(f"flood{number}", 64, client="A")
        hold(blocks, request)
        blocks.free(request.request_id)
    assert blocks.num_cached(second) == 4
    assert len(blocks.find_prefix(second)) == 4
