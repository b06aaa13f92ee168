"""Mirrors a prefix cache from its changes, and finds the blocks to announce to routers, and to withdraw.

A block is *offered* while it is part of a prefix that a request can hit. This differs from being cached:

- all layers keep everything: every block before it must be cached, too;
- some layers have a window: a prefix can be hit at a boundary if these layers have the blocks that the window covers
  there. All blocks before the boundary are offered, even those that the windowed layers have freed;
- recurrent layers: a prefix can be hit where a state is kept, and all blocks before are offered.

Example: blocks A B C D, a window of two blocks, and the windowed layers have freed A. At B the window lacks A, so B is
no boundary. C and D are boundaries, so all four blocks are offered. If the windowed layers free D, too, C is the last
boundary, and D is withdrawn. If they free B, there is no boundary left, and A, B and C are withdrawn, although other
layers may still have them.

Every hit is on offered blocks. If all layers keep everything, every offered block can be hit. Otherwise a prompt that
differs from an offered prefix at some point hits up to the last boundary before that point.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mlx_server.batching.blocks.prefix_cache import (
    BlockRemoved,
    BlocksStored,
    CacheCleared,
    PrefixChange,
    StateChanged,
)
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import images_within

ANNOUNCE_AGAIN_S = 60.0
"""A block that is hit is announced again after this time, for routers that started late."""

_MAX_REMEMBERED = 8192
"""Blocks that are no longer cached, but may be about to be written to the disk, or gone on behind."""


@dataclass(slots=True, eq=False)
class MirroredBlock:
    """A block that is cached, or was cached and has cached blocks after it. `parent` is None for a prefix's first
    block, and if it is unknown; without `token_ids`, only the hash is known. `image_keys` name the images whose
    placeholder tokens it has, and its place in them. `groups` are the layer groups that have it, as bits. `runs` are,
    for each window, how many of its blocks are present from this one backwards. `announced_s` is the time of the last
    announcement; None if it is not announced."""

    block_hash: bytes
    parent: MirroredBlock | None = None
    token_ids: Sequence[int] = ()
    extra_keys: tuple[str, ...] = ()
    image_keys: tuple[str, ...] = ()
    adapter: str | None = None
    groups: int = 0
    is_whole: bool = False
    runs: tuple[int, ...] = ()
    is_boundary: bool = False
    num_offered_behind: int = 0
    children: set[MirroredBlock] = field(default_factory=set)
    announced_s: float | None = None

    @property
    def is_offered(self) -> bool:
        return self.is_boundary or self.num_offered_behind > 0


@dataclass(frozen=True, slots=True)
class Announcement:
    """The changes since the last announcement, in this order: the cache was cleared, blocks were removed, and chains of
    consecutive blocks were stored. `removed_from_disk` and `on_disk` are the same for single blocks on disk."""

    is_cleared: bool
    removed: list[bytes]
    stored: list[list[MirroredBlock]]
    removed_from_disk: list[bytes]
    on_disk: list[MirroredBlock]


class PrefixMirror:
    """The mirror of one model's cache. Not thread-safe."""

    def __init__(
        self,
        windows: Sequence[int | None],
        *,
        has_states: bool = False,
        is_on_disk: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`windows` are those of the layer groups. `has_states`: prefixes are hit only where a state is kept.
        `is_on_disk` says whether a block can be read from the disk tier, if there is one."""
        self._full = sum(1 << group for group, window in enumerate(windows) if window is None)
        self._windows = [(1 << g, -((1 - window) // BLOCK_SIZE)) for g, window in enumerate(windows) if window]
        self._before = tuple(num_seen for _, num_seen in self._windows)  # the runs before a first block
        self._states: set[bytes] | None = set() if has_states else None
        self._is_on_disk = is_on_disk
        self._blocks: dict[bytes, MirroredBlock] = {}
        self._changed: dict[MirroredBlock, None] = {}
        self._hits: list[MirroredBlock] = []
        self._unused: OrderedDict[MirroredBlock, None] = OrderedDict()  # the oldest first; some may have come back
        # If all layers have windows, all may have given up a block before the next one of its prefix is full.
        self._max_unused = _MAX_REMEMBERED if is_on_disk is not None or not self._full else 0
        self._announced_on_disk: set[bytes] = set()
        self._disk_changes: dict[bytes, bool] = {}
        self._is_cleared = True

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, change: PrefixChange) -> None:
        """Applies one change of the cache."""
        if isinstance(change, BlocksStored):
            self._store(change)
        elif isinstance(change, BlockRemoved):
            block = self._blocks.get(change.block_hash)
            if block is not None:
                block.groups &= ~(1 << change.group)
                self._settle(block)
                self._unused[block] = None
                self._unused.move_to_end(block)
        elif isinstance(change, StateChanged):
            self._keep_state(change)
        else:
            assert isinstance(change, CacheCleared)
            self._clear()

    def change_disk(self, block_hash: bytes, is_there: bool) -> None:
        """Notes that a block, perhaps of another model, was written to the disk, or removed from it."""
        if self._is_on_disk is not None:
            self._disk_changes[block_hash] = is_there

    def take(self, now: float) -> Announcement:
        """Returns what to announce. `now` is the caller's clock in seconds."""
        removed = [
            block.block_hash for block in self._changed if block.announced_s is not None and not block.is_offered
        ]
        stored = []
        for block in reversed(self._changed):
            if not block.is_offered:
                block.announced_s = None
            elif block.announced_s is None:
                stored.append(_announce(_unannounced_to(block), now))
        for block in self._hits:
            stored += [_announce(run, now) for run in _old_runs_to(block, now - ANNOUNCE_AGAIN_S)]
        is_cleared = self._is_cleared
        while len(self._unused) > self._max_unused:
            self._drop_unused(self._unused.popitem(last=False)[0])
        self._changed, self._hits, self._is_cleared = {}, [], False
        removed_from_disk = [
            h for h, is_there in self._disk_changes.items() if not is_there and h in self._announced_on_disk
        ]
        self._announced_on_disk.difference_update(removed_from_disk)
        return Announcement(is_cleared, removed, stored, removed_from_disk, list(self._take_disk(stored)))

    def _store(self, change: BlocksStored) -> None:
        parent = None if change.parent is None else self._block(change.parent)
        block = parent
        for offset, block_hash in enumerate(change.block_hashes):
            index = change.first + offset
            block = self._block(block_hash)
            if not block.token_ids:
                block.token_ids = array("I", change.token_ids[offset * BLOCK_SIZE : (offset + 1) * BLOCK_SIZE])
                block.adapter, block.parent = change.adapter, parent
                block.extra_keys = change.extra_keys if index == 0 else ()
                within = images_within(change.images, index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
                block.image_keys = tuple([f"{digest.hex()}:{place}" for digest, place in within])
                if parent is not None:
                    parent.children.add(block)
            groups = sum([1 << group for group, missing in enumerate(change.missing) if index >= missing])
            if groups & ~block.groups or not block.is_whole:
                block.groups |= groups
                self._settle(block)
            parent = block
        if change.is_hit and block is not None:
            self._hits.append(block)
            if self._states is not None:
                self._keep_state(StateChanged(block.block_hash, is_kept=True))

    def _keep_state(self, change: StateChanged) -> None:
        assert self._states is not None, "only recurrent models have states"
        (self._states.add if change.is_kept else self._states.discard)(change.block_hash)
        block = self._blocks.get(change.block_hash)
        if block is not None:
            self._settle(block)

    def _clear(self) -> None:
        self._blocks, self._changed, self._hits = {}, {}, []
        self._unused.clear()
        self._announced_on_disk.clear()
        if self._states is not None:
            self._states.clear()
        self._is_cleared = True

    def _block(self, block_hash: bytes) -> MirroredBlock:
        block = self._blocks.get(block_hash)
        if block is None:
            block = self._blocks[block_hash] = MirroredBlock(block_hash)
        return block

    def _settle(self, block: MirroredBlock) -> None:
        """Updates whether prefixes can be hit at the end of a block, and of the blocks after it that this affects."""
        todo = [block]
        while todo:
            block = todo.pop()
            above = block.parent
            is_whole = bool(block.token_ids) and block.groups & self._full == self._full
            is_whole = is_whole and (above is None or above.is_whole)
            before = self._before if above is None else above.runs or (0,) * len(self._windows)
            runs = tuple(
                [
                    min(num_seen, run + 1) if block.groups & group else 0
                    for (group, num_seen), run in zip(self._windows, before, strict=True)
                ]
            )
            if (is_whole, runs) != (block.is_whole, block.runs):
                block.is_whole, block.runs = is_whole, runs
                todo += block.children
            has_state = self._states is None or block.block_hash in self._states
            self._offer(block, is_whole and has_state and runs == self._before)

    def _offer(self, block: MirroredBlock, is_boundary: bool) -> None:
        was_offered, block.is_boundary = block.is_offered, is_boundary
        at: MirroredBlock | None = block
        while at is not None and at.is_offered != was_offered:
            self._changed[at] = None
            above = at.parent
            if above is not None:
                was_offered = above.is_offered
                above.num_offered_behind += 1 if at.is_offered else -1
            at = above

    def _drop_unused(self, block: MirroredBlock) -> None:
        """Forgets a block that no layer has and that no other block follows; then the blocks before it if the same is
        true of them."""
        at: MirroredBlock | None = block
        while at is not None and not at.groups and not at.children and at not in self._unused:
            del self._blocks[at.block_hash]
            if (above := at.parent) is not None:
                above.children.discard(at)
            at = above

    def _take_disk(self, stored: Sequence[Sequence[MirroredBlock]]) -> Iterator[MirroredBlock]:
        """Yields blocks on disk to announce: those just written, and known ones that were there already."""
        is_on_disk = self._is_on_disk
        if is_on_disk is None:
            return
        written = [self._blocks.get(h) for h, is_there in self._disk_changes.items() if is_there]
        self._disk_changes = {}
        known = [block for chain in stored for block in chain if is_on_disk(block.block_hash)]
        for block in [*written, *known]:
            if block is not None and block.token_ids and block.block_hash not in self._announced_on_disk:
                self._announced_on_disk.add(block.block_hash)
                yield block


def _unannounced_to(block: MirroredBlock) -> list[MirroredBlock]:
    """The unannounced blocks up to this one, in order."""
    chain = [block]
    while (above := chain[-1].parent) is not None and above.announced_s is None:
        chain.append(above)
    return chain[::-1]


def _old_runs_to(block: MirroredBlock, before_s: float) -> list[list[MirroredBlock]]:
    """The blocks up to this one that were announced before `before_s`, as chains without gaps."""
    runs: list[list[MirroredBlock]] = []
    at: MirroredBlock | None = block
    is_open = False
    while at is not None:
        is_old = at.is_offered and at.announced_s is not None and at.announced_s <= before_s
        if is_old:
            if not is_open:
                runs.append([])
            runs[-1].append(at)
        is_open = is_old
        at = at.parent
    return [run[::-1] for run in reversed(runs)]


def _announce(chain: list[MirroredBlock], now: float) -> list[MirroredBlock]:
    for block in chain:
        block.announced_s = now
    return chain
