"""Compares servers over HTTP: the same requests to each, in turns (A B A B), with medians and ratios.

A server is a URL or a command. A command is started for each turn and ended after it, so that its caches are cold and
no other server runs meanwhile. In a command, {port} is a free port, {model} the value of --model, {python} this Python,
and {threads} the value of --threads or -1. Each round has new prompts, the same for all servers.

A ratio says how many times as good the first server is as the best of the others. There is no verdict if the ranges of
the rounds overlap.

examples:
  mlx-serve bench compare --model DIR --workload uniform shared-prefix \\
    --server 'mlx-serve={python} -m mlx_server serve --model {model} --port {port}' \\
    --server 'mlx_lm={python} -m mlx_lm server --model {model} --port {port}'
  mlx-serve bench compare --url a=http://127.0.0.1:8000 --url b=http://127.0.0.1:8001 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shlex
import signal
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mlx_server.bench.arguments import above_0, add_json_argument, add_key_argument, from_1, server_url
from mlx_server.bench.serve.client import list_models
from mlx_server.bench.serve.command import (
    INTRUDER,
    WORKLOADS,
    add_load_arguments,
    check_options,
    make_load,
    make_target,
)
from mlx_server.bench.serve.report import without_arrays
from mlx_server.bench.serve.run import Load, measure
from mlx_server.bench.servers import Server
from mlx_server.bench.tables import print_progress, render_table, write_json
from mlx_server.errors import ConfigError, ServeError

MIN_ROUNDS = 3
"""For a verdict. The ranges of two equal servers are disjoint by chance in 1 of 10 comparisons with 3 rounds, and in 1
of 126 with 5."""

_MAX_OUTPUT_DIFFERENCE = 0.05
_SEED_STRIDE = 10_000
"""More than a run has rounds: no round of `--seed 1` has the prompts of one of `--seed 0`."""

_THREADS_VARIABLES = ("MLX_SERVE_CPU_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench compare`."""
    add = parser.add_argument
    add("--server", action="append", default=[], metavar="NAME=COMMAND", help="a server to start; repeat for more")
    add("--url", action="append", default=[], metavar="NAME=URL", help="a running server; repeat for more")
    add("--model", help="model to request, and {model} in commands; default: the first that a server lists")
    add_key_argument(parser)
    add("--workload", nargs="+", choices=WORKLOADS, default=["uniform"], help="one table for each")
    add("--rounds", type=from_1, default=5, metavar="N", help="turns of each server")
    add(
        "--threads",
        nargs="+",
        type=from_1,
        default=[None],
        metavar="N",
        help="threads that a server computes with, passed as {threads} and as "
        f"{', '.join(_THREADS_VARIABLES)}; tables for each number; default: each server's own",
    )
    add("--start-timeout", type=above_0, default=600.0, metavar="S", help="seconds in which a server must be ready")
    add_load_arguments(parser)
    parser.set_defaults(num_warmups=2)
    add_json_argument(parser, "every turn's figures")


def run(args: argparse.Namespace) -> int:
    """Prints a table for each workload and number of threads, then one line of JSON; 1 if a turn failed. Raises
    `ServeError` and its kinds."""
    servers = _servers(args)
    check_options(args, *args.workload)
    loads = [make_load(args, name) for name in args.workload]
    documents = []
    is_whole = True
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="mlx-serve-compare-") as folder:
        for load, (index, threads) in itertools.product(loads, enumerate(args.threads)):
            # New prompts for each number of threads: a server of --url has those before in its prefix cache.
            fresh = replace(load, seed=load.seed * _SEED_STRIDE + index * args.rounds)
            sides = take_turns([_with_threads(one, threads) for one in servers], fresh, args, Path(folder))
            is_whole = is_whole and all(side.is_whole for side in sides)
            figures = figures_of(load.name, has_goodput=bool(load.goodput))
            title = f"{load.name} (rounds: {args.rounds}{'' if threads is None else f', threads: {threads}'})"
            print(f"\n{title}\n\n{render(sides, figures)}", flush=True)
            documents.append({"threads": threads, **as_document(load.name, sides, figures)})
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "api_key")}
    document = {"benchmark": "compare", "settings": settings, "results": documents}
    print(f"\n{json.dumps(document, default=str)}", flush=True)
    write_json(args.json, document)
    return 0 if is_whole else 1


