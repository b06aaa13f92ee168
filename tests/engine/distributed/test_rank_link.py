"""What ranks say to each other, and whom they listen to."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_server import SamplingParams
from mlx_server.config import load_config
from mlx_server.engine.distributed import rank_link
from mlx_server.engine.distributed.leader import Leader
from mlx_server.engine.distributed.rank_link import (
    Done,
    Link,
    Memory,
    RankLostError,
    Stop,
    Unload,
    leader_host,
    shared_settings,
)
from mlx_server.engine.distributed.ranks import Load
from mlx_server.errors import ConfigError
from mlx_server.outputs import BlockMove, NewRequestData, PoolChange, ScheduledChunk, SchedulerOutput
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.memory import read_memory
from tests.engine.distributed.switched_off import MAY_MAKE_NETWORKS
from tests.engine.distributed.worlds import END_S
from tests.ports import HOST


@pytest.fixture(autouse=True)
def survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that loses a rank ends its process, which here is that of the tests."""
    monkeypatch.setattr("mlx_server.engine.distributed.leader._GRACE_S", 3600.0)


def linked(work: Callable[[Link], None], tokens: tuple[bytes, bytes] = (b"t" * 32, b"t" * 32)) -> Link:
    """Rank 0's end of a link; `work` has the other one, on a thread of its own."""
    with socket.create_server((HOST, 0)) as server:

        def connect() -> None:
            try:
                link = Link(socket.create_connection(server.getsockname()), tokens[1], is_leader=False)
            except RankLostError:
                return
            work(link)
            link.close()

        threading.Thread(target=connect, daemon=True).start()
        return Link(server.accept()[0], tokens[0], is_leader=True)


def test_a_step_arrives_as_it_was_sent():
    sampling = SamplingParams(seed=3, stop=["x"], logit_bias={5: 1.5}, allowed_token_ids=(1, 2), stop_token_ids=(9,))
    chunks = (
        ScheduledChunk("a", 0, 3, (1, 2, 3), ((1,),), True, 0, allowed_bitmask=b"\x01\x00", checkpoint=4),
        ScheduledChunk("b", 7, 3, (4, 5, 6), ((), (2,)), True, 5, num_drafts=2, draft_bitmasks=(None, b"\xff")),
        ScheduledChunk("c", 9, 1, None, ((),), True, 8, recent_token_ids=(7,)),
    )
    step = SchedulerOutput(
        8,
        chunks,
        (NewRequestData("a", (1, 2, 3), (), sampling, frozenset({2, 4}), 1),),
        ("gone",),
        num_prompt_tokens=3,
        pool_change=PoolChange(9, (BlockMove(1, 2),), 3),
    )

    def echo(link: Link) -> None:
        link.send(link.receive())

    link = linked(echo)
    link.send(step)
    assert link.receive() == step
    with pytest.raises(RankLostError, match="its process has ended"):
        link.receive()
    link.close()


def test_who_does_not_know_the_secret_is_no_rank():
    with pytest.raises(RankLostError, match="not a rank of this group"):
        linked(lambda link: None, (b"t" * 32, b"u" * 32))


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05hello", b"\x7f\xff\xff\xff"])
def test_who_says_nothing_or_nonsense_holds_nobody_up(said: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_link, "_PROOF_S", 1)
    with socket.create_server((HOST, 0)) as server, socket.create_connection(server.getsockname()) as stranger:
        stranger.sendall(said)
        with pytest.raises(RankLostError, match="not a rank of this group"):
            Link(server.accept()[0], b"t" * 32, is_leader=True)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\x80",
        bytes((rank_link._KINDS.index(SchedulerOutput),)) + b"\x93\x01\x02\x03",
        bytes((rank_link._KINDS.index(Memory),)) + b"\x81\xa7reading",
        bytes((rank_link._KINDS.index(Done),)) + b"\x83\xa6number\x01\xa6result\xa2\xff\xfe\xa5error\xc0",
    ],
)
def test_a_rank_that_cannot_be_understood_is_lost(frame: bytes):
    """Of another version, say; whatever it sends, the others end with a reason."""
    link = linked(lambda other: other._connection.send_bytes(frame))
    with pytest.raises(RankLostError, match="it sent an invalid message"):
        link.receive()
    link.close()


@pytest.mark.parametrize("begun", [b"", b"\x00\x00\x01\x00half a mess"])
def test_a_rank_that_stops_is_noticed_also_in_the_middle_of_a_message(begun: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_link, "_SILENCE_S", 1)
    noticed = threading.Event()

    def work(link: Link) -> None:
        if begun:
            os.write(link._connection.fileno(), begun)
        noticed.wait(END_S)

    link = linked(work)
    with pytest.raises(RankLostError, match="it has sent nothing for 1 s"):
        link.receive()
    noticed.set()
    link.close()


