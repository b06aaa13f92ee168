"""A block of KV memory, known by its number only; the free queue, a request's block table, and how a pool is cut."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import NULL_BLOCK_ID, BlockMove


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


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one layer group. Block i holds tokens 32 * i to 32 * i + 31. The table grows at its
    end. Its first `num_gone` entries are empty: they were given up, or never held."""

    blocks: list[Block]
    num_gone: int

    def __len__(self) -> int:
        """The number of entries, empty ones included."""
        return self.num_gone + len(self.blocks)

    def ids(self, start: int = 0) -> tuple[int, ...]:
        """The block ids from entry `start` on, `NULL_BLOCK_ID` for empty entries."""
        num_null = max(0, self.num_gone - start)
        held = self.blocks[max(0, start - self.num_gone) :]
        return (NULL_BLOCK_ID,) * num_null + tuple([block.block_id for block in held])

    def end(self, num_tokens: int, most_held: int | None) -> int:
        """The length of a table with room for `num_tokens` tokens; with `most_held`, at most that many blocks are held
        at once, and the rest follows as others are given up."""
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        return num_blocks if most_held is None else min(num_blocks, self.num_gone + most_held)

    def give_up(self, num_gone: int) -> list[Block]:
        """Empties the first `num_gone` entries and returns the blocks that they held, in order."""
        count = max(0, num_gone - self.num_gone)
        assert count <= len(self.blocks), "a block is given up before it is allocated"
        gone = self.blocks[:count]
        del self.blocks[:count]
        self.num_gone += count
        return gone


@dataclass(frozen=True, slots=True)
class Compaction:
    """A pool cut to `num_blocks`. Moves go from above the cut to below it, so their order does not matter.

    blocks 0 to 7, of which 1 and 6 are referenced, 4 and 7 cached; cut to 3 blocks
    evicted  4, the least recently used, since only one cached block has room
    moves    6 -> 0, 7 -> 2
    result   6 1 7
    """

    num_blocks: int
    moves: tuple[BlockMove, ...]
    evicted: tuple[int, ...]


def plan_compaction(num_blocks: int, referenced: Collection[int], cached: Sequence[int]) -> Compaction:
    """The fewest moves that bring all referenced blocks, and as many cached ones as fit, below `num_blocks`.

    `cached` are unreferenced blocks, the least recently used first; these are evicted first. `num_blocks` must hold at
    least the referenced blocks.
    """
    assert len(referenced) <= num_blocks, "referenced blocks cannot be cut"
    num_evicted = max(0, len(cached) - (num_blocks - len(referenced)))
    kept = {*referenced, *cached[num_evicted:]}
    holes = (block_id for block_id in range(num_blocks) if block_id not in kept)
    above = sorted(block_id for block_id in kept if block_id >= num_blocks)
    moves = tuple(BlockMove(source, next(holes)) for source in above)
    return Compaction(num_blocks, moves, tuple(cached[:num_evicted]))


class BlockSupply(Protocol):
    """Decides whether a pool may grow: the memory budget, as far as the policy needs to know it.

    Called between steps, on the scheduler's thread; must be quick.
    """

    def take(self, least: int, most: int, *, is_needed: bool) -> int:
        """How many blocks the pool may grow by now: `least` to `most`, or 0. `is_needed` says that a request would have
        to wait otherwise; without it only cached content would be lost."""
        ...

    def give_back(self, num_blocks: int) -> None:
        """The memory of `num_blocks` blocks is free again."""
        ...


class BlockObserver(Protocol):
    """Hears what happens to the content of blocks."""

    def on_taken(self, block: Block) -> None:
        """A request got the block for its own tokens; the old content is gone."""
        return

    def on_hit(self, block: Block) -> None:
        """A request shares the block's content."""
        return

    def on_freed(self, block: Block) -> None:
        """No request holds the block any more."""
        return

    def on_evicted(self, block: Block) -> None:
        """The block has left the pool, and its content is lost if it had any."""
        return


class Unobserved(BlockObserver):
    """The observer of a pool that nobody observes."""
