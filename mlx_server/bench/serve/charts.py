"""The charts of a result document, as a picture and in a page that stands alone; matplotlib draws them."""

from __future__ import annotations

import importlib.util
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_server.bench.serve import report
from mlx_server.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = (
    *("Time to first token", "Time per output token", "Gaps between tokens", "End-to-end latency"),
    *("Output over time", "Time to first token by prompt length"),
)
_Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, header, rows."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
svg { background: white; width: 100%; height: auto; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8886; padding: 0.25rem 0.8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
pre { white-space: pre-wrap; }
</style></head><body><h1>{{ title }}</h1>
{% for name, header, rows in tables %}<h2>{{ name }}</h2><table>
<thead><tr>{% for cell in header %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody></table>
{% endfor %}<h2>Charts</h2>{{ charts | safe }}
{% if errors %}<h2>Failed requests</h2><pre>{{ errors }}</pre>{% endif %}
<h2>Definitions</h2><pre>{{ definitions }}</pre></body></html>
"""


def check_plotting() -> None:
    """Raises `ConfigError` where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--html and --plot need matplotlib, which is not installed. "
            "Install it with: pip install 'mlx-server[bench]'."
        )


def write_charts(result: Mapping[str, Any], target: Path | io.StringIO, kind: str) -> None:
    """All charts as one picture: `kind` is `png` or `svg`. Needs matplotlib, as all of what follows."""
    import matplotlib

    # Names may have dollar signs, and the texts of a page can be searched.
    with matplotlib.rc_context({"text.parse_math": False, "svg.fonttype": "none"}):
        draw(result).savefig(target, dpi=120, format=kind)


def render_page(result: Mapping[str, Any]) -> str:
    """Figures, charts, settings and definitions as HTML, in which nothing is fetched from elsewhere."""
    import jinja2

    groups = {"all": result, **result.get("tiers", {})}
    spreads = {f"{kind}_{figure}_ms" for kind in report.SPREADS for figure in report.FIGURES}
    names = [name for name in report.without_arrays(result) if name not in {"tiers", *spreads}]
    rows = [[name, *(_value(group.get(name)) for group in groups.values())] for name in names]
    tables: list[_Table] = [("Settings and totals", ["", *groups], rows)]
    for name, group in groups.items():
        rows = [[one, *(_value(group[f"{kind}_{one}_ms"]) for kind in report.SPREADS)] for one in report.FIGURES]
        tables.append((f"Latencies, {name}", ["ms", *report.SPREADS], rows))
    charts = io.StringIO()
    write_charts(result, charts, "svg")
    return (
        jinja2.Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title=f"{result['model_id']}: {result['workload']}",
            tables=tables,
            charts=charts.getvalue().partition("<!DOCTYPE")[2].partition(">")[2],
            errors=report.render_errors(result["errors"]),
            definitions=(report.__doc__ or "").strip(),
        )
    )


def draw(result: Mapping[str, Any]) -> Figure:
    """Latency distributions, output over time, and TTFT by prompt length; a colour a tier or part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9.6), layout="constrained")
    figure.suptitle(f"{result['model_id']}, {result['workload']}")
    charts = list(figure.subplots(3, 2).flat)
    *distributions, output, by_length = charts
    for number, (group, requests) in enumerate(sorted(_by_group(result).items())):
        look: dict[str, Any] = {"color": f"C{number}", "label": group}
        for chart, values_ms in zip(distributions, _latencies_ms(requests)):
            if values_ms:
                chart.ecdf(values_ms, **look)
        counts = np.bincount([int(time_s) for request in requests for time_s in request.token_times_s])
        output.plot(np.arange(len(counts)) + 0.5, counts, **look)
        by_length.scatter([r.input_len for r in requests], [1e3 * r.ttft_s for r in requests], s=9, **look)
    labels = [("ms", "share")] * 4 + [("s", "token events a second"), ("prompt tokens", "ms")]
    for chart, title, (x_label, y_label) in zip(charts, TITLES, labels):
        chart.set(title=title, xlabel=x_label, ylabel=y_label, xlim=(0, None), ylim=(0, None))
        chart.grid(alpha=0.3)
    if len(set(result["groups"])) > 1:
        figure.legend(*output.get_legend_handles_labels(), loc="outside upper right")
    return figure


@dataclass(frozen=True, slots=True)
class _Request:
    start_s: float
    ttft_s: float
    itls_s: Sequence[float]
    input_len: int
    output_len: int

    @property
    def token_times_s(self) -> list[float]:
        return [self.start_s + since_s for since_s in accumulate((self.ttft_s, *self.itls_s))]


def _by_group(result: Mapping[str, Any]) -> Mapping[str, Sequence[_Request]]:
    """The complete requests."""
    names = ("start_times", "ttfts", "itls", "input_lens", "output_lens")
    groups: dict[str, list[_Request]] = defaultdict(list)
    for group, error, *fields in zip(result["groups"], result["errors"], *(result[name] for name in names)):
        if not error:
            groups[group].append(_Request(*fields))
    return groups


def _latencies_ms(requests: Sequence[_Request]) -> tuple[list[float], ...]:
    """TTFT, TPOT, ITL and E2EL."""
    return (
        [1e3 * r.ttft_s for r in requests],
        [1e3 * sum(r.itls_s) / (r.output_len - 1) for r in requests if r.output_len > 1],
        [1e3 * gap_s for r in requests for gap_s in r.itls_s],
        [1e3 * (r.ttft_s + sum(r.itls_s)) for r in requests],
    )


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else str(value)
