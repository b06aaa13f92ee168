"""Capacity: for each context length, the most streams at which a server keeps stated latencies.

A stream sends one request after the other. A number of streams keeps the promise if at least --share of all
requests meets every limit and none fails. Without --streams, the number is doubled until the promise breaks,
then bisected; with it, every number given is measured.

examples:
  mlx-serve bench sweep --slo ttft:2000 tpot:100 --context 256 1024 4096
  mlx-serve bench sweep --slo tpot:80 --context 512 --streams 1 2 4 8 16 --json sweep.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.bench.arguments import add_json_argument, add_key_argument, add_server_arguments, from_1
from mlx_server.bench.serve.client import Target
from mlx_server.bench.serve.command import add_request_arguments, parse_goodput, target
from mlx_server.bench.serve.report import render_errors, without_arrays
from mlx_server.bench.serve.run import Load, measure
from mlx_server.bench.serve.workloads import Shape, Span
from mlx_server.bench.tables import render_items, tell, write_json


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: so many streams at one context length."""

    context: int
    num_streams: int
    keeps: bool
    good_share: float
    result: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What was found for one context length; `num_streams` of 0 keeps nothing."""

    context: int
    num_streams: int
    points: tuple[Point, ...]

    @property
    def at(self) -> Point | None:
        """The measurement at the capacity."""
        return next((point for point in self.points if point.num_streams == self.num_streams), None)

    @property
    def beyond(self) -> Point | None:
        """The measurement with the fewest streams that broke the promise."""
        broken = [point for point in self.points if not point.keeps]
        return min(broken, key=lambda point: point.num_streams, default=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench sweep`."""
    add = parser.add_argument
    add_server_arguments(parser)
    add_key_argument(parser)
    add("--slo", nargs="+", required=True, metavar="NAME:MS", help="limits, like ttft:2000 tpot:100 e2el:9000")
    add("--share", type=_share, default=0.95, metavar="P", help="of the requests that must meet them")
    add("--context", nargs="+", type=from_1, default=[256, 1024, 4096], metavar="TOKENS", help="prompt lengths")
    add("--output-len", type=from_1, default=64, metavar="TOKENS", help="tokens of each answer")
    add("--streams", nargs="+", type=from_1, metavar="N", help="measure these numbers, instead of bisecting")
    add("--max-streams", type=from_1, default=64, metavar="N", help="most streams that are tried when bisecting")
    add("--requests-per-stream", type=from_1, default=3, metavar="N", help="one after the other, each stream")
    add_request_arguments(parser)
    parser.set_defaults(num_warmups=1)
    add_json_argument(parser, "every measurement")


def run(args: argparse.Namespace) -> int:
    """Prints all measurements and the capacities, then one line of JSON. Raises `ServeError` and its kinds."""
    limits = parse_goodput(args.slo)
    aim = target(args, args.base_url, args.model)
    capacities = [find_capacity(args, limits, aim, context) for context in args.context]
    print(f"{render_points(capacities)}\n\n{render_capacities(capacities, limits, args.share)}", flush=True)
    settings = {"benchmark": "sweep", "slo_ms": limits, "share": args.share}
    write_json(args.json, settings | {"results": [_document(capacity, is_full=True) for capacity in capacities]})
    print(f"\n{json.dumps(settings | {'results': [_document(capacity) for capacity in capacities]})}")
    return 0


def find_capacity(args: argparse.Namespace, limits: Mapping[str, float], aim: Target, context: int) -> Capacity:
    """Measures until the capacity at this context is known."""
    points: list[Point] = []

    def keeps(num_streams: int) -> bool:
        wanted = Load(
            name=f"{context} tokens, {num_streams} streams",
            workload=_shape(args, context, num_streams),
            max_concurrency=num_streams,
            num_warmups=args.num_warmups,
            seed=random.Random(f"{args.seed}:{context}:{num_streams}").getrandbits(32),
            goodput=limits,
        )
        result = asyncio.run(measure(aim, wanted))
        points.append(_point(context, num_streams, result, args.share))
        tell(f"{context} tokens, {_judgement(points[-1])}")
        return points[-1].keeps

    if args.streams:
        num_streams = most_of_ladder(keeps, sorted(set(args.streams)))
    else:
        num_streams = most_by_bisection(keeps, args.max_streams)
    return Capacity(context, num_streams, tuple(points))


