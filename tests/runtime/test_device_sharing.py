"""How models share the MLX thread: by the time their steps take, and a load in pieces beside them."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from mlx_server.errors import EngineDeadError, ModelLoadError
from mlx_server.outputs import ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from mlx_server.runtime import device_queue, executor
from mlx_server.runtime.device_queue import FairShare
from mlx_server.runtime.executor import MLXExecutor, MLXThread
from tests.virtual_threads import VirtualThreads

LATE_ERROR = "[METAL] Command buffer execution failed: Insufficient Memory."


class TimedRunner:
    """Steps that take `step_s` on the device, which runs them in the order of launch; `bench.log` has who was launched
    and who was fetched."""

    launch_is_host_only = True

    def __init__(self, name: str, step_s: float, bench: Bench) -> None:
        self._name, self._step_s, self._bench = name, step_s, bench

    def launch(self, step: SchedulerOutput) -> tuple[int, float]:
        self._bench.log.append(self._name)
        if step.step_id == 99:
            raise RuntimeError("no memory")
        if step.step_id == 97:
            raise RuntimeError(LATE_ERROR)
        return step.step_id, self._bench.compute(self._step_s)

    def wait(self, launched: tuple[int, float]) -> None:
        self._bench.threads.sleep_until(launched[1])
        if launched[0] == 98:
            raise RuntimeError("the device has lost it")
        if launched[0] == 96:
            raise RuntimeError(LATE_ERROR)

    def fetch(self, launched: tuple[int, float]) -> ModelRunnerOutput:
        self._bench.log.append(f"{self._name} done")
        return ModelRunnerOutput(launched[0], {})


class Bench:
    """The MLX thread in virtual time. It begins when `run` has submitted all there is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, computes_at_launch: bool = False) -> None:
        self.threads = VirtualThreads()
        for module in (device_queue, executor):
            self.threads.patch(module, monkeypatch)
        self.log: list[str] = []
        self.is_broken = False
        self.thread = MLXThread(self._clock, computes_at_launch=computes_at_launch)
        self._free_s = 0.0

    def _clock(self) -> float:
        if self.is_broken:
            raise OSError("no clock")
        return self.threads.now_s

    def compute(self, seconds: float) -> float:
        """Behind what the device has to do; when it will be over."""
        self._free_s = max(self._free_s, self.threads.now_s) + seconds
        return self._free_s

    def executor(self, name: str, step_s: float, weight: float = 1.0) -> MLXExecutor:
        runner = TimedRunner(name, step_s, self)
        return MLXExecutor(self.thread, runner, weight)  # type: ignore[arg-type]

    def piece(self, name: str, seconds: float) -> asyncio.Future[None]:
        def work() -> None:
            self.log.append(name)
            self.threads.sleep(seconds)

        return asyncio.wrap_future(self.thread.call(work))

    def run(self, submit_all: Callable[[], Sequence[asyncio.Future[Any]]]) -> list[Any]:
        """Results and exceptions of all of it."""

        async def main() -> list[Any]:
            return await asyncio.gather(*submit_all(), return_exceptions=True)

        return self.threads.run(main())

    def launched(self) -> list[str]:
        return [name for name in self.log if not name.endswith(" done")]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.thread.stop()


def submit(executor: MLXExecutor, num_steps: int) -> list[asyncio.Future[ModelRunnerOutput]]:
    return [executor.submit(SchedulerOutput(step, ())) for step in range(num_steps)]


def test_equal_models_take_turns(bench: Bench):
    a, b = bench.executor("a", 1.0), bench.executor("b", 1.0)
    bench.run(lambda: submit(a, 6) + submit(b, 6))
    order = bench.launched()
    assert all(abs(order[:end].count("a") - order[:end].count("b")) <= 1 for end in range(len(order)))


def test_long_steps_of_one_leave_the_other_its_time(bench: Bench):
    """Ten short steps for each long one, so that streams wait for one long step in ten, not in every second."""
    long, short = bench.executor("long", 10.0), bench.executor("short", 1.0)
    bench.run(lambda: submit(long, 3) + submit(short, 20))
    assert bench.launched()[:22] == ["long", *["short"] * 10, "long", *["short"] * 10]


