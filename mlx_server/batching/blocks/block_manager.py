"""Which request holds which block: its block tables, the cached prefix that it begins with, and when it gives blocks
up."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from mlx_server.batching.blocks.block import Block, FreeBlockQueue
from mlx_server.batching.blocks.block_pool import BlockPool, BlockSupply
from mlx_server.batching.blocks.layer_groups import BlockTable, LayerGroups, first_seen, num_blocks_for
from mlx_server.batching.blocks.prefix_cache import (
    CachedPrefix,
    PrefixCache,
    PrefixListener,
    SeenBlock,
    extend_block_hashes,
    most_hit,
    root_hash,
)
from mlx_server.batching.blocks.state_checkpoints import StateCheckpoints
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockIds
from mlx_server.request import Request

_MAX_FOUND = 16
"""Lookups that are remembered: a step looks up the oldest, the shortest and one aged request of each tier."""


class PagedBlockManager(BlockPool):
    """The blocks of one model's requests. Not thread-safe: only the scheduler uses it.

    A request has a block table in each layer group. A table only grows, until `free` or `detach`; in a group with a
    window, the blocks before the window are given up as it moves on.
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
        """Without `groups`, no layer has a window. Without `max_blocks` the pool is fixed. With `checkpoints`, hits end
        where a recurrent state is kept."""
        self.groups = groups or LayerGroups()
        super().__init__(num_blocks, PrefixCache(self.groups.windows), max_blocks, supply)
        self.no_prefix = CachedPrefix(0, 0, tuple([] for _ in self.groups.windows))
        self._tables: dict[str, list[BlockTable]] = {}
        self._num_allocated: dict[str, int] = {}  # entries of a table without a window
        self._num_cached: dict[str, int] = {}  # leading blocks of a table that were offered to the prefix cache
        self._root = root_hash(model_key)
        self._detached: list[list[Block]] = []
        self.enable_prefix_caching = enable_prefix_caching
        self.checkpoints = checkpoints

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cache)

    @property
    def num_detached_blocks(self) -> int:
        """Blocks that become free when the submitted steps have finished."""
        return next(self.num_freed_in_turn(()))

    def watch_prefixes(self, listener: PrefixListener) -> None:
        """`listener` gets all changes of what is cached from now on."""
        self._cache.listener = listener
        if self.checkpoints is not None:
            self.checkpoints.listener = listener

    def cached_block(self, block_hash: bytes, group: int = 0) -> Block | None:
        """The cached block with this hash in a layer group; None if there is none."""
        return self._cache.get(block_hash, group)

    def block_ids(self, request_id: str, group: int = 0) -> tuple[int, ...]:
        """The block table of a request that holds blocks; () otherwise."""
        tables = self._tables.get(request_id)
        return () if tables is None else tables[group].ids()

    def holds(self, request: Request, num_tokens: int) -> bool:
        """Whether `allocate` has already given the request room for `num_tokens` tokens."""
        return self._num_allocated.get(request.request_id, 0) >= num_blocks_for(num_tokens)

    def may_hit(self, request: Request) -> bool:
        """Whether a request may use cached blocks. Cached blocks have no logits or hidden states, so requests that need
        those of their prompt compute it."""
        needs_prompt = request.sampling.prompt_logprobs is not None and not request.output_token_ids
        return self.enable_prefix_caching and not needs_prompt and request.pooling is None

    def find_prefix(self, request: Request) -> CachedPrefix:
        """The longest cached prefix of a request that holds no blocks. Changes no block.

        It never includes the last known token, which must be computed to have logits. If no layer has a window or a
        state, the result is remembered. It is looked up again only if the next block is cached meanwhile, or if one of
        its blocks is evicted or gets or loses its only request.
        """
        if not self.may_hit(request):
            return self.no_prefix
        extend_block_hashes(request, self._root, request.num_tokens)
        hashes, most, found = request.block_hashes, most_hit(request), self._found.get(request)
        if found is not None and (len(found) == most or hashes[len(found)] not in self._cache):
            return found
        found = self._cache.longest_prefix(hashes, most, self.checkpoints)
        if self.grows_block_by_block:
            if len(self._found) >= _MAX_FOUND:
                self._found.clear()
            self._found[request] = found
            for block in found:
                block.found_mark = self._found_mark
        return found

    def forget(self, request: Request) -> None:
        """Call when a waiting request has ended: what was found for it would keep it, and its images, alive."""
        self._found.pop(request, None)

    def num_cached(self, request: Request, guess: int = 0) -> int:
        """The length in blocks of the prefix that `find_prefix` finds. If no layer has a window or a state, this takes
        O(1) if `guess` is right, otherwise O(log n): the pool evicts prefixes from their ends, so all blocks before a
        cached one are cached, too. That can fail if two requests with equal blocks are freed in turns; then the answer
        is another boundary of the prefix."""
        if not self.may_hit(request):
            return 0
        if not self.grows_block_by_block:
            return len(self.find_prefix(request))
        extend_block_hashes(request, self._root, request.num_tokens)
        cached, hashes, most = self._cache, request.block_hashes, most_hit(request)
        if (guess == 0 or hashes[guess - 1] in cached) and (guess == most or hashes[guess] not in cached):
            return guess
        return bisect_left(range(most), True, key=lambda index: hashes[index] not in cached)

    def resumed_checkpoint(self, request: Request) -> int | None:
        """The slot of the recurrent state from which a request that was just admitted resumes; None if it starts from
        nothing."""
        num_blocks = request.num_computed_tokens // BLOCK_SIZE
        if self.checkpoints is None or not num_blocks:
            return None
        return self.checkpoints.slot(request.block_hashes[num_blocks - 1])

    def num_new_blocks(self, request: Request, num_tokens: int, prefix: CachedPrefix | None = None) -> int:
        """How many free blocks `allocate` with these arguments would take, including unreferenced blocks of the
        prefix."""
        tables = self._tables.get(request.request_id)
        if tables is not None:
            return self._num_missing(tables, num_tokens)
        prefix = prefix or self.no_prefix
        return prefix.num_idle + self._num_missing(prefix.tables(), num_tokens)

    def num_freed_in_turn(self, request_ids: Iterable[str], keep: Iterable[Block] = ()) -> Iterator[int]:
        """Yields how many blocks become free if all detached ones are given back, then if those of the first request
        are, too, then of the second, and so on: one number more than requests. Blocks in `keep` count as held."""
        kept = set(keep)
        num_holds: Counter[Block] = Counter()
        num_freed = 0
        for blocks in chain([chain.from_iterable(self._detached)], map(self._held_blocks, request_ids)):
            for block in blocks:
                num_holds[block] += 1
                num_freed += num_holds[block] == block.ref_cnt and block not in kept
            yield num_freed

    def allocate(self, request: Request, num_tokens: int, prefix: CachedPrefix | None = None) -> BlockIds | None:
        """Grows the request's tables to hold `num_tokens` tokens; in groups with a window, as far as the next step may
        need. Returns the appended ids; None, and takes nothing, if there are not enough free blocks and the pool cannot
        grow.

        `prefix`, from `find_prefix`, is shared as it is. It may be given only while the tables are empty.

            a prompt of 100 tokens, of which 64 are cached: the 2 cached blocks are shared, 2 new ones are appended
            its next 28 tokens fill the fourth block and append nothing; the 129th token appends a fifth
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
            for _ in range(table.end(num_tokens, most) - len(table)):
                table.blocks.append(self._take(request.client))
        new_ids = tuple([table.ids(start) for table, start in zip(tables, num_before)])
        return new_ids if any(new_ids) else ()

    # --- prefixes that are loaded from disk -----------------------------------------------------------------

    @property
    def grows_block_by_block(self) -> bool:
        """Whether a prefix can be hit at each block boundary; with windows or states, only at some of them."""
        return not self.groups.has_windows and self.checkpoints is None

    def reach(self, request: Request, is_stored: Callable[[bytes, int], bool]) -> int:
        """The length of the prefix that `find_prefix` would find if what `is_stored` on disk were cached, too."""
        return self._cache.reach(request.block_hashes[: most_hit(request)], self.checkpoints, is_stored)

    def seen(self, request: Request, num_blocks: int) -> list[SeenBlock]:
        """The blocks that the token after the request's first `num_blocks` blocks attends to, and which are cached."""
        return self._cache.seen(request.block_hashes[:num_blocks])

    def hold(self, request: Request, seen: Sequence[SeenBlock]) -> list[SeenBlock]:
        """Gives a request without blocks those in `seen`: the cached ones, and new ones for the others, for which there
        must be room. Returns the new ones, for `cache_loaded`."""
        tables: dict[int, BlockTable] = {}
        new: list[SeenBlock] = []
        for _, _, block in seen:
            if block is not None:
                self._reference(block, request.client)
        for index, group, block in seen:
            if block is None:
                block = self._take(request.client)
                new.append(SeenBlock(index, group, block))
            tables.setdefault(group, BlockTable([], index)).blocks.append(block)
        self._tables[request.request_id] = [tables[group] for group in range(len(self.groups))]
        return new

    def cache_loaded(self, request: Request, seen: SeenBlock, *, is_rounded: bool) -> None:
        """Caches a block from `hold`: the next step begins with copying its content."""
        self._cache.insert_loaded(request, seen, is_rounded=is_rounded)

    def give_up_unseen(self, request: Request) -> None:
        """Gives up the blocks of groups with a window that lie before the window of the request's next token. They stay
        cached; the oldest is evicted first."""
        if not self.groups.has_windows:
            return
        position = request.num_computed_tokens
        for table, window in zip(self._tables[request.request_id], self.groups.windows):
            if window is not None:
                for block in table.give_up(first_seen(position, window)):
                    self._release(block)

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Caches the blocks that the first `num_tokens` tokens fill. Their ids are known, and their K/V are computed,
        or will be by a step that runs before any step that reads them. Blocks of pooled inputs are not cached: a
        thousand texts that come once would displace prefixes that come again."""
        if not self.enable_prefix_caching or request.pooling is not None:
            return
        num_full = num_tokens // BLOCK_SIZE
        first = self._num_cached.get(request.request_id, 0)
        if num_full <= first:
            return
        extend_block_hashes(request, self._root, num_tokens)
        self._cache.insert_all(request, self._tables[request.request_id], first, num_full)
        self._num_cached[request.request_id] = num_full
        if self.checkpoints is not None:
            self.checkpoints.commit(request, num_full)

    def free(self, request_id: str) -> None:
        """Gives back all blocks of a request, the last of each group first, so that shared beginnings are evicted
        last."""
        for block in reversed(self._leave(request_id)):
            self._release(block)

    def detach(self, request_id: str) -> list[Block]:
        """Ends the request's hold like `free`, but its blocks stay referenced until `free_detached`: a submitted step
        may still write them."""
        blocks = self._leave(request_id)
        self._detached.append(blocks)
        return blocks

    def free_detached(self, blocks: list[Block]) -> None:
        """Gives back what `detach` returned."""
        self._detached = [group for group in self._detached if group is not blocks]
        for block in reversed(blocks):
            self._release(block)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content; does nothing and returns False while any block is referenced."""
        if len(self._free) != len(self._blocks):
            return False
        for _, block in list(self._cache):
            self._evict(block)
        self._free = FreeBlockQueue(self._blocks)
        if self.checkpoints is not None:
            self.checkpoints.clear()
        self._cache.on_cleared()
        return True

    def check_integrity(self) -> None:
        """Asserts all invariants, in O(blocks); for tests and idle moments."""
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
                registered = self._cache.get(block.block_hash, block.layer_group)
                assert registered is block, f"{block} is not what its hash finds"
        assert len(free) + len(holders) == len(self._blocks), "free and referenced blocks are not all blocks"
        for block_hash, block in self._cache:
            assert block.block_hash == block_hash, f"{block} is cached under another hash"
        for request, found in self._found.items():
            walked = self._cache.longest_prefix(request.block_hashes, len(found))
            assert walked == found, f"what was found for {request} is no longer so"
        for request_id, tables in self._tables.items():
            for table, most in zip(tables, self.groups.most_held, strict=True):
                assert most is None or len(table.blocks) <= most, f"{request_id} holds more than its window"
                assert most is not None or table.num_gone == 0, f"{request_id} has given up what it still sees"

    def _start(self, request: Request, prefix: CachedPrefix) -> list[BlockTable]:
        """The tables of a request that is admitted: they begin with its cached prefix."""
        for block in prefix:
            self._reference(block, request.client)
            self.observer.on_hit(block)
        self._found.pop(request, None)
        if prefix:
            self._cache.on_hit(request, prefix)
            self._num_cached[request.request_id] = len(prefix)
        if self.checkpoints is not None:
            extend_block_hashes(request, self._root, request.num_tokens)
            num_cached = len(self._cache.longest_prefix(request.block_hashes, most_hit(request)))
            self.checkpoints.start(request, len(prefix), num_cached)
        return prefix.tables()

    def _leave(self, request_id: str) -> list[Block]:
        """Removes the records of a request and returns its blocks."""
        self._num_allocated.pop(request_id, None)
        self._num_cached.pop(request_id, None)
        if self.checkpoints is not None:
            self.checkpoints.stop(request_id)
        blocks = list(self._held_blocks(request_id))
        self._tables.pop(request_id, None)
        return blocks

    def _held_blocks(self, request_id: str) -> Iterator[Block]:
        """The blocks of a request, group by group."""
        return chain.from_iterable([table.blocks for table in self._tables.get(request_id, ())])

    def _num_missing(self, tables: list[BlockTable], num_tokens: int) -> int:
        """How many blocks the tables lack for `num_tokens` tokens."""
        pairs = zip(tables, self.groups.most_held)
        return sum([max(0, table.end(num_tokens, most) - len(table)) for table, most in pairs])
