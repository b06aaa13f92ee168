"""Block hashes chain, and the cache finds whole prefixes only."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_server.batching.blocks.block import Block
from mlx_server.batching.blocks.prefix_cache import (
    DIGEST_BYTES,
    PrefixCache,
    extend_block_hashes,
    hash_block,
    root_hash,
)
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Request
from tests.batching.worlds import make_request, prompt

ROOT = root_hash("model")
A, B, Y = prompt(BLOCK_SIZE, 0), prompt(BLOCK_SIZE, 100), prompt(BLOCK_SIZE, 200)


def hashes(token_ids: list[int], *, root: bytes = ROOT, **identity: Any) -> list[bytes]:
    request = make_request(prompt_token_ids=token_ids, **identity)
    extend_block_hashes(request, root, request.num_tokens)
    return request.block_hashes


def test_the_second_block_of_another_prefix_is_another_block() -> None:
    """The case that hashing blocks alone gets wrong: block Y of `A+Y` is not block Y of `B+Y`."""
    first, second = hashes(A + Y), hashes(B + Y)
    assert len(first) == len(second) == 2
    assert first[1] != second[1]
    cache = PrefixCache()
    for block_id, block_hash in enumerate(first):
        cache.insert(block_hash, Block(block_id))
    assert len(cache.longest_prefix(second, 2)) == 0
    assert [block.block_id for block in cache.longest_prefix(hashes(A + Y + B), 3)] == [0, 1]


def test_equal_prefixes_have_equal_hashes() -> None:
    assert hashes(A + Y + B)[:2] == hashes(A + Y) == hashes(A + Y + [5] * 31)


def test_hashes_are_the_same_in_every_process() -> None:
    """Not salted as Python's `hash()` is, so that they can be compared across restarts and machines."""
    assert len(ROOT) == DIGEST_BYTES == 16
    assert root_hash("").hex() == "fe53f82551e64b1cf299c06160d3b07a"
    assert hash_block(root_hash(""), range(32)).hex() == "d90d204ea787a01683818f42eb7413f8"


def test_every_part_of_the_input_counts() -> None:
    variants = [
        hashes(A),
        hashes(B),
        hashes([*A[:-1], A[-1] + 1]),
        hashes([A[1], A[0], *A[2:]]),
        hashes(A, root=root_hash("other model")),
        hashes(A, extra_keys=("salt",)),
        hashes(A, extra_keys=("salt", "")),
        hashes(A, extra_keys=("sa", "lt")),
        hashes(A, extra_keys=("lt", "sa")),
        hashes(A, adapter="salt"),
        hashes(A, adapter="other"),
        hashes(A, adapter="salt", extra_keys=("salt",)),
    ]
    assert len({tuple(variant) for variant in variants}) == len(variants)


def test_extra_keys_separate_the_whole_chain() -> None:
    plain, salted = hashes(A + Y), hashes(A + Y, extra_keys=("tenant",))
    assert plain[0] != salted[0]
    assert plain[1] != salted[1]
    assert salted == hashes(A + Y, extra_keys=("tenant",))


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 63, 64, 65, 200])
def test_only_full_blocks_have_hashes(num_tokens: int) -> None:
    assert len(hashes(prompt(num_tokens))) == num_tokens // BLOCK_SIZE


def test_hashes_grow_with_the_output() -> None:
    request = make_request(prompt_token_ids=A + Y[:20], max_tokens=50)
    extend_block_hashes(request, ROOT, request.num_tokens)
    assert len(request.block_hashes) == 1
    request.output_token_ids.extend(Y[20:])
    extend_block_hashes(request, ROOT, request.num_tokens)
    assert request.block_hashes == hashes(A + Y)
    extend_block_hashes(request, ROOT, 10)
    assert request.block_hashes == hashes(A + Y)


def full_cache(request: Request) -> PrefixCache:
    cache = PrefixCache()
    for block_id, block_hash in enumerate(request.block_hashes):
        assert cache.insert(block_hash, Block(block_id))
    return cache


def test_the_longest_prefix_stops_at_the_first_gap() -> None:
    request = make_request(prompt_token_ids=A + Y + B)
    extend_block_hashes(request, ROOT, request.num_tokens)
    cache = full_cache(request)
    middle = cache.get(request.block_hashes[1])
    assert middle is not None
    cache.remove(middle)
    assert [block.block_id for block in cache.longest_prefix(request.block_hashes, 3)] == [0]
    assert cache.get(request.block_hashes[1]) is None
    assert middle.block_hash is None
    assert len(cache) == 2
    assert dict(cache).keys() == {request.block_hashes[0], request.block_hashes[2]}


def test_a_prefix_can_be_cut() -> None:
    request = make_request(prompt_token_ids=A + Y + B)
    extend_block_hashes(request, ROOT, request.num_tokens)
    cache = full_cache(request)
    assert [len(cache.longest_prefix(request.block_hashes, most)) for most in range(5)] == [0, 1, 2, 3, 3]


def test_the_first_of_two_equal_blocks_stays_the_one() -> None:
    cache = PrefixCache()
    first, second = Block(0), Block(1)
    assert cache.insert(b"hash", first)
    assert not cache.insert(b"hash", second)
    assert cache.get(b"hash") is first
    assert second.block_hash is None
    with pytest.raises(AssertionError, match="cached already"):
        cache.insert(b"other", first)
    with pytest.raises(AssertionError, match="not cached"):
        cache.remove(second)
