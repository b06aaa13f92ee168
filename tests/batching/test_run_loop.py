"""The asyncio loop: one step ahead, waking up, stopping, and dying with the executor."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import ImageJob, ImageResult, ModelRunnerOutput, RequestOutput, SchedulerOutput
from mlx_server.request import FinishReason, PromptImage
from tests.batching.worlds import (
    FakeExecutor,
    FakeRunner,
    FakeStore,
    World,
    chunks,
    expected_tokens,
    make_request,
    make_scheduler,
    step_seconds,
)
from tests.virtual_threads import run_virtually

BOTH_MODES = pytest.mark.parametrize("is_async", [False, True])


class Loop:
    """A scheduler whose `run` is a task, and what it has delivered."""

    def __init__(self, *, is_async: bool, num_blocks: int = 64, **limits: Any) -> None:
        self.scheduler = make_scheduler(num_blocks, is_async=is_async, **limits)
        self.executor = FakeExecutor(FakeRunner(num_blocks))
        self.executor.runner.seconds = lambda _: 0.0  # nothing can be predicted
        self.now = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.outputs: list[RequestOutput] = []
        self.task: asyncio.Task[None] | None = None

    def clock(self) -> float:
        return self.now

    def deliver(self, outputs: list[RequestOutput]) -> None:
        self.outputs.extend(outputs)
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)

    def is_done(self, *request_ids: str) -> bool:
        return set(request_ids) <= {output.request_id for output in self.outputs if output.finish_reason}

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it does not happen")

    async def settle(self) -> None:
        """Long enough for the loop to come to rest."""
        for _ in range(20):
            await asyncio.sleep(0)


@asynccontextmanager
async def running(**extra: Any) -> AsyncIterator[Loop]:
    loop = Loop(**extra)
    loop.task = asyncio.create_task(loop.scheduler.run(loop.executor, loop.clock, loop.deliver))
    yield loop
    loop.scheduler.stop()
    await loop.task
    loop.scheduler.check_integrity()
    assert loop.executor.runner.num_submitted == 0, "a step is still out there"


@BOTH_MODES
async def test_requests_are_served(is_async: bool) -> None:
    async with running(is_async=is_async) as loop:
        requests = [make_request(f"r{index}", 10 + 30 * index, max_tokens=7) for index in range(5)]
        for request in requests:
            loop.scheduler.add_request(request)
        await loop.until(lambda: loop.is_done(*(request.request_id for request in requests)))
        for request in requests:
            assert loop.tokens[request.request_id] == expected_tokens(request.prompt_token_ids, 7)


@BOTH_MODES
async def test_one_step_ahead_is_submitted_or_none(is_async: bool) -> None:
    async with running(is_async=is_async) as loop:
        loop.scheduler.add_request(make_request("r", max_tokens=20))
        await loop.until(lambda: loop.is_done("r"))
        assert loop.executor.num_most_submitted == (2 if is_async else 1)


@BOTH_MODES
async def test_an_idle_loop_wakes_up(is_async: bool) -> None:
    async with running(is_async=is_async) as loop:
        for name in ("first", "second"):
            await loop.settle()
            loop.scheduler.add_request(make_request(name))
            await loop.until(lambda name=name: loop.is_done(name))  # type: ignore[misc]


@BOTH_MODES
async def test_an_idle_loop_does_not_spin(is_async: bool) -> None:
    async with running(is_async=is_async) as loop:
        loop.scheduler.add_request(make_request("r"))
        await loop.until(lambda: loop.is_done("r"))
        await loop.settle()
        calls = 0

        def count() -> float:
            nonlocal calls
            calls += 1
            return 0.0

        loop.clock = count  # type: ignore[method-assign]
        await loop.settle()
        assert calls == 0


@BOTH_MODES
async def test_a_waiting_request_can_be_aborted_while_the_loop_is_idle(is_async: bool) -> None:
    async with running(is_async=is_async) as loop:
        await loop.settle()
        loop.scheduler.add_request(make_request("r"))
        assert loop.scheduler.finish_request("r")
        await loop.settle()
        assert loop.outputs == []
        assert loop.scheduler.num_waiting == 0


@BOTH_MODES
async def test_a_running_request_can_be_aborted(is_async: bool) -> None:
    async with running(is_async=is_async) as loop:
        loop.scheduler.add_request(make_request("r", max_tokens=500))
        loop.scheduler.add_request(make_request("other", max_tokens=20))
        await loop.until(lambda: len(loop.tokens.get("r", ())) >= 3)
        assert loop.scheduler.finish_request("r")
        await loop.until(lambda: loop.is_done("other"))
        await loop.settle()
        assert loop.scheduler.blocks.num_free_blocks == loop.scheduler.blocks.num_blocks
        assert not loop.is_done("r")


async def test_who_arrives_while_a_step_runs_is_submitted_beside_it() -> None:
    async with running(is_async=True) as loop:
        loop.executor.is_held = True
        loop.scheduler.add_request(make_request("r", max_tokens=1))
        await loop.settle()
        assert loop.executor.runner.num_submitted == 1
        loop.scheduler.add_request(make_request("late", max_tokens=1))
        await loop.settle()
        assert loop.executor.runner.num_submitted == 2
        assert loop.outputs == []
        loop.executor.release()
        await loop.until(lambda: loop.is_done("r", "late"))


async def test_a_seat_that_becomes_free_while_a_step_runs_is_taken_at_once() -> None:
    async with running(is_async=True, max_num_seqs=1) as loop:
        loop.executor.is_held = True
        loop.scheduler.add_request(make_request("r", max_tokens=1))
        loop.scheduler.add_request(make_request("waits", max_tokens=1))
        await loop.settle()
        assert loop.executor.runner.num_submitted == 1
        assert loop.scheduler.finish_request("r")
        await loop.settle()
        assert loop.executor.runner.num_submitted == 2
        loop.executor.release()
        await loop.until(lambda: loop.is_done("waits"))


class Device:
    """Runs the steps it is given one after the other, each for as long as the fake model takes, in the loop's time."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.started: list[tuple[float, list[str]]] = []
        self.idle_s = 0.0
        self._free_s = 0.0

    def submit(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        begins_s = max(loop.time(), self._free_s)
        self.idle_s += begins_s - self._free_s
        self.started.append((begins_s, list(chunks(output))))
        self._free_s = begins_s + step_seconds(output)
        self.runner.submit(output)
        loop.call_at(self._free_s, lambda: future.set_result(self.runner.fetch()))
        return future

    def flush(self) -> None:
        pass


def test_what_a_launch_takes_is_left_to_it() -> None:
    """A step that takes the host 20 ms to launch is composed so much earlier, or the device would wait."""
    waits = []
    for launch_s in (0.0, 0.02):
        scheduler = make_scheduler()
        world = World(scheduler)
        world.add(make_request("stream", 40, max_tokens=60))
        for _ in range(3):
            assert world.schedule() is not None
            scheduler.update(dataclasses.replace(world.runner.fetch(), launch_time_s=launch_s))
        assert world.schedule() is not None
        waits.append(scheduler.next_schedule_s(100.0) - 100.0)
    assert waits == pytest.approx([0.9 * 0.05 - 0.004, 0.9 * 0.05 - 0.008 - 0.02])


def test_who_arrives_in_a_long_step_waits_for_the_rest_of_it_and_for_no_other() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        scheduler = make_scheduler(is_async=True)
        device = Device(FakeRunner(64))
        ended: list[RequestOutput] = []
        running = asyncio.create_task(scheduler.run(device, clock, ended.extend))
        scheduler.add_request(make_request("stream", 40, max_tokens=60))
        await asyncio.sleep(1.0)
        idle_s = device.idle_s
        for name in ("a", "b", "c"):
            scheduler.add_request(make_request(name, 8, max_tokens=1, arrival_s=clock()))
            await asyncio.sleep(0.03)  # a step takes 50 ms, or 58 with a prompt
            arrived_s = clock() - 0.03
            await asyncio.sleep(0.2)
            started_s = next(begins_s for begins_s, names in device.started if name in names)
            assert started_s - arrived_s <= 0.05 + 0.016, "it waited for a step that began after its arrival"
        assert device.idle_s == idle_s, "the device has waited for the host"
        scheduler.stop()
        await running

    run_virtually(main())


@BOTH_MODES
async def test_who_waits_for_too_long_is_reported(is_async: bool) -> None:
    async with running(is_async=is_async, max_num_seqs=1, queue_timeout_s=5.0) as loop:
        loop.scheduler.add_request(make_request("runs", max_tokens=400))
        loop.scheduler.add_request(make_request("waits"))
        await loop.until(lambda: bool(loop.outputs))
        loop.now = 6.0
        await loop.until(lambda: loop.is_done("waits"))
        reasons = [output.finish_reason for output in loop.outputs if output.request_id == "waits"]
        assert reasons == [FinishReason.ERROR]


def test_who_waits_for_an_image_for_too_long_is_reported_although_nothing_else_happens() -> None:
    async def main() -> None:
        loop, clock = Loop(is_async=True, queue_timeout_s=5.0), asyncio.get_running_loop().time
        encoding: asyncio.Future[ImageResult] = asyncio.get_running_loop().create_future()
        loop.executor.encode = lambda job: encoding  # type: ignore[attr-defined]
        ended_s = dict[str, float]()

        def deliver(outputs: list[RequestOutput]) -> None:
            ended_s.update((output.request_id, clock()) for output in outputs)

        task = asyncio.create_task(loop.scheduler.run(loop.executor, clock, deliver))
        for arrival_s, name in ((0.0, "first"), (2.0, "second")):
            await asyncio.sleep(arrival_s - clock())
            image = PromptImage(10, 64, name.encode().ljust(32), {})
            loop.scheduler.add_request(make_request(name, 200, arrival_s=arrival_s, images=(image,)))
        await asyncio.sleep(60.0)
        assert ended_s == pytest.approx({"first": 5.0, "second": 7.0}, abs=0.01)
        loop.scheduler.stop()
        await task

    run_virtually(main())


@BOTH_MODES
async def test_a_step_is_submitted_before_the_image_that_may_displace_what_it_needs(is_async: bool) -> None:
    async with running(is_async=is_async) as loop:
        happened: list[tuple[str, str]] = []
        submit = loop.executor.submit

        def noting(output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
            happened.extend(("computed", name) for name in chunks(output))
            return submit(output)

        def encode(job: ImageJob) -> asyncio.Future[ImageResult]:
            happened.append(("encoded", job.request.request_id))
            future = asyncio.get_running_loop().create_future()
            future.set_result(ImageResult(is_encoded=True, was_run=True))
            return future

        loop.executor.submit = noting  # type: ignore[method-assign]
        loop.executor.encode = encode  # type: ignore[attr-defined]
        for name in "ab":
            image = PromptImage(10, 64, name.encode() * 32, {})
            loop.scheduler.add_request(make_request(name, 300, 1, images=(image,)))
        await loop.until(lambda: loop.is_done("a", "b"))
    assert happened == [("encoded", "a"), ("computed", "a"), ("encoded", "b"), ("computed", "b")]


@BOTH_MODES
async def test_stopping_delivers_what_is_submitted(is_async: bool) -> None:
    async with running(is_async=is_async) as loop:
        loop.scheduler.add_request(make_request("r", max_tokens=400))
        await loop.until(lambda: len(loop.tokens.get("r", ())) >= 3)
        loop.scheduler.stop()
        assert loop.task is not None
        await loop.task
        assert loop.executor.runner.num_submitted == 0
        steps = loop.scheduler.counters.num_steps
        assert loop.tokens["r"] == expected_tokens(make_request("r").prompt_token_ids, steps)


async def test_it_can_be_stopped_before_it_began() -> None:
    loop = Loop(is_async=True)
    loop.scheduler.stop()
    await loop.scheduler.run(loop.executor, loop.clock, loop.deliver)


@BOTH_MODES
@pytest.mark.parametrize("step", [0, 1, 5])
async def test_what_the_executor_raises_ends_the_loop(step: int, is_async: bool) -> None:
    loop = Loop(is_async=is_async)
    unretrieved: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    loop.executor.fails_at = step
    loop.scheduler.add_request(make_request("r", max_tokens=50))
    with pytest.raises(RuntimeError, match=f"step {step} failed"):
        await loop.scheduler.run(loop.executor, loop.clock, loop.deliver)
    assert len(loop.tokens.get("r", ())) == step
    assert loop.scheduler.fail_all() == ["r"]
    loop.scheduler.check_integrity()
    assert loop.scheduler.blocks.num_free_blocks == loop.scheduler.blocks.num_blocks
    await loop.settle()
    del loop
    assert unretrieved == []


async def test_it_can_be_cancelled_with_steps_in_flight() -> None:
    loop = Loop(is_async=True)
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    loop.executor.is_held = True
    loop.scheduler.add_request(make_request("r", max_tokens=50))
    task = asyncio.create_task(loop.scheduler.run(loop.executor, loop.clock, loop.deliver))
    await loop.settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    loop.executor.cancel()
    await loop.settle()
    assert reports == []
    assert loop.scheduler.fail_all() == ["r"]


def test_a_wake_up_at_the_end_of_its_event_loop_keeps_it_from_nothing() -> None:
    """`asyncio.run` cancels the loop's task in the turn in which the last block was read or written."""

    async def main() -> None:
        loop = Loop(is_async=True, store=FakeStore())
        loop.task = asyncio.create_task(loop.scheduler.run(loop.executor, loop.clock, loop.deliver))
        loop.scheduler.add_request(make_request("r", 3 * BLOCK_SIZE))
        await loop.until(lambda: loop.is_done("r"))
        await loop.settle()
        assert loop.scheduler.disk is not None
        assert loop.scheduler.disk.rest_s(loop.now, is_idle=True), "it rests until blocks are to be saved"
        loop.scheduler.wake()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
