"""The one MLX thread, and each model's queue of steps on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx

from mlx_server.errors import EngineDeadError
from mlx_server.outputs import ModelRunnerOutput, SchedulerOutput
from mlx_server.runtime.device_queue import DeviceQueue, DeviceStep, FairShare
from mlx_server.runtime.layers.cpu import MAX_ROWS
from mlx_server.runtime.memory import resident_memory
from mlx_server.runtime.model_runner import LaunchedStep

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LONG_LAUNCH_S = 0.025
"""On a device that computes in the launch, shorter steps are launched ahead all the same: nobody notices two of their
results at once, and the graph is built while the last products run."""


class StepRunner(Protocol):
    """Launches and fetches steps as `ModelRunner` does. MLX thread only, except `wait`."""

    @property
    def launch_is_host_only(self) -> bool: ...

    def launch(self, step: SchedulerOutput) -> LaunchedStep: ...

    def wait(self, launched: LaunchedStep) -> None: ...

    def fetch(self, launched: LaunchedStep) -> ModelRunnerOutput: ...


class Worker(Protocol):
    """Has work for the MLX thread, a piece at a time."""

    @property
    def has_work(self) -> bool: ...

    def advance(self) -> None: ...

    def abandon(self, error: BaseException) -> None:
        """Fails all waiting work: the thread has ended."""

    def distrust(self, error: BaseException) -> None:
        """Fails what the device has not finished."""


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    function: Callable[[], T]
    future: Future[T]

    def run(self) -> BaseException | None:
        """The error of the function, if any."""
        if not self.future.set_running_or_notify_cancel():
            return None
        try:
            self.future.set_result(self.function())
        except BaseException as error:  # the caller handles every kind
            self.future.set_exception(error)
            return error
        return None

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class _Calls:
    """Work other than steps, such as pieces of loading and unloading, in order of arrival."""

    def __init__(self, thread: MLXThread) -> None:
        self._waiting: deque[_Call[Any]] = deque()
        self._thread = thread

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def append(self, call: _Call[Any]) -> None:
        self._waiting.append(call)

    def advance(self) -> None:
        start_s = self._thread.clock()
        if (call := self._take()) is not None:
            self._thread.judge(call.run())
        self._thread.charge(self, self._thread.clock() - start_s)

    def abandon(self, error: BaseException) -> None:
        while (call := self._take()) is not None:
            call.fail(error)

    def _take(self) -> _Call[Any] | None:
        """The next call, for one thread: any may abandon those that the MLX thread has not taken."""
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def distrust(self, error: BaseException) -> None:
        """Waiting calls have not begun."""


class MLXThread:
    """Loads, runs and unloads all models, since MLX's streams belong to the thread that made them.

    The models share the thread's time in proportion to their weights; all calls together count as one more model. So a
    model's steps wait for at most one step, or one piece of loading, of another model. Its steps and its images have
    equal parts of its share.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        wire_memory: bool = False,
        computes_at_launch: bool | None = None,
    ) -> None:
        """`wire_memory` is passed to `resident_memory` while the thread runs. `computes_at_launch`: the launch of a
        large graph lasts nearly as long as its step, as on MLX's CPU, whose queue holds ten tasks of ten nodes; None
        means that it depends on the device."""
        self.clock = clock
        self.computes_at_launch = mx.default_device() == mx.cpu if computes_at_launch is None else computes_at_launch
        self._wires_memory = wire_memory
        self.device = DeviceQueue(clock, self.notify)
        self._condition = threading.Condition()
        self._calls = _Calls(self)
        self._models: FairShare[FairShare[Worker]] = FairShare()
        self._model_of: dict[Worker, FairShare[Worker]] = {}
        self.attach(self._calls)
        self._is_stopping = False
        self._is_lost = False
        self.charged_s = 0.0  # to all workers so far
        self._thread = threading.Thread(target=self._main, name="mlx", daemon=True)
        self._has_started = False

    @property
    def is_alive(self) -> bool:
        """Whether it takes work, or still finishes some."""
        if self._is_lost:
            return False
        return self._thread.is_alive() if self._has_started else not self._is_stopping

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` on the MLX thread; any thread may call this. Its exception is the future's."""
        future: Future[T] = Future()
        if not self.offer(lambda: self._calls.append(_Call(function, future))):
            future.set_exception(_stopped())
        return future

    def offer(self, add: Callable[[], None]) -> bool:
        """Calls `add`, which gives a worker of the thread more work. Returns False, without the call, if the thread is
        stopping."""
        with self._condition:
            if self._is_stopping:
                return False
            if not self._has_started:  # an instance that is never used starts no thread
                self._has_started = True
                self._thread.start()
            add()
            self._condition.notify()
            return True

    def attach(self, worker: Worker, weight: float = 1.0, *, beside: Worker | None = None) -> None:
        """`weight` is the share of its model, or it has an equal part of the share of the one `beside`."""
        with self._condition:
            if beside is not None:
                model = self._model_of[beside]
            else:
                self._models.add(model := FairShare(), weight)
            model.add(worker)
            self._model_of[worker] = model

    def detach(self, worker: Worker) -> None:
        with self._condition:
            model = self._model_of.pop(worker)
            model.remove(worker)
            if model not in self._model_of.values():
                self._models.remove(model)

    def charge(self, worker: Worker, seconds: float) -> None:
        """The worker has used the device for `seconds`."""
        with self._condition:
            self.charged_s += seconds
            if (model := self._model_of.get(worker)) is not None:
                model.charge(worker, seconds)
                self._models.charge(model, seconds)

    def judge(self, error: BaseException | None) -> None:
        """Call with what a step or call has raised. An error of the device fails all launched steps: MLX tells it once,
        to whoever asks first, and a step that has failed would count as right if that was another. MLX thread."""
        message = _device_message(error)
        if message is not None:
            with self._condition:
                workers = list(self._model_of)
            for worker in workers:
                worker.distrust(RuntimeError(message))  # `error` refers to the model that met it

    def notify(self) -> None:
        """The device has finished a step."""
        with self._condition:
            self._condition.notify()

    def give_up(self, error: EngineDeadError) -> None:
        """The device will never finish its work: all steps and waiting calls fail with `error`, and the thread is
        abandoned. Any thread."""
        self._is_lost = True
        self._abandon_all(error)

    def stop(self) -> None:
        """Ends the thread after all its calls and steps, and waits for it, unless it was given up."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        if self._has_started and not self._is_lost:
            self._thread.join()

    def _main(self) -> None:
        self.device.start()
        try:
            with resident_memory(wire=self._wires_memory):
                while (work := self._wait_for_work()) is not None:
                    work()
        except BaseException as error:
            logger.critical("The MLX thread has died: %s", error, exc_info=error)
            self._abandon_all(EngineDeadError(f"The MLX thread has died: {type(error).__name__}: {error}"))
        finally:
            self.device.stop()
            # A thread that ends with streams left makes MLX abort the process at its exit, some of the time.
            mx.clear_streams()

    def _abandon_all(self, error: EngineDeadError) -> None:
        with self._condition:
            self._is_stopping = True
            workers = list(self._model_of)
        for worker in workers:
            worker.abandon(error)

    def _wait_for_work(self) -> Callable[[], None] | None:
        """The next work: results first, since clients wait for them. None when the thread should end."""
        with self._condition:
            while True:
                if self.device.is_oldest_over:
                    return self.device.settle_oldest
                ready = [worker for worker in self._model_of if worker.has_work]
                model = self._models.next([self._model_of[worker] for worker in ready].__contains__)
                if model is not None and (worker := model.next(ready.__contains__)) is not None:
                    return worker.advance
                if self._is_stopping and self.device.is_empty:
                    return None
                self._condition.wait()


def _device_message(error: BaseException | None) -> str | None:
    """MLX's message for a failed command buffer, if `error` is it or was raised from it."""
    if error is None:
        return None
    message = str(error)
    return message if message.startswith("[METAL]") else _device_message(error.__cause__ or error.__context__)


def _stopped() -> EngineDeadError:
    return EngineDeadError("The MLX thread has stopped; restart the server.")


@dataclass(frozen=True, slots=True)
class _Submission:
    step: SchedulerOutput
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[ModelRunnerOutput]


@dataclass(frozen=True, slots=True)
class _Launched:
    step: LaunchedStep
    submission: _Submission
    paid_s: float
    launch_s: float


class MLXExecutor:
    """Runs one model's steps on the MLX thread; `submit` is called on the event loop's thread.

    A step may be launched while another one, of any model, runs, except after a long launch that computed its step. A
    future gets its result when the device has finished. After an exception in a step, the state of the pools is
    unknown: all waiting and later futures get it, but only when the device has finished all of the model's steps, so
    that the model can be unloaded at once.
    """

    def __init__(self, thread: MLXThread, runner: StepRunner, weight: float = 1.0) -> None:
        """`weight` is this model's share of the device while other models have work."""
        self._thread = thread
        self._device = thread.device
        self._runner = runner
        self._submissions: deque[_Submission] = deque()
        self._launched: deque[_Launched] = deque()
        self._failed: deque[_Submission] = deque()
        self._error: BaseException | None = None
        self._last_step_s = 0.0
        self.num_submitted = self.num_launched = 0  # steps so far
        thread.attach(self, weight)

    @property
    def has_work(self) -> bool:
        return bool(self._submissions) and self._device.has_room and not self._would_delay_a_result

    @property
    def _would_delay_a_result(self) -> bool:
        """Whether the next launch would compute its own step before the running step's result is handed out. Steps of
        few rows are short graphs, which fit MLX's queue: such a launch returns at once."""
        if not self._thread.computes_at_launch or self._device.is_empty or self._last_step_s < _LONG_LAUNCH_S:
            return False
        return sum(chunk.num_tokens for chunk in self._submissions[0].step.chunks) > MAX_ROWS

    def submit(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        """Queues a step; returns a future of the running loop for its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ModelRunnerOutput] = loop.create_future()
        submission = _Submission(output, loop, future)
        if self._error is not None or not self._thread.offer(lambda: self._submissions.append(submission)):
            future.set_exception(self._error or _stopped())
        else:
            self.num_submitted += 1
        return future

    def close(self) -> None:
        """Removes the executor from the thread; no step may be in flight."""
        self._thread.detach(self)

    def advance(self) -> None:
        """Launches a step; called on the MLX thread."""
        submission = self._submissions.popleft()
        try:
            if self._error is not None:
                raise self._error
            self._launch(submission)
        except BaseException as error:
            self._fail(error, submission)
        self.num_launched += 1

    def abandon(self, error: BaseException) -> None:
        launched = [entry.submission for entry in tuple(self._launched)]
        for submission in (*self._failed, *launched, *self._submissions):
            _settle(submission, error)

    def distrust(self, error: BaseException) -> None:
        """The next launched step to be settled fails, and with it the model."""
        if self._launched:
            self._first_error(error)

    def _launch(self, submission: _Submission) -> None:
        step = submission.step
        started_s = self._thread.clock()
        launched = self._runner.launch(step)
        launch_s = self._thread.clock() - started_s
        is_computed = self._thread.computes_at_launch and launch_s >= _LONG_LAUNCH_S
        host_s = launch_s if self._runner.launch_is_host_only and not is_computed else 0.0
        self._launched.append(_Launched(launched, submission, self._last_step_s, host_s))
        self._thread.charge(self, self._last_step_s)
        # If all requests are new, none has waited for this step.
        is_awaited = bool(step.draft_steps) or len(step.new_requests) < len(step.chunks)
        self._device.push(DeviceStep(self, started_s, is_awaited, is_computed), partial(self._runner.wait, launched))

    def settle(self, step_time_s: float, idle_time_s: float) -> None:
        """Delivers the oldest launched step's result and charges its time; at the launch, the time of the step before
        was charged. For `DeviceQueue`."""
        if self._error is not None:
            self.fail(self._error)
            return
        entry = self._launched[0]
        try:
            output = self._runner.fetch(entry.step)
        except BaseException as error:
            self.fail(error)
            return
        self._launched.popleft()
        self._thread.charge(self, step_time_s - entry.paid_s)
        self._last_step_s = step_time_s
        result = replace(output, step_time_s=step_time_s, idle_time_s=idle_time_s, launch_time_s=entry.launch_s)
        _settle(entry.submission, result)

    def fail(self, error: BaseException) -> None:
        """The oldest launched step has failed. For `DeviceQueue`."""
        self._fail(error, self._launched.popleft().submission)

    def _fail(self, error: BaseException, submission: _Submission) -> None:
        error = self._first_error(error)
        self._failed.append(submission)
        while self._failed and not self._launched:
            _settle(self._failed.popleft(), error)

    def _first_error(self, error: BaseException) -> BaseException:
        """The model's first error, which all its steps get; it is `error` if there was none before."""
        if self._error is None:
            logger.error("A step failed: %s", error, exc_info=error)
            self._error = error
            self._thread.judge(error)
        return self._error


def _settle(submission: _Submission, result: ModelRunnerOutput | BaseException) -> None:
    """Delivers a result to the waiting loop, unless the loop is closed or the wait was cancelled."""

    def settle() -> None:
        if submission.future.done():  # cancelled, or given up
            return
        if isinstance(result, BaseException):
            submission.future.set_exception(result)
        else:
            submission.future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        submission.loop.call_soon_threadsafe(settle)
