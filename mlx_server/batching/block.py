"""A block of KV memory, by its number only, and the queue of those that nobody references."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Protocol


class BlockState(enum.IntEnum):
    """What a block is to the pool."""

    FREE = 0
    CACHED = 1
    """Referenced by nobody; its content may be hit."""
    REFERENCED = 2
    SHARED = 3
    """Referenced by more than one request."""


class Block:
    """Bookkeeping of one block of `BLOCK_SIZE` slots. Holds no tensors: `block_id` indexes the pools.

    `block_hash` is set while the block's content stands in the prefix cache, also when `ref_cnt` is 0; `layer_group`
    says which layers' K/V that is.
    """

    __slots__ = ("block_hash", "block_id", "layer_group", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.layer_group = 0
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    @property
    def state(self) -> BlockState:
        if self.ref_cnt:
            return BlockState.REFERENCED if self.ref_cnt == 1 else BlockState.SHARED
        return BlockState.FREE if self.block_hash is None else BlockState.CACHED

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hash={digest})"


class FreeBlockQueue:
    """Unreferenced blocks in the order in which to take them; every operation is O(1).

    The links live in the blocks themselves because a prefix hit takes a block from the middle, which a
    deque cannot do in constant time, and so that nothing is allocated per operation. One sentinel, whose
    links point at the ends, spares every operation its special cases.
    """

    def __init__(self, blocks: list[Block]) -> None:
        self._sentinel = Block(-1)
        self._sentinel.prev_free = self._sentinel.next_free = self._sentinel
        self._len = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        block = self._sentinel.next_free
        while block is not None and block is not self._sentinel:
            yield block
            block = block.next_free

    @property
    def first(self) -> Block | None:
        """The next to be taken."""
        block = self._sentinel.next_free
        return None if block is self._sentinel else block

    def append(self, block: Block) -> None:
        """Makes `block` the last to be taken."""
        last = self._sentinel.prev_free
        assert last is not None
        self._insert(block, last, self._sentinel)

    def appendleft(self, block: Block) -> None:
        """Makes `block` the next to be taken."""
        first = self._sentinel.next_free
        assert first is not None
        self._insert(block, self._sentinel, first)

    def popleft(self) -> Block:
        """Takes the first block; the queue must not be empty."""
        block = self._sentinel.next_free
        assert block is not None
        assert block is not self._sentinel, "the free queue is empty"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Takes `block` from wherever it stands."""
        before, after = block.prev_free, block.next_free
        assert before is not None, f"{block} is not in the queue"
        assert after is not None
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self._len -= 1

    def _insert(self, block: Block, before: Block, after: Block) -> None:
        assert block.next_free is None, f"{block} is in the queue already"
        before.next_free = block
        block.prev_free = before
        block.next_free = after
        after.prev_free = block
        self._len += 1


class BlockObserver(Protocol):
    """Is told what happens to the content of blocks."""

    def on_taken(self, block: Block) -> None:
        """A request got the block for tokens of its own; what was in it is gone."""
        ...

    def on_hit(self, block: Block) -> None:
        """A request shares what is in the block."""
        ...

    def on_freed(self, block: Block) -> None:
        """Nobody holds the block any more."""
        ...

    def on_evicted(self, block: Block) -> None:
        """What is in the block is lost, if there was anything."""
        ...
