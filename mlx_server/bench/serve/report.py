"""The figures of a measured run, by vLLM's names, keys and definitions, and their tables.

TTFT   from sending to the first token event
ITL    every gap between token events, pooled over requests
TPOT   (E2EL - TTFT) / (output tokens - 1), of each request
E2EL   from sending to the last token event
goodput  requests a second that met every limit; a request of one token has a TPOT of 0

Token counts come from `usage`. Peaks are over whole seconds since the first request was sent: the most token events in
one, and the most requests open at any time in one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlx_server.bench.serve.client import RequestRecord
from mlx_server.bench.tables import render_items, render_table

FIGURES = ("ttft", "tpot", "itl", "e2el")
LIMITED = ("ttft", "tpot", "e2el")
"""Figures with one value for each request, which `--goodput` can limit."""

SPREADS = ("mean", "median", "std", "p90", "p95", "p99")
_COUNTER = re.compile(r"^((?:vllm|mlx_serve):\w+)_total(?:\{(.*)\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')


def summarise(records: Sequence[RequestRecord], duration_s: float, goodput: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run. `goodput` maps names to limits in milliseconds; a good request meets all of them."""
    done = [record for record in records if record.is_complete]
    num_prompt = sum(record.num_prompt_tokens for record in done)
    num_output = sum(record.num_output_tokens for record in done)
    values_ms = _latencies_ms(done)
    num_good = sum(_is_good(record, goodput) for record in done)
    num_events, num_open = _by_second(done)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_prompt,
        "total_output_tokens": num_output,
        "total_cached_tokens": sum(record.num_cached_tokens for record in done),
        "good_completed": num_good if goodput else None,
        "request_throughput": _rate(len(done), duration_s),
        "request_goodput": _rate(num_good, duration_s) if goodput else None,
        "output_throughput": _rate(num_output, duration_s),
        "total_token_throughput": _rate(num_prompt + num_output, duration_s),
        "max_output_tokens_per_s": float(max(num_events.values(), default=0)),
        "max_concurrent_requests": max(num_open.values(), default=0),
    }
    for name, values in values_ms.items():
        result.update(_spread(name, values))
    result["max_itl_ms"] = max(values_ms["itl"], default=0.0)
    return result


