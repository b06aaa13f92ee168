"""Servers side by side, from outside: the same requests to each, in turns (A B A B), medians and ratios.

A server is a command that is started afresh for every turn and ended after it, so that caches are cold and no
other server is on the machine, or an address. In a command, {port} is a free port, {model} what --model says,
{python} this Python. A round has new prompts, the same for all servers.

A ratio says how many times as good the first server is as another. There is no verdict where the ranges of the
rounds touch.

examples:
  mlx-serve bench compare --model DIR --workload uniform shared-prefix \\
    --server 'mlx-serve={python} -m mlx_server serve --model {model} --port {port}' \\
    --server 'mlx_lm={python} -m mlx_lm server --model {model} --port {port}'
  mlx-serve bench compare --url a=http://127.0.0.1:8000 --url b=http://127.0.0.1:8001 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx

from mlx_server.bench.arguments import above_0, add_key_argument, from_1
from mlx_server.bench.compare_servers import READY_PATHS, Server
from mlx_server.bench.compare_verdict import Figure, Turns, Verdict, figures_of, judge
from mlx_server.bench.serve import check_writable, without_arrays
from mlx_server.bench.serve_client import list_models
from mlx_server.bench.serve_options import (
    WORKLOADS,
    add_request_arguments,
    add_workload_arguments,
    load,
    target,
)
from mlx_server.bench.serve_run import Load, measure
from mlx_server.bench.tables import render_table
from mlx_server.errors import ConfigError, ServeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench compare`."""
    add = parser.add_argument
    add("--server", action="append", default=[], metavar="NAME=COMMAND", help="a server to start; repeat for more")
    add("--url", action="append", default=[], metavar="NAME=URL", help="a server that runs; repeat for more")
    add(
        "--ready",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"where the server answers 200 once it is ready; default: {' or '.join(READY_PATHS)}",
    )
    add("--model", help="{model} of the commands, and the model to ask for; default: the first that a server lists")
    add_key_argument(parser)
    add("--workload", nargs="+", choices=WORKLOADS, default=["uniform"], help="a table each")
    add("--rounds", type=from_1, default=5, metavar="N", help="turns of each server")
    add("--start-timeout", type=above_0, default=600.0, metavar="S", help="longest wait for a server")
    add_workload_arguments(parser)
    add_request_arguments(parser)
    parser.set_defaults(num_warmups=2)
    add("--json", type=Path, metavar="FILE", help="write every turn's figures there")


def run(args: argparse.Namespace) -> int:
    """Prints a table a workload, then one line of JSON; 1 if a turn failed. Raises `ServeError` and its kinds."""
    check_writable(args.json)
    servers = _servers(args)
    loads = [load(args, name) for name in args.workload]
    documents = []
    is_whole = True
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="mlx-serve-compare-") as folder:
        for wanted in loads:
            sides = take_turns(servers, wanted, args, Path(folder))
            is_whole = is_whole and all(side.is_whole for side in sides)
            figures = figures_of(wanted.name, has_goodput=bool(wanted.goodput))
            print(f"\n{wanted.name} (rounds: {args.rounds})\n\n{render(sides, figures)}", flush=True)
            documents.append(as_document(wanted.name, sides, figures))
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "api_key")}
    document = {"benchmark": "compare", "settings": settings, "results": documents}
    text = json.dumps(document, default=str)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}")
    return 0 if is_whole else 1


def take_turns(servers: Sequence[Server], wanted: Load, args: argparse.Namespace, folder: Path) -> list[Turns]:
    """Round after round, each server in turn. A turn that fails is told and left out; the others go on."""
    results: dict[str, list[Mapping[str, Any] | None]] = {server.name: [] for server in servers}
    for number in range(args.rounds):
        seeded = replace(wanted, seed=wanted.seed + number)
        for server in servers:
            what = f"{wanted.name}, round {number + 1}, {server.name}"
            try:
                result = _take_turn(server, seeded, args, folder / f"{server.name}.log")
            except ServeError as error:
                results[server.name].append(None)
                print(f"{what}: {error}", file=sys.stderr, flush=True)
            else:
                results[server.name].append(result)
                print(f"{what}: {result['duration']:.1f} s, {result['failed']} failed", file=sys.stderr, flush=True)
    return [Turns(name, tuple(taken)) for name, taken in results.items()]


