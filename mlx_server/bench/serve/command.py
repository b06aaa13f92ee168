"""Sends load to any OpenAI-compatible server over HTTP, and measures latencies by vLLM's names and definitions.

examples:
  mlx-serve bench serve --max-concurrency 8 --goodput ttft:1000 tpot:80
  mlx-serve bench serve --workload mixed --request-rate 2 --burstiness 0.5
  mlx-serve bench serve --workload agent --endpoint chat --tier gold=KEY1:1 --tier free=KEY2:3
  mlx-serve bench serve --dataset mooncake.jsonl --num-prompts 200 --trace-speed 0.5 --trace-shrink 8

A run prints tables, then one line of JSON. The same workload and seed make the same prompts, so a second run finds
them in the server's prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
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
    refuse_options,
)
from mlx_server.bench.serve.client import CHAT, COMPLETIONS, Target, Tier
from mlx_server.bench.serve.report import LIMITED, render, without_arrays
from mlx_server.bench.serve.run import Arrivals, Intruder, Load, measure
from mlx_server.bench.serve.workloads import SHAPES, Recorded, Shape, Span, Turn, read_dataset
from mlx_server.bench.tables import write_json
from mlx_server.errors import ConfigError

INTRUDER = "long-prompt-intruder"
WORKLOADS = (*SHAPES, INTRUDER)
_WORKLOAD = "random"
_NUM_STREAMS, _STREAM_LEN, _INTRUDER_LEN = 4, 512, 4096

_PROMPTS, _TRACE = "a file of prompts", "a trace"
_SENDING = ("num_prompts", "max_concurrency", "request_rate", "burstiness", "tier")
_OPTIONS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        **dict.fromkeys(SHAPES, (*_SENDING, "prefix_len", "input_len", "output_len", "turns")),
        INTRUDER: ("streams", "intruder_len", "output_len"),
        _PROMPTS: (*_SENDING, "output_len"),
        _TRACE: (*_SENDING, "trace_speed", "trace_shrink"),
    }
)
"""The options that change each kind of load. Those that are not here change all."""


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
        help="a class of clients with its own key and its share of the load; repeat for more",
    )
    load = parser.add_mutually_exclusive_group().add_argument
    load("--workload", choices=WORKLOADS, help=f"default: {_WORKLOAD}")
    load("--dataset", type=Path, metavar="FILE", help="prompts (JSON lines) or a trace (Mooncake, Azure, BurstGPT)")
    add("--trace-speed", type=above_0, metavar="X", help="replay a trace X times as fast")
    add("--trace-shrink", type=from_1, metavar="N", help="divide a trace's lengths by N")
    add_load_arguments(parser)
    add_json_argument(parser, "the result, with the times of every request,")


def run(args: argparse.Namespace) -> int:
    """Runs the load; 1 if any request failed. Raises `ServeError` and its kinds."""
    if args.dataset:
        name = args.dataset.name
    else:
        name = args.workload or _WORKLOAD
        check_options(args, name)
    load = make_load(args, name, dataset=args.dataset, tiers=args.tier)
    result = _measure_with_progress(make_target(args, args.url, args.model), load)
    print(f"{render(result)}\n{json.dumps(without_arrays(result))}", flush=True)
    write_json(args.json, result)
    return 1 if result["failed"] else 0


def _measure_with_progress(target: Target, load: Load) -> dict[str, Any]:
    """`measure`, with a progress bar on stderr if that is a terminal."""
    with closing(tqdm(desc=load.name, unit="req", leave=False, disable=None, file=sys.stderr)) as bar:
        return asyncio.run(measure(target, load, on_start=bar.reset, on_done=lambda record: bar.update()))


def span(text: str) -> Span:
    """A length in tokens, or a range like 16-2048."""
    low, dash, high = text.partition("-")
    made = Span(from_1(low), from_1(high if dash else low))
    if made.high < made.low:
        raise argparse.ArgumentTypeError(f"{text} is not a range; write the smaller length first")
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
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from error
    if not isinstance(made, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return made


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options that change a workload (lengths, arrivals, limits for good requests), and those for what a
    request looks like."""
    add = parser.add_argument
    add("--num-prompts", type=from_1, metavar="N", help="conversations of the workload, or lines of the dataset")
    add("--prefix-len", type=from_0, metavar="TOKENS", help="tokens of a prefix that all prompts share")
    add("--input-len", type=span, metavar="TOKENS", help="about so many in each turn, or a range like 16-2048")
    add("--output-len", type=span, metavar="TOKENS", help="of each answer, or a range")
    add("--turns", type=from_1, metavar="N", help="turns of each conversation")
    add("--streams", type=from_1, metavar="N", help=f"decoding streams of {INTRUDER}; default: {_NUM_STREAMS}")
    intruder_len = f"the long prompt of {INTRUDER}; default: {_INTRUDER_LEN}"
    add("--intruder-len", type=from_1, metavar="TOKENS", help=intruder_len)
    add("--max-concurrency", type=from_1, metavar="N", help="most conversations at a time; default: all")
    add(
        "--request-rate", type=above_0, metavar="R", help="conversations a second; default: all at once, or the trace's"
    )
    add("--burstiness", type=above_0, help="shape of the gamma-distributed gaps; default: 1 (Poisson)")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits of good requests, like ttft:500 tpot:50")
    add("--endpoint", choices=(COMPLETIONS, CHAT), default=COMPLETIONS, help="/v1/completions or /v1/chat/completions")
    add(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help='fields to add to every request; null removes one, like {"ignore_eos": null} for a server that refuses it',
    )
    add("--seed", type=int, default=0, help="of prompts, lengths, arrivals and tiers")
    add("--num-warmups", type=from_0, default=0, metavar="N", help="requests sent first and not measured")


