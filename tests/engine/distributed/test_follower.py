"""A rank other than 0, followed through its messages: what it answers, and with what status it ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_server.config import Config, load_config
from mlx_server.engine.distributed import follower
from mlx_server.engine.distributed.rank_link import (
    Done,
    Failed,
    Hello,
    Link,
    Memory,
    Stop,
    Unload,
    shared_settings,
)
from mlx_server.engine.distributed.ranks import Load, MakeRunner
from mlx_server.outputs import SchedulerOutput
from mlx_server.runtime.cache.layers import PoolRoom
from tests.engine.distributed.worlds import END_S
from tests.engine_worlds import make_folder, on_the_cpu
from tests.ports import HOST, free_ports

pytestmark = on_the_cpu

TOKEN = b"t" * 32
ROOM = PoolRoom(1024, 2**23, 2**23)


class Left(BaseException):
    """Instead of the end of the process."""


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The statuses with which the process would have ended at once."""
    statuses: list[int] = []

    def leave(status: int) -> None:
        statuses.append(status)
        raise Left

    monkeypatch.setattr(follower, "leave", leave)
    monkeypatch.setattr(follower, "set_up_logging", lambda *_: None)
    monkeypatch.setattr(follower, "_MEMORY_S", 0.01)
    monkeypatch.setenv("MLX_RANK", "1")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield statuses
    for number, handler in handlers.items():
        signal.signal(number, handler)


def invite(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """The rank joins a group in which it has the whole model, and is told to come to this port."""
    group = SimpleNamespace(rank=lambda: 1)
    monkeypatch.setattr(follower, "join_group", lambda rank, size: group)
    monkeypatch.setattr(follower, "from_first", lambda group, data: TOKEN + port.to_bytes(2, "big"))
    monkeypatch.setattr(
        follower, "load_in_pieces", lambda settings, folder, adapters, group: read_alone(settings, folder, ())
    )


class Leader:
    """Rank 0's end: a thread that says what the test says. All messages but readings of memory are `got`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, say: Callable[[Link, Callable[[], Any]], None]) -> None:
        self.got: list[Any] = []
        self.num_readings = 0
        self._server = socket.create_server((HOST, 0))
        invite(monkeypatch, self._server.getsockname()[1])
        self._say = say
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._server:
            link = Link(self._server.accept()[0], TOKEN, is_leader=True)

        def next_message() -> Any:
            while isinstance(message := link.receive(), Memory):
                self.num_readings += 1
            self.got.append(message)
            return message

        next_message()
        self._say(link, next_message)
        link.close()

    def join(self) -> None:
        self._thread.join(END_S)
        assert not self._thread.is_alive()


read_alone = follower.load_in_pieces


def config_for(model: object) -> Config:
    flags = {"model": str(model), "tensor_parallel_size": "2", "tensor_parallel_host": HOST, "max_model_len": "512"}
    return load_config(environ={}, flags=flags)


def test_a_rank_loads_unloads_and_ends_when_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = config_for(make_folder(tmp_path / "m"))

    def say(link: Link, next_message: Callable[[], Any]) -> None:
        for first in (1, 3):
            link.send(Load(first, 2**33))
            next_message()
            link.send(MakeRunner(first + 1, ROOM))
            next_message()
            link.send(Unload())
        link.send(MakeRunner(5, ROOM))
        next_message()
        while leader.num_readings == 0:
            link.receive()
            leader.num_readings += 1
        link.send(Stop(0))

    leader = Leader(monkeypatch, say)
    assert follower.follow(config) == 0
    leader.join()
    hello, *answers = leader.got
    assert hello == Hello(1, shared_settings(config))
    assert [answer.number for answer in answers] == [1, 2, 3, 4, 5]
    assert [answer.error for answer in answers] == [None] * 4 + ["weights are loaded first"]
    weights, runner, *again = (answer.result for answer in answers)
    assert again == [weights, runner, ""]
    assert "bytes of weights" in weights
    assert "blocks of" in runner
    assert left == []
    assert caplog.messages.count("Rank 1 follows rank 0") == 1
    assert "weights are loaded first" in caplog.text


def test_a_model_that_is_not_there_is_an_answer_and_a_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def say(link: Link, next_message: Callable[[], Any]) -> None:
        link.send(Load(1, 2**33))
        next_message()
        link.send(Stop(0))

    leader = Leader(monkeypatch, say)
    assert follower.follow(config_for(tmp_path / "nothing")) == 0
    leader.join()
    (answer,) = leader.got[1:]
    assert isinstance(answer, Done)
    assert answer.error is not None
    assert "There is no model" in answer.error
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert (line.getMessage(), line.exc_info) == (answer.error, None)
    assert left == []


def test_a_step_that_fails_ends_the_rank_and_rank_0_hears_why(
    monkeypatch: pytest.MonkeyPatch, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def say(link: Link, next_message: Callable[[], Any]) -> None:
        link.send(SchedulerOutput(1, ()))
        next_message()
        link.send(Stop(0))

    leader = Leader(monkeypatch, say)
    follower.follow(config_for("random:mini"))
    leader.join()
    assert leader.got[1:] == [Failed("a step failed: AssertionError: there are steps of a loaded model only")]
    assert left == [1]
    assert "A step failed: there are steps of a loaded model only" in caplog.messages


def test_a_rank_ends_with_rank_0_s_status(monkeypatch: pytest.MonkeyPatch, left: list[int]) -> None:
    leader = Leader(monkeypatch, lambda link, _: link.send(Stop(3)))
    with pytest.raises(Left):
        follower.follow(config_for("random:mini"))
    leader.join()
    assert left == [3]


def test_a_rank_that_loses_rank_0_ends(
    monkeypatch: pytest.MonkeyPatch, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    leader = Leader(monkeypatch, lambda link, _: None)
    with pytest.raises(Left):
        follower.follow(config_for("random:mini"))
    leader.join()
    assert left == [1]
    assert "Rank 0 is lost: its process has ended" in caplog.text


def test_a_rank_that_cannot_reach_rank_0_ends(
    monkeypatch: pytest.MonkeyPatch, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    invite(monkeypatch, *free_ports(1))
    with pytest.raises(Left):
        follower.follow(config_for("random:mini"))
    assert left == [1]
    assert "Rank 0 cannot be joined: " in caplog.text


def test_the_second_signal_ends_a_rank_at_once(
    monkeypatch: pytest.MonkeyPatch, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    goes_on = threading.Event()

    def say(link: Link, _: Callable[[], Any]) -> None:
        assert isinstance(link.receive(), Memory), "signals are handled now"
        os.kill(os.getpid(), signal.SIGTERM)
        goes_on.wait(END_S)

    def noted(self: logging.Handler, record: logging.LogRecord) -> None:
        if "send the signal again" in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)

    handler = type("Again", (logging.Handler,), {"emit": noted})()
    follower.logger.addHandler(handler)
    leader = Leader(monkeypatch, say)
    try:
        with pytest.raises(Left):
            follower.follow(config_for("random:mini"))
    finally:
        follower.logger.removeHandler(handler)
        goes_on.set()
    leader.join()
    assert left == [128 + signal.SIGTERM]