def _take_turn(server: Server, wanted: Load, args: argparse.Namespace, log_path: Path) -> Mapping[str, Any]:
    with server.session(model=args.model, log_path=log_path, start_timeout_s=args.start_timeout) as url:
        model = _find_model(url, args)
        return without_arrays(asyncio.run(measure(target(args, url, model), wanted)))


def _find_model(url: str, args: argparse.Namespace) -> str | None:
    """The server's own name of the wanted model: as it was named, its full path, or the folder's name."""
    wanted: str | None = args.model
    if wanted is None:
        return None
    try:
        listed = asyncio.run(list_models(url, target(args, url, None).api_key))
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return wanted
    names = (wanted, str(Path(wanted).resolve()), Path(wanted).name)
    return next((name for name in names if name in listed), listed[0] if listed else wanted)


def render(sides: Sequence[Turns], figures: Sequence[Figure]) -> str:
    """A table of the first server beside each other one."""
    first, *others = sides
    return "\n\n".join(_render_pair(first, other, figures) for other in others)


def as_document(workload: str, sides: Sequence[Turns], figures: Sequence[Figure]) -> dict[str, Any]:
    """The same and every turn's figures, ready for JSON."""
    first, *others = sides
    return {
        "workload": workload,
        "turns": {side.name: side.results for side in sides},
        "verdicts": [
            {
                "figure": figure.key,
                "first": first.name,
                "second": other.name,
                "factor": verdict.factor,
                "low": verdict.low,
                "high": verdict.high,
                "is_better": verdict.is_better,
                "reason": verdict.reason,
            }
            for other in others
            for figure in figures
            for verdict in [judge(figure, first, other)]
        ],
    }


def _render_pair(first: Turns, second: Turns, figures: Sequence[Figure]) -> str:
    rows = []
    for figure in figures:
        verdict = judge(figure, first, second)
        rows.append(
            [
                figure.label,
                _spread(first.values(figure)),
                _spread(second.values(figure)),
                _ratio(verdict),
                _sentence(verdict, first.name, second.name),
            ]
        )
    tokens = [f"{side.num_output_tokens:,.0f}" if any(side.results) else "-" for side in (first, second)]
    rows.append(["output tokens", *tokens, "", ""])
    return render_table(["median (range)", first.name, second.name, "ratio (range)", "better"], rows)


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
    """In the order of the flags: those with commands, then those with addresses."""
    paths = {name: (path,) for name, path in (_named("--ready", text) for text in args.ready)}
    made = [Server(name=name, command=command) for name, command in (_named("--server", t) for t in args.server)]
    made += [Server(name=name, url=url) for name, url in (_named("--url", text) for text in args.url)]
    names = [server.name for server in made]
    if len(made) < 2:
        raise ConfigError(f"{len(made)} server to compare; name two at least with --server or --url.")
    if len(set(names)) < len(names):
        raise ConfigError("Two servers have one name; give each its own.")
    if unknown := set(paths) - set(names):
        raise ConfigError(f"--ready names {', '.join(sorted(unknown))}, which no --server or --url does.")
    for server in made:
        if server.command and "{port}" not in server.command:
            raise ConfigError(f"The command of {server.name} does not say {{port}}, so it cannot be reached.")
        if server.command and "{model}" in server.command and args.model is None:
            raise ConfigError(f"The command of {server.name} says {{model}}; name it with --model.")
    return [replace(server, ready_paths=paths.get(server.name, READY_PATHS)) for server in made]


def _named(flag: str, text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value or "/" in name:
        raise ConfigError(f"{flag} {text} is not understood; write NAME=... with a name without slashes.")
    return name, value


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that servers are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _unwind) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
