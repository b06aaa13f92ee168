"""All blocks of one model: how they are taken, shared, freed and evicted; how the pool grows and is cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_server.batching.blocks.block import Block, BlockState, FreeBlockQueue
from mlx_server.batching.blocks.prefix_cache import CachedPrefix, PrefixCache
from mlx_server.outputs import BlockMove, EngineCounters, PoolChange
from mlx_server.request import Request


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

    def give_back(self, num_blocks: int) -> None:
        """The memory of `num_blocks` blocks is free again."""


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


class BlockPool:
    """A pool grows when an allocation would evict a cached block or fail, while `supply` allows it, up to `max_blocks`;
    `shrink` cuts it. Ids do not change when it grows. If it `is_changed`, `take_change` says what the runner must do
    before the next step. `observer` is notified of what happens to the content of blocks, `before_eviction` of each
    cached block whose content is about to be lost. Not thread-safe.

    A block with `ref_cnt` 0 is in the free queue. If it also has a hash, it is still in the prefix cache: all unused
    memory is prefix cache. Taking such a block from the queue evicts it.

    A block that is given up may be taken at once, although submitted steps still read or write it: steps run in the
    order in which they are composed, so the step that takes it runs after all of these.
    """

    def __init__(
        self, num_blocks: int, cache: PrefixCache, max_blocks: int | None = None, supply: BlockSupply | None = None
    ) -> None:
        """Without `max_blocks` the pool never grows beyond `num_blocks`."""
        assert 1 <= num_blocks <= (max_blocks or num_blocks)
        self.max_blocks = max_blocks or num_blocks
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeBlockQueue(self._blocks)
        self._cache = cache
        self._supply = supply
        self._found: dict[Request, CachedPrefix] = {}  # lookups since the last `_forget`
        self._found_mark = 0  # the mark of their blocks
        self._moves: tuple[BlockMove, ...] = ()
        self._num_cut = 0
        self.is_changed = False
        self.observer: BlockObserver = Unobserved()
        self.before_eviction: Callable[[Block], None] = lambda block: None
        self.counters = EngineCounters()

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
        self.counters.num_pool_cuts += 1
        self.counters.num_blocks_moved += len(plan.moves)
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

    # --- for `PagedBlockManager` ----------------------------------------------------------------------------

    def _reference(self, block: Block, client: str) -> None:
        """A client's request shares a cached block."""
        if block.ref_cnt == 0:
            self._free.remove(block)
            self._forget(block)
        block.ref_cnt += 1
        if block.client != client:
            block.client = None

    def _take(self, client: str) -> Block:
        """A free block for a request's own tokens; there must be one."""
        if not self._free.has_empty:
            self._grow(1, is_needed=False)
        block = self._free.popleft()
        if block.block_hash is not None:
            self._lose(block)
        block.ref_cnt, block.client = 1, client
        self.observer.on_taken(block)
        return block

    def _lose(self, block: Block) -> None:
        """Evicts a cached block whose content is about to be lost."""
        self.before_eviction(block)
        self._evict(block)
        self.counters.num_block_evictions += 1

    def _evict(self, block: Block) -> None:
        self._cache.remove(block)
        self._forget(block)

    def _forget(self, block: Block) -> None:
        """Forgets all remembered lookups if one of them found the block."""
        if block.found_mark == self._found_mark:
            self._found_mark += 1
            self._found.clear()

    def _release(self, block: Block) -> None:
        """A request gives up a block. The last one frees it; if it is cached, its content stays until it is taken."""
        block.ref_cnt -= 1
        if block.ref_cnt > 0:
            return
        self._forget(block)
        self.observer.on_freed(block)
        if block.block_hash is None:
            self._free.appendleft(block)
        else:
            self._free.append(block)

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
        self.counters.num_pool_growths += 1
        self.is_changed = True
        return True

    def _swap(self, block: Block, free: Block) -> None:
        """A block with content and one without change places."""
        source, destination = block.block_id, free.block_id
        self._blocks[source], self._blocks[destination] = free, block
        block.block_id, free.block_id = destination, source
