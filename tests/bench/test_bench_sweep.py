"""`bench sweep` on a server whose latency is a known function of its open streams, in virtual time."""

from __future__ import annotations

import argparse
import json

import pytest
from scripted_servers import Asked, ScriptedServer
from virtual_time import run_virtually

from mlx_server.bench.serve import command, sweep
from mlx_server.bench.serve.sweep import most_by_bisection, most_of_ladder
from mlx_server.errors import ConfigError


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.fixture
def server(monkeypatch):
    """Each stream slows the others by 10 ms a token; a prompt's token costs 1 ms, and no context is over 500."""

    def script(asked: Asked) -> list[float]:
        ttft_s = 0.001 * len(asked.prompt.split())
        return [ttft_s + 0.010 * asked.num_open * index for index in range(asked.num_tokens)]

    made = ScriptedServer(script)
    make = command.Target
    monkeypatch.setattr(command, "Target", lambda **fields: make(**fields, transport=made))
    monkeypatch.setattr(sweep.asyncio, "run", run_virtually)
    return made


def swept(capsys, *argv: str) -> dict:
    assert sweep.run(parsed(*argv)) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_capacity_is_where_the_latency_says(server, capsys):
    found = swept(capsys, "--slo", "tpot:75", "--share", "1", "--context", "50", "200", "--output-len", "8")
    assert [(result["context"], result["max_streams"]) for result in found["results"]] == [(50, 7), (200, 7)]
    assert [point["streams"] for point in found["results"][0]["points"]] == [1, 2, 4, 8, 6, 7]
    assert [point["keeps"] for point in found["results"][0]["points"]] == [True, True, True, False, True, True]


def test_prompts_over_the_limit_leave_no_capacity(server, capsys):
    assert sweep.run(parsed("--slo", "tpot:35", "ttft:300", "--context", "100", "400", "--output-len", "4")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "| 100 | 3 |" in printed
    assert "| 400 | 0 | - | 1 stream: 0% good |" in printed
    assert "TPOT of at most 35 ms, TTFT of at most 300 ms for 95% of the requests" in printed


def test_the_share_allows_some_to_be_late(server, capsys):
    """At 8 streams the first 7 requests find fewer open than that; the 17 after them do not."""
    argv = ("--slo", "tpot:75", "--context", "50", "--output-len", "8", "--streams", "8", "--requests-per-stream", "3")
    point = swept(capsys, *argv)["results"][0]["points"][0]
    assert point["good_share"] == pytest.approx(7 / 24)
    assert swept(capsys, *argv, "--share", "0.29")["results"][0]["max_streams"] == 8
    assert swept(capsys, *argv, "--share", "0.3")["results"][0]["max_streams"] == 0


def test_a_ladder_measures_every_rung(server, capsys):
    found = swept(capsys, "--slo", "tpot:75", "--share", "1", "--context", "50", "--streams", "9", "3", "6", "20")
    assert [point["streams"] for point in found["results"][0]["points"]] == [3, 6, 9, 20]
    assert found["results"][0]["max_streams"] == 6


def test_streams_are_as_many_as_said_and_prompts_are_never_sent_twice(server, capsys):
    swept(capsys, "--slo", "ttft:900", "--context", "30", "--streams", "5", "2", "--requests-per-stream", "4")
    prompts = [asked.prompt for asked in server.asked if len(asked.prompt.split()) == 30]
    assert len(prompts) == len(set(prompts)) == (5 + 2) * 4 + 2  # and a warm-up before each
    assert server.most_open == 5


def test_a_server_that_refuses_keeps_nothing_and_says_why(server, capsys):
    refuse, server.script = server.script, lambda asked: [] if len(asked.prompt.split()) > 400 else refuse(asked)
    assert sweep.run(parsed("--slo", "ttft:9000", "--context", "500", "--num-warmups", "0")) == 0
    assert "3 failed: 3 x the stream ended without a token" in capsys.readouterr().out


@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_bisection_finds_every_answer(most):
    for answer in range(most + 1):
        tried: list[int] = []
        assert most_by_bisection(lambda count: tried.append(count) or count <= answer, most) == answer  # noqa: B023
        assert len(tried) == len(set(tried)) <= 13


@pytest.mark.parametrize(("answer", "expected"), [(0, 0), (2, 2), (5, 4), (9, 8)])
def test_a_ladder_stops_counting_at_the_first_failure(answer, expected):
    assert most_of_ladder(lambda count: count <= answer, [8, 4, 2]) == expected
    assert most_of_ladder(lambda count: count != 2, [1, 2, 4]) == 1


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="NAME:MS"):
        sweep.run(parsed("--slo", "itl:9"))
    with pytest.raises(SystemExit):
        parsed("--slo", "ttft:1", "--share", "1.5")
