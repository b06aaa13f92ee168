"""A block of KV memory, by its number only: the queue of those that nobody references, the table of one request, and
how a pool of them grows and is cut."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import NULL_BLOCK_ID, BlockMove


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
    says which layers' K/V that is, and `is_rounded` whether it was read from a record of 8 bits. `found_mark` is the
    manager's of when a prefix with the block was looked up.
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
    """Unreferenced blocks in the order in which to take them; every operation is O(1).

    An ordered dictionary because a prefix hit takes a block from the middle, which a deque cannot do in constant time.
    """

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = OrderedDict.fromkeys(blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    @property
    def first(self) -> Block | None:
        """The next to be taken."""
        return next(iter(self._blocks), None)

    def append(self, block: Block) -> None:
        """Makes `block` the last to be taken."""
        assert block not in self._blocks, f"{block} is in the queue already"
        self._blocks[block] = None

    def appendleft(self, block: Block) -> None:
        """Makes `block` the next to be taken."""
        self.append(block)
        self._blocks.move_to_end(block, last=False)

    def popleft(self) -> Block:
        """Takes the first block; the queue must not be empty."""
        assert self._blocks, "the free queue is empty"
        return self._blocks.popitem(last=False)[0]

    def remove(self, block: Block) -> None:
        """Takes `block` from wherever it stands."""
        assert block in self._blocks, f"{block} is not in the queue"
        del self._blocks[block]


@dataclass(slots=True)
class BlockTable:
    """The blocks of one request in one layer group. Block i holds tokens 32 * i to 32 * i + 31. Grows at its end; its
    first `num_gone` entries are given up, or were never held."""

    blocks: list[Block]
    num_gone: int

    def __len__(self) -> int:
        """Entries, those given up included."""
        return self.num_gone + len(self.blocks)

    def ids(self, start: int = 0) -> tuple[int, ...]:
        """The entries from index `start` on."""
        num_null = max(0, self.num_gone - start)
        held = self.blocks[max(0, start - self.num_gone) :]
        return (NULL_BLOCK_ID,) * num_null + tuple([block.block_id for block in held])

    def end(self, num_tokens: int, most_held: int | None) -> int:
        """How long the table is to be that has room for `num_tokens` tokens, or for all that may be held at once."""
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        return num_blocks if most_held is None else min(num_blocks, self.num_gone + most_held)

    def give_up(self, num_gone: int) -> list[Block]:
        """Makes the first `num_gone` entries empty; the blocks that were held there, in order."""
        count = max(0, num_gone - self.num_gone)
        assert count <= len(self.blocks), "a block is given up before it is there"
        gone = self.blocks[:count]
        del self.blocks[:count]
        self.num_gone += count
        return gone


@dataclass(frozen=True, slots=True)
class Compaction:
    """A pool cut to `num_blocks`. Moves go from above the cut to below it, so their order does not matter.

    before   0 1 2 3 4 5 6 7     referenced 1 6, cached 4 7, cut to 4
    after    6 1 7 .             moves 6 -> 0, 7 -> 2; 4 is evicted if there is no room for it
    """

    num_blocks: int
    moves: tuple[BlockMove, ...]
    evicted: tuple[int, ...]


def plan_compaction(num_blocks: int, referenced: Collection[int], cached: Sequence[int]) -> Compaction:
    """The fewest moves that bring every referenced block, and as many cached ones as there is room for, below
    `num_blocks`, which must hold the referenced ones.

    `cached` are those that nobody references, the least recently used first: these are given up first.
    """
    assert len(referenced) <= num_blocks, "referenced blocks cannot be cut"
    num_evicted = max(0, len(cached) - (num_blocks - len(referenced)))
    kept = {*referenced, *cached[num_evicted:]}
    holes = (block_id for block_id in range(num_blocks) if block_id not in kept)
    above = sorted(block_id for block_id in kept if block_id >= num_blocks)
    moves = tuple(BlockMove(source, next(holes)) for source in above)
    return Compaction(num_blocks, moves, tuple(cached[:num_evicted]))


class BlockSupply(Protocol):
    """Decides whether a pool may grow: where its memory comes from, as far as the policy needs to know.

    Called between steps, on the scheduler's thread; must be quick."""

    def take(self, least: int, most: int, *, is_needed: bool) -> int:
        """How many blocks the pool may grow by now: from `least` to `most`, or 0. `is_needed`: a request would
        have to wait otherwise; else only cached content would have to go."""
        ...

    def give_back(self, num_blocks: int) -> None:
        """The memory of so many blocks is free again."""
        ...


class BlockObserver(Protocol):
    """Is told what happens to the content of blocks."""

    def on_taken(self, block: Block) -> None:
        """A request got the block for tokens of its own; what was in it is gone."""
        return

    def on_hit(self, block: Block) -> None:
        """A request shares what is in the block."""
        return

    def on_freed(self, block: Block) -> None:
        """Nobody holds the block any more."""
        return

    def on_evicted(self, block: Block) -> None:
        """What is in the block is lost, if there was anything."""
        return


class Unobserved(BlockObserver):
    """Of a pool that nobody observes."""
