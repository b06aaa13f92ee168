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


# --- clients --------------------------------------------------------------------------------------------------


def fill(queue: FreeBlockQueue, client: str | None, count: int) -> None:
    """Caches so many new blocks of a client, as if just used."""
    for _ in range(count):
        block = Block(0)
        block.client, block.block_hash = client, b"h"
        queue.append(block)


def taken(queue: FreeBlockQueue, count: int) -> list[str | None]:
    return [queue.popleft().client for _ in range(count)]


def test_who_has_many_blocks_loses_them_before_who_has_few() -> None:
    queue = FreeBlockQueue([])
    fill(queue, "B", 10)
    for _ in range(50):
        fill(queue, "A", 10)
        if len(queue) > 100:
            assert taken(queue, 10) == ["A"] * 10, "B's are the oldest, and it has a tenth"
    queue = FreeBlockQueue([])
    fill(queue, "A", 100)
    fill(queue, "B", 100)
    assert set(taken(queue, 30)) == {"A"}, "of two with equal numbers, the one that used them longer ago"
    assert set(taken(queue, 30)) == {"A", "B"}, "until it has fewer"


def test_who_is_idle_loses_all_in_the_end() -> None:
    """B's ten are used once; A uses its ninety in turn. B's go after some nine times as long as with one client."""
    queue = FreeBlockQueue([])
    fill(queue, "B", 10)
    fill(queue, "A", 90)
    num_freed = 0
    while queue.popleft().client != "B":
        fill(queue, "A", 1)
        num_freed += 1
    assert 700 <= num_freed <= 800
    while "B" in {block.client for block in queue}:
        fill(queue, "A", 1)
        queue.popleft()
        num_freed += 1
    assert num_freed <= 100 * 100


def test_what_several_clients_have_used_goes_when_it_is_the_oldest_of_all() -> None:
    queue = FreeBlockQueue([])
    fill(queue, "A", 2)
    fill(queue, None, 50)
    fill(queue, "B", 60)
    found = taken(queue, 112)
    assert found.index(None) > found.index("A")
    assert all(client == "B" for client in found[: found.index("A")])
    assert [client for client in found if client != "B"] == ["A"] * 2 + [None] * 50


def test_the_order_by_clients_is_that_of_a_brute_force() -> None:
    rng = random.Random(5)
    queue = FreeBlockQueue([])
    used: dict[Block, int] = {}
    for now in range(1, 3000):
        block = Block(now)
        block.client = rng.choice(["A", "A", "A", "B", None, "C"]) if now % 1000 < 700 else "A"
        queue.append(block)
        used[block] = now
        if rng.random() < 0.1:
            some = rng.choice(list(used))
            queue.remove(some)
            del used[some]
        while len(used) > 60:
            clients = {b.client for b in used}
            oldest = {c: min((b for b in used if b.client == c), key=used.__getitem__) for c in clients}
            counts = {client: sum(b.client == client for b in used) for client in oldest}
            weights = {c: counts[c] * (now - used[b]) for c, b in oldest.items() if c is not None}
            is_shared_oldest = None in oldest and used[oldest[None]] == min(used.values())
            expected = {None} if is_shared_oldest else {c for c in weights if weights[c] == max(weights.values())}
            found = queue.popleft()
            assert found.client in expected
            assert found is oldest[found.client]
            del used[found]
    assert sorted(used, key=used.__getitem__) == list(queue)


def test_a_block_tells_what_it_is() -> None:
    block = Block(7)
    assert repr(block) == "Block(7, ref_cnt=0, hash=None)"
    block.block_hash = bytes(range(16))
    assert repr(block) == "Block(7, ref_cnt=0, hash=00010203)"
