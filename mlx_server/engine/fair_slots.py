"""Slots for work that many clients ask for at once, given to better tiers first and to the keys of a tier in turn. Also
daemon threads for such work, and a clock of the processor time that a thread has used."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlx_server.errors import QuotaExceededError
from mlx_server.request import Priority

_SHARE = 8
"""A worse tier that waits gets one of so many slots."""


@dataclass(frozen=True, slots=True)
class Requester:
    """The client whose work it is. Keys of one priority take turns."""

    key: str = ""
    priority: Priority = Priority.NORMAL


ANYONE = Requester()


class Slot:
    """A slot in use. Call `release` on every path."""

    def __init__(self, slots: FairSlots, holder: Requester) -> None:
        self._slots: FairSlots | None = slots
        self._holder = holder

    def release(self) -> None:
        """Passes the slot to the next in line. Idempotent."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.take_back(self._holder)


class FairSlots:
    """A limited number of slots. Event-loop thread only.

    Normal priority cannot use one of the slots, and low priority cannot use two, if there are that many, so that work
    which cannot be interrupted never keeps all slots from a better tier. In the same way, a key cannot use one of the
    slots of its priority, if there are two, so that the others of its tier have one. Otherwise better tiers come first,
    except for the share of worse ones.
    """

    def __init__(self, num_slots: int, max_num_waiting: int | None = None) -> None:
        """`max_num_waiting` limits the new work of one key that may wait; None means no limit."""
        self.num_slots = num_slots
        self.max_num_waiting = max_num_waiting
        self._held: Counter[Requester] = Counter()
        self._waiting: dict[Priority, OrderedDict[str, deque[asyncio.Future[Slot]]]] = {
            priority: OrderedDict() for priority in Priority
        }
        self._num_passed: Counter[Priority] = Counter()

    @property
    def num_held(self) -> int:
        return self._held.total()

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for keys in self._waiting.values() for queue in keys.values())

    def try_acquire(self, requester: Requester) -> Slot | None:
        """Returns a slot if one is free for the requester. Those that wait could not use it."""
        return self._give(requester) if self._has_room(requester) else None

    async def acquire(self, requester: Requester, *, is_later: bool = False) -> Slot:
        """Waits for a slot. Raises `QuotaExceededError` if too much of the key's work waits already, unless this
        `is_later` work of a request that has had a slot before: the work done for it would be lost."""
        slot = self.try_acquire(requester)
        if slot is not None:
            return slot
        queue = self._waiting[requester.priority].setdefault(requester.key, deque())
        if not is_later and self.max_num_waiting is not None and len(queue) >= self.max_num_waiting:
            raise QuotaExceededError(
                f"{len(queue)} requests of this key wait to be read; the limit is {self.max_num_waiting}. "
                "Send fewer at a time."
            )
        coming: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        queue.append(coming)
        try:
            return await coming
        except asyncio.CancelledError:
            if coming.done() and not coming.cancelled():
                coming.result().release()
            else:
                self._forget(requester, coming)
            raise

    def take_back(self, holder: Requester) -> None:
        """For `Slot.release` only."""
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]
        while (following := self._next_requester()) is not None:
            keys = self._waiting[following.priority]
            queue = keys[following.key]
            coming = queue.popleft()
            if queue:
                keys.move_to_end(following.key)
            else:
                del keys[following.key]
            if not coming.done():
                coming.set_result(self._give(following))

    def _give(self, requester: Requester) -> Slot:
        self._held[requester] += 1
        return Slot(self, requester)

    def _has_room(self, requester: Requester) -> bool:
        key, priority = requester.key, requester.priority
        num_usable = max(1, self.num_slots - priority)
        num_like = sum(num for holder, num in self._held.items() if holder.priority >= priority)
        num_own = sum(num for holder, num in self._held.items() if holder.key == key)
        return num_like < num_usable and num_own < max(1, num_usable - 1) and self.num_held < self.num_slots

    def _next_requester(self) -> Requester | None:
        """Who gets the next slot: the best priority that can use it, or the worst one that was passed over often
        enough; of its keys the next in turn that can."""
        waiting = (map(partial(Requester, priority=priority), self._waiting[priority]) for priority in Priority)
        able = [next(filter(self._has_room, requesters), None) for requesters in waiting]
        firsts = [requester for requester in able if requester is not None]
        if not firsts:
            return None
        due = [requester for requester in firsts if self._num_passed[requester.priority] >= _SHARE - 1]
        chosen = due[-1] if due else firsts[0]
        self._num_passed[chosen.priority] = 0
        self._num_passed.update(other.priority for other in firsts if other.priority > chosen.priority)
        return chosen

    def _forget(self, requester: Requester, coming: asyncio.Future[Slot]) -> None:
        keys = self._waiting[requester.priority]
        queue = keys.get(requester.key)
        if queue is not None and coming in queue:
            queue.remove(coming)
            if not queue:
                del keys[requester.key]


