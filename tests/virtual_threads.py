"""Real threads in virtual time: exactly one runs at a time, and the clock moves only when all of them wait.

Code with threads, conditions and queues thus runs in the same order every time, and without delays: a thread that
sleeps or waits hands over to the next one that can run, in the order in which they were woken.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Task:
    """One thread, which waits for `turn` until it may run."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.wait_number = 0  # the number of its current wait; timers of earlier waits are ignored
        self.is_waiting = False
        self.is_timed_out = False


class VirtualThreads:
    """The clock and the running thread, which alone may call the methods."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.running = self._first = _Task()  # the thread that creates this object
        self._is_stuck = False
        self._ready: deque[_Task] = deque()
        self._timers: list[tuple[float, int, int, _Task]] = []
        self._count = itertools.count()

    def clock(self) -> float:
        return self.now_s

    def sleep_until(self, then_s: float) -> None:
        if then_s > self.now_s:
            self.wait(then_s)

    def sleep(self, seconds: float) -> None:
        self.sleep_until(self.now_s + seconds)

    def give_way(self) -> None:
        """Lets all other threads run that can."""
        self._ready.append(self.running)
        self._hand_over()

    def wait(self, until_s: float | None = None) -> bool:
        """Waits for `wake` or until that time; returns whether it was woken."""
        task = self.running
        task.wait_number += 1
        task.is_waiting, task.is_timed_out = True, False
        if until_s is not None:
            heapq.heappush(self._timers, (until_s, next(self._count), task.wait_number, task))
        self._hand_over()
        return not task.is_timed_out

    def wake(self, task: _Task) -> None:
        if task.is_waiting:
            task.is_waiting = False
            self._ready.append(task)

    def start(self, main: Callable[[], None]) -> _Task:
        task = _Task()

        def body() -> None:
            task.turn.acquire()
            try:
                main()
            finally:
                self._next().turn.release()

        threading.Thread(target=body, daemon=True).start()
        self._ready.append(task)
        return task

    def _hand_over(self) -> None:
        task, following = self.running, self._next()
        if following is not task:
            following.turn.release()
            task.turn.acquire()
        assert not self._is_stuck, "every thread waits for something that will never happen"

    def _next(self) -> _Task:
        while not self._ready:
            if not self._timers:
                self._is_stuck = True
                self._ready.append(self._first)
                break
            then_s, _, wait_number, task = heapq.heappop(self._timers)
            if task.is_waiting and task.wait_number == wait_number:
                self.now_s = max(self.now_s, then_s)
                task.is_timed_out = True
                self.wake(task)
        self.running = self._ready.popleft()
        return self.running

    def patch(self, module: Any, monkeypatch: Any) -> None:
        """Replaces the threads, conditions and queues that a module imports from the standard library by these."""
        ours = {
            "threading": SimpleNamespace(
                Thread=lambda **named: _Thread(self, **named), Condition=lambda: _Condition(self)
            ),
            "SimpleQueue": _SimpleQueueOf(self),
        }
        for name, stand_in in ours.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Like `asyncio.run` with this clock; the event loop is one of the threads."""
        with asyncio.Runner(loop_factory=lambda: _Loop(self)) as runner:
            return runner.run(main)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in virtual time from 0."""
    return VirtualThreads().run(main)


class _Thread:
    def __init__(self, threads: VirtualThreads, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._threads, self._target = threads, target
        self._is_alive = False
        self._joining: list[_Task] = []

    def start(self) -> None:
        self._is_alive = True
        self._threads.start(self._main)

    def is_alive(self) -> bool:
        return self._is_alive

    def join(self) -> None:
        while self._is_alive:
            self._joining.append(self._threads.running)
            self._threads.wait()

    def _main(self) -> None:
        try:
            self._target()
        finally:
            self._is_alive = False
            for task in self._joining:
                self._threads.wake(task)


class _Condition:
    """A condition without a real lock, which is not needed: no other thread runs until the holder waits."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._threads = threads
        self._waiting: deque[_Task] = deque()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> None:
        self._waiting.append(self._threads.running)
        self._threads.wait()

    def notify(self) -> None:
        if self._waiting:
            self._threads.wake(self._waiting.popleft())


class _SimpleQueue(Generic[T]):
    def __init__(self, threads: VirtualThreads) -> None:
        self._items: deque[T] = deque()
        self._condition = _Condition(threads)

    def put(self, item: T) -> None:
        self._items.append(item)
        self._condition.notify()

    def get(self) -> T:
        while not self._items:
            self._condition.wait()
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class _SimpleQueueOf:
    """Stands for `SimpleQueue`, also with a type in brackets."""

    def __init__(self, threads: VirtualThreads) -> None:
        self._threads = threads

    def __call__(self) -> _SimpleQueue[Any]:
        return _SimpleQueue(self._threads)

    def __getitem__(self, _: object) -> _SimpleQueueOf:
        return self


class _Selector(selectors.SelectSelector):
    """Waits in virtual time for other threads, not for events from outside."""

    def __init__(self, threads: VirtualThreads) -> None:
        super().__init__()
        self.threads = threads
        self.task = threads.running

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        threads = self.threads
        threads.give_way()
        if not (ready := super().select(0)) and (timeout is None or timeout > 0):
            threads.wait(None if timeout is None else threads.now_s + timeout)
            ready = super().select(0)
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, threads: VirtualThreads) -> None:
        self._virtual = _Selector(threads)
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.threads.now_s

    def call_soon_threadsafe(self, *args: Any, **named: Any) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(*args, **named)
        self._virtual.threads.wake(self._virtual.task)
        return handle
