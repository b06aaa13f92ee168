"""The free queue: order, removal from the middle, and misuse."""

from __future__ import annotations

import random

import pytest

from mlx_server.batching.blocks.block import Block, BlockState, FreeBlockQueue


def make_queue(count: int) -> tuple[list[Block], FreeBlockQueue]:
    blocks = [Block(block_id) for block_id in range(count)]
    return blocks, FreeBlockQueue(blocks)


def ids(queue: FreeBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


@pytest.mark.parametrize(
    ("ref_cnt", "block_hash", "state"),
    [
        (0, None, BlockState.FREE),
        (0, b"h", BlockState.CACHED),
        (1, None, BlockState.REFERENCED),
        (1, b"h", BlockState.REFERENCED),
        (2, b"h", BlockState.SHARED),
        (3, b"h", BlockState.SHARED),
    ],
)
def test_a_block_is_what_its_references_and_its_hash_make_it(
    ref_cnt: int, block_hash: bytes | None, state: BlockState
) -> None:
    block = Block(0)
    block.ref_cnt, block.block_hash = ref_cnt, block_hash
    assert block.state is state


def test_blocks_come_out_in_the_order_of_going_in() -> None:
    _, queue = make_queue(4)
    assert ids(queue) == [0, 1, 2, 3]
    assert [queue.popleft().block_id for _ in range(4)] == [0, 1, 2, 3]
    assert len(queue) == 0
    assert ids(queue) == []


@pytest.mark.parametrize(("removed", "left"), [(0, [1, 2, 3]), (1, [0, 2, 3]), (3, [0, 1, 2])])
def test_a_block_can_be_taken_from_anywhere(removed: int, left: list[int]) -> None:
    blocks, queue = make_queue(4)
    queue.remove(blocks[removed])
    assert ids(queue) == left
    queue.append(blocks[removed])
    assert ids(queue) == [*left, removed]


def test_a_block_can_be_put_first() -> None:
    blocks, queue = make_queue(3)
    queue.remove(blocks[2])
    queue.appendleft(blocks[2])
    assert ids(queue) == [2, 0, 1]
    assert queue.popleft() is blocks[2]


def test_an_empty_queue_can_be_filled_from_either_end() -> None:
    for add in (FreeBlockQueue.append, FreeBlockQueue.appendleft):
        blocks, queue = make_queue(1)
        queue.popleft()
        add(queue, blocks[0])
        assert ids(queue) == [0]


def test_misuse_is_caught() -> None:
    blocks, queue = make_queue(1)
    with pytest.raises(AssertionError, match="in the queue already"):
        queue.append(blocks[0])
    with pytest.raises(AssertionError, match="in the queue already"):
        queue.appendleft(blocks[0])
    block = queue.popleft()
    with pytest.raises(AssertionError, match="not in the queue"):
        queue.remove(block)
    with pytest.raises(AssertionError, match="is empty"):
        queue.popleft()


def test_it_behaves_as_a_list_under_random_use() -> None:
    rng = random.Random(0)
    blocks, queue = make_queue(20)
    model = list(range(20))
    for _ in range(5000):
        out = [block_id for block_id in range(20) if block_id not in model]
        verb = rng.choice(["popleft", "remove", "append", "appendleft"])
        if verb == "popleft" and model:
            assert queue.popleft().block_id == model.pop(0)
        elif verb == "remove" and model:
            chosen = rng.choice(model)
            model.remove(chosen)
            queue.remove(blocks[chosen])
        elif verb == "append" and out:
            model.append(out[0])
            queue.append(blocks[out[0]])
        elif verb == "appendleft" and out:
            model.insert(0, out[0])
            queue.appendleft(blocks[out[0]])
        assert ids(queue) == model
        assert len(queue) == len(model)


def test_a_block_tells_what_it_is() -> None:
    block = Block(7)
    assert repr(block) == "Block(7, ref_cnt=0, hash=None)"
    block.block_hash = bytes(range(16))
    assert repr(block) == "Block(7, ref_cnt=0, hash=00010203)"
