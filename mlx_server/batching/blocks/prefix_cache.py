"""Which blocks already hold the K/V of which prefix, and the changes of that for listeners outside.

The hash of a block includes the hash of the block before it. So it stands for the whole prefix up to the block's end,
not for its 32 tokens alone: K/V depend on everything before them, so block Y of `A+Y` is not block Y of `B+Y`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple, TypeAlias

from mlx_server.batching.blocks.block import Block
from mlx_server.batching.blocks.layer_groups import BlockTable, first_seen
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import STATES
from mlx_server.request import PromptImage, Request, images_within

DIGEST_BYTES = 16


def root_hash(model_key: str) -> bytes:
    """The parent hash of every first block. `model_key` names the weights: K/V of other weights are different."""
    return blake2b(b"root\0" + model_key.encode(), digest_size=DIGEST_BYTES).digest()


def adapter_root(root: bytes, adapter: str) -> bytes:
    """The parent hash of the first blocks of an adapter's requests: their K/V differ from the model's own."""
    return blake2b(b"adapter\0" + root + adapter.encode(), digest_size=DIGEST_BYTES).digest()


_IMAGE = b"\xff\xff\xff\xff"
"""Marks an image where an extra key would have its length; no key is that long."""


def hash_block(
    parent: bytes,
    token_ids: Sequence[int],
    extra_keys: tuple[str, ...] = (),
    images: Sequence[tuple[bytes, int]] = (),
) -> bytes:
    """The 128-bit BLAKE2b hash of a block: of its parent's hash, its token ids, the extra keys (in a request's first
    block only), and each image with placeholders in the block, as the image's digest and the block's offset in it.

    It is cryptographic because a collision would show one client another's context. Placeholders have the same id for
    every image, so they say nothing of it. Example: of an image with 40 placeholders, a block that begins at the 20th
    has the offset 20; if the image begins 12 tokens after the block's start, the offset is -12.
    """
    digest = blake2b(parent, digest_size=DIGEST_BYTES)
    digest.update(array("I", token_ids).tobytes())
    for key in extra_keys:
        encoded = key.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    for image, offset in images:
        digest.update(_IMAGE + image + offset.to_bytes(8, "little", signed=True))
    return digest.digest()


def extend_block_hashes(request: Request, root: bytes, num_tokens: int) -> None:
    """Extends `request.block_hashes` to all full blocks of its first `num_tokens` known tokens."""
    hashes = request.block_hashes
    adapter = request.adapter_key or request.adapter
    first_parent = root if adapter is None else adapter_root(root, adapter)
    for index in range(len(hashes), num_tokens // BLOCK_SIZE):
        start = index * BLOCK_SIZE
        parent = hashes[-1] if hashes else first_parent
        extra = request.extra_keys if index == 0 else ()
        end = start + BLOCK_SIZE
        images = images_within(request.images, start, end)
        hashes.append(hash_block(parent, request.token_ids(start, end), extra, images))


def most_hit(request: Request) -> int:
    """The most blocks of a request that may be hit: at least one token must be computed."""
    return (request.num_tokens - 1) // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The first `num_blocks` blocks of a request, as far as its next token attends to them; `num_idle` of these blocks
    are not referenced.

    `groups` has the blocks of each layer group: all, or the last ones, which the group's window reaches.
    """

    num_blocks: int
    num_idle: int
    groups: tuple[list[Block], ...]

    def __len__(self) -> int:
        return self.num_blocks

    def __iter__(self) -> Iterator[Block]:
        """All blocks, group by group."""
        return chain.from_iterable(self.groups)

    @property
    def num_rounded(self) -> int:
        """How many blocks of the prefix were read from a record of 8 bits in any layer group."""
        first = [len(self) - len(blocks) for blocks in self.groups]
        numbered = [pair for blocks, number in zip(self.groups, first) for pair in enumerate(blocks, number)]
        return len({number for number, block in numbered if block.is_rounded})

    def tables(self) -> list[BlockTable]:
        """Block tables that begin with the prefix, one for each group."""
        return [BlockTable(list(blocks), len(self) - len(blocks)) for blocks in self.groups]


class SeenBlock(NamedTuple):
    """A block of a prefix in a layer group: its index in the prefix, and the cached block, if there is one."""

    number: int
    group: int
    block: Block | None


