"""A block of KV memory, known by its number only, and the queue of free blocks."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator


class BlockState(enum.IntEnum):
    """What a pool says of a block."""

    FREE = 0
    CACHED = 1
    """Not referenced; requests may hit its content."""
    REFERENCED = 2
    SHARED = 3
    """Referenced by more than one request."""


class Block:
    """The record of one block of `BLOCK_SIZE` tokens. It holds no tensors: `block_id` is an index into the KV pool.

    `block_hash` is set while the block is in the prefix cache, also when `ref_cnt` is 0. `layer_group` says which
    layers' K/V it holds, and `is_rounded` whether these were read from a record of 8 bits. `found_mark` tells the
    manager which lookup of a prefix found the block last.
    """

    __slots__ = ("block_hash", "block_id", "found_mark", "is_rounded", "layer_group", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.layer_group = 0
        self.found_mark = -1
        self.is_rounded = False

    @property
    def state(self) -> BlockState:
        if self.ref_cnt:
            return BlockState.REFERENCED if self.ref_cnt == 1 else BlockState.SHARED
        return BlockState.FREE if self.block_hash is None else BlockState.CACHED

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hash={digest})"


class FreeBlockQueue:
    """Unreferenced blocks in the order in which they are taken; every operation is O(1).

    An ordered dictionary, because a prefix hit removes a block from the middle: a deque would need O(n) for that.
    """

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = OrderedDict.fromkeys(blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    @property
    def first(self) -> Block | None:
        """The next block to be taken; None if there is none."""
        return next(iter(self._blocks), None)

    def append(self, block: Block) -> None:
        """Adds a block that will be taken last."""
        assert block not in self._blocks, f"{block} is in the queue already"
        self._blocks[block] = None

    def appendleft(self, block: Block) -> None:
        """Adds a block that will be taken next."""
        self.append(block)
        self._blocks.move_to_end(block, last=False)

    def popleft(self) -> Block:
        """Takes the first block; the queue must not be empty."""
        assert self._blocks, "the free queue is empty"
        return self._blocks.popitem(last=False)[0]

    def remove(self, block: Block) -> None:
        """Removes a block from any place."""
        assert block in self._blocks, f"{block} is not in the queue"
        del self._blocks[block]
