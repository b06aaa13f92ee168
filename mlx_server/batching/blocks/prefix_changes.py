"""The changes of a prefix cache, for listeners outside: enough to know which prefixes a request would hit.

A listener is called on the scheduler's thread, once or a few times a step, and must be quick: it puts the change into a
queue. A change holds all that it reports, so another thread can read it later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mlx_server.config import BLOCK_SIZE
from mlx_server.request import PromptImage, Request


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