def _latencies_ms(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """The values of each of `FIGURES`, in that order, of complete requests."""
    return {
        "ttft": [1e3 * record.ttft_s for record in records],
        "tpot": [1e3 * tpot for record in records if (tpot := record.tpot_s) is not None],
        "itl": [1e3 * gap for record in records for gap in record.gaps_s],
        "e2el": [1e3 * record.e2e_s for record in records],
    }


def describe_requests(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Lists with a value for each request, in order, times in seconds; 0 or an empty list if a request failed."""
    start_s = min((record.sent_s for record in records), default=0.0)
    return {
        "start_times": [record.sent_s - start_s for record in records],
        "ttfts": [record.ttft_s if record.is_complete else 0.0 for record in records],
        "itls": [record.gaps_s if record.is_complete else [] for record in records],
        "input_lens": [record.num_prompt_tokens for record in records],
        "cached_lens": [record.num_cached_tokens for record in records],
        "output_lens": [record.num_output_tokens if record.is_complete else 0 for record in records],
        "groups": [record.group for record in records],
        "errors": [record.error or "" for record in records],
    }


ARRAYS = frozenset(describe_requests([]))
"""Keys of the result document with a value for each request."""


def _is_good(record: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    """Whether a complete request met all limits."""
    found = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2e_s}
    return all(1e3 * found[name] <= limit for name, limit in limits_ms.items())


def read_counters(scrape: str) -> Counter[str]:
    """The counters in the text of `/metrics` by name, without `_total`, summed over their labels; those with a position
    in a draft are `name:0`, `name:1`, ..."""
    counts: Counter[str] = Counter()
    for name, labels, value in _COUNTER.findall(scrape):
        position = _POSITION.search(labels)
        counts[name if position is None else f"{name}:{position[1]}"] += int(float(value))
    return counts


def added_counts(before: str, after: str) -> Counter[str]:
    """What a run added to the counters of `/metrics`, read before and after it; names as of `read_counters`."""
    new = read_counters(after)
    new.subtract(read_counters(before))
    return new


def describe_counters(before: str, after: str) -> dict[str, Any]:
    """What a run added to the counters of `/metrics`, read before and after it: output tokens for each call of the
    model, and the acceptance of drafts under vLLM's keys; without what the server does not count or has not done. The
    acceptance length includes the token that the model adds; the rates by position are shares of the drafts."""
    new = added_counts(before, after)
    found: dict[str, Any] = {}
    num_calls, num_output = new["mlx_serve:model_calls"], new["vllm:generation_tokens"]
    if num_calls > 0 and num_output >= 0:
        found["output_tokens_per_model_call"] = num_output / num_calls
    num_drafts, num_tokens, num_accepted = (
        new[f"vllm:spec_decode_num_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if num_drafts > 0 and num_tokens > 0:
        by_position = "vllm:spec_decode_num_accepted_tokens_per_pos:"
        positions = sorted(int(name.removeprefix(by_position)) for name in new if name.startswith(by_position))
        found |= {
            "spec_decode_acceptance_rate": 100.0 * num_accepted / num_tokens,
            "spec_decode_acceptance_length": 1.0 + num_accepted / num_drafts,
            "spec_decode_num_drafts": num_drafts,
            "spec_decode_draft_tokens": num_tokens,
            "spec_decode_accepted_tokens": num_accepted,
            "spec_decode_per_position_acceptance_rates": [new[f"{by_position}{at}"] / num_drafts for at in positions],
        }
    return found


def without_arrays(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result document without the lists of `describe_requests`."""
    return {name: value for name, value in result.items() if name not in ARRAYS}


def render(result: Mapping[str, Any]) -> str:
    """All tables of a result document."""
    parts = [render_summary(result)]
    if "output_tokens_per_model_call" in result:
        parts.append(f"output tokens a model call: {result['output_tokens_per_model_call']:.2f}")
    if "tiers" in result:
        parts.append(_render_tiers(result["tiers"]))
    if "spec_decode_num_drafts" in result:
        parts.append(render_table(["speculative decoding", "value"], _drafts_rows(result)))
    if "worst_gap_ms" in result:
        parts.append(
            f"{result['num_streams']} streams decode; a prompt of {result['intruder_prompt_tokens']} tokens arrives.\n"
            f"worst gap of a stream: {result['worst_gap_ms']:.0f} ms "
            f"(before it: {result['worst_gap_before_ms']:.0f} ms)\n"
            f"the prompt's own TTFT: {result['intruder_ttft_ms']:.0f} ms"
        )
    if result["failed"]:
        parts.append(f"failed requests:\n{render_errors(result['errors'])}")
    return "\n\n".join(parts) + "\n"


def render_summary(summary: Mapping[str, Any]) -> str:
    """The tables of totals and latencies."""
    counts = [
        ["requests completed / failed", f"{summary['completed']} / {summary['failed']}"],
        ["duration", f"{summary['duration']:.2f} s"],
        ["prompt / cached / output tokens", _counts(summary)],
        ["requests/s", f"{summary['request_throughput']:.2f}"],
        ["output tokens/s (peak)", f"{summary['output_throughput']:.1f} ({summary['max_output_tokens_per_s']:.0f})"],
        ["total tokens/s", f"{summary['total_token_throughput']:.1f}"],
    ]
    if summary["request_goodput"] is not None:
        num_sent = summary["completed"] + summary["failed"]
        counts.append(["good requests", f"{summary['good_completed']} of {num_sent}"])
        counts.append(["good requests/s", f"{summary['request_goodput']:.2f}"])
    rows = [[name.upper(), *(_ms(summary, f"{kind}_{name}_ms", name) for kind in SPREADS)] for name in FIGURES]
    return render_table(["", "value"], counts) + "\n\n" + render_table(["ms", *SPREADS], rows)


def _render_tiers(tiers: Mapping[str, Mapping[str, Any]]) -> str:
    return render_items(
        tiers.items(),
        {
            "tier": lambda item: item[0],
            "requests": lambda item: str(item[1]["completed"]),
            "failed": lambda item: str(item[1]["failed"]),
            "output tok/s": lambda item: f"{item[1]['output_throughput']:.1f}",
            "mean TTFT ms": lambda item: _ms(item[1], "mean_ttft_ms", "ttft"),
            "p99 TTFT ms": lambda item: _ms(item[1], "p99_ttft_ms", "ttft"),
            "mean TPOT ms": lambda item: _ms(item[1], "mean_tpot_ms", "tpot"),
            "good/s": lambda item: "" if item[1]["request_goodput"] is None else f"{item[1]['request_goodput']:.2f}",
        },
    )


def _ms(summary: Mapping[str, Any], key: str, figure: str) -> str:
    """The figure in tables: a mean of 0 is that of no values."""
    return f"{summary[key]:.1f}" if summary[f"mean_{figure}_ms"] else "-"


def render_errors(errors: Sequence[str]) -> str:
    """The five most common errors, one on each line."""
    counts = Counter(error for error in errors if error)
    return "\n".join(f"{count} x {error}" for error, count in counts.most_common(5))


def _drafts_rows(result: Mapping[str, Any]) -> list[list[str]]:
    by_position = result["spec_decode_per_position_acceptance_rates"]
    return [
        ["acceptance rate", f"{result['spec_decode_acceptance_rate']:.1f} %"],
        ["acceptance length", f"{result['spec_decode_acceptance_length']:.2f}"],
        ["drafts", f"{result['spec_decode_num_drafts']:,}"],
        ["drafted tokens", f"{result['spec_decode_draft_tokens']:,}"],
        ["accepted tokens", f"{result['spec_decode_accepted_tokens']:,}"],
        ["accepted by position", ", ".join(f"{100 * rate:.1f} %" for rate in by_position)],
    ]


def _counts(summary: Mapping[str, Any]) -> str:
    names = ("total_input_tokens", "total_cached_tokens", "total_output_tokens")
    return " / ".join(f"{summary[name]:,}" for name in names)


def _spread(name: str, values_ms: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and interpolated percentiles; 0 without values."""
    values = np.array(values_ms or [0.0])
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        **{f"p{percent}_{name}_ms": float(np.percentile(values, percent)) for percent in (90, 95, 99)},
    }


def _by_second(records: Sequence[RequestRecord]) -> tuple[Counter[int], Counter[int]]:
    """Token events, and requests open at any time, in each whole second since the first request was sent."""
    start_s = min((record.sent_s for record in records), default=0.0)
    spans = [[math.floor(time - start_s) for time in (r.sent_s, *r.token_times_s)] for r in records]
    events = Counter(second for _, *seconds in spans for second in seconds)
    return events, Counter(second for span in spans for second in range(span[0], span[-1] + 1))


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s else 0.0