def test_weights_are_shares_of_the_time(bench: Bench):
    a, b = bench.executor("a", 1.0, weight=3.0), bench.executor("b", 1.0)
    bench.run(lambda: submit(a, 60) + submit(b, 60))
    assert Counter(bench.launched()[:40]) == {"a": 30, "b": 10}


def test_what_is_beside_a_model_s_steps_has_half_of_the_model_s_share(bench: Bench):
    """As its images: else a model that sees would have two shares."""
    a, b, images = (bench.executor(name, 1.0) for name in ("a", "b", "images of a"))
    bench.thread.detach(images)
    bench.thread.attach(images, beside=a)
    bench.run(lambda: submit(a, 60) + submit(b, 60) + submit(images, 60))
    assert Counter(bench.launched()[:80]) == {"b": 40, "a": 20, "images of a": 20}
    bench.thread.detach(a)
    assert bench.run(lambda: submit(images, 1) + submit(b, 1)), "they go on where the steps have left"


def test_pieces_of_a_load_and_steps_take_turns(bench: Bench):
    """Behind a piece, the device gets as many steps as it may have."""
    a = bench.executor("a", 1.0)

    def submit_all() -> list[asyncio.Future[Any]]:
        return [*(bench.piece("piece", 5.0) for _ in range(4)), *submit(a, 20)]

    bench.run(submit_all)
    assert bench.launched() == [*["piece", "a", "a"] * 4, *["a"] * 12]


def test_who_was_away_does_not_make_up_for_it():
    share: FairShare[str] = FairShare()
    share.add("a")
    share.add("b")
    for _ in range(10):
        assert share.next(lambda member: member == "a") == "a"
        share.charge("a", 1.0)
    order = []
    for _ in range(6):
        member = share.next(lambda member: True)
        assert member is not None
        order.append(member)
        share.charge(member, 1.0)
    assert order == ["b", "a", "b", "a", "b", "a"]


def test_nobody_goes_when_nobody_has_work_and_who_left_pays_nothing():
    share: FairShare[str] = FairShare()
    share.add("a")
    assert share.next(lambda member: False) is None
    share.remove("a")
    share.charge("a", 1.0)
    assert share.next(lambda member: True) is None


def test_the_device_has_one_step_ahead_whoever_it_is_from(bench: Bench):
    a, b = (bench.executor(name, 1.0) for name in "ab")
    results = bench.run(lambda: submit(a, 3) + submit(b, 3))
    # The second turn is b's again: what its first step costs is not known yet.
    order = ["a", "b", "b", "a", "b", "a"]
    assert bench.launched() == order
    assert bench.log[0] == "a"
    assert bench.log[1:-1:2] == order[1:]
    assert bench.log[2::2] == [f"{name} done" for name in order[:-1]]
    assert bench.log[-1] == "a done"
    assert [result.step_time_s for result in results] == [1.0] * 6


def test_each_model_pays_for_its_own_steps_only(bench: Bench):
    """The long step is waited for while the short model's next one is launched; it counts as the long model's."""
    long, short = bench.executor("long", 10.0), bench.executor("short", 1.0)
    results = bench.run(lambda: submit(long, 2) + submit(short, 8))
    assert [result.step_time_s for result in results] == [10.0] * 2 + [1.0] * 8


@pytest.mark.parametrize(("step_s", "idle_s"), [(0.1, 0.1), (0.5, 0.0)], ids=["over", "busy"])
def test_idle_time_is_what_the_device_waited_for_a_step_that_somebody_waited_for(
    step_s: float, idle_s: float, bench: Bench
):
    """The second step comes 0.2 s after the first. A device that is still busy with that then was never idle."""
    executor = bench.executor("a", step_s)
    chunk = ScheduledChunk("a", 3, 1, (1,), (), True, 1)

    async def submit_in_time(step: int) -> ModelRunnerOutput:
        await asyncio.sleep(0.2 * step)
        return await executor.submit(SchedulerOutput(step, (chunk,)))

    _, second = results = bench.run(lambda: [asyncio.ensure_future(submit_in_time(step)) for step in range(2)])
    assert second.idle_time_s == pytest.approx(idle_s)
    assert [result.step_time_s for result in results] == pytest.approx([step_s] * 2)


