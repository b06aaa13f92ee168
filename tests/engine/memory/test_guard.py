"""What a guard asks of its pool, step by step, and when it no longer asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_server.engine.memory.guard import MemoryGuard, PressureLevel

NONE, EVICT, HOLD, PREEMPT = PressureLevel


class Pool:
    """A pool of 21 blocks, all of them idle, which keeps one. It cuts what it is asked to, unless it `saves`."""

    def __init__(self, *, saves: bool = False) -> None:
        self.blocks = SimpleNamespace(num_blocks=21, num_free_blocks=21, groups=[None], is_changed=False)
        self.saves = saves
        self.asked: list[tuple[int, bool]] = []
        self.held: list[bool] = []

    def shrink(self, num_blocks: int, *, saves_first: bool = False) -> int:
        self.asked.append((num_blocks, saves_first))
        num_cut = 0 if saves_first and self.saves else num_blocks
        self.blocks.num_blocks -= num_cut
        self.blocks.num_free_blocks -= num_cut
        return num_cut

    def hold_admission(self, is_held: bool) -> None:
        self.held.append(is_held)

    def lowest_rank(self) -> None:
        return None

    def preempt_lowest(self) -> bool:
        return True


class Memory:
    """10 bytes a block; what was cut is given back at once."""

    block_bytes = 10

    def __init__(self) -> None:
        self.awaited: list[int] = []

    async def given_back(self, num_blocks: int) -> None:
        self.awaited.append(num_blocks)


def guard_of(pool: Pool, memory: Memory | None = None) -> MemoryGuard:
    found: Any = (pool, memory or Memory())
    return MemoryGuard(*found)


@pytest.fixture
def idle() -> int:
    """The blocks that the pool can do without."""
    pool = Pool()
    return guard_of(pool).num_idle_bytes // 10


def test_each_level_asks_for_its_part(idle: int) -> None:
    pool = Pool()
    guard = guard_of(pool)
    guard.act(NONE)
    assert (pool.asked, pool.held) == ([], [False])
    guard.act(EVICT)
    half = -(-idle // 2)
    guard.act(HOLD)
    assert pool.asked == [(half, True), (-(-(idle - half) // 2), True)]
    left = idle - half - pool.asked[1][0]
    guard.act(PREEMPT)
    assert pool.asked[2] == (left, False)
    assert pool.held == [False, False, True, True]
    assert (guard.counters.num_pressure_cuts, guard.counters.num_pressure_holds) == (3, 1)
    guard.act(PREEMPT)
    assert pool.asked[3] == (0, False)
    assert guard.counters.num_pressure_cuts == 3, "nothing was left"
    guard.act(EVICT)
    guard.act(HOLD)
    assert guard.counters.num_pressure_holds == 2
    guard.preempt_lowest()
    assert guard.counters.num_pressure_preemptions == 1


def test_a_cut_is_put_off_twice_and_forgotten_when_memory_is_back(idle: int) -> None:
    pool = Pool(saves=True)
    guard = guard_of(pool)
    half = -(-idle // 2)
    guard.act(EVICT)
    guard.act(NONE)
    assert pool.asked == [(half, True), (0, False)]
    guard.act(NONE)
    assert len(pool.asked) == 2, "once"
    for _ in range(3):
        guard.act(EVICT)
    assert pool.asked[2:] == [(half, True), (half, True), (half, False)]
    guard.act(NONE)
    assert len(pool.asked) == 5, "the cut was made"
    num_free, pool.blocks.num_free_blocks = pool.blocks.num_free_blocks, 0
    for _ in range(3):
        guard.act(EVICT)
    pool.blocks.num_free_blocks = num_free
    guard.act(EVICT)
    assert pool.asked[-1][1], "nothing was put off while there was nothing to cut"


async def test_others_get_what_they_ask_for_or_what_is_idle(idle: int) -> None:
    pool, memory = Pool(), Memory()
    guard = guard_of(pool, memory)
    assert await guard.give_memory(11, 1.0) == 20
    assert await guard.give_memory(10, 1.0) == 10
    assert await guard.give_memory(10**6, 1.0) == 10 * (idle - 3)
    assert await guard.give_memory(10, 1.0) == 0
    assert pool.asked == [(2, True), (1, True), (idle - 3, True)]
    assert memory.awaited == [2, 3, idle], "of all cuts together"
    assert guard.num_idle_bytes == 0


async def test_what_comes_too_late_is_no_longer_asked_for() -> None:
    pool = Pool()

    def refuse(num_blocks: int, *, saves_first: bool = False) -> int:
        pool.asked.append((num_blocks, saves_first))
        return 0

    pool.shrink = refuse  # type: ignore[method-assign]
    assert await guard_of(pool).give_memory(10, 0.1) == 0
    assert pool.asked[-1] == (0, False)
    assert set(pool.asked[:-1]) == {(1, True), (1, False)}