_Has = Callable[[bytes], bool]
"""Whether the block with this hash, or the state at its end, is there."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks [first, first + len(block_hashes)) of a prefix are cached. `parent` is the hash of the block before them,
    None for the first block. Layer group g has at least the blocks from index `missing[g]` of the prefix on.
    `extra_keys`, `adapter` and `images` are those of the requests that may hit the prefix. With `is_hit`, a request has
    hit the blocks and nothing has changed."""

    first: int
    parent: bytes | None
    block_hashes: tuple[bytes, ...]
    token_ids: Sequence[int]
    missing: tuple[int, ...]
    extra_keys: tuple[str, ...]
    adapter: str | None
    is_hit: bool = False
    images: tuple[PromptImage, ...] = ()

    @classmethod
    def of(
        cls, request: Request, first: int, end: int, missing: tuple[int, ...], *, is_hit: bool = False
    ) -> BlocksStored:
        """Blocks [first, end) of a request, whose hashes must be known."""
        hashes = request.block_hashes
        return cls(
            first,
            hashes[first - 1] if first else None,
            tuple(hashes[first:end]),
            request.token_ids(first * BLOCK_SIZE, end * BLOCK_SIZE),
            missing,
            request.extra_keys,
            request.adapter,
            is_hit,
            request.images,
        )


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A layer group's block with this hash is no longer cached."""

    block_hash: bytes
    group: int


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The recurrent state at the end of a block is now kept, or no longer kept."""

    block_hash: bytes
    is_kept: bool


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing is cached any more."""


PrefixChange: TypeAlias = BlocksStored | BlockRemoved | StateChanged | CacheCleared
PrefixListener: TypeAlias = Callable[[PrefixChange], None]
"""Gets all changes of a prefix cache, on the scheduler's thread, once or a few times a step. It must be quick: it puts
the change into a queue. A change holds all that it reports, so another thread can read it later."""


