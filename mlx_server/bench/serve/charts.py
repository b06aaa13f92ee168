"""The charts of `bench serve --plot`, drawn with matplotlib."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_server.bench.serve.client import RequestRecord
from mlx_server.bench.serve.report import latencies_ms
from mlx_server.environment import install_command
from mlx_server.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = (
    *("Time to first token", "Time per output token", "Gaps between tokens", "End-to-end latency"),
    *("Output over time", "Time to first token by prompt length"),
)


def check_plotting() -> None:
    """Raises `ConfigError` without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib, which is not installed. Install it: {install_command('bench')}.")


def write_charts(result: Mapping[str, Any], path: Path) -> None:
    """Writes all charts as one PNG."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # names may contain dollar signs
        draw(result).savefig(path, dpi=120, format="png")


def draw(result: Mapping[str, Any]) -> Figure:
    """Latency distributions, output over time, and TTFT by prompt length, of the complete requests. Each tier, or each
    part of a workload, has its own colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9.6), layout="constrained")
    figure.suptitle(f"{result['model_id']}, {result['workload']}")
    charts = list(figure.subplots(3, 2).flat)
    *distributions, output, by_length = charts
    for number, (group, records) in enumerate(sorted(_by_group(result).items())):
        look: dict[str, Any] = {"color": f"C{number}", "label": group}
        for chart, values_ms in zip(distributions, latencies_ms(records).values()):
            if values_ms:
                chart.ecdf(values_ms, **look)
        counts = np.bincount([int(time_s) for record in records for time_s in record.token_times_s])
        output.plot(np.arange(len(counts)) + 0.5, counts, **look)
        by_length.scatter([r.num_prompt_tokens for r in records], [1e3 * r.ttft_s for r in records], s=9, **look)
    labels = [("ms", "share")] * 4 + [("s", "token events a second"), ("prompt tokens", "ms")]
    for chart, title, (x_label, y_label) in zip(charts, TITLES, labels):
        chart.set(title=title, xlabel=x_label, ylabel=y_label, xlim=(0, None), ylim=(0, None))
        chart.grid(alpha=0.3)
    if len(set(result["groups"])) > 1:
        figure.legend(*output.get_legend_handles_labels(), loc="outside upper right")
    return figure


def _by_group(result: Mapping[str, Any]) -> Mapping[str, Sequence[RequestRecord]]:
    """The complete requests of the result document."""
    names = ("groups", "errors", "start_times", "ttfts", "itls", "input_lens", "output_lens")
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for group, error, start_s, ttft_s, gaps_s, input_len, output_len in zip(*(result[name] for name in names)):
        if not error:
            token_times_s = list(accumulate(gaps_s, initial=start_s + ttft_s))
            groups[group].append(RequestRecord(group, start_s, token_times_s, input_len, output_len))
    return groups
