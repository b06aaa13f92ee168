"""What a prefix cache tells of itself while it changes: enough to know from outside which prefixes a request would hit.

Whoever is told is on the scheduler's thread, once or a few times a step, and must be quick: it puts the change into a
queue. Changes hold what they tell of, so that they may be read later on another thread.
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
    None for a prefix's first block. Layer group g has them from index `missing[g]` in the prefix on, at least.
    `extra_keys`, `adapter` and `images` are those of the requests that may hit the prefix. `is_hit`: a request has hit
    them, and nothing has changed."""

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
        """Blocks [first, end) of a request whose hashes are known so far."""
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
    """A layer group's block of that hash is cached no more."""

    block_hash: bytes
    group: int


@dataclass(frozen=True, slots=True)
class StateChanged:
    """Whether the recurrent state at the end of a block is kept has changed."""

    block_hash: bytes
    is_kept: bool


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing is cached."""


PrefixChange: TypeAlias = BlocksStored | BlockRemoved | StateChanged | CacheCleared
Tell: TypeAlias = Callable[[PrefixChange], None]
