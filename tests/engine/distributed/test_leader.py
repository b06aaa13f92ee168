"""Rank 0 with other ranks that the tests play: what they must agree on, and how it ends when one is lost."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_server.engine.distributed import leader as leader_module
from mlx_server.engine.distributed.leader import Leader
from mlx_server.engine.distributed.rank_link import Done, Failed, Heartbeat, Link, Memory, Message, RankLostError, Stop
from mlx_server.engine.distributed.ranks import Load, MakeRunner
from mlx_server.errors import EngineDeadError, ModelLoadError
from mlx_server.outputs import SchedulerOutput
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.memory import read_memory
from tests.engine.distributed.test_rank_link import linked

Answer = Callable[[Any], Message | None]


@pytest.fixture(autouse=True)
def survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that loses a rank ends its process, which here is that of the tests."""
    monkeypatch.setattr(leader_module, "_GRACE_S", 3600.0)
    monkeypatch.setattr(leader_module, "_END_S", 0.5)


class Other:
    """Another rank: `got` are the messages that it has received."""

    def __init__(self, answer: Answer) -> None:
        self.got: list[Any] = []
        self.has_ended = threading.Event()
        self._answer = answer
        self.link = linked(self._work)

    def _work(self, link: Link) -> None:
        try:
            while not isinstance(message := link.receive(), Stop):
                self.got.append(message)
                answer = self._answer(message)
                if answer is not None:
                    link.send(answer)
            self.got.append(message)
        except RankLostError:
            pass
        self.has_ended.set()


def lead(*answers: Answer) -> tuple[Leader, list[Other]]:
    others = [Other(answer) for answer in answers]
    return Leader(SimpleNamespace(), {rank: one.link for rank, one in enumerate(others, 1)}, MLXThread()), others  # type: ignore[arg-type]


def says(result: str, error: str | None = None) -> Answer:
    return lambda message: Done(message.number, result, error) if isinstance(message, Load | MakeRunner) else None


async def loaded(weight_bytes: int = 42) -> Any:
    return SimpleNamespace(weight_bytes=weight_bytes)


async def failed() -> Any:
    raise ModelLoadError("It is broken here.")


SAME, OTHER = says("42 bytes of weights"), says("41 bytes of weights")


async def test_all_ranks_do_what_this_one_does_and_end_with_it() -> None:
    leader, others = lead(SAME, SAME)
    assert (await leader.load(7, loaded())).weight_bytes == 42
    step = SchedulerOutput(1, ())
    leader.send(step)
    leader.close()
    for other in others:
        assert other.has_ended.wait(10)
        assert other.got == [Load(1, 7), step, Stop(0)]


async def test_the_runner_s_room_is_that_of_all_ranks() -> None:
    room = PoolRoom(1, 2, 3)
    info = SimpleNamespace(num_blocks=1, max_blocks=2, block_bytes=3, max_num_seqs=4, state_bytes=5, level="x")

    async def made() -> Any:
        return "runner", info

    leader, (other,) = lead(says("1 to 2 blocks of 3 bytes, 4 requests with states of 5 bytes, x"))
    assert await leader.make_runner(room, made()) == ("runner", info)
    leader.close()
    assert other.has_ended.wait(10)
    assert other.got == [MakeRunner(1, room), Stop(0)]


@pytest.mark.parametrize(
    ("answers", "work", "words"),
    [
        ((SAME, OTHER), loaded, "Rank 2 has 41 bytes of weights, and rank 0 has 42 .*: are their files the same"),
        ((OTHER, SAME), loaded, "Rank 1 has 41 bytes"),
        ((SAME, says("", "No room.")), loaded, "Rank 2: No room"),
        ((SAME, SAME), failed, "It is broken here"),
    ],
)
async def test_what_one_rank_cannot_load_none_has_loaded(
    answers: tuple[Answer, ...], work: Callable[[], Any], words: str
) -> None:
    """The next load is another one; if there is none, the others end with an error, too."""
    leader, others = lead(*answers)
    for number in (1, 2):
        with pytest.raises(ModelLoadError, match=words):
            await leader.load(7, work())
        assert leader._number == number
    leader.close()
    for other in others:
        assert other.has_ended.wait(10)
        assert other.got == [Load(1, 7), Load(2, 7), Stop(1)]