def check_options(args: argparse.Namespace, *loads: str) -> None:
    """Raises `ConfigError` for options that change none of these workloads."""
    others = {name for names in _OPTIONS.values() for name in names}.difference(*(_OPTIONS[load] for load in loads))
    refuse_options(args, others, " and ".join(loads))


def make_target(args: argparse.Namespace, base_url: str, model: str | None) -> Target:
    """The server at `base_url`, with the key of the flag or the environment."""
    key = api_key(args)
    return Target(base_url=base_url, model=model, api_key=key, endpoint=args.endpoint, extra_body=args.extra_body)


def make_load(args: argparse.Namespace, name: str, *, dataset: Path | None = None, tiers: Sequence[Tier] = ()) -> Load:
    """The load that the options describe: the workload of this name, or the dataset. Raises `ConfigError`."""
    if len({tier.name for tier in tiers}) < len(tiers):
        raise ConfigError("--tier names a tier twice.")
    if tiers and args.api_key:
        raise ConfigError("--api-key has no effect beside --tier, whose keys are sent. Leave it out.")
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
        if name not in LIMITED or not value.replace(".", "", 1).isdecimal():
            raise ConfigError(f"{text} is not a limit; write NAME:MS with NAME {', '.join(LIMITED)}, like ttft:500.")
        limits[name] = float(value)
    return limits


def _workload(args: argparse.Namespace, name: str) -> Shape | Intruder:
    if name == INTRUDER:
        num_stream_tokens = _one_output_len(args, name) or _STREAM_LEN
        return Intruder(args.streams or _NUM_STREAMS, num_stream_tokens, args.intruder_len or _INTRUDER_LEN)
    return shape(args, SHAPES[name])


def _one_output_len(args: argparse.Namespace, load: str) -> int | None:
    given: Span | None = args.output_len
    if given is not None and given.low < given.high:
        raise ConfigError(f"--output-len is {given.low}-{given.high}, but {load} takes one length, not a range.")
    return None if given is None else given.low


def shape(args: argparse.Namespace, made: Shape) -> Shape:
    """The shape with the values of the flags."""
    names = ("num_prompts", "prefix_len", "input_len", "output_len", "turns")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(made, **given)


def _recorded(args: argparse.Namespace, path: Path) -> Recorded:
    output_len = _one_output_len(args, _PROMPTS)
    lines = read_dataset(path, args.num_prompts, **({} if output_len is None else {"output_len": output_len}))
    check_options(args, _PROMPTS if isinstance(lines[0], Turn) else _TRACE)
    if args.trace_speed is not None and args.request_rate is not None:
        raise ConfigError("--trace-speed has no effect beside --request-rate, which replaces a trace's arrivals.")
    return Recorded(lines, args.trace_speed or 1.0, args.trace_shrink or 1)


def _arrivals(args: argparse.Namespace) -> Arrivals | None:
    if args.request_rate is not None:
        return Arrivals(args.request_rate, 1.0 if args.burstiness is None else args.burstiness)
    if args.burstiness is not None:
        raise ConfigError("--burstiness needs --request-rate.")
    return None
