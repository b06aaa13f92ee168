"""Which blocks already hold the K/V of which prefix.

A block's hash chains that of the block before it, so that it stands for the whole prefix up to its end and
not for 32 tokens alone: K/V depend on everything before them, and block Y of `A+Y` is not block Y of `B+Y`.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

from mlx_server.batching.block import Block
from mlx_server.batching.layer_groups import first_seen
from mlx_server.config import BLOCK_SIZE
from mlx_server.request import Request

DIGEST_BYTES = 16


def root_hash(model_key: str) -> bytes:
    """The parent of every first block. `model_key` names the weights: other weights, other K/V."""
    return blake2b(b"root\0" + model_key.encode(), digest_size=DIGEST_BYTES).digest()


def adapter_root(root: bytes, adapter: str) -> bytes:
    """The parent of the first blocks of an adapter's requests: its K/V are no other's, nor the model's own."""
    return blake2b(b"adapter\0" + root + adapter.encode(), digest_size=DIGEST_BYTES).digest()


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    """128-bit BLAKE2b of the parent's hash, the ids and, in a request's first block, its extra keys.

    Cryptographic because a collision would show one client another's context.
    """
    digest = blake2b(parent, digest_size=DIGEST_BYTES)
    digest.update(array("I", token_ids).tobytes())
    for key in extra_keys:
        encoded = key.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


def extend_block_hashes(request: Request, root: bytes, num_tokens: int) -> None:
    """Brings `request.block_hashes` up to every full block within its first `num_tokens` known tokens."""
    hashes = request.block_hashes
    first_parent = root if request.adapter is None else adapter_root(root, request.adapter)
    for index in range(len(hashes), num_tokens // BLOCK_SIZE):
        start = index * BLOCK_SIZE
        parent = hashes[-1] if hashes else first_parent
        extra = request.extra_keys if index == 0 else ()
        hashes.append(hash_block(parent, request.token_ids(start, start + BLOCK_SIZE), extra))


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The first `num_blocks` blocks of a request, as far as its next token sees them.

    `groups` has those of each layer group: all of them, or the last ones, which lie in the group's window.
    """

    num_blocks: int
    groups: tuple[list[Block], ...]

    def __len__(self) -> int:
        return self.num_blocks

    def __iter__(self) -> Iterator[Block]:
        """Every block, group by group."""
        return chain.from_iterable(self.groups)


class PrefixCache:
    """Block hash and layer group to block. Knows neither who uses a block nor when it is evicted."""

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        """`windows` are those of the layer groups."""
        self._windows = tuple(windows)
        self._groups: list[dict[bytes, Block]] = [{} for _ in windows]
        self._full = [blocks for blocks, window in zip(self._groups, windows) if window is None]
        self._windowed = [
            (blocks, -((1 - window) // BLOCK_SIZE))  # those that hold the window - 1 tokens before a boundary
            for blocks, window in zip(self._groups, windows)
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
        """The longest cached prefix of at most `max_blocks`, whose last hash is one of `ends` if they are given.

        Groups without a window have all of its blocks, others those that the token behind it sees.
        """
        length = self._last_end(block_hashes, self._num_in_full(block_hashes[:max_blocks]), ends)
        groups = []
        for blocks, window in zip(self._groups, self._windows):
            first = first_seen(length * BLOCK_SIZE, window)
            groups.append([blocks[block_hash] for block_hash in block_hashes[first:length]])
        return CachedPrefix(length, tuple(groups))

    def insert(self, block_hash: bytes, block: Block, group: int = 0) -> bool:
        """Registers a full block; False if an equal one is registered already, which then stays the one."""
        assert block.block_hash is None, f"{block} is cached already"
        if block_hash in self._groups[group]:
            return False
        self._groups[group][block_hash] = block
        block.block_hash, block.layer_group = block_hash, group
        return True

    def remove(self, block: Block) -> None:
        """Forgets a cached block: its memory is about to be written anew."""
        assert block.block_hash is not None, f"{block} is not cached"
        del self._groups[block.layer_group][block.block_hash]
        block.block_hash = None

    def _num_in_full(self, block_hashes: Sequence[bytes]) -> int:
        """How many of the blocks, from the first, all groups without a window have."""
        num_blocks = len(block_hashes)
        for blocks in self._full:
            for index in range(num_blocks):
                if block_hashes[index] not in blocks:
                    num_blocks = index
                    break
        return num_blocks

    def _last_end(self, block_hashes: Sequence[bytes], num_blocks: int, ends: Container[bytes] | None) -> int:
        """The last boundary, `num_blocks` at most, at which every window is whole and that is one of `ends`."""
        length, before = num_blocks, -1
        while length != before:
            before = length
            for blocks, num_seen in self._windowed:
                length = _last_whole(blocks, num_seen, block_hashes, length)
            if ends is not None:
                while length and block_hashes[length - 1] not in ends:
                    length -= 1
        return length


def _last_whole(blocks: Container[bytes], num_seen: int, block_hashes: Sequence[bytes], length: int) -> int:
    """The last boundary, `length` at most, whose `num_seen` blocks before it (or all there are) are cached."""
    num_cached = 0
    for index in range(length - 1, -1, -1):
        if num_cached == num_seen:
            break
        num_cached += 1
        if block_hashes[index] not in blocks:
            length, num_cached = index, 0
    return length
