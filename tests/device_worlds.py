"""Schedulers with the real executor, MLX thread and device queue, on a simulated device in virtual time.

There are two kinds of device. On a `FILLED` one, only the last tenth of a step is left when `launch` returns, as with
MLX's CPU, whose queue of tasks is short. A `SELF_RUNNING` one computes asynchronously after `launch`, as Metal and CUDA
do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from mlx_server.outputs import ModelRunnerOutput, RequestOutput, SchedulerOutput
from mlx_server.request import Request
from mlx_server.runtime import device_queue, executor
from tests.batching.worlds import FakeRunner, make_scheduler
from tests.virtual_threads import VirtualThreads

NUM_BLOCKS = 8192


class Kind(Enum):
    FILLED = "filled"
    SELF_RUNNING = "self-running"


ALL_KINDS = pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a step costs. The device takes `base_s`, `row_s` for each decode and `prompt_s` for each token of longer
    chunks. The host takes `launch_s`, and `copy_s` for each block that is copied into or out of the pool: in parallel
    on a self-running device, as part of the step on the other."""

    base_s: float
    row_s: float
    prompt_s: float
    launch_s: float
    copy_s: float = 0.0

    def host_s(self, step: SchedulerOutput) -> float:
        copies = step.copies
        return self.launch_s + (0.0 if copies is None else self.copy_s * (len(copies.saved) + len(copies.loaded)))

    def seconds(self, step: SchedulerOutput) -> float:
        sizes = [chunk.num_tokens for chunk in step.chunks]
        return self.base_s + self.row_s * sizes.count(1) + self.prompt_s * sum(size for size in sizes if size > 1)


GPU = Profile(base_s=0.025, row_s=0.0005, prompt_s=1 / 1250, launch_s=0.003)
"""An 8B model in 4 bits on a Mac with a small GPU, roughly."""

FAST_GPU = Profile(base_s=0.025, row_s=0.0005, prompt_s=1 / 2500, launch_s=0.003)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """When a step was submitted to the device, and when it began and ended there."""

    model: str
    step: SchedulerOutput
    launched_s: float
    began_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.began_s


class Device:
    """Runs steps in order. Step n takes `stretch(n)` times the time of the profile."""

    def __init__(self, threads: VirtualThreads, kind: Kind, profile: Profile, stretch: Callable[[int], float]) -> None:
        self.kind = kind
        self.profile = profile
        self.steps: list[DeviceStep] = []
        self._threads = threads
        self._stretch = stretch
        self._free_s = 0.0

    def compute(self, model: str, step: SchedulerOutput) -> float:
        """Submits a step; returns when it will end."""
        launched_s = self._threads.now_s
        seconds = self.profile.seconds(step) * self._stretch(len(self.steps))
        if self.kind is not Kind.SELF_RUNNING:
            began_s, seconds = max(launched_s, self._free_s), seconds + self.profile.host_s(step)
        else:
            self._threads.sleep(self.profile.host_s(step))
            began_s = max(self._threads.now_s, self._free_s)
        self._free_s = began_s + seconds
        self.steps.append(DeviceStep(model, step, launched_s, began_s, self._free_s))
        if self.kind is not Kind.SELF_RUNNING:
            self._threads.sleep_until(self._free_s - 0.1 * seconds)
        return self._free_s

    def idle_s(self, from_s: float, to_s: float) -> float:
        """How long the device was idle between two times."""
        busy = [min(step.end_s, to_s) - max(step.began_s, from_s) for step in self.steps]
        return to_s - from_s - sum(max(seconds, 0.0) for seconds in busy)


@dataclass(frozen=True, slots=True)
class _Launched:
    step_id: int
    end_s: float


class DeviceRunner:
    """A `ModelRunner` with the fake model of `tests/batching/worlds.py`."""

    launch_is_host_only = True

    def __init__(self, name: str, threads: VirtualThreads, device: Device, runner: FakeRunner) -> None:
        self.runner = runner
        runner.copy_seconds = lambda num_blocks: device.profile.copy_s * num_blocks
        self._name, self._threads, self._device = name, threads, device

    def launch(self, step: SchedulerOutput) -> _Launched:
        self.runner.submit(step)
        return _Launched(step.step_id, self._device.compute(self._name, step))

    def wait(self, launched: _Launched) -> None:
        self._threads.sleep_until(launched.end_s)

    def fetch(self, launched: _Launched) -> ModelRunnerOutput:
        self.wait(launched)
        output = self.runner.fetch()
        assert output.step_id == launched.step_id
        return output


