"""How long KV blocks keep what is in them: sampled, and only when it is asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from mlx_server.observability.histogram import Histogram

_RESIDENCY_S = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    1200,
    1800,
)


@dataclass(slots=True)
class _Stay:
    began_s: float
    last_used_s: float


class KVBlockResidency:
    """vLLM's three histograms of a block's content: from its first token to its eviction, from its last use to that,
    and between two uses. Of the blocks that are taken, a share is followed. Event-loop thread only.
    """

    def __init__(self, share: float, clock: Callable[[], float], seed: int | None = None) -> None:
        """`share` of the blocks, 0 to 1; times are on `clock`."""
        self.by_name = {
            "kv_block_lifetime_seconds": Histogram(_RESIDENCY_S),
            "kv_block_idle_before_evict_seconds": Histogram(_RESIDENCY_S),
            "kv_block_reuse_gap_seconds": Histogram(_RESIDENCY_S),
        }
        self._share = share
        self._clock = clock
        self._draw = random.Random(seed).random
        self._stays: dict[Hashable, _Stay] = {}

    def on_taken(self, block: Hashable) -> None:
        """A request got the block for tokens of its own; what was in it is gone."""
        self.on_evicted(block)
        if self._draw() < self._share:
            now = self._clock()
            self._stays[block] = _Stay(now, now)

    def on_hit(self, block: Hashable) -> None:
        """A request shares what is in the block."""
        stay = self._stays.get(block)
        if stay is not None:
            now = self._clock()
            self.by_name["kv_block_reuse_gap_seconds"].observe(now - stay.last_used_s)
            stay.last_used_s = now

    def on_freed(self, block: Hashable) -> None:
        """Nobody holds the block any more; its content may be hit until it is evicted."""
        stay = self._stays.get(block)
        if stay is not None:
            stay.last_used_s = self._clock()

    def on_evicted(self, block: Hashable) -> None:
        """What is in the block is lost."""
        stay = self._stays.pop(block, None)
        if stay is not None:
            now = self._clock()
            self.by_name["kv_block_lifetime_seconds"].observe(now - stay.began_s)
            self.by_name["kv_block_idle_before_evict_seconds"].observe(now - stay.last_used_s)

    def forget(self) -> None:
        """The pool is a new one: those who were followed are gone without an eviction."""
        self._stays.clear()
