"""How models share the MLX thread: by the time their steps take, and a load in pieces beside them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from mlx_server.errors import EngineDeadError
from mlx_server.outputs import ModelRunnerOutput, SchedulerOutput
from mlx_server.runtime.executor import MLXExecutor, MLXThread
from mlx_server.runtime.fair_share import FairShare


class Clock:
    """Stands still unless somebody works."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.is_broken = False

    def __call__(self) -> float:
        if self.is_broken:
            raise OSError("no clock")
        return self.now_s


class TimedRunner:
    """Steps that take `step_s` on the device, which runs them in the order of launch; `log` has who was launched
    and who was fetched."""

    def __init__(self, name: str, step_s: float, clock: Clock, log: list[str], *, is_eager: bool = True) -> None:
        self.is_eager = is_eager
        self.is_launch_beside = not is_eager
        self.num_model_calls = 0
        self._name, self._step_s, self._clock, self._log = name, step_s, clock, log

    def launch(self, step: SchedulerOutput) -> int:
        self.num_model_calls += 1
        self._log.append(self._name)
        if step.step_id == 99:
            raise RuntimeError("no memory")
        return step.step_id

    def fetch(self, launched: int) -> ModelRunnerOutput:
        self._log.append(f"{self._name} done")
        self._clock.now_s += self._step_s
        return ModelRunnerOutput(launched, {})


class Bench:
    """A thread that is held until `run`, so that the order of all that was submitted is its own choice."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.log: list[str] = []
        self.thread = MLXThread(self.clock)
        self._gate = threading.Event()
        self._taken = threading.Event()
        self.thread.call(self._hold)
        self._taken.wait()

    def _hold(self) -> None:
        self._taken.set()
        self._gate.wait()

    def executor(self, name: str, step_s: float, weight: float = 1.0, *, is_eager: bool = True) -> MLXExecutor:
        runner = TimedRunner(name, step_s, self.clock, self.log, is_eager=is_eager)
        return MLXExecutor(self.thread, runner, weight)  # type: ignore[arg-type]

    def piece(self, name: str, seconds: float) -> asyncio.Future[None]:
        def work() -> None:
            self.log.append(name)
            self.clock.now_s += seconds

        return asyncio.wrap_future(self.thread.call(work))

    async def run(self, work: list[asyncio.Future[ModelRunnerOutput]]) -> list[ModelRunnerOutput]:
        self._gate.set()
        return await asyncio.gather(*work)

    def launched(self) -> list[str]:
        return [name for name in self.log if not name.endswith(" done")]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made._gate.set()
    made.thread.stop()


def submit(executor: MLXExecutor, num_steps: int) -> list[asyncio.Future[ModelRunnerOutput]]:
    return [executor.submit(SchedulerOutput(step, ())) for step in range(num_steps)]


async def test_equal_models_take_turns(bench: Bench):
    a, b = bench.executor("a", 1.0), bench.executor("b", 1.0)
    await bench.run(submit(a, 3) + submit(b, 3))
    assert bench.launched() == ["a", "b"] * 3


async def test_long_steps_of_one_leave_the_other_its_time(bench: Bench):
    """Ten short steps for each long one, so that streams wait for one long step in ten, not in every second."""
    long, short = bench.executor("long", 10.0), bench.executor("short", 1.0)
    await bench.run(submit(long, 3) + submit(short, 20))
    assert bench.launched()[:22] == ["long", *["short"] * 10, "long", *["short"] * 10]


async def test_weights_are_shares_of_the_time(bench: Bench):
    a, b = bench.executor("a", 1.0, weight=3.0), bench.executor("b", 1.0)
    await bench.run(submit(a, 60) + submit(b, 60))
    assert Counter(bench.launched()[:40]) == {"a": 30, "b": 10}


async def test_pieces_of_a_load_and_steps_take_turns(bench: Bench):
    a = bench.executor("a", 1.0)
    pieces = [bench.piece("piece", 5.0) for _ in range(4)]
    await bench.run(submit(a, 20))
    await asyncio.gather(*pieces)
    order = bench.launched()
    between = [sum(name == "a" for name in part) for part in _split(order, "piece")]
    assert between == [0, 5, 5, 5, 5]


def _split(order: list[str], mark: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for name in order:
        if name == mark:
            parts.append([])
        else:
            parts[-1].append(name)
    return parts


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


async def test_the_device_has_one_step_ahead_whoever_it_is_from(bench: Bench):
    a, b = (bench.executor(name, 1.0, is_eager=False) for name in "ab")
    work = submit(a, 3) + submit(b, 3)
    a.flush()
    b.flush()
    results = await bench.run(work)
    # The second turn is b's again: what its first step costs is not known yet.
    order = ["a", "b", "b", "a", "b", "a"]
    assert bench.launched() == order
    assert bench.log[0] == "a"
    assert bench.log[1:-1:2] == order[1:]
    assert bench.log[2::2] == [f"{name} done" for name in order[:-1]]
    assert bench.log[-1] == "a done"
    assert [result.step_time_s for result in results] == [1.0] * 6


async def test_each_model_pays_for_its_own_steps_only(bench: Bench):
    """The long step is waited for while the short model's next one is launched; it counts as the long model's."""
    long, short = bench.executor("long", 10.0, is_eager=False), bench.executor("short", 1.0, is_eager=False)
    work = submit(long, 2) + submit(short, 8)
    long.flush()
    short.flush()
    results = await bench.run(work)
    assert [result.step_time_s for result in results] == [10.0] * 2 + [1.0] * 8


async def test_a_failed_step_of_one_model_fails_no_other(bench: Bench, caplog: pytest.LogCaptureFixture):
    a, b = (bench.executor(name, 1.0, is_eager=False) for name in "ab")
    bad = a.submit(SchedulerOutput(99, ()))
    good = submit(b, 3)
    a.flush()
    b.flush()
    await bench.run(good)
    with pytest.raises(RuntimeError, match="no memory"):
        await bad
    assert "A step failed: no memory" in caplog.text


async def test_nobody_waits_for_a_thread_that_has_died(bench: Bench, caplog: pytest.LogCaptureFixture):
    executor = bench.executor("a", 1.0)
    waiting = [*submit(executor, 3), bench.piece("piece", 1.0)]
    bench.clock.is_broken = True
    bench._gate.set()
    for future in waiting:
        with pytest.raises(EngineDeadError, match="no clock"):
            await future
    for future in (executor.submit(SchedulerOutput(3, ())), bench.piece("late", 1.0)):
        with pytest.raises(EngineDeadError):
            await future
    assert bench.log == []
    assert "The MLX thread has died" in caplog.text