class PrefixCache:
    """Block hash and layer group to block. It does not know who uses a block or when it is evicted. `listener`, if set,
    gets all changes."""

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        """`windows` are the windows of the layer groups, in tokens; None for no window."""
        self.listener: PrefixListener | None = None
        self._windows = tuple(windows)
        self._groups: list[dict[bytes, Block]] = [{} for _ in windows]
        self._full = [group for group, window in enumerate(windows) if window is None]
        self._windowed = [
            (group, -((1 - window) // BLOCK_SIZE))  # blocks of the window - 1 tokens before a boundary
            for group, window in enumerate(windows)
            if window is not None
        ]

    def __len__(self) -> int:
        return sum([len(blocks) for blocks in self._groups])

    def __iter__(self) -> Iterator[tuple[bytes, Block]]:
        return chain.from_iterable(blocks.items() for blocks in self._groups)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether the first layer group has the block."""
        return block_hash in self._groups[0]

    def get(self, block_hash: bytes, group: int = 0) -> Block | None:
        return self._groups[group].get(block_hash)

    def longest_prefix(
        self, block_hashes: Sequence[bytes], max_blocks: int, ends: Container[bytes] | None = None
    ) -> CachedPrefix:
        """The longest cached prefix of at most `max_blocks`; with `ends`, one whose last hash is in `ends`.

        Groups without a window must have all of its blocks, other groups those that the token after it attends to.

            no window: blocks 0 to 5 and 7 are cached, so the prefix is 0 to 5
            a window of 64 tokens: 4 and 5 must be cached, too; if 5 is not, 3 and 4 make a prefix of 5 blocks
        """
        here = [blocks.__contains__ for blocks in self._groups]
        length = self._length(block_hashes[:max_blocks], here, None if ends is None else ends.__contains__)
        groups = []
        for blocks, window in zip(self._groups, self._windows):
            first = first_seen(length * BLOCK_SIZE, window)
            groups.append([blocks[block_hash] for block_hash in block_hashes[first:length]])
        num_idle = sum([block.ref_cnt == 0 for blocks in groups for block in blocks])
        return CachedPrefix(length, num_idle, tuple(groups))

    def reach(
        self, block_hashes: Sequence[bytes], ends: Container[bytes] | None, is_stored: Callable[[bytes, int], bool]
    ) -> int:
        """The length of `longest_prefix` if blocks of layer groups and states (`STATES`) that `is_stored` elsewhere
        were cached here, too."""

        def either(here: Container[bytes], group: int) -> _Has:
            return lambda block_hash: block_hash in here or is_stored(block_hash, group)

        groups = [either(blocks, group) for group, blocks in enumerate(self._groups)]
        return self._length(block_hashes, groups, None if ends is None else either(ends, STATES))

    def seen(self, block_hashes: Sequence[bytes]) -> list[SeenBlock]:
        """The blocks of a prefix that the token after it attends to, group by group."""
        num_blocks = len(block_hashes)
        return [
            SeenBlock(index, group, blocks.get(block_hashes[index]))
            for group, (blocks, window) in enumerate(zip(self._groups, self._windows))
            for index in range(first_seen(num_blocks * BLOCK_SIZE, window), num_blocks)
        ]

    def insert(self, block_hash: bytes, block: Block, group: int = 0) -> bool:
        """Caches a full block; False if an equal block is cached already, which then stays."""
        assert block.block_hash is None, f"{block} is cached already"
        if block_hash in self._groups[group]:
            return False
        self._groups[group][block_hash] = block
        block.block_hash, block.layer_group = block_hash, group
        return True

    def insert_all(self, request: Request, tables: Sequence[BlockTable], first: int, num_full: int) -> None:
        """Caches blocks [first, num_full) of a request, except those that its tables no longer hold."""
        for group, table in enumerate(tables):
            for index in range(max(first, table.num_gone), num_full):
                self.insert(request.block_hashes[index], table.blocks[index - table.num_gone], group)
        if self.listener is not None:
            self.listener(BlocksStored.of(request, first, num_full, tuple([table.num_gone for table in tables])))

    def insert_loaded(self, request: Request, seen: SeenBlock, *, is_rounded: bool) -> None:
        """Caches one block of a request whose hashes are known."""
        assert seen.block is not None, "what is loaded is in a block"
        if not self.insert(request.block_hashes[seen.number], seen.block, seen.group):
            return
        seen.block.is_rounded = is_rounded
        if self.listener is not None:
            after = seen.number + 1
            missing = tuple([after - (group == seen.group) for group in range(len(self._groups))])
            self.listener(BlocksStored.of(request, seen.number, after, missing))

    def on_hit(self, request: Request, prefix: CachedPrefix) -> None:
        """A request begins with a cached prefix."""
        if self.listener is not None:
            missing = tuple([len(prefix) - len(blocks) for blocks in prefix.groups])
            self.listener(BlocksStored.of(request, 0, len(prefix), missing, is_hit=True))

    def on_cleared(self) -> None:
        """All blocks and states have been removed."""
        if self.listener is not None:
            self.listener(CacheCleared())

    def remove(self, block: Block) -> None:
        """Forgets a cached block, whose memory is about to be overwritten."""
        assert block.block_hash is not None, f"{block} is not cached"
        if self.listener is not None:
            self.listener(BlockRemoved(block.block_hash, block.layer_group))
        del self._groups[block.layer_group][block.block_hash]
        block.block_hash, block.is_rounded = None, False

    def _length(self, block_hashes: Sequence[bytes], groups: Sequence[_Has], is_end: _Has | None) -> int:
        """The last boundary before which groups without a window have all blocks, at which each window is complete, and
        that `is_end`."""
        length, before = len(block_hashes), -1
        for group in self._full:
            has = groups[group]
            length = next((index for index in range(length) if not has(block_hashes[index])), length)
        while length != before:
            before = length
            for group, num_seen in self._windowed:
                length = _last_whole(groups[group], num_seen, block_hashes, length)
            while is_end is not None and length and not is_end(block_hashes[length - 1]):
                length -= 1
        return length


def _last_whole(has: _Has, num_seen: int, block_hashes: Sequence[bytes], length: int) -> int:
    """The last boundary up to `length` whose `num_seen` blocks before it (or all, if there are fewer) are cached."""
    num_cached = 0
    for index in range(length - 1, -1, -1):
        if num_cached == num_seen:
            break
        num_cached += 1
        if not has(block_hashes[index]):
            length, num_cached = index, 0
    return length