@pytest.mark.parametrize(("bad_step", "message"), [(99, "no memory"), (98, "the device has lost it")])
def test_a_failed_step_of_one_model_fails_no_other(
    bad_step: int, message: str, bench: Bench, caplog: pytest.LogCaptureFixture
):
    a, b = (bench.executor(name, 1.0) for name in "ab")
    bad, *good = bench.run(lambda: [a.submit(SchedulerOutput(bad_step, ())), *submit(b, 3)])
    assert str(bad) == message
    assert [result.step_id for result in good] == [0, 1, 2]
    assert f"A step failed: {message}" in caplog.text


@pytest.mark.parametrize("heard", ["by a launch", "by a wait", "by a call", "by a load"])
def test_an_error_of_the_device_fails_all_launched_steps(heard: str, bench: Bench):
    """Whoever hears of it: nobody else will."""
    a, b = (bench.executor(name, 1.0) for name in "ab")

    def call() -> None:
        raise RuntimeError(LATE_ERROR)

    def load() -> None:
        try:
            call()
        except RuntimeError as error:
            raise ModelLoadError("The model cannot be loaded.") from error

    async def soon(work: Callable[[], None]) -> None:
        await asyncio.sleep(0.5)
        await asyncio.wrap_future(bench.thread.call(work))

    def submit_all() -> list[asyncio.Future[Any]]:
        launched = submit(a, 1)
        if heard in ("by a launch", "by a wait"):
            return [*launched, b.submit(SchedulerOutput(97 if heard == "by a launch" else 96, ())), *submit(a, 1)]
        work = call if heard == "by a call" else load
        return [*launched, asyncio.ensure_future(soon(work)), *submit(a, 1)]

    results = bench.run(submit_all)
    if heard == "by a wait":
        assert results[0] == ModelRunnerOutput(0, {}, step_time_s=1.0, launch_time_s=0.0), "it was over before"
    else:
        assert str(results[0]) == LATE_ERROR
    assert str(results[1]) == ("The model cannot be loaded." if heard == "by a load" else LATE_ERROR)
    assert str(results[2]) == LATE_ERROR
    assert results[2] is not results[1]


def test_nobody_holds_a_model_whose_steps_are_over(bench: Bench):
    def serve() -> weakref.ref[TimedRunner]:
        runner = TimedRunner("a", 1.0, bench)
        executor = MLXExecutor(bench.thread, runner)  # type: ignore[arg-type]
        bench.run(lambda: submit(executor, 3))
        executor.close()
        return weakref.ref(runner)

    held = serve()
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("steps", [(98, 0), (0, 98), (0, 99), (98, 99)], ids=str)
def test_nobody_holds_a_model_whose_failure_is_known(
    steps: tuple[int, ...], bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """It may be unloaded as soon as one of its futures has failed; the device may be at work on another step then."""
    monkeypatch.setattr(executor.logger, "disabled", True)  # what keeps records keeps tracebacks, too

    def serve() -> weakref.ref[TimedRunner]:
        runner = TimedRunner("a", 1.0, bench)
        served = MLXExecutor(bench.thread, runner)  # type: ignore[arg-type]

        async def first_failure() -> None:
            futures = [served.submit(SchedulerOutput(step, ())) for step in steps]
            await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
            served.close()
            await bench.piece("unload", 0.0)
            errors = [future.exception() for future in futures]  # all: what nobody asks for is logged and kept
            assert any(errors)

        bench.threads.run(first_failure())
        return weakref.ref(runner)

    held = serve()
    gc.collect()
    assert held() is None
    b = bench.executor("b", 1.0)
    assert [result.step_time_s for result in bench.run(lambda: submit(b, 2))] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("computes_at_launch", "step_s", "num_ahead"),
    [(True, 0.3, 0), (True, 0.02, 1), (False, 0.3, 1)],
    ids=["a CPU's long steps", "its short ones", "a device that runs by itself"],
)
def test_no_result_waits_for_a_long_launch_that_computes_the_next_step(
    computes_at_launch: bool, step_s: float, num_ahead: int, monkeypatch: pytest.MonkeyPatch
):
    """MLX's CPU has computed nearly all of a step when its launch returns. Launched ahead, steps came in pairs there:
    no result for the time of two, and then both. The launches of a device that runs by itself may be as long."""
    bench = Bench(monkeypatch, computes_at_launch=computes_at_launch)
    executor = bench.executor("a", step_s)
    runner = executor._runner
    plain = runner.launch

    def launch(step: SchedulerOutput) -> Any:
        launched: Any = plain(step)
        bench.threads.sleep_until(launched[1] - 0.01 * step_s)
        return launched

    runner.launch = launch  # type: ignore[method-assign]
    results = bench.run(lambda: submit(executor, 4))
    bench.thread.stop()
    launches = [place for place, what in enumerate(bench.log) if what == "a"]
    held_up = [launched - bench.log[:place].count("a done") for launched, place in enumerate(launches)]
    assert held_up == [0, *[num_ahead] * 3]
    assert [result.step_time_s for result in results] == pytest.approx([step_s] * 4)


