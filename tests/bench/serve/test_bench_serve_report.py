"""The charts of a run."""

from __future__ import annotations

import argparse
import importlib.util
import re

import pytest
from matplotlib.axes import Axes

from mlx_server.bench.serve import command
from mlx_server.bench.serve.client import RequestRecord
from mlx_server.bench.serve.report import TITLES, describe_requests, draw, summarise, write_charts
from mlx_server.errors import ConfigError

LIMITS = {"ttft": 250.0}


def record(group: str, sent_s: float, times_s: list[float], error: str | None = None) -> RequestRecord:
    return RequestRecord(group, sent_s, times_s, len(times_s) * 100, len(times_s), error=error)


@pytest.fixture
def result() -> dict:
    records = [
        record("gold", 10.0, [10.2, 10.5, 11.5]),
        record("free <b>", 10.5, [10.9, 12.1]),
        record("free <b>", 11.0, [11.4], error="HTTP 503: <busy>"),
    ]
    tiers = {name: summarise([r for r in records if r.group == name], 3.0, LIMITS) for name in ("gold", "free <b>")}
    head = {"model_id": "m&m", "workload": "random", "backend": "chat", "num_prompts": 3, "request_rate": "inf"}
    return {**head, **summarise(records, 3.0, LIMITS), "tiers": tiers, **describe_requests(records)}


def lines(chart: Axes) -> list[list[tuple[float, float]]]:
    """The points of each line, of which those of a share are joined by steps."""
    return [[(round(x, 6), round(y, 6)) for x, y in zip(*line.get_data())] for line in chart.lines]


def test_charts_are_of_the_complete_requests(result):
    figure = draw(result)
    ttft, tpot, itl, e2el, output, by_length = figure.axes
    assert [chart.get_title() for chart in figure.axes] == list(TITLES)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["free <b>", "gold"]
    assert lines(ttft) == [[(400, 0), (400, 1)], [(200, 0), (200, 1)]]
    assert [line[-1] for line in lines(tpot)] == [(1200, 1), (650, 1)]
    assert lines(itl)[1] == [(300, 0), (300, 0.5), (1000, 1)]
    assert [line[-1] for line in lines(e2el)] == [(1600, 1), (1500, 1)]
    assert lines(output) == [[(0.5, 1), (1.5, 0), (2.5, 1)], [(0.5, 2), (1.5, 1)]]
    assert [dots.get_offsets().round(6).tolist() for dots in by_length.collections] == [[[200, 400]], [[300, 200]]]


def test_a_run_without_a_complete_request_has_empty_charts():
    records = [record("all", 1.0, [], error="HTTP 503")]
    head = {"model_id": "$m", "workload": "$x"}
    assert [len(chart.lines) for chart in draw({**head, **describe_requests(records)}).axes] == [0] * 6


def test_the_picture_is_a_picture(result, tmp_path):
    write_charts(result, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_remedy_is_named_before_anything_is_sent(monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ConfigError, match=re.escape("pip install '.[bench]'")):
        command.run(parser.parse_args(["--plot", str(tmp_path / "out.png")]))
