"""A block of KV memory, known by its number only, and the queue of free blocks."""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter


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
    manager which lookup of a prefix found the block last. `client` is whose request filled it; None once a request of
    another client has hit it.
    """

    __slots__ = ("block_hash", "block_id", "client", "found_mark", "is_rounded", "layer_group", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.layer_group = 0
        self.found_mark = -1
        self.is_rounded = False
        self.client: str | None = None

    @property
    def state(self) -> BlockState:
        if self.ref_cnt:
            return BlockState.REFERENCED if self.ref_cnt == 1 else BlockState.SHARED
        return BlockState.FREE if self.block_hash is None else BlockState.CACHED

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hash={digest})"


class FreeBlockQueue:
    """Unreferenced blocks: empty ones, which are taken first, and cached ones, which are then evicted.

    Each client's cached blocks are in the order of their last use. The client with the largest product of how many it
    has and how long ago its oldest was used loses that one. So a client with few blocks keeps them for longer, in
    proportion, and one that is idle loses them in the end. With one client, the least recently used block goes.

        A uses 1,900 blocks in turn, B used its 100 once. The time is counted in freed blocks.
        200 later      A's oldest is from 1,900 ago: 1,900 * 1,900; B's from 300 ago: 100 * 300. A loses one.
        36,000 later   1,900 * 1,900 and 100 * 36,100: B begins to lose its own.

    Blocks that several clients have used are nobody's: one is evicted when it is the least recently used of all. So no
    beginning goes before what follows it, whoever computed that.

    Taking a block looks at each client that has some, everything else is O(1): ordered dictionaries, since a prefix hit
    removes a block from the middle.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        """Of empty blocks."""
        self._empty = OrderedDict.fromkeys(blocks)
        self._cached: dict[str | None, OrderedDict[Block, int]] = {}  # by client; when each was freed
        self._now = 0

    def __len__(self) -> int:
        return len(self._empty) + sum(map(len, self._cached.values()))

    def __iter__(self) -> Iterator[Block]:
        """The empty ones, then the cached ones, the least recently used first."""
        by_use = heapq.merge(*[queue.items() for queue in self._cached.values()], key=itemgetter(1))
        return chain(self._empty, (block for block, _ in by_use))

    @property
    def has_empty(self) -> bool:
        """Whether the next block to be taken is empty."""
        return bool(self._empty)

    def append(self, block: Block) -> None:
        """Adds a cached block, just used."""
        assert not self._holds(block), f"{block} is in the queue already"
        self._now += 1
        self._cached.setdefault(block.client, OrderedDict())[block] = self._now

    def appendleft(self, block: Block) -> None:
        """Adds an empty block that will be taken next."""
        assert not self._holds(block), f"{block} is in the queue already"
        self._empty[block] = None
        self._empty.move_to_end(block, last=False)

    def popleft(self) -> Block:
        """Takes a block; the queue must not be empty."""
        assert self._empty or self._cached, "the free queue is empty"
        block = next(iter(self._empty or self._next_cached()))
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Removes a block from any place."""
        assert self._holds(block), f"{block} is not in the queue"
        if block in self._empty:
            del self._empty[block]
            return
        queue = self._cached[block.client]
        del queue[block]
        if not queue:
            del self._cached[block.client]

    def _holds(self, block: Block) -> bool:
        return block in self._empty or block in self._cached.get(block.client, ())

    def _next_cached(self) -> OrderedDict[Block, int]:
        """The cached blocks the oldest of which goes next."""
        shared, own = self._cached.get(None), [queue for client, queue in self._cached.items() if client is not None]
        if shared and _oldest(shared) <= min(map(_oldest, own), default=self._now):
            return shared
        return max(own, key=lambda queue: len(queue) * (self._now - _oldest(queue)))


def _oldest(queue: OrderedDict[Block, int]) -> int:
    return next(iter(queue.values()))