def take_turns(servers: Sequence[Server], load: Load, args: argparse.Namespace, folder: Path) -> list[Turns]:
    """Measures each server once a round. A turn that fails is reported and left out."""
    results: dict[str, list[Mapping[str, Any] | None]] = {server.name: [] for server in servers}
    for number in range(args.rounds):
        seeded = replace(load, seed=load.seed + number)
        for server in servers:
            what = f"{load.name}, round {number + 1}, {server.name}"
            result = None
            try:
                result = _take_turn(server, seeded, args, folder / f"{server.name}.log")
                print_progress(f"{what}: {result['duration']:.1f} s, {result['failed']} failed")
            except ServeError as error:
                print_progress(f"{what}: {error}")
            results[server.name].append(result)
    return [Turns(name, tuple(taken)) for name, taken in results.items()]


def _take_turn(server: Server, load: Load, args: argparse.Namespace, log_path: Path) -> Mapping[str, Any]:
    with server.session(model=args.model, log_path=log_path, start_timeout_s=args.start_timeout) as url:
        model = _find_model(url, args)
        return without_arrays(asyncio.run(measure(make_target(args, url, model), load)))


def _with_threads(server: Server, count: int | None) -> Server:
    if server.command is None:
        return server
    command = server.command.replace("{threads}", "-1" if count is None else str(count))
    variables = {} if count is None else dict.fromkeys(_THREADS_VARIABLES, str(count))
    return replace(server, command=command, environ=os.environ | variables)


def _find_model(url: str, args: argparse.Namespace) -> str | None:
    """The server's own name of the model: as it was given, its full path, or the folder's name."""
    model: str | None = args.model
    if model is None:
        return None
    target = make_target(args, url, None)
    try:
        listed = asyncio.run(list_models(target, target.api_key))
    except ServeError:
        return model
    names = (model, str(Path(model).resolve()), Path(model).name)
    return next((name for name in names if name in listed), listed[0])


def render(sides: Sequence[Turns], figures: Sequence[Figure]) -> str:
    """A table with a column for each server; ratios are of the first server to the best of the others."""
    first, *others = sides
    rows = []
    for figure in figures:
        best = best_of(others, figure)
        verdict = judge(figure, first, best)
        spreads = [_spread(side.values(figure)) for side in sides]
        rows.append([figure.label, *spreads, _ratio(verdict), _sentence(verdict, first.name, best.name)])
    tokens = [f"{side.num_output_tokens:,.0f}" if any(side.results) else "-" for side in sides]
    rows.append(["output tokens", *tokens, "", ""])
    return render_table(["median (range)", *(side.name for side in sides), "ratio (range)", "better"], rows)


def best_of(sides: Sequence[Turns], figure: Figure) -> Turns:
    """The server with the best median among those without failed requests; the first if all have failed requests."""
    whole = [side for side in sides if side.is_whole]
    pick = max if figure.is_rate else min
    return pick(whole, key=lambda side: statistics.median(side.values(figure))) if whole else sides[0]


def as_document(workload: str, sides: Sequence[Turns], figures: Sequence[Figure]) -> dict[str, Any]:
    """The same for JSON, with the figures of every turn."""
    first, *others = sides
    return {
        "workload": workload,
        "turns": {side.name: side.results for side in sides},
        "verdicts": [
            {"figure": figure.key, "first": first.name, "second": other.name, **asdict(judge(figure, first, other))}
            for other in others
            for figure in figures
        ],
    }


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{_number(statistics.median(values))} ({_number(min(values))}-{_number(max(values))})"


def _ratio(verdict: Verdict) -> str:
    if verdict.factor is None or verdict.low is None or verdict.high is None:
        return "-"
    return f"{verdict.factor:.2f}x ({verdict.low:.2f}-{verdict.high:.2f})"


def _sentence(verdict: Verdict, first: str, second: str) -> str:
    if verdict.is_better is None:
        return f"no verdict: {verdict.reason}"
    return first if verdict.is_better else second


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _servers(args: argparse.Namespace) -> list[Server]:
    """Those with commands, then those with URLs. Raises `ConfigError`."""
    made = [Server(name=name, command=command) for name, command in (_named("--server", t) for t in args.server)]
    made += [Server(name=name, url=_url(name, url)) for name, url in (_named("--url", text) for text in args.url)]
    names = [server.name for server in made]
    if len(made) < 2:
        raise ConfigError(f"Servers to compare: {len(made)}; name at least two with --server or --url.")
    if len(set(names)) < len(names):
        raise ConfigError("Two servers have the same name; give each its own.")
    for server in made:
        _check_words(server)
        if server.command and "{port}" not in server.command:
            raise ConfigError(f"The command of {server.name} has no {{port}}, so the server cannot be reached.")
        if server.command and "{model}" in server.command and args.model is None:
            raise ConfigError(f"The command of {server.name} has {{model}}; name it with --model.")
    if args.threads != [None] and not args.server:
        raise ConfigError("--threads has no effect on servers that are given by --url. Leave it out.")
    return made