async def test_a_load_that_succeeds_after_one_that_failed_ends_with_success() -> None:
    leader, (other,) = lead(SAME)
    with pytest.raises(ModelLoadError):
        await leader.load(7, failed())
    await leader.load(7, loaded())
    leader.close()
    assert other.has_ended.wait(10)
    assert other.got[-1] == Stop(0)


async def test_a_rank_that_is_lost_while_it_loads_ends_the_load(caplog: pytest.LogCaptureFixture) -> None:
    leader, (lost, other) = lead(lambda message: Failed("a step failed: here"), lambda message: None)
    with pytest.raises(
        EngineDeadError, match=r"Rank 1 of the model is lost: a step failed: here\. Start all ranks again"
    ):
        await leader.load(7, loaded())
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL] == [
        "Rank 1 of the model is lost: a step failed: here. Start all ranks again."
    ]
    with pytest.raises(EngineDeadError):
        await asyncio.wrap_future(leader._thread.call(lambda: None))
    leader.send(SchedulerOutput(1, ()))
    leader.close()
    del lost, other


async def test_a_rank_that_fails_while_this_one_waits_for_it_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This rank's work may hang in a sum over ranks."""
    monkeypatch.setattr(leader_module, "_AGREE_S", 0.05)
    leader, _ = lead(says("", "No room."))
    work = asyncio.get_running_loop().create_future()
    load = asyncio.create_task(leader.load(7, work))  # type: ignore[arg-type]
    while not leader._is_lost:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    work.set_exception(EngineDeadError("given up"))
    with pytest.raises(EngineDeadError, match="given up"):
        await load
    leader.close()


@pytest.mark.parametrize("is_load", [True, False])
async def test_what_has_sums_over_ranks_runs_to_its_end_even_if_it_is_cancelled(is_load: bool) -> None:
    """Reading weights has none; a rank that makes its runner would wait for this one forever."""
    leader, (other,) = lead(lambda message: None)
    work = asyncio.get_running_loop().create_future()
    task: asyncio.Task[Any] = asyncio.create_task(
        leader.load(7, work) if is_load else leader.make_runner(PoolRoom(1, 2, 3), work)
    )
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    assert (work.cancelled(), task.done()) == (is_load, is_load)
    if not is_load:
        work.set_result(("runner", None))
    with pytest.raises(asyncio.CancelledError):
        await task
    leader.close()
    assert other.has_ended.wait(10)
    assert other.got[-1] == Stop(0)


class Runner:
    """A runner whose launches or results may fail."""

    launch_is_host_only = True

    def __init__(self, fails_at: str = "") -> None:
        self._fails_at = fails_at

    def launch(self, step: SchedulerOutput) -> Any:
        return self._done("launch", step)

    def wait(self, launched: Any) -> None:
        self._done("wait", launched)

    def fetch(self, launched: Any) -> Any:
        return self._done("fetch", launched)

    def _done(self, name: str, result: Any) -> Any:
        if name == self._fails_at:
            raise ValueError(name)
        return result


@pytest.mark.parametrize("fails_at", ["", "launch", "fetch"])
def test_each_step_is_sent_first_and_a_failed_one_ends_all_ranks_with_an_error(fails_at: str) -> None:
    leader, (other,) = lead(lambda message: None)
    runner = leader.leading(Runner(fails_at))  # type: ignore[arg-type]
    assert runner.launch_is_host_only
    step = SchedulerOutput(1, ())
    try:
        launched = runner.launch(step)
        runner.wait(launched)
        assert runner.fetch(launched) == step
    except ValueError as error:
        assert str(error) == fails_at  # noqa: PT017
    leader.close()
    assert other.has_ended.wait(10)
    assert other.got == [step, Stop(1 if fails_at else 0)]


def test_readings_are_answered_so_that_a_rank_knows_that_this_one_lives() -> None:
    reading = read_memory()
    leader, (other,) = lead(lambda message: None if isinstance(message, Heartbeat) else Memory(reading))
    leader.unload()
    while not any(isinstance(message, Heartbeat) for message in other.got):
        threading.Event().wait(0.01)
    leader.close()
