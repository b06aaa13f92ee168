"""Who gets the next slot."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_server.engine.fair_slots import FairSlots, Requester, Slot, in_daemon_thread, own_clock
from mlx_server.errors import QuotaExceededError
from mlx_server.request import Priority


async def queue_up(slots: FairSlots, requesters: list[Requester], got: list[Requester]) -> list[asyncio.Task[None]]:
    """Each gets a slot, writes itself down and gives it back."""

    async def use(requester: Requester) -> None:
        slot = await slots.acquire(requester)
        got.append(requester)
        slot.release()

    tasks = [asyncio.create_task(use(requester)) for requester in requesters]
    await asyncio.sleep(0)
    return tasks


async def order(requesters: list[Requester], num_slots: int = 1) -> list[Requester]:
    """The order in which they get the one slot that all wait for."""
    slots, got = FairSlots(num_slots), []
    held = await slots.acquire(Requester("holder", Priority.HIGH))
    tasks = await queue_up(slots, requesters, got)
    assert slots.num_waiting == len(requesters)
    held.release()
    await asyncio.gather(*tasks)
    assert (slots.num_held, slots.num_waiting) == (0, 0)
    return got


async def test_better_tiers_come_first():
    requesters = [Requester("a", priority) for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH)]
    assert await order(requesters) == requesters[::-1]


async def test_the_keys_of_a_tier_take_turns():
    many, few = [Requester("many")] * 6, [Requester("few")] * 2
    assert [requester.key for requester in await order(many + few)] == ["many", "few", "many", "few", *["many"] * 4]


async def test_an_eighth_is_for_worse_tiers():
    high, low = [Requester("h", Priority.HIGH)] * 24, [Requester("l", Priority.LOW)] * 3
    got = await order(low + high)
    assert [index for index, requester in enumerate(got) if requester.key == "l"] == [7, 15, 23]


async def take(slots: FairSlots, priority: Priority, keys: str = "abc") -> list[Slot]:
    """All slots that these keys of this priority can have now."""
    taken: list[Slot] = []
    for key in keys:
        while (slot := slots.try_acquire(Requester(key, priority))) is not None:
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


async def test_a_key_leaves_a_slot_for_the_others_of_its_tier():
    slots = FairSlots(4)
    taken, got = await take(slots, Priority.NORMAL, "a"), list[Requester]()
    waiting = await queue_up(slots, [Requester("a")] * 3, got)
    assert (len(taken), slots.num_held, slots.num_waiting) == (2, 2, 3)
    assert len(await take(slots, Priority.NORMAL, "b")) == 1
    taken[0].release()
    await asyncio.gather(*waiting)
    assert got == [Requester("a")] * 3


async def test_a_key_that_has_its_slots_holds_up_no_key_behind_it():
    slots, got = FairSlots(4), list[Requester]()
    mine, others = await take(slots, Priority.NORMAL, "a"), await take(slots, Priority.NORMAL, "b")
    tasks = await queue_up(slots, [Requester("a"), Requester("c")], got)
    others[0].release()
    await tasks[1]
    assert got == [Requester("c")]
    mine[0].release()
    await tasks[0]


async def test_there_is_always_one_for_everybody():
    assert [len(await take(FairSlots(1), priority)) for priority in Priority] == [1, 1, 1]


async def test_who_gives_up_waiting_leaves_nothing_behind():
    slots, got = FairSlots(1), []
    held = await slots.acquire(Requester())
    first, second = await queue_up(slots, [Requester("a"), Requester("b")], got)
    first.cancel()
    await asyncio.sleep(0)
    assert slots.num_waiting == 1
    held.release()
    held.release()
    await second
    assert [requester.key for requester in got] == ["b"]
    assert slots.num_held == 0


async def test_a_slot_that_comes_with_the_cancellation_is_given_on():
    slots, got = FairSlots(1), []
    held = await slots.acquire(Requester())
    first, second = await queue_up(slots, [Requester("a"), Requester("b")], got)
    held.release()
    first.cancel()
    await second
    assert [requester.key for requester in got] == ["b"]
    assert slots.num_held == 0


async def test_one_key_s_queue_is_bounded():
    slots, got = FairSlots(1, max_num_waiting=2), []
    held = await slots.acquire(Requester())
    tasks = await queue_up(slots, [Requester("a"), Requester("a"), Requester("b")], got)
    with pytest.raises(QuotaExceededError, match="2 requests of this key wait to be read; the limit is 2"):
        await slots.acquire(Requester("a"))
    later = asyncio.create_task(slots.acquire(Requester("a"), is_later=True))
    await asyncio.sleep(0)
    assert slots.num_waiting == 4
    held.release()
    await asyncio.gather(*tasks)
    (await later).release()


# --- the clock ----------------------------------------------------------------------------------------------------


async def test_work_in_a_thread_that_nobody_waits_for_any_more_ends_quietly(monkeypatch: pytest.MonkeyPatch):
    """A process need not wait for it, either, and other threads have stacks as before."""
    faults: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    usual_bytes, begun, gate = threading.stack_size(), asyncio.Event(), threading.Event()
    loop, threads = asyncio.get_running_loop(), list[threading.Thread]()

    def work() -> None:
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(begun.set)
        gate.wait()

    waiting = asyncio.create_task(in_daemon_thread(work, stack_bytes=2**22))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    (thread,) = threads
    thread.join()
    assert (thread.daemon, faults, threading.stack_size()) == (True, [], usual_bytes)


def test_a_thread_s_clock_counts_its_work_and_not_its_waits():
    clock = own_clock()
    before = clock()
    time.sleep(0.05)
    assert clock() - before < 0.05
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    assert clock() - before >= 0.05


@pytest.mark.parametrize("status", [0, 14])
def test_on_macos_the_kernel_is_asked_for_seconds_and_microseconds(monkeypatch: pytest.MonkeyPatch, status: int):
    class Function:
        def __init__(self, work: Any) -> None:
            self.work = work

        def __call__(self, *arguments: Any) -> int:
            return self.work(*arguments)

    def thread_info(port: ctypes.c_uint32, flavor: int, words: Any, count: Any) -> int:
        assert (port.value, flavor, count._obj.value) == (77, 3, 10)
        words[0], words[1], words[2], words[3] = 5, 250_000, 2, 500_000
        return status

    library = SimpleNamespace(pthread_mach_thread_np=Function(lambda thread: 77), thread_info=Function(thread_info))
    monkeypatch.delattr(time, "pthread_getcpuclockid", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    clock = own_clock()
    if status:
        with pytest.raises(OSError, match="thread_info failed with 14"):
            clock()
    else:
        assert clock() == 7.75
