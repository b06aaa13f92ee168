"""The steps that the device has been given and whose results are not settled yet, of all models together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

_MAX_STEPS = 2
"""One that runs and one behind it, so that the device need not wait for the host."""


class StepOwner(Protocol):
    """One model's launched steps, oldest first. Called on the MLX thread."""

    def settle(self, step_time_s: float, idle_time_s: float) -> None:
        """The oldest is over."""
        ...

    def fail(self, error: BaseException) -> None:
        """The oldest has failed. The owner drops its steps."""
        ...


@dataclass(slots=True, eq=False)
class DeviceStep:
    """A step on the device. `is_awaited`: somebody has waited for it, so idle time before it counts. `outcome` is when
    it was over, or what it failed with; None while it runs."""

    owner: StepOwner
    wait: Callable[[], None]
    started_s: float
    is_awaited: bool
    outcome: float | BaseException | None = None


class DeviceQueue:
    """The device runs steps in the order of launch, so they are settled in that order, whichever model's turn it is:
    each model then pays for its own time.

    A device that computes by itself tells nobody when it has finished. So a thread of the queue's own waits for each
    step and notes the time; the MLX thread is free meanwhile, and no end is booked that was not seen. Everything else
    is for the MLX thread only.
    """

    def __init__(self, clock: Callable[[], float], notify: Callable[[], None]) -> None:
        """`notify` is called on the queue's thread when a step is over."""
        self._clock = clock
        self._notify = notify
        self._steps: deque[DeviceStep] = deque()
        self._unwatched: SimpleQueue[DeviceStep | None] = SimpleQueue()
        self._last_end_s = 0.0
        self._thread = threading.Thread(target=self._watch, name="mlx-device", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether the device may be given another step now."""
        return len(self._steps) < _MAX_STEPS

    @property
    def is_empty(self) -> bool:
        return not self._steps

    @property
    def is_oldest_over(self) -> bool:
        return bool(self._steps) and self._steps[0].outcome is not None

    def push(self, step: DeviceStep) -> None:
        """The step is launched. `step.wait` is called on the queue's thread."""
        self._steps.append(step)
        self._unwatched.put(step)

    def book(self, step: DeviceStep) -> None:
        """Settles a step whose outcome is known."""
        if not isinstance(step.outcome, float):
            assert step.outcome is not None, "its end has not been seen"
            step.owner.fail(step.outcome)
            return
        idle_s = max(step.started_s - self._last_end_s, 0.0) if step.is_awaited else 0.0
        step_time_s = step.outcome - max(step.started_s, self._last_end_s)
        self._last_end_s = step.outcome
        step.owner.settle(step_time_s, idle_s)

    def settle_oldest(self) -> None:
        self.book(self._steps.popleft())

    def observe(self, step: DeviceStep) -> None:
        """Waits until a step is over."""
        try:
            step.wait()
            step.outcome = self._clock()
        except BaseException as error:  # its owner's to handle, whatever it is
            step.outcome = error

    def drop(self, owner: StepOwner) -> None:
        """Forgets an owner's steps: one has failed."""
        self._steps = deque(step for step in self._steps if step.owner is not owner)

    def stop(self) -> None:
        """Ends the queue's thread behind the steps that it has, and waits for it."""
        self._unwatched.put(None)
        self._thread.join()

    def _watch(self) -> None:
        while (step := self._unwatched.get()) is not None:
            self.observe(step)
            self._notify()
            del step  # it holds a model, which may be unloaded before another step comes