_THREAD_BASIC_INFO = 3
_NUM_INFO_WORDS = 10
"""Of `struct thread_basic_info` (mach/thread_info.h): seconds and microseconds in user and in system mode, and six more
that are not used."""


def own_clock() -> Callable[[], float]:
    """A clock of the calling thread's processor time in seconds. Any thread may read it while the calling thread lives;
    after that, its reading is meaningless, or it raises `OSError`."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)  # missing on macOS
    return _mach_clock() if clock_of is None else partial(time.clock_gettime, clock_of(threading.get_ident()))


def _mach_clock() -> Callable[[], float]:
    system = ctypes.CDLL(None)
    system.pthread_mach_thread_np.argtypes = [ctypes.c_void_p]
    system.pthread_mach_thread_np.restype = ctypes.c_uint32
    port = system.pthread_mach_thread_np(threading.get_ident())

    def read() -> float:
        words = (ctypes.c_int32 * _NUM_INFO_WORDS)()
        count = ctypes.c_uint32(_NUM_INFO_WORDS)
        status = system.thread_info(ctypes.c_uint32(port), _THREAD_BASIC_INFO, words, ctypes.byref(count))
        if status != 0:
            raise OSError(f"thread_info failed with {status}")
        return float(words[0] + words[2] + (words[1] + words[3]) / 1e6)

    return read


T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T], *, stack_bytes: int = 0) -> T:
    """Like `asyncio.to_thread`, but the thread does not keep the process from ending. Its stack may grow to
    `stack_bytes`; 0 means the default size."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    _start(threading.Thread(target=work, name="background", daemon=True), stack_bytes)
    return await asyncio.wrap_future(future)


def _start(thread: threading.Thread, stack_bytes: int) -> None:
    """Python has one stack size for all threads. Others that start at the same time get it, too, which only takes
    address space."""
    usual_bytes = threading.stack_size(stack_bytes)
    try:
        thread.start()
    finally:
        threading.stack_size(usual_bytes)


async def shielded(work: Awaitable[T]) -> T:
    """Like `asyncio.shield`: the work goes on if the caller is cancelled. Its error is then dropped; from Python 3.14
    on, `asyncio.shield` logs it with a traceback."""
    working = asyncio.ensure_future(work)
    working.add_done_callback(take_error)
    await asyncio.wait((working,))
    return working.result()


def take_error(working: asyncio.Future[Any]) -> None:
    """Marks an error as retrieved, or asyncio would log it if nobody waits for the work."""
    if not working.cancelled():
        working.exception()


async def in_executor(executor: ThreadPoolExecutor, work: Callable[[], T], on_done: Callable[[], object]) -> T:
    """Runs `work` in a thread, then calls `on_done` on the event loop. If the caller is cancelled, the work goes on and
    keeps what `on_done` gives back, so that clients that leave early do not get more threads."""

    working = asyncio.get_running_loop().run_in_executor(executor, work)
    working.add_done_callback(lambda _: on_done())
    return await shielded(working)
