"""The charts of a run, its HTML page and its picture."""

from __future__ import annotations

import importlib.util
import re
from xml.etree import ElementTree

import pytest

from mlx_server.bench import serve_plot
from mlx_server.bench.serve_charts import Chart, Series, make_charts
from mlx_server.bench.serve_client import RequestRecord
from mlx_server.bench.serve_html import render_report
from mlx_server.bench.serve_report import describe_requests, summarise
from mlx_server.bench.svg import render_svg, ticks
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


def rounded(series: Series) -> list[tuple[float, float]]:
    return [(round(x, 6), round(y, 6)) for x, y in series.points]


def test_charts_are_of_the_complete_requests(result):
    ttft, tpot, itl, e2el, output, by_length = make_charts(result)
    assert [[series.label for series in chart.series] for chart in (ttft, by_length)] == [["free <b>", "gold"]] * 2
    assert [rounded(series) for series in ttft.series] == [[(400, 0), (400, 1)], [(200, 0), (200, 1)]]
    assert [rounded(series)[-1] for series in tpot.series] == [(1200, 1), (650, 1)]
    assert rounded(itl.series[1]) == [(300, 0), (300, 0.5), (1000, 0.5), (1000, 1)]
    assert [rounded(series)[-1] for series in e2el.series] == [(1600, 1), (1500, 1)]
    assert [rounded(series) for series in output.series] == [[(0.5, 1), (1.5, 0), (2.5, 1)], [(0.5, 2), (1.5, 1)]]
    assert [rounded(series) for series in by_length.series] == [[(200, 400)], [(300, 200)]]


def test_a_chart_of_many_points_stays_small():
    gaps = [index / 1000 for index in range(20_000)]
    records = [RequestRecord("all", 0.0, [sum(gaps[:1]), *gaps], 1, 20_001)]
    records[0].token_times_s = sorted(gaps)
    itl = make_charts(describe_requests(records))[2]
    assert len(itl.series[0].points) == 500
    assert itl.series[0].points[-1][1] == 1.0


def test_svg_puts_points_where_they_belong():
    chart = Chart("T <t>", "x", "y", (Series("a", ((0.0, 0.0), (50.0, 1.0))), Series("b", ((100.0, 0.5),))))
    root = ElementTree.fromstring(render_svg(chart))
    lines = [line.get("points") for line in root.iter("polyline")]
    assert lines == ["58.0,236.0 282.0,34.0", "506.0,135.0"]
    texts = [text.text for text in root.iter("text")]
    assert {"T <t>", "x", "y", "a", "b", "0", "20", "100", "0.2", "1"} <= set(texts)


def test_svg_of_points_draws_a_dot_each_and_says_when_there_are_none():
    dots = ElementTree.fromstring(render_svg(Chart("", "", "", (Series("a", ((1.0, 2.0),) * 3),), is_scatter=True)))
    assert len(list(dots.iter("circle"))) == 3
    assert "no data" in render_svg(Chart("", "", "", (Series("a", ()),)))


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0.0, [0, 1]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (730.0, [0, 200, 400, 600, 800]),
        (10.1, [0, 2.5, 5, 7.5, 10, 12.5]),
    ],
)
def test_axes_have_round_numbers(most, expected):
    assert ticks(most) == pytest.approx(expected)


def test_the_page_stands_alone_and_escapes_what_others_named(result):
    page = render_report(result)
    assert page.count("<svg") == 6
    assert not re.search(r"""(src|href)=|url\(|@import|<script""", page)
    assert "<busy>" not in page
    assert "free <b>" not in page
    assert "1 x HTTP 503: &lt;busy&gt;" in page
    assert "m&amp;m: random" in page
    assert page.count("<h2>Latencies") == 3
    assert "<td>request_goodput</td><td>0.33</td>" in page
    assert "TPOT   (E2EL - TTFT) / (output tokens - 1)" in page
    ElementTree.fromstring(page.partition("</head>")[2].rpartition("</html>")[0])  # well formed


def test_the_picture_has_every_chart(result, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    path = tmp_path / "out.png"
    serve_plot.check_plotting()
    serve_plot.write_png(result, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title() for axes in figures[0].axes] == [chart.title for chart in make_charts(result)]
    assert [len(axes.lines) for axes in figures[0].axes] == [2, 2, 2, 2, 2, 0]
    assert len(figures[0].axes[5].collections) == 2


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    with pytest.raises(ConfigError, match=re.escape("pip install 'mlx-server[plot]'")):
        serve_plot.check_plotting()
