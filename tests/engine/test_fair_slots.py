"""Who gets the next slot."""

from __future__ import annotations

import asyncio

import pytest

from mlx_server.engine.fair_slots import Asker, FairSlots, Slot
from mlx_server.errors import QuotaExceededError
from mlx_server.request import Priority


async def queue_up(slots: FairSlots, askers: list[Asker], got: list[Asker]) -> list[asyncio.Task[None]]:
    """Each gets a slot, writes itself down and gives it back."""

    async def use(asker: Asker) -> None:
        slot = await slots.acquire(asker)
        got.append(asker)
        slot.release()

    tasks = [asyncio.create_task(use(asker)) for asker in askers]
    await asyncio.sleep(0)
    return tasks


async def order(askers: list[Asker], num_slots: int = 1) -> list[Asker]:
    """The order in which they get the one slot that all wait for."""
    slots, got = FairSlots(num_slots), []
    held = await slots.acquire(Asker("holder", Priority.HIGH))
    tasks = await queue_up(slots, askers, got)
    assert slots.num_waiting == len(askers)
    held.release()
    await asyncio.gather(*tasks)
    assert (slots.num_held, slots.num_waiting) == (0, 0)
    return got


async def test_better_tiers_come_first():
    askers = [Asker("a", priority) for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH)]
    assert await order(askers) == askers[::-1]


async def test_the_keys_of_a_tier_take_turns():
    many, few = [Asker("many")] * 6, [Asker("few")] * 2
    assert [asker.key for asker in await order(many + few)] == ["many", "few", "many", "few", *["many"] * 4]


async def test_an_eighth_is_for_worse_tiers():
    high, low = [Asker("h", Priority.HIGH)] * 24, [Asker("l", Priority.LOW)] * 3
    got = await order(low + high)
    assert [index for index, asker in enumerate(got) if asker.key == "l"] == [7, 15, 23]


async def take(slots: FairSlots, priority: Priority) -> list[Slot]:
    """All slots that this priority can have now."""
    taken: list[Slot] = []
    while (slot := slots.try_acquire(Asker("k", priority))) is not None:
        taken.append(slot)
    return taken


async def test_worse_tiers_leave_slots_for_better_ones():
    slots = FairSlots(5)
    low = await take(slots, Priority.LOW)
    normal = await take(slots, Priority.NORMAL)
    high = await take(slots, Priority.HIGH)
    assert (len(low), len(normal), len(high)) == (3, 1, 1)
    low[0].release()
    assert len(await take(slots, Priority.HIGH)) == 1
    assert slots.num_held == 5


async def test_there_is_always_one_for_everybody():
    assert [len(await take(FairSlots(1), priority)) for priority in Priority] == [1, 1, 1]


async def test_who_gives_up_waiting_leaves_nothing_behind():
    slots, got = FairSlots(1), []
    held = await slots.acquire(Asker())
    first, second = await queue_up(slots, [Asker("a"), Asker("b")], got)
    first.cancel()
    await asyncio.sleep(0)
    assert slots.num_waiting == 1
    held.release()
    held.release()
    await second
    assert [asker.key for asker in got] == ["b"]
    assert slots.num_held == 0


async def test_a_slot_that_comes_with_the_cancellation_is_given_on():
    slots, got = FairSlots(1), []
    held = await slots.acquire(Asker())
    first, second = await queue_up(slots, [Asker("a"), Asker("b")], got)
    held.release()
    first.cancel()
    await second
    assert [asker.key for asker in got] == ["b"]
    assert slots.num_held == 0


async def test_one_key_s_queue_is_bounded():
    slots, got = FairSlots(1, max_num_waiting=2), []
    held = await slots.acquire(Asker())
    tasks = await queue_up(slots, [Asker("a"), Asker("a"), Asker("b")], got)
    with pytest.raises(QuotaExceededError, match="2 requests of this key wait to be read; the limit is 2"):
        await slots.acquire(Asker("a"))
    later = asyncio.create_task(slots.acquire(Asker("a"), is_later=True))
    await asyncio.sleep(0)
    assert slots.num_waiting == 4
    held.release()
    await asyncio.gather(*tasks)
    (await later).release()