def test_a_rank_that_has_proved_itself_may_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_link, "_PROOF_S", 1)

    def work(other: Link) -> None:
        time.sleep(1.3)
        other.send(Unload())

    link = linked(work)
    assert link.receive() == Unload()
    link.close()


@pytest.mark.slow
@pytest.mark.skipif(not MAY_MAKE_NETWORKS, reason="no network of its own may be made here (unshare -rn)")
def test_a_machine_that_is_switched_off_is_noticed():
    """Its connections are never closed. Two networks, and the cable between them is cut."""
    script = Path(__file__).with_name("switched_off.py")
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-m", "tests.engine.distributed.switched_off"],
        cwd=script.parents[3],
        capture_output=True,
        text=True,
        timeout=END_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("its connection has ended: "), done.stdout  # timed out, or nothing leads there


async def test_a_load_that_is_cancelled_midway_leaves_the_ranks_in_step():
    """The others are not interrupted: what they answer to the first load is not taken for the second's answer."""
    got: list[Any] = []
    goes_on = threading.Event()

    def work(link: Link) -> None:
        while not isinstance(message := link.receive(), Stop):
            got.append(message)
            if isinstance(message, Load):
                if message.number == 1:
                    goes_on.wait(END_S)
                link.send(Done(message.number, f"{40 + message.number} bytes of weights"))

    leader = Leader(SimpleNamespace(), {1: linked(work)}, MLXThread())

    async def read() -> Any:
        return SimpleNamespace(weight_bytes=42)

    first = asyncio.create_task(leader.load(10**9, asyncio.Event().wait()))
    await asyncio.sleep(0)
    while not got:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    leader.unload()
    second = asyncio.create_task(leader.load(10**9, read()))
    await asyncio.sleep(0.01)
    goes_on.set()
    assert (await second).weight_bytes == 42
    leader.close()
    assert got == [Load(1, 10**9), Unload(), Load(2, 10**9)]


def test_pools_are_booked_by_the_rank_that_has_least_room():
    reading = replace(read_memory(), available_bytes=12345)
    answered = threading.Event()

    def work(link: Link) -> None:
        link.send(Memory(reading))
        link.receive()
        answered.set()
        assert isinstance(link.receive(), Stop)

    leader = Leader(SimpleNamespace(), {1: linked(work)}, MLXThread())
    assert answered.wait(END_S)
    assert leader.read_memory() == reading
    leader.close()


def test_a_rank_that_stops_when_it_is_told_to_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def work(link: Link) -> None:
        assert isinstance(link.receive(), Stop)

    leader = Leader(SimpleNamespace(), {1: linked(work)}, MLXThread())
    send = leader.send

    def send_and_see_it_go(message: Any) -> None:
        send(message)
        for reader in leader._readers:
            reader.join(END_S)

    monkeypatch.setattr(leader, "send", send_and_see_it_go)
    leader.close()
    assert caplog.messages == []


# --- where rank 0 is --------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("MLX_HOSTFILE", "MLX_JACCL_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_rank_0_is_where_the_setting_or_the_launcher_says(tmp_path: Path, launched: pytest.MonkeyPatch):
    ring = tmp_path / "hosts.json"
    ring.write_text('[["10.0.0.1:5000"], ["10.0.0.2:5000"]]')
    launched.setenv("MLX_HOSTFILE", str(ring))
    assert leader_host(load_config(environ={})) == "10.0.0.1"
    launched.setenv("MLX_JACCL_COORDINATOR", "10.0.0.3:6000")
    assert leader_host(load_config(environ={})) == "10.0.0.3"
    assert leader_host(load_config(environ={}, flags={"tensor_parallel_host": "10.0.0.4"})) == "10.0.0.4"


@pytest.mark.parametrize("content", [None, "{", "5", "[]", "[[]]", '{"a": 1}', "no file"])
def test_rank_0_that_nobody_names_must_be_given(content: str | None, tmp_path: Path, launched: pytest.MonkeyPatch):
    if content is not None:
        ring = tmp_path / "hosts.json"
        launched.setenv("MLX_HOSTFILE", str(ring))
        if content != "no file":
            ring.write_text(content)
    with pytest.raises(ConfigError, match=r"The address of rank 0 is unknown.* --tensor-parallel-host"):
        leader_host(load_config(environ={}))


def test_settings_that_change_answers_must_be_those_of_all_ranks():
    own, other = (
        shared_settings(load_config(environ={}, flags={"max_num_seqs": count, "port": count})) for count in ("8", "9")
    )
    assert {name for name, value in own.items() if other[name] != value} == {"max_num_seqs"}
    assert own["max_num_seqs"] == "8"
    assert {"mlx", "mlx-lm", "mlx-server"} < own.keys()