def _named(flag: str, text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value or "/" in name:
        raise ConfigError(f"{flag} {text} is not understood; write NAME=..., with no slash in the name.")
    return name, value


def _url(name: str, text: str) -> str:
    try:
        return server_url(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--url {name}: {error}.") from error


def _check_words(server: Server) -> None:
    try:
        shlex.split(server.command or "")
    except ValueError as error:
        raise ConfigError(f"The command of {server.name} is not understood: {error}. Close or escape it.") from error


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that servers are ended."""
    before = {number: signal.signal(number, _unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@dataclass(frozen=True, slots=True)
class Figure:
    """A key of the result document. `by_output` marks figures that cannot be compared if answers differ in length."""

    key: str
    label: str
    is_rate: bool = False
    by_output: bool = False


_LOAD_FIGURES = (
    Figure("mean_ttft_ms", "mean TTFT, ms"),
    Figure("p99_ttft_ms", "p99 TTFT, ms"),
    Figure("mean_tpot_ms", "mean TPOT, ms"),
    Figure("median_itl_ms", "p50 ITL, ms"),
    Figure("p95_itl_ms", "p95 ITL, ms"),
    Figure("p99_itl_ms", "p99 ITL, ms"),
    Figure("max_itl_ms", "worst gap, ms"),
    Figure("mean_e2el_ms", "mean E2EL, ms", by_output=True),
    Figure("output_throughput", "output tok/s", is_rate=True, by_output=True),
)
_GOODPUT = Figure("request_goodput", "good requests/s", is_rate=True)
_INTRUDER_FIGURES = (
    Figure("worst_gap_ms", "worst gap of a stream, ms"),
    Figure("intruder_ttft_ms", "the long prompt's TTFT, ms"),
)


@dataclass(frozen=True, slots=True)
class Turns:
    """A server's result documents, one for each round; None for a round that failed."""

    name: str
    results: tuple[Mapping[str, Any] | None, ...]

    def values(self, figure: Figure) -> list[float]:
        return [float(result[figure.key]) for result in self.results if result is not None]

    @property
    def num_output_tokens(self) -> float:
        return statistics.median(float(result["total_output_tokens"]) for result in self.results if result is not None)

    @property
    def is_whole(self) -> bool:
        return all(result is not None and not result["failed"] for result in self.results)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`factor` says how many times as good the first server is as the second, by the medians; `low` and `high` are the
    smallest and the largest factor of a round. They are None if a figure is 0. `is_better` is None without a verdict,
    and `reason` says why."""

    factor: float | None = None
    low: float | None = None
    high: float | None = None
    is_better: bool | None = None
    reason: str = ""


def figures_of(workload: str, *, has_goodput: bool) -> tuple[Figure, ...]:
    """The figures that are compared for this workload."""
    figures = _INTRUDER_FIGURES if workload == INTRUDER else _LOAD_FIGURES
    return (*figures, _GOODPUT) if has_goodput else figures


def judge(figure: Figure, first: Turns, second: Turns) -> Verdict:
    """The verdict on one figure. Both servers must have the same number of rounds."""
    if not first.is_whole or not second.is_whole:
        return Verdict(reason="requests failed")
    mine, theirs = first.values(figure), second.values(figure)
    if 0.0 in (*mine, *theirs):
        return Verdict(reason="a figure is 0")
    factors = [_factor(figure, *pair) for pair in zip(mine, theirs)]
    factor = _factor(figure, statistics.median(mine), statistics.median(theirs))
    reason = _refusal(figure, first, second)
    return Verdict(factor, min(factors), max(factors), None if reason else factor > 1, reason)


def _refusal(figure: Figure, first: Turns, second: Turns) -> str:
    """Why there is no verdict; empty if there is one."""
    mine, theirs = first.values(figure), second.values(figure)
    if len(mine) < MIN_ROUNDS:
        return f"fewer than {MIN_ROUNDS} rounds"
    counts = (first.num_output_tokens, second.num_output_tokens)
    if figure.by_output and max(counts) - min(counts) > _MAX_OUTPUT_DIFFERENCE * max(counts):
        return "answers differ in length"
    if max(mine) >= min(theirs) and max(theirs) >= min(mine):
        return "within the spread"
    return ""


def _factor(figure: Figure, mine: float, theirs: float) -> float:
    return mine / theirs if figure.is_rate else theirs / mine
