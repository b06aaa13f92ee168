"""`bench structured` on a scripted server in virtual time."""

from __future__ import annotations

import argparse

import pytest
from scripted_servers import Asked, ScriptedServer, evenly
from virtual_time import run_virtually

from mlx_server.bench.lab import structured
from mlx_server.bench.lab.structured import ALONE, CONDITIONS, PLAIN, STRUCTURED, Setup, Turn, measure, rise_of
from mlx_server.bench.serve.client import Target
from mlx_server.errors import ServeError

GAP_S = 0.01


def turns(server: ScriptedServer, num_rounds: int = 2, **more: object) -> list[Turn]:
    target = Target(base_url="http://test", model="m", transport=server)
    return run_virtually(measure(target, Setup(num_stream_tokens=64, **more), num_rounds))


def test_conditions_take_turns_and_the_first_round_is_dropped() -> None:
    server = ScriptedServer(evenly(GAP_S, GAP_S))
    made = turns(server, num_rounds=2)
    order = [turn.condition for turn in made]
    assert order == [PLAIN, STRUCTURED, ALONE, STRUCTURED, ALONE, PLAIN]
    streams = [asked for asked in server.asked if "prompt" in asked.body]
    assert len(streams) == 3 * len(CONDITIONS) * 8
    assert {asked.num_tokens for asked in streams} == {64}


def test_gaps_count_from_the_guests_beginning_to_the_first_stream_s_end() -> None:
    alone, *_ = [turn for turn in turns(ScriptedServer(evenly(GAP_S, GAP_S))) if turn.condition == ALONE]
    assert len(alone.gaps_s) == 8 * (64 - 8)
    assert alone.mean_itl_ms == pytest.approx(10)
    assert alone.p99_itl_ms == pytest.approx(10)


def test_guests_are_distinct_and_as_many_as_asked_for() -> None:
    server = ScriptedServer(evenly(GAP_S, GAP_S))
    made = turns(server, num_guests=3)
    assert server.most_open == 8 + 3
    guests = [asked for asked in server.asked if "messages" in asked.body]
    assert len({asked.prompt for asked in server.asked}) == len(server.asked)
    formats = [str(asked.body["response_format"]) for asked in guests if "response_format" in asked.body]
    assert len(set(formats)) == len(formats) > 3
    assert all("ignore_eos" not in asked.body for asked in guests if "response_format" in asked.body)
    assert all(asked.body["ignore_eos"] for asked in guests if "response_format" not in asked.body)
    assert {turn.num_guests_done for turn in made if turn.condition == ALONE} == {0}


def test_the_rise_is_of_medians() -> None:
    made = [Turn(PLAIN, (0.010, 0.010), 1), Turn(PLAIN, (0.5, 0.5), 1), Turn(PLAIN, (0.010, 0.010), 1)]
    made += [Turn(STRUCTURED, (0.010, 0.012), 1), Turn(ALONE, (0.008, 0.008), 0)]
    assert rise_of(made, STRUCTURED, PLAIN) == pytest.approx(0.1)
    assert structured.as_document(made)["rise_over_alone"] == pytest.approx(0.375)
    assert [line.split("|")[1].strip() for line in structured.render(made).splitlines()[2:]] == list(CONDITIONS)


def test_failures_are_told() -> None:
    with pytest.raises(ServeError, match="a stream failed: HTTP 503"):
        turns(ScriptedServer(status=503))

    with pytest.raises(ServeError, match="lower --guest-len"):
        turns(ScriptedServer(evenly(GAP_S, GAP_S)), num_guest_tokens=100)

    def few(asked: Asked) -> list[float]:
        return [GAP_S * index for index in range(8)]

    with pytest.raises(ServeError, match="raise --output-len"):
        turns(ScriptedServer(few))


@pytest.mark.parametrize(("limit", "status"), [("0.2", 0), ("0.05", 1)])
def test_the_command_judges_the_rise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path, limit: str, status: int
) -> None:
    made = [Turn(PLAIN, (0.01, 0.01), 1), Turn(STRUCTURED, (0.011, 0.011), 1), Turn(ALONE, (0.01, 0.01), 0)]

    async def measured(*args: object) -> list[Turn]:
        return made

    monkeypatch.setattr(structured, "measure", measured)
    parser = argparse.ArgumentParser()
    structured.add_arguments(parser)
    args = parser.parse_args(["--max-rise", limit, "--json", str(tmp_path / "figures.json")])
    assert structured.run(args) == status
    assert "+10.0%" in capsys.readouterr().out
    assert (tmp_path / "figures.json").is_file()
