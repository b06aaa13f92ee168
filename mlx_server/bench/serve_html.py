"""A result as one HTML file that stands alone: figures, charts as inline SVG, settings and definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mlx_server.bench import serve_report
from mlx_server.bench.serve_charts import make_charts
from mlx_server.bench.serve_drafts import drafts_rows
from mlx_server.bench.serve_report import FIGURES, render_errors
from mlx_server.bench.svg import render_svg

_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
svg text { fill: currentColor; font-size: 11px; } svg .title { font-size: 13px; font-weight: 600; }
svg .grid { stroke: currentColor; stroke-opacity: 0.15; } svg .label { fill-opacity: 0.75; }
.s0 { color: #2f6fdb; } .s1 { color: #d9622b; } .s2 { color: #2e9e5b; }
.s3 { color: #a44fc4; } .s4 { color: #b58900; } .s5 { color: #d33f6a; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
pre { white-space: pre-wrap; }
"""
_SPREADS = ("mean", "median", "std", "p90", "p95", "p99")
_SETTINGS = (
    *("model_id", "backend", "workload", "num_prompts", "max_concurrency", "request_rate", "burstiness"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "seed"),
)


def render_report(result: Mapping[str, Any]) -> str:
    """The whole page; nothing in it is fetched from elsewhere."""
    title = f"{result['model_id']}: {result['workload']}"
    groups = [("all", result), *result.get("tiers", {}).items()]
    errors, drafts = render_errors(result["errors"]), drafts_rows(result)
    sections = [
        _table(("", *(name for name, _ in groups)), _totals(groups)),
        *(_latencies(name, group, is_titled=len(groups) > 1) for name, group in groups),
        "<h2>Speculative decoding</h2>" + _table(("", ""), drafts) if drafts else "",
        f'<h2>Charts</h2><div class="charts">{"".join(map(render_svg, make_charts(result)))}</div>',
        f"<h2>Failed requests</h2><pre>{escape(errors)}</pre>" if errors else "",
        "<h2>Settings</h2>" + _table(("", ""), [(name, _value(result[name])) for name in _SETTINGS if name in result]),
        f"<h2>Definitions</h2><pre>{escape((serve_report.__doc__ or '').strip())}</pre>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def _totals(groups: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Sequence[str]]:
    names = (
        "completed",
        "failed",
        "duration",
        "total_input_tokens",
        "total_cached_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "total_token_throughput",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
    )
    return [(name, *(_value(group[name]) for _, group in groups)) for name in names]


def _latencies(name: str, group: Mapping[str, Any], *, is_titled: bool) -> str:
    rows = [(figure, *(_value(group[f"{kind}_{figure}_ms"]) for kind in _SPREADS)) for figure in FIGURES]
    title = f"Latencies, {name}" if is_titled else "Latencies"
    return f"<h2>{escape(title)}</h2>" + _table(("ms", *_SPREADS), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _value(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
