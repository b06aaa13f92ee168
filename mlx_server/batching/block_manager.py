"""Who holds which block: allocation, sharing of prefixes, reference counts, eviction in LRU order."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from mlx_server.batching.block import (
    Block,
    BlockObserver,
    BlockState,
    BlockSupply,
    BlockTable,
    FreeBlockQueue,
    Unobserved,
    plan_compaction,
)
from mlx_server.batching.layer_groups import LayerGroups, first_seen, num_blocks_for
from mlx_server.batching.prefix_cache import CachedPrefix, PrefixCache, extend_block_hashes, root_hash
from mlx_server.batching.state_checkpoints import StateCheckpoints
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds, BlockMove, PoolChange
from mlx_server.request import Request


class PagedBlockManager:
    """All blocks of one model's pools. Not thread-safe: used by the scheduler only.

    A request has a block table in each layer group. It only grows, until `free` or `detach`, but in a group with a
    window its front is given up as the window moves on. A block with `ref_cnt` 0 is in the free
    queue and, if its hash is set, in the prefix cache too; taking it from the queue is the eviction. So all
    idle memory is prefix cache, and only referenced blocks count as used. Blocks that hold nothing cached
    are taken first, then the least recently used.

    What is given up may be taken at once, although steps that were submitted still read or write it: steps run in the
    order in which they are composed, and the step that takes it is composed after all of them.

    The pool grows when an allocation would evict or fail, as long as `supply` gives, up to `max_blocks`; it is
    cut by `shrink`. `take_change` says what the runner must do before the next step. Ids are stable on growth.
    `observer` is told what becomes of the content of blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: LayerGroups | None = None,
        *,
        max_blocks: int | None = None,
        supply: BlockSupply | None = None,
        model_key: str = "",
        enable_prefix_caching: bool = True,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        """Without `groups`, all layers keep everything. Without `max_blocks` the size is fixed. With `checkpoints`,
        a prefix is cached only up to one of them."""
        assert 1 <= num_blocks <= (max_blocks or num_blocks)
        self.max_blocks = max_blocks or num_blocks
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeBlockQueue(self._blocks)
        self.groups = groups or LayerGroups()
        self.no_prefix = CachedPrefix(0, tuple([] for _ in self.groups.windows))
        self._tables: dict[str, list[BlockTable]] = {}
        self._num_allocated: dict[str, int] = {}  # entries that a table without a window has
        self._num_cached: dict[str, int] = {}  # leading blocks of a table that were offered to the cache
        self._cache = PrefixCache(self.groups.windows)
        self._root = root_hash(model_key)
        self._detached: list[list[Block]] = []
        self._supply = supply
        self._moves: tuple[BlockMove, ...] = ()
        self._num_cut = 0
        self._is_changed = False
        self.enable_prefix_caching = enable_prefix_caching
        self.checkpoints = checkpoints
        self.observer: BlockObserver = Unobserved()
        self.num_evictions = 0
        self.num_growths = 0
        self.num_cuts = 0
        self.num_moves = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation may take, cached ones included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cache)

    @property
    def num_detached_blocks(self) -> int:
        """Blocks that become free when the submitted steps have finished."""
        return next(self.num_freed_in_turn(()))

    def states(self, most: int) -> list[BlockState]:
        """The states of all blocks by id; of `most` evenly spaced ones if there are more."""
        count = min(most, len(self._blocks))
        return [self._blocks[index * len(self._blocks) // count].state for index in range(count)]

    def block_ids(self, request_id: str, group: int = 0) -> tuple[int, ...]:
        """The block table of a request that holds blocks; () otherwise."""
        tables = self._tables.get(request_id)
        return () if tables is None else tables[group].ids()

    def holds(self, request: Request, num_tokens: int) -> bool:
        """Whether `allocate` has given the request room for `num_tokens` tokens already."""
        return self._num_allocated.get(request.request_id, 0) >= num_blocks_for(num_tokens)

    def may_hit(self, request: Request) -> bool:
        """Whether a request may use cached blocks. They give no logits: who wants those of the prompt computes it."""
        wants_prompt = request.sampling.prompt_logprobs is not None and not request.output_token_ids
        return self.enable_prefix_caching and not wants_prompt

    def find_prefix(self, request: Request) -> CachedPrefix:
        """The longest cached prefix of a request that holds no blocks. Changes no block.

        It never covers the request's last known token: one token must be computed to have logits.
        """
        if not self.may_hit(request):
            return self.no_prefix
        extend_block_hashes(request, self._root, request.num_tokens)
        return self._cache.longest_prefix(request.block_hashes, _most_hit(request), self.checkpoints)

    def num_cached(self, request: Request, guess: int = 0) -> int:
        """How long the prefix that `find_prefix` finds is, in blocks. Where layers keep everything, in O(1) if `guess`
        is right and O(log n) else: blocks are evicted from a prefix's end, so that a cached block has all before it
        cached, too. Where that does not hold (equal blocks of two requests that were freed in turns), the answer is
        another boundary of the prefix."""
        if not self.may_hit(request):
            return 0
        if self.groups.has_windows or self.checkpoints is not None:
            return len(self.find_prefix(request))
        extend_block_hashes(request, self._root, request.num_tokens)
        cached, hashes, most = self._cache, request.block_hashes, _most_hit(request)
        if (guess == 0 or hashes[guess - 1] in cached) and (guess == most or hashes[guess] not in cached):
            return guess
        return bisect_left(range(most), True, key=lambda index: hashes[index] not in cached)

    def resumed_checkpoint(self, request: Request) -> int | None:
        """Where the recurrent state is from which a request that was just admitted goes on; None if it starts."""
        num_blocks = request.num_computed_tokens // BLOCK_SIZE
        if self.checkpoints is None or not num_blocks:
            return None
        return self.checkpoints.slot(request.block_hashes[num_blocks - 1])

    def num_new_blocks(self, request: Request, num_tokens: int, prefix: CachedPrefix | None = None) -> int:
        """Free blocks that `allocate` with these arguments would take, revived prefix blocks included."""
        tables = self._tables.get(request.request_id)
        if tables is not None:
            return self._num_missing(tables, num_tokens)
        prefix = prefix or self.no_prefix
        num_revived = sum([block.ref_cnt == 0 for block in prefix])
        return num_revived + self._num_missing(_tables_of(prefix), num_tokens)

    def num_freed_in_turn(self, request_ids: Iterable[str], keep: Iterable[Block] = ()) -> Iterator[int]:
        """How many blocks become free with all detached ones given back, then with the first request's too,
        the second's, and so on: one number more than requests. Blocks of `keep` count as held."""
        kept = set(keep)
        num_holds: Counter[Block] = Counter()
        num_freed = 0
        for blocks in chain([chain.from_iterable(self._detached)], map(self._held_blocks, request_ids)):
            for block in blocks:
                num_holds[block] += 1
                num_freed += num_holds[block] == block.ref_cnt and block not in kept
            yield num_freed

    def allocate(self, request: Request, num_tokens: int, prefix: CachedPrefix | None = None) -> BlockIds | None:
        """Grows the request's tables to hold `num_tokens` tokens, those of groups with a window as far as the next
        step may need it; the ids that were appended, or None if there are not enough free blocks and no more to be
        had (then nothing was taken).

        `prefix`, from `find_prefix`, is shared as it is; it may be given only while the tables are empty.
        """
        tables = self._tables.get(request.request_id)
        if tables is not None:
            assert not prefix, "a prefix is shared before anything else is allocated"
            self.give_up_unseen(request)
        if not self.make_room(self.num_new_blocks(request, num_tokens, prefix)):
            return None
        if tables is not None:
            num_before = [len(table) for table in tables]
        else:
            tables = self._tables[request.request_id] = self._start(request, prefix or self.no_prefix)
            num_before = [0] * len(tables)
        num_allocated = self._num_allocated.get(request.request_id, 0)
        self._num_allocated[request.request_id] = max(num_allocated, num_blocks_for(num_tokens))
        for table, most in zip(tables, self.groups.most_held):
            for _ in range(_end(table, num_tokens, most) - len(table)):
                table.blocks.append(self._take())
        new_ids = tuple([table.ids(start) for table, start in zip(tables, num_before)])
        return new_ids if any(new_ids) else ()

    def give_up_unseen(self, request: Request) -> None:
        """Gives back the blocks of groups with a window that no token of the request sees any more. They stay cached,
        the oldest first to be evicted."""
        if not self.groups.has_windows:
            return
        position = request.num_computed_tokens
        for table, window in zip(self._tables[request.request_id], self.groups.windows):
            if window is not None:
                for block in table.give_up(first_seen(position, window)):
                    self._release(block)

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Registers the blocks that the first `num_tokens` tokens fill: their ids are known, and their K/V
        are computed, or will be by a step submitted before any step that reads them."""
        if not self.enable_prefix_caching:
            return
        num_full = num_tokens // BLOCK_SIZE
        first = self._num_cached.get(request.request_id, 0)
        if num_full <= first:
            return
        extend_block_hashes(request, self._root, num_tokens)
        for group, table in enumerate(self._tables[request.request_id]):
            for index in range(max(first, table.num_gone), num_full):
                self._cache.insert(request.block_hashes[index], table.blocks[index - table.num_gone], group)
        self._num_cached[request.request_id] = num_full
        if self.checkpoints is not None:
            self.checkpoints.commit(request, num_full)

    def free(self, request_id: str) -> None:
        """Gives back all blocks of a request, each group's tail first, so that shared heads are evicted last."""
        for block in reversed(self._leave(request_id)):
            self._release(block)

    def detach(self, request_id: str) -> list[Block]:
        """Ends the request's hold like `free`, but the blocks stay referenced until `free_detached`:
        a step that was submitted may still write them."""
        blocks = self._leave(request_id)
        self._detached.append(blocks)
        return blocks

    def free_detached(self, blocks: list[Block]) -> None:
        """Gives back what `detach` returned, tail first."""
        self._detached = [group for group in self._detached if group is not blocks]
        for block in reversed(blocks):
            self._release(block)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; False, and nothing done, while any block is referenced."""
        if len(self._free) != len(self._blocks):
            return False
        for _, block in list(self._cache):
            self._cache.remove(block)
        if self.checkpoints is not None:
            self.checkpoints.clear()
        return True

    # --- the pool's size ------------------------------------------------------------------------------------

    def make_room(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, after the pool has grown if need be."""
        missing = num_blocks - len(self._free)
        return missing <= 0 or self._grow(missing, is_needed=True)

    def shrink(self, num_blocks: int) -> int:
        """Cuts the pool by up to `num_blocks`: unused blocks go first, then cached ones. How many went; 0 while
        another change waits to be taken. Their memory is free when the change is done, see `on_changed`."""
        num_cut = min(num_blocks, len(self._free), len(self._blocks) - 1)
        if num_cut <= 0 or self._is_changed:
            return 0
        referenced = [block.block_id for block in self._blocks if block.ref_cnt]
        cached = [block.block_id for block in self._free if block.block_hash is not None]
        plan = plan_compaction(len(self._blocks) - num_cut, referenced, cached)
        for block_id in plan.evicted:
            self._cache.remove(self._blocks[block_id])
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
        self._is_changed = True
        return num_cut

    def on_changed(self, change: PoolChange) -> None:
        """A step with this change has been executed."""
        if change.num_blocks_cut and self._supply is not None:
            self._supply.give_back(change.num_blocks_cut)

    def take_change(self) -> PoolChange | None:
        """What must be done to the pools before the next step; None if they are as they were at the last call."""
        if not self._is_changed:
            return None
        change = PoolChange(len(self._blocks), self._moves, self._num_cut)
        self._moves, self._num_cut, self._is_changed = (), 0, False
        return change

    def _grow(self, least: int, *, is_needed: bool) -> bool:
        """Adds at least so many blocks, as many as there are if they can be had; False if nothing was added."""
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
        self._is_changed = True
        return True

    def _swap(self, block: Block, free: Block) -> None:
        """A block that holds something and one that does not change places."""
        source, destination = block.block_id, free.block_id
        self._blocks[source], self._blocks[destination] = free, block
        block.block_id, free.block_id = destination, source

    def check_integrity(self) -> None:
        """Asserts every invariant; for tests and idle moments, O(blocks)."""
        if self.checkpoints is not None:
            self.checkpoints.check_integrity()
        holders = Counter(block.block_id for request_id in self._tables for block in self._held_blocks(request_id))
        holders.update(block.block_id for group in self._detached for block in group)
        free = set(self._free)
        assert len(self._blocks) <= self.max_blocks, "the pool has outgrown its limit"
        for block_id, block in enumerate(self._blocks):
            assert block.block_id == block_id, f"{block} stands at {block_id}"
            assert block.ref_cnt == holders[block.block_id], f"{block} has {holders[block.block_id]} holders"
            assert (block.ref_cnt == 0) == (block in free), f"{block} is free and held, or neither"
            if block.block_hash is not None:
                found = self._cache.get(block.block_hash, block.layer_group)
                assert found is block, f"{block} is not what its hash finds"
        assert len(free) + len(holders) == len(self._blocks), "free and referenced blocks are not all blocks"
        for block_hash, block in self._cache:
            assert block.block_hash == block_hash, f"{block} is cached under another hash"
        for request_id, tables in self._tables.items():
            for table, most in zip(tables, self.groups.most_held, strict=True):
                assert most is None or len(table.blocks) <= most, f"{request_id} holds more than its window"
                assert most is not None or table.num_gone == 0, f"{request_id} has given up what it still sees"

    def _start(self, request: Request, prefix: CachedPrefix) -> list[BlockTable]:
        """Tables of a request that is admitted: they begin with its cached prefix."""
        for block in prefix:
            self._reference(block)
            self.observer.on_hit(block)
        if prefix:
            self._num_cached[request.request_id] = len(prefix)
        if self.checkpoints is not None:
            extend_block_hashes(request, self._root, request.num_tokens)
            num_cached = len(self._cache.longest_prefix(request.block_hashes, _most_hit(request)))
            self.checkpoints.start(request, len(prefix), num_cached)
        return _tables_of(prefix)

    def _leave(self, request_id: str) -> list[Block]:
        """Ends what is known of a request; the blocks that it held."""
        self._num_allocated.pop(request_id, None)
        self._num_cached.pop(request_id, None)
        if self.checkpoints is not None:
            self.checkpoints.stop(request_id)
        blocks = list(self._held_blocks(request_id))
        self._tables.pop(request_id, None)
        return blocks

    def _held_blocks(self, request_id: str) -> Iterator[Block]:
        """Group by group."""
        return chain.from_iterable([table.blocks for table in self._tables.get(request_id, ())])

    def _num_missing(self, tables: list[BlockTable], num_tokens: int) -> int:
        """By how many blocks the tables fall short of `num_tokens` tokens, as far as they are ever to hold them."""
        pairs = zip(tables, self.groups.most_held)
        return sum([max(0, _end(table, num_tokens, most) - len(table)) for table, most in pairs])

    def _reference(self, block: Block) -> None:
        if block.ref_cnt == 0:
            self._free.remove(block)
        block.ref_cnt += 1

    def _take(self) -> Block:
        first = self._free.first
        if first is not None and first.block_hash is not None:
            self._grow(1, is_needed=False)
        block = self._free.popleft()
        if block.block_hash is not None:
            self._cache.remove(block)
            self.num_evictions += 1
        block.ref_cnt = 1
        self.observer.on_taken(block)
        return block

    def _release(self, block: Block) -> None:
        block.ref_cnt -= 1
        if block.ref_cnt > 0:
            return
        self.observer.on_freed(block)
        if block.block_hash is None:
            self._free.appendleft(block)
        else:
            self._free.append(block)


def _most_hit(request: Request) -> int:
    """The most blocks of a request that may be hit."""
    return (request.num_tokens - 1) // BLOCK_SIZE


def _tables_of(prefix: CachedPrefix) -> list[BlockTable]:
    return [BlockTable(list(blocks), len(prefix) - len(blocks)) for blocks in prefix.groups]


def _end(table: BlockTable, num_tokens: int, most_held: int | None) -> int:
    """How long a table is to be that has room for `num_tokens` tokens, or for all that may be held at once."""
    num_blocks = num_blocks_for(num_tokens)
    return num_blocks if most_held is None else min(num_blocks, table.num_gone + most_held)
