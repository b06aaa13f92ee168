"""The memory of one model's KV pool: what it may grow by, and how it is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mlx_server.engine.memory_budget import MemoryShare

_REFUSAL_S = 0.2
"""How long a refusal stands before the system is asked again: a full pool asks for every block."""

_ROOMY_BELOW = 0.8
"""Pressure to which a pool doubles and keeps what is cached: well under the one at which it gives that back."""

_NEEDED_BELOW = 0.89
"""Pressure to which it gets what a request needs: under the one at which nobody is admitted any more."""


class KvMemory:
    """Lets a pool of blocks grow within its model's share of the budget; a `BlockSupply`. Event-loop thread only."""

    def __init__(self, share: MemoryShare, block_bytes: int, clock: Callable[[], float]) -> None:
        self.block_bytes = block_bytes
        self._share = share
        self._clock = clock
        self._refused_blocks: dict[bool, int] = {}
        self._refused_until_s = 0.0
        self._num_given_back = 0
        self._given_back = asyncio.Event()

    def take(self, least: int, most: int, *, is_needed: bool) -> int:
        now = self._clock()
        if now >= self._refused_until_s:
            self._refused_blocks.clear()
        elif least >= self._refused_blocks.get(is_needed, least + 1):
            return 0
        num_blocks = min(most, self._growable_blocks(_ROOMY_BELOW))
        if num_blocks < least and is_needed:
            num_blocks = min(least, self._growable_blocks(_NEEDED_BELOW))
        if num_blocks < least or not self._share.grow(num_blocks * self.block_bytes):
            self._refused_blocks[is_needed] = least
            self._refused_until_s = now + _REFUSAL_S
            return 0
        return num_blocks

    def _growable_blocks(self, pressure: float) -> int:
        return self._share.growable_bytes(pressure) // self.block_bytes

    def give_back(self, num_blocks: int) -> None:
        self._share.shrink(num_blocks * self.block_bytes)
        self._num_given_back += num_blocks
        self._given_back.set()

    async def given_back(self, num_blocks: int) -> None:
        """Returns when so many blocks have been given back in all."""
        while self._num_given_back < num_blocks:
            self._given_back.clear()
            await self._given_back.wait()
