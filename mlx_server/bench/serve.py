"""Load from outside on any OpenAI-compatible server, and its latencies, under vLLM's names and definitions.

examples:
  mlx-serve bench serve --max-concurrency 8 --goodput ttft:1000 tpot:80
  mlx-serve bench serve --workload mixed --request-rate 2 --burstiness 0.5 --html report.html
  mlx-serve bench serve --workload agent --endpoint chat --tier gold=KEY1:1 --tier free=KEY2:3
  mlx-serve bench serve --dataset mooncake.jsonl --num-prompts 200 --trace-speed 0.5 --trace-shrink 8

A run prints tables, then one line of JSON. The same seed makes the same prompts: a second run of it meets a
warm prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mlx_server.bench.arguments import above_0, add_key_argument, add_server_arguments, from_1
from mlx_server.bench.serve_drafts import drafts_rows
from mlx_server.bench.serve_html import render_report
from mlx_server.bench.serve_options import (
    INTRUDER,
    WORKLOADS,
    add_request_arguments,
    add_workload_arguments,
    load,
    target,
    tier,
)
from mlx_server.bench.serve_plot import check_plotting, write_png
from mlx_server.bench.serve_report import describe_requests, render_errors, render_summary, render_tiers
from mlx_server.bench.serve_run import Load, Target, measure
from mlx_server.bench.tables import render_table
from mlx_server.errors import ConfigError

_ARRAYS = frozenset(describe_requests([]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench serve`."""
    add = parser.add_argument
    add_server_arguments(parser)
    add_key_argument(parser)
    add(
        "--tier",
        type=tier,
        action="append",
        default=[],
        metavar="NAME=KEY[:WEIGHT]",
        help="a class of clients with a key of its own and its share of the load; repeat for more",
    )
    add("--workload", choices=WORKLOADS, default="random")
    add("--dataset", type=Path, metavar="FILE", help="prompts (JSON lines) or a trace (Mooncake, Azure, BurstGPT)")
    add("--trace-speed", type=above_0, default=1.0, metavar="X", help="replay a trace X times as fast")
    add("--trace-shrink", type=from_1, default=1, metavar="N", help="divide a trace's lengths by N")
    add_workload_arguments(parser)
    add_request_arguments(parser)
    add("--json", type=Path, metavar="FILE", help="write the result there, with every request's times")
    add("--html", type=Path, metavar="FILE", help="write a report with charts, one file that needs no other")
    add("--plot", type=Path, metavar="FILE.png", help="write the charts as a picture; needs `mlx-server[plot]`")


def run(args: argparse.Namespace) -> int:
    """Runs the load; 1 if any request failed. Raises `ServeError` and its kinds."""
    if args.plot is not None:
        check_plotting()
    for path in (args.json, args.html, args.plot):
        check_writable(path)
    name = args.dataset.name if args.dataset else args.workload
    wanted = load(args, name, dataset=args.dataset, tiers=args.tier)
    result = measure_with_progress(target(args, args.base_url, args.model), wanted)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.html is not None:
        args.html.write_text(render_report(result), encoding="utf-8")
    if args.plot is not None:
        write_png(result, args.plot)
    print(f"{render(result)}\n{json.dumps(without_arrays(result))}")
    return 1 if result["failed"] else 0


def check_writable(path: Path | None) -> None:
    """Before the measuring, which may take an hour. Raises `ConfigError`."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"Cannot write {path}: there is no such folder, or it may not be written.")


def measure_with_progress(aim: Target, wanted: Load) -> dict[str, Any]:
    """`measure`, with a bar on stderr where that is a terminal."""
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(desc=wanted.name, unit="req", leave=False, disable=None, file=sys.stderr))
        return asyncio.run(measure(aim, wanted, on_start=bar.reset, on_done=lambda record: _advance(bar)))


def _advance(bar: tqdm[Any]) -> None:
    bar.update()


def render(result: Mapping[str, Any]) -> str:
    """The tables for people."""
    parts = [render_summary(result)]
    if "tiers" in result:
        parts.append(render_tiers(result["tiers"]))
    if drafts := drafts_rows(result):
        parts.append(render_table(["speculative decoding", "value"], drafts))
    if result["workload"] == INTRUDER:
        parts.append(
            f"{result['num_streams']} streams decode; a prompt of {result['intruder_prompt_tokens']} tokens arrives.\n"
            f"worst gap of a stream: {result['worst_gap_ms']:.0f} ms "
            f"(before it: {result['worst_gap_before_ms']:.0f} ms)\n"
            f"the prompt's own TTFT: {result['intruder_ttft_ms']:.0f} ms"
        )
    if result["failed"]:
        parts.append(f"failed requests:\n{render_errors(result['errors'])}")
    return "\n\n".join(parts) + "\n"


def without_arrays(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures alone, short enough for a line."""
    return {name: value for name, value in result.items() if name not in _ARRAYS}
