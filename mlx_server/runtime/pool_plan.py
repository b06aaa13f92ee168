"""How large a model's pools are to begin with, and how large they may become."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_server.config import BLOCK_SIZE, CacheConfig
from mlx_server.runtime.kv_cache import PagedKVCache
from mlx_server.runtime.memory import checkpoint_slots, first_kv_blocks, max_kv_blocks, state_slots


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Slots for the recurrent state of `num_slots` requests and of `num_checkpoints` prefixes, which take
    `state_bytes`, and `num_blocks` blocks that may become `max_blocks`."""

    num_slots: int
    num_checkpoints: int
    state_bytes: int
    num_blocks: int
    max_blocks: int
    block_bytes: int

    @property
    def first_bytes(self) -> int:
        """What is allocated before the first request."""
        return self.num_blocks * self.block_bytes + self.state_bytes


def plan_pools(
    cache: PagedKVCache,
    settings: CacheConfig,
    *,
    max_num_tokens: int,
    max_num_seqs: int,
    kv_limit_bytes: int,
    state_limit_bytes: int,
) -> PoolPlan:
    """What `cache` needs for at most `max_num_seqs` requests at a time and `max_num_tokens` tokens of theirs.

    All of it may take `kv_limit_bytes`. Recurrent state, which does not grow, takes shares of `state_limit_bytes`:
    what is free now; none is kept for prefixes that are not cached. Raises `InsufficientMemoryError` or `ConfigError`
    if the pool asked for is not to be had.
    """
    slot_bytes = cache.slot_bytes
    num_slots = state_slots(slot_bytes, max_num_seqs, state_limit_bytes)
    num_checkpoints = checkpoint_slots(slot_bytes, num_slots, state_limit_bytes) if settings.prefix_caching else 0
    state_bytes = (num_slots + num_checkpoints) * slot_bytes
    block_bytes = max(1, cache.block_bytes)  # there are models that keep nothing in blocks
    num_groups = len(cache.windows)
    max_blocks = num_groups * max_kv_blocks(
        settings.kv_cache_memory,
        settings.num_kv_blocks,
        num_groups * block_bytes,
        -(-max_num_tokens // BLOCK_SIZE),
        kv_limit_bytes - state_bytes,
    )
    num_blocks = num_groups * (settings.num_kv_blocks or first_kv_blocks(max_blocks // num_groups))
    return PoolPlan(num_slots, num_checkpoints, state_bytes, num_blocks, max_blocks, block_bytes)
