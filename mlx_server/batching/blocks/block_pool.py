"""All blocks of one model: which are free, how the pool grows, and how it is cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from mlx_server.batching.blocks.block import (
    Block,
    BlockObserver,
    BlockState,
    BlockSupply,
    FreeBlockQueue,
    Unobserved,
    plan_compaction,
)
from mlx_server.outputs import BlockMove, PoolChange


class BlockPool(ABC):
    """A pool grows when an allocation would evict a cached block or fail, while `supply` allows it, up to `max_blocks`;
    `shrink` cuts it. Ids do not change when it grows. If it `is_changed`, `take_change` says what the runner must do
    before the next step. `observer` is notified of what happens to the content of blocks. Not thread-safe."""

    def __init__(self, num_blocks: int, max_blocks: int | None = None, supply: BlockSupply | None = None) -> None:
        """Without `max_blocks` the pool never grows beyond `num_blocks`."""
        assert 1 <= num_blocks <= (max_blocks or num_blocks)
        self.max_blocks = max_blocks or num_blocks
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeBlockQueue(self._blocks)
        self._supply = supply
        self._moves: tuple[BlockMove, ...] = ()
        self._num_cut = 0
        self.is_changed = False
        self.observer: BlockObserver = Unobserved()
        self.num_evictions = self.num_growths = self.num_cuts = self.num_moves = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation may take, including cached ones."""
        return len(self._free)

    def states(self, most: int) -> list[BlockState]:
        """The states of all blocks by id, or of `most` evenly spaced ones if there are more."""
        count = min(most, len(self._blocks))
        return [self._blocks[index * len(self._blocks) // count].state for index in range(count)]

    def content_id(self, block: Block) -> int:
        """Where the block's content is until the change that waits for the next step has been made."""
        return next((move.source for move in self._moves if move.destination == block.block_id), block.block_id)

    def make_room(self, num_blocks: int) -> bool:
        """Whether `num_blocks` blocks are free, after the pool has grown if necessary."""
        missing = num_blocks - len(self._free)
        return missing <= 0 or self._grow(missing, is_needed=True)

    def shrink(self, num_blocks: int, defers: Callable[[list[Block]], bool] | None = None) -> int:
        """Cuts the pool by up to `num_blocks`, unused blocks first, then cached ones unless `defers` says that their
        content must stay for now. Returns how many blocks go; 0 while an earlier change waits for the next step. Their
        memory is free once the change is made, see `on_changed`."""
        num_cut = min(num_blocks, len(self._free), len(self._blocks) - 1)
        if num_cut <= 0 or self.is_changed:
            return 0
        referenced = [block.block_id for block in self._blocks if block.ref_cnt]
        cached = [block.block_id for block in self._free if block.block_hash is not None]
        plan = plan_compaction(len(self._blocks) - num_cut, referenced, cached)
        lost = [self._blocks[block_id] for block_id in plan.evicted]
        if defers is not None and defers(lost):
            return 0
        for block in lost:
            self._lose(block)
        for move in plan.moves:
            self._swap(self._blocks[move.source], self._blocks[move.destination])
        for block in self._blocks[plan.num_blocks :]:
            self._free.remove(block)
            self.observer.on_evicted(block)
        del self._blocks[plan.num_blocks :]
        self.num_evictions += len(plan.evicted)
        self.num_cuts += 1
        self.num_moves += len(plan.moves)
        self._moves, self._num_cut = plan.moves, num_cut
        self.is_changed = True
        return num_cut

    def on_changed(self, change: PoolChange) -> None:
        """A step with this change has been executed."""
        if change.num_blocks_cut and self._supply is not None:
            self._supply.give_back(change.num_blocks_cut)

    def take_change(self) -> PoolChange | None:
        """What the runner must do to the pool before the next step; None if nothing."""
        if not self.is_changed:
            return None
        change = PoolChange(len(self._blocks), self._moves, self._num_cut)
        self._moves, self._num_cut, self.is_changed = (), 0, False
        return change

    def _grow(self, least: int, *, is_needed: bool) -> bool:
        """Grows the pool by at least `least` blocks, up to twice its size; False if it did not grow."""
        num_blocks = len(self._blocks)
        most = self.max_blocks - num_blocks
        if self._supply is None or least > most:
            return False
        num_new = self._supply.take(least, min(most, max(least, num_blocks)), is_needed=is_needed)
        if num_new == 0:
            return False
        self._blocks += [Block(num_blocks + index) for index in range(num_new)]
        for block in reversed(self._blocks[num_blocks:]):
            self._free.appendleft(block)
        self.num_growths += 1
        self.is_changed = True
        return True

    def _swap(self, block: Block, free: Block) -> None:
        """A block with content and one without change places."""
        source, destination = block.block_id, free.block_id
        self._blocks[source], self._blocks[destination] = free, block
        block.block_id, free.block_id = destination, source

    @abstractmethod
    def _lose(self, block: Block) -> None:
        """The content of a cached block is about to be lost."""
