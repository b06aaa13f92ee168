"""What the scheduler costs the host, in calls: the same in every run, and growing with the running set only."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_server.bench.lab import host_cost, stream_cost
from mlx_server.bench.lab.host_cost import HostCost, measure
from mlx_server.cli.main import main


def calls(num_running: int, num_waiting: int) -> tuple[float, float]:
    cost = measure(num_running, num_waiting, num_steps=32)
    return cost.schedule_calls, cost.update_calls


def test_counts_repeat() -> None:
    assert calls(4, 10) == calls(4, 10)


def test_how_many_wait_costs_nothing() -> None:
    without, few, many = (calls(4, num_waiting) for num_waiting in (0, 10, 2000))
    assert few == many
    assert few[1] == without[1]
    assert few[0] <= without[0] + 34, "beside a look at the queue, at its clients and at the seats"


def test_the_cost_grows_no_faster_than_the_running_set() -> None:
    (small_schedule, small_update), (schedule, update) = calls(8, 100), calls(32, 100)
    assert schedule <= 4 * small_schedule
    assert update <= 4 * small_update


def test_the_cost_of_a_request_is_a_few_calls() -> None:
    """A guard against a slip, generous to other versions of Python."""
    schedule, update = calls(32, 1000)
    assert schedule / 32 < 20
    assert update / 32 < 16


def test_finding_no_draft_costs_a_few_calls_more() -> None:
    """To look and to ask whether to wait. It took 197 for one request, and 437 for four, while every step asked what
    drafts would bring before there were any."""
    for num_running, most in ((1, 110), (4, 320)):
        without = measure(num_running, 0, num_steps=32)
        cost = measure(num_running, 0, num_steps=32, speculates=True)
        more = cost.schedule_calls + cost.update_calls - without.schedule_calls - without.update_calls
        assert 0 < more < most


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    host_cost.add_arguments(parser)
    path = tmp_path / "cost.json"
    arguments = ["--num-running", "1", "4", "--num-waiting", "0", "9", "--num-steps", "5", "--json", str(path)]
    assert host_cost.run(parser.parse_args(arguments)) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()]
    assert [(row[1].strip(), row[2].strip()) for row in rows[2:]] == [("1", "0"), ("4", "0"), ("1", "9"), ("4", "9")]
    results = json.loads(path.read_text())["results"]
    assert [result["num_running"] for result in results] == [1, 4, 1, 4]
    assert all(result["total_us"] > 0 for result in results)


def test_the_table_shows_whole_microseconds() -> None:
    table = host_cost.render([HostCost(64, 10_000, 43.4, 41.2, 19.6, 825.4, 650.0)])
    assert table.splitlines()[-1].split("|")[1:-1] == [
        " 64      ",
        "  10,000 ",
        "          43 ",
        "        41 ",
        "      20 ",
        "    104 ",
        "            825 ",
        "          650 ",
    ]


@pytest.mark.slow
def test_streams_of_a_server_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    host_cost.add_arguments(parser)
    path = tmp_path / "cost.json"
    arguments = ["--streams", "3", "--step-ms", "2", "--num-steps", "5", "--json", str(path)]
    assert host_cost.run(parser.parse_args(arguments)) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("| 3 ")
    (result,) = json.loads(path.read_text())["results"]
    assert result["num_streams"] == 3
    assert result["token_us"] > result["send_us"] > 0
    assert 0 < result["tokens_per_s"] <= 3 / 0.002


class SlowServer:
    """A process that serves one stream: sends it a byte, or nothing, each time that it is asked for its measurement,
    which it has at the 500th time."""

    def __init__(self, piece: bytes) -> None:
        self._piece = piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answers: list[object] = [self._listener.getsockname()[1], (1.0, 2.0)]
        self._num_asked = 0

    def poll(self, timeout_s: float | None = None) -> bool:
        if timeout_s is not None:
            return True
        if not self._num_asked:
            self._stream = self._listener.accept()[0]
        self._num_asked += 1
        self._stream.send(self._piece)
        return self._num_asked == 500

    def recv(self) -> object:
        return self._answers.pop(0)

    def close(self) -> None:
        self._listener.close()
        self._stream.close()


@pytest.mark.parametrize("piece", [b"x", b""])
def test_streams_may_last_as_long_as_they_have_tokens(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by ten seconds at each look."""
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(stream_cost, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    plan = stream_cost._Plan("folder", num_streams=1, step_s=0.1, num_steps=500)
    with contextlib.closing(SlowServer(piece)) as server:
        if piece:
            assert stream_cost._read_streams(plan, server) == (1.0, 2.0)
        else:
            with pytest.raises(TimeoutError, match="no token has come for 120 s"):
                stream_cost._read_streams(plan, server)


@pytest.mark.parametrize("arguments", [["--num-running", "0"], ["--num-waiting", "-1"], ["--num-steps", "x"]])
def test_wrong_counts_are_refused(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    host_cost.add_arguments(parser)
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--streams", "1", "--speculate", "--num-waiting", "0"), "on --streams: --num-waiting, --speculate"),
        (("--step-ms", "0"), "Without effect on the scheduler alone: --step-ms"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "host-cost", *arguments]) == 2
    assert message in capsys.readouterr().err
