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
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mlx_server.bench.arguments import (
    above_0,
    add_json_argument,
    add_key_argument,
    add_server_arguments,
    api_key,
    from_0,
    from_1,
    output_file,
)
from mlx_server.bench.serve.charts import check_plotting, render_page, write_charts
from mlx_server.bench.serve.client import CHAT, COMPLETIONS, Target, Tier
from mlx_server.bench.serve.report import LIMITED, render, without_arrays
from mlx_server.bench.serve.run import Arrivals, Intruder, Load, measure
from mlx_server.bench.serve.workloads import SHAPES, Recorded, Shape, Span, read_dataset
from mlx_server.bench.tables import write_json
from mlx_server.errors import ConfigError

INTRUDER = "long-prompt-intruder"
WORKLOADS = (*SHAPES, INTRUDER)
_OUTPUT_LEN = 64
_STREAM_LEN = 512


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
    add_json_argument(parser, "the result, with every request's times,")
    add("--html", type=output_file, metavar="FILE", help="write a report with charts, one file that needs no other")
    add("--plot", type=output_file, metavar="FILE.png", help="write the charts as a picture")


def run(args: argparse.Namespace) -> int:
    """Runs the load; 1 if any request failed. Raises `ServeError` and its kinds."""
    if args.html is not None or args.plot is not None:
        check_plotting()
    name = args.dataset.name if args.dataset else args.workload
    wanted = load(args, name, dataset=args.dataset, tiers=args.tier)
    result = _measure_with_progress(target(args, args.base_url, args.model), wanted)
    write_json(args.json, result)
    if args.html is not None:
        args.html.write_text(render_page(result), encoding="utf-8")
    if args.plot is not None:
        write_charts(result, args.plot, "png")
    print(f"{render(result)}\n{json.dumps(without_arrays(result))}")
    return 1 if result["failed"] else 0


def _measure_with_progress(aim: Target, wanted: Load) -> dict[str, Any]:
    """`measure`, with a bar on stderr where that is a terminal."""
    with closing(tqdm(desc=wanted.name, unit="req", leave=False, disable=None, file=sys.stderr)) as bar:
        return asyncio.run(measure(aim, wanted, on_start=bar.reset, on_done=lambda record: bar.update()))


def span(text: str) -> Span:
    """A length in tokens, or two with a dash between."""
    low, dash, high = text.partition("-")
    made = Span(from_1(low), from_1(high if dash else low))
    if made.high < made.low:
        raise argparse.ArgumentTypeError(f"{text} goes down; write the smaller length first")
    return made


def tier(text: str) -> Tier:
    """NAME=KEY or NAME=KEY:WEIGHT."""
    name, _, rest = text.partition("=")
    key, _, weight = rest.rpartition(":") if ":" in rest else (rest, "", "1")
    if not name or not key:
        raise argparse.ArgumentTypeError("a tier is written NAME=KEY or NAME=KEY:WEIGHT")
    return Tier(name, key, above_0(weight))


def json_object(text: str) -> dict[str, Any]:
    """Fields of a request's body."""
    try:
        made = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON: {error}") from error
    if not isinstance(made, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
    return made


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """How requests are written."""
    add = parser.add_argument
    add("--endpoint", choices=(COMPLETIONS, CHAT), default=COMPLETIONS, help="/v1/completions or /v1/chat/completions")
    add(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help='fields for every request\'s body; null leaves one out, like {"ignore_eos": null} for a server '
        "that refuses it",
    )
    add("--seed", type=int, default=0, help="of prompts, lengths, arrivals and tiers")
    add("--num-warmups", type=from_0, default=0, metavar="N", help="requests sent before, not measured")


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """What a workload's requests look like, when they come, and which are good; each has its own defaults."""
    add = parser.add_argument
    add("--num-prompts", type=from_1, metavar="N", help="conversations of the workload, or lines of the dataset")
    add("--prefix-len", type=from_0, metavar="TOKENS", help="tokens that all prompts begin with")
    add("--input-len", type=span, metavar="TOKENS", help="of a turn's own text, about; also a range, like 16-2048")
    add("--output-len", type=span, metavar="TOKENS", help="tokens of each answer; also a range")
    add("--turns", type=from_1, metavar="N", help="turns of each conversation")
    add("--streams", type=from_1, default=4, metavar="N", help=f"decoding streams of {INTRUDER}")
    add("--intruder-len", type=from_1, default=4096, metavar="TOKENS", help=f"the long prompt of {INTRUDER}")
    add("--max-concurrency", type=from_1, metavar="N", help="most conversations at a time; default: all")
    add("--request-rate", type=above_0, metavar="R", help="arrivals a second; default: all at once, or the trace's")
    add("--burstiness", type=above_0, help="shape of the gamma-distributed gaps; 1, the default, is Poisson")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits, like ttft:500 tpot:50 e2el:9000")


def target(args: argparse.Namespace, base_url: str, model: str | None) -> Target:
    """The server at `base_url`; its key is the flag's or the environment's."""
    key = api_key(args)
    return Target(base_url=base_url, model=model, api_key=key, endpoint=args.endpoint, extra_body=args.extra_body)


def load(args: argparse.Namespace, name: str, *, dataset: Path | None = None, tiers: Sequence[Tier] = ()) -> Load:
    """The load that the options describe: the workload of this name, or the dataset's. Raises `ConfigError`."""
    if len({tier.name for tier in tiers}) < len(tiers):
        raise ConfigError("--tier names one tier twice.")
    return Load(
        name=name,
        workload=_recorded(args, dataset) if dataset else _workload(args, name),
        arrivals=_arrivals(args),
        max_concurrency=args.max_concurrency,
        num_warmups=args.num_warmups,
        seed=args.seed,
        goodput=parse_goodput(args.goodput),
        tiers=tiers,
    )


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds by figure. Raises `ConfigError`."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in LIMITED or not value.replace(".", "", 1).isdigit():
            raise ConfigError(f"{text} is no limit; write NAME:MS with NAME {', '.join(LIMITED)}, like ttft:500.")
        limits[name] = float(value)
    return limits


def _workload(args: argparse.Namespace, name: str) -> Shape | Intruder:
    if name == INTRUDER:
        num_stream_tokens = args.output_len.low if args.output_len else _STREAM_LEN
        return Intruder(args.streams, num_stream_tokens, args.intruder_len)
    return shape(args, SHAPES[name])


def shape(args: argparse.Namespace, made: Shape) -> Shape:
    """With what the flags say in place of its own values."""
    names = ("num_prompts", "prefix_len", "input_len", "output_len", "turns")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(made, **given)


def _recorded(args: argparse.Namespace, path: Path) -> Recorded:
    lines = read_dataset(path, args.num_prompts)
    output_len = args.output_len.low if args.output_len else _OUTPUT_LEN
    return Recorded(lines, output_len, args.trace_speed, args.trace_shrink)


def _arrivals(args: argparse.Namespace) -> Arrivals | None:
    if args.request_rate is not None:
        return Arrivals(args.request_rate, 1.0 if args.burstiness is None else args.burstiness)
    if args.burstiness is not None:
        raise ConfigError("--burstiness shapes arrivals; give --request-rate, too.")
    return None
