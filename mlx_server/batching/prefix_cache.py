"""Which blocks already hold the K/V of which prefix.

A block's hash chains that of the block before it, so that it stands for the whole prefix up to its end and
not for 32 tokens alone: K/V depend on everything before them, and block Y of `A+Y` is not block Y of `B+Y`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from mlx_server.batching.block import Block
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


class PrefixCache:
    """Block hash to block. Knows neither who uses a block nor when it is evicted."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[tuple[bytes, Block]]:
        return iter(self._blocks.items())

    def get(self, block_hash: bytes) -> Block | None:
        return self._blocks.get(block_hash)

    def longest_prefix(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[Block]:
        """Blocks of the longest cached prefix, at most `max_blocks`."""
        found: list[Block] = []
        for block_hash in block_hashes[:max_blocks]:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, block_hash: bytes, block: Block) -> bool:
        """Registers a full block; False if an equal one is registered already, which then stays the one."""
        assert block.block_hash is None, f"{block} is cached already"
        if block_hash in self._blocks:
            return False
        self._blocks[block_hash] = block
        block.block_hash = block_hash
        return True

    def remove(self, block: Block) -> None:
        """Forgets a cached block: its memory is about to be written anew."""
        assert block.block_hash is not None, f"{block} is not cached"
        del self._blocks[block.block_hash]
        block.block_hash = None