def test_a_long_launch_of_many_rows_waits_for_the_result_of_few(monkeypatch: pytest.MonkeyPatch):
    """A CPU's steps of few rows are launched at once, but the launch of a prompt's step computes it."""
    bench = Bench(monkeypatch, computes_at_launch=True)
    executor = bench.executor("a", 0.1)
    runner = executor._runner
    plain = runner.launch

    def launch(step: SchedulerOutput) -> Any:
        launched: Any = plain(step)
        if step.chunks[0].num_tokens > 64:
            bench.threads.sleep_until(launched[1] - 0.001)
        return launched

    runner.launch = launch  # type: ignore[method-assign]

    def submit_all() -> list[asyncio.Future[ModelRunnerOutput]]:
        rows = (1, 1, 1, 100, 1, 1)
        chunks = [ScheduledChunk("r", 0, count, (1,) * count, ((0,),), True, 0) for count in rows]
        return [executor.submit(SchedulerOutput(step, (chunk,))) for step, chunk in enumerate(chunks)]

    bench.run(submit_all)
    bench.thread.stop()
    launches = [place for place, what in enumerate(bench.log) if what == "a"]
    held_up = [launched - bench.log[:place].count("a done") for launched, place in enumerate(launches)]
    assert held_up == [0, 1, 1, 0, 0, 1]


def test_a_loop_that_closes_while_it_is_handed_a_result_harms_no_other(bench: Bench):
    """It is open when it is looked at."""
    executor = bench.executor("a", 1.0)

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        has_tried = asyncio.Event()
        plain = loop.call_soon_threadsafe

        def call(*arguments: Any, **named: Any) -> asyncio.Handle:
            loop.call_soon_threadsafe = plain  # type: ignore[method-assign]
            plain(has_tried.set)
            raise RuntimeError("Event loop is closed")

        loop.call_soon_threadsafe = call  # type: ignore[method-assign]
        future = executor.submit(SchedulerOutput(0, ()))
        await has_tried.wait()
        assert not future.done()

    bench.threads.run(leave())
    assert [result.step_id for result in bench.run(lambda: submit(executor, 2))] == [0, 1]


def test_nobody_waits_for_a_thread_that_has_died(bench: Bench, caplog: pytest.LogCaptureFixture):
    executor = bench.executor("a", 1.0)
    bench.is_broken = True
    ends = bench.run(lambda: [*submit(executor, 3), bench.piece("piece", 1.0)])
    ends += bench.run(lambda: [executor.submit(SchedulerOutput(3, ())), bench.piece("late", 1.0)])
    assert [type(end) for end in ends] == [EngineDeadError] * 6
    assert all("no clock" in str(end) for end in ends[:4])
    assert bench.log == []
    assert "The MLX thread has died" in caplog.text


async def test_a_thread_may_be_given_up_when_it_takes_a_call(caplog: pytest.LogCaptureFixture):
    """By any thread, as when another rank of a model is lost."""
    lost = threading.Event()

    def clock() -> float:  # which is read before a call is taken
        if lost.is_set():
            lost.clear()
            other = threading.Thread(target=thread.give_up, args=(EngineDeadError("a rank is lost"),))
            other.start()
            other.join()
        return time.monotonic()

    thread = MLXThread(clock)
    lost.set()
    with pytest.raises(EngineDeadError, match="a rank is lost"):
        await asyncio.wait_for(asyncio.wrap_future(thread.call(lambda: None)), 30)
    await asyncio.to_thread(thread._thread.join, 30)
    assert caplog.text == "", "the thread ends, and not by an error"