@dataclass(frozen=True, slots=True)
class Delivery:
    time_s: float
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Booked:
    """A step's result, and when the event loop received it."""

    time_s: float
    result: ModelRunnerOutput


@dataclass(slots=True)
class Model:
    """One model's scheduler and its results."""

    world: DeviceWorld
    name: str
    executor: executor.MLXExecutor
    scheduler: Any
    booked: list[Booked] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)

    def add(self, request: Request) -> None:
        request.arrival_s = self.world.threads.now_s
        self.scheduler.add_request(request)

    def submit(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        result = self.executor.submit(output)
        result.add_done_callback(lambda done: self.booked.append(Booked(self.world.threads.now_s, done.result())))
        return result

    def deliver(self, outputs: list[RequestOutput]) -> None:
        self.deliveries.extend(Delivery(self.world.threads.now_s, output) for output in outputs)

    def times(self, request_id: str) -> list[float]:
        """When each output of a request was delivered."""
        return [delivery.time_s for delivery in self.deliveries if delivery.output.request_id == request_id]

    def is_done(self, request_id: str) -> bool:
        return any(d.output.request_id == request_id and d.output.finish_reason is not None for d in self.deliveries)

    def true_steps(self) -> list[DeviceStep]:
        return [step for step in self.world.device.steps if step.model == self.name]

    async def until_done(self, *request_ids: str, within_s: float = 600.0) -> None:
        end_s = self.world.threads.now_s + within_s
        while not all(map(self.is_done, request_ids)):
            assert self.world.threads.now_s < end_s, "it does not come to an end"
            await asyncio.sleep(0.01)


class DeviceWorld:
    """A device, the MLX thread, and the models on it. A test makes it first, and passes its coroutine to `run`."""

    def __init__(
        self,
        kind: Kind,
        monkeypatch: pytest.MonkeyPatch,
        profile: Profile = GPU,
        stretch: Callable[[int], float] = lambda number: 1.0,
    ) -> None:
        self.threads = VirtualThreads()
        self.threads.patch(executor, monkeypatch)
        self.threads.patch(device_queue, monkeypatch)
        self.device = Device(self.threads, kind, profile, stretch)
        self.mlx_thread = executor.MLXThread(self.threads.clock, computes_at_launch=kind is Kind.FILLED)
        self.models: list[Model] = []

    @asynccontextmanager
    async def model(self, name: str = "m", weight: float = 1.0, **limits: Any) -> AsyncIterator[Model]:
        """A model whose scheduler runs within the block. Requests that have not ended by then are aborted."""
        limits.setdefault("target_step_s", 0.06)
        runner = DeviceRunner(name, self.threads, self.device, FakeRunner(NUM_BLOCKS))
        scheduler = make_scheduler(
            NUM_BLOCKS, is_async=True, is_device_shared=lambda: self._is_shared_with(made), **limits
        )
        made = Model(self, name, executor.MLXExecutor(self.mlx_thread, runner, weight), scheduler)  # type: ignore[arg-type]
        self.models.append(made)
        task = asyncio.create_task(scheduler.run(made, self.threads.clock, made.deliver))
        yield made
        for request in list(scheduler.in_order()):
            scheduler.finish_request(request.request_id)
        scheduler.stop()
        await task
        scheduler.check_integrity()
        assert runner.runner.num_submitted == 0, "a step has not ended"

    def _is_shared_with(self, model: Model) -> bool:
        return any(
            other.scheduler.num_running + other.scheduler.num_waiting for other in self.models if other is not model
        )

    def run(self, main: Any) -> Any:
        async def all_of_it() -> Any:
            try:
                return await asyncio.wait_for(main, 3600.0)
            finally:
                self.mlx_thread.stop()

        return self.threads.run(all_of_it())