def render_points(capacities: Sequence[Capacity]) -> str:
    """A row a measurement."""
    return render_items(
        [point for capacity in capacities for point in sorted(capacity.points, key=lambda point: point.num_streams)],
        {
            "context": lambda point: f"{point.context:,}",
            "streams": lambda point: str(point.num_streams),
            "output tok/s": lambda point: f"{point.result['output_throughput']:.1f}",
            "p95 TTFT ms": lambda point: f"{point.result['p95_ttft_ms']:.1f}",
            "p95 TPOT ms": lambda point: f"{point.result['p95_tpot_ms']:.1f}",
            "p95 E2EL ms": lambda point: f"{point.result['p95_e2el_ms']:.1f}",
            "good": lambda point: f"{point.good_share:.0%}",
            "keeps it": lambda point: "yes" if point.keeps else "no",
        },
    )


def render_capacities(capacities: Sequence[Capacity], limits: Mapping[str, float], share: float) -> str:
    """A row a context."""
    promise = ", ".join(f"{name.upper()} of at most {limit:g} ms" for name, limit in limits.items())
    table = render_items(
        capacities,
        {
            "context": lambda capacity: f"{capacity.context:,}",
            "most streams": lambda capacity: str(capacity.num_streams),
            "output tok/s": lambda capacity: f"{capacity.at.result['output_throughput']:.1f}" if capacity.at else "-",
            "beyond": lambda capacity: _judgement(capacity.beyond) if capacity.beyond else "not tried",
        },
    )
    return f"Most streams with {promise} for {share:.0%} of the requests:\n\n{table}"


def _shape(args: argparse.Namespace, context: int, num_streams: int) -> Shape:
    output_len = Span(args.output_len, args.output_len)
    return Shape(num_streams * args.requests_per_stream, 0, Span(context, context), output_len)


def _point(context: int, num_streams: int, result: Mapping[str, Any], share: float) -> Point:
    good_share = result["good_completed"] / (result["completed"] + result["failed"])
    return Point(context, num_streams, not result["failed"] and good_share >= share, good_share, result)


def _judgement(point: Point) -> str:
    plural = "" if point.num_streams == 1 else "s"
    text = f"{point.num_streams} stream{plural}: {point.good_share:.0%} good"
    if point.result["failed"]:
        text += f", {point.result['failed']} failed: {render_errors(point.result['errors'], most=1)}"
    return text


def _document(capacity: Capacity, *, is_full: bool = False) -> dict[str, Any]:
    """With every figure of every measurement, or without."""
    return {
        "context": capacity.context,
        "max_streams": capacity.num_streams,
        "points": [
            {"streams": point.num_streams, "keeps": point.keeps, "good_share": point.good_share}
            | (without_arrays(point.result) if is_full else {})
            for point in capacity.points
        ],
    }


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def most_by_bisection(keeps: Callable[[int], bool], most: int) -> int:
    """The largest count from 1 to `most` that keeps it, 0 if 1 does not. Takes for granted that fewer streams
    keep what more do. Doubles until one fails, then halves the distance: about 2 log2 of the answer."""
    good, bad = 0, 1
    while keeps(bad):
        good, bad = bad, min(2 * bad, most)
        if good == most:
            return most
    return good + bisect_left(range(good + 1, bad), True, key=lambda count: not keeps(count))


def most_of_ladder(keeps: Callable[[int], bool], ladder: Sequence[int]) -> int:
    """Measures every rung; the last before the first that fails, 0 if the first does."""
    kept = [keeps(count) for count in sorted(ladder)]
    num_good = kept.index(False) if False in kept else len(kept)
    return sorted(ladder)[num_good - 1] if num_good else 0
