"""The launched steps of all models that have not been settled, and the order in which models share the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

_MAX_STEPS = 2
"""One that runs and one that waits, so that the device does not wait for the host."""


class StepOwner(Protocol):
    """One model's launched steps, oldest first. Called on the MLX thread."""

    def settle(self, step_time_s: float, idle_time_s: float) -> None:
        """The oldest step has ended."""

    def fail(self, error: BaseException) -> None:
        """The oldest step has failed."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step on the device. `is_awaited`: a request was waiting for it, so idle time before it counts.
    `is_nearly_over`: its launch has already computed most of it."""

    owner: StepOwner
    started_s: float
    is_awaited: bool
    is_nearly_over: bool = False


class DeviceQueue:
    """Settles the steps of all models in the order of launch, in which the device runs them, also after failures. So
    each model is charged for its own time.

    A GPU does not report when it has finished. So a thread of the queue waits for each step and records the time, and
    the MLX thread is free meanwhile. Everything else is for the MLX thread only.
    """

    def __init__(self, clock: Callable[[], float], notify: Callable[[], None]) -> None:
        """`notify` is called on the queue's thread when a step has ended."""
        self._clock = clock
        self._notify = notify
        self._steps: deque[DeviceStep] = deque()
        self._unwatched: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[float | BaseException] = SimpleQueue()  # of the oldest steps
        self._last_end_s = 0.0
        self._thread = threading.Thread(target=self._watch, name="mlx-device", daemon=True)

    def start(self) -> None:
        """Starts the queue's thread."""
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether another step may be launched now. Not after one that is nearly over, because the launch would compute
        the next step before the result of this one is delivered."""
        return len(self._steps) < _MAX_STEPS and not (self._steps and self._steps[-1].is_nearly_over)

    @property
    def is_empty(self) -> bool:
        return not self._steps

    @property
    def is_oldest_over(self) -> bool:
        return not self._outcomes.empty()

    def push(self, step: DeviceStep, wait: Callable[[], None]) -> None:
        """Call when the step is launched. The queue's thread calls `wait`, which returns when the step has ended."""
        self._steps.append(step)
        self._unwatched.put(wait)

    def settle_oldest(self) -> None:
        """Waits for the oldest step and settles it."""
        step, outcome = self._steps.popleft(), self._outcomes.get()
        if isinstance(outcome, BaseException):
            step.owner.fail(outcome)
            return
        idle_s = max(step.started_s - self._last_end_s, 0.0) if step.is_awaited else 0.0
        step_time_s = outcome - max(step.started_s, self._last_end_s)
        self._last_end_s = outcome
        step.owner.settle(step_time_s, idle_s)

    def stop(self) -> None:
        """Ends the queue's thread after the steps that it has, and waits for it."""
        self._unwatched.put(None)
        self._thread.join()

    def _outcome(self, wait: Callable[[], None]) -> float | BaseException:
        """The time when a step ended, or its error."""
        try:
            wait()
            return self._clock()
        except BaseException as error:  # the owner handles all of them
            return error

    def _watch(self) -> None:
        while (wait := self._unwatched.get()) is not None:
            outcome = self._outcome(wait)
            del wait  # it refers to a model, which may be unloaded once the outcome is known
            self._outcomes.put(outcome)
            del outcome  # the traceback of an error refers to it, too
            self._notify()


T = TypeVar("T")


@dataclass(slots=True)
class _Account:
    weight: float
    spent_s: float
    """Device seconds over weight, on the common scale of all members."""


class FairShare(Generic[T]):
    """Weighted fair queueing: among the members with work, the one that has used the device least is next.

    For each step of 200 ms of one member, a member with steps of 10 ms runs twenty. A member that returns after a pause
    starts level with the others: unused time is not saved. Not thread-safe.
    """

    def __init__(self) -> None:
        self._accounts: dict[T, _Account] = {}  # the one served longest ago comes first, so equals take turns
        self._now_s = 0.0

    def add(self, member: T, weight: float = 1.0) -> None:
        """`weight` is the member's share relative to the others."""
        assert weight > 0.0, "a member without a share would never be served"
        self._accounts[member] = _Account(weight, self._now_s)

    def remove(self, member: T) -> None:
        del self._accounts[member]

    def __iter__(self) -> Iterator[T]:
        """All members, with work or without."""
        return iter(self._accounts)

    def next(self, has_work: Callable[[T], bool]) -> T | None:
        """The next member; None if none has work."""
        ready = [member for member in self._accounts if has_work(member)]
        if not ready:
            return None
        chosen = min(ready, key=self._start_s)
        self._now_s = self._start_s(chosen)
        account = self._accounts.pop(chosen)
        account.spent_s = self._now_s
        self._accounts[chosen] = account
        return chosen

    def charge(self, member: T, seconds: float) -> None:
        """Records that the member has used the device for `seconds`. Removed members are ignored."""
        account = self._accounts.get(member)
        if account is not None:
            account.spent_s += seconds / account.weight

    def _start_s(self, member: T) -> float:
        return max(self._accounts[member].spent_s, self._now_s)
