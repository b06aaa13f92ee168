"""Offline throughput: this engine beside mlx-lm's own ways to generate, on the same prompts, in one process.

All share the weights. In each of its turns a system starts with empty caches, is warmed up with two short
requests, then gets the whole workload at once; turns rotate. Outputs are greedy and of fixed length. Model
calls and the positions run through the model are counted at the model itself, in the same way for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_tokenizer

from mlx_server.bench.comparison import Profile, Turn, compare, profile_turn
from mlx_server.bench.engine_system import Engine
from mlx_server.bench.environment import describe_environment
from mlx_server.bench.mlx_lm_systems import Batched, Sequential
from mlx_server.bench.report import as_document, describe_profile, render_rows
from mlx_server.bench.systems import System
from mlx_server.bench.workloads import WORKLOADS, Workload, make_warm_up, make_workload
from mlx_server.errors import ConfigError
from mlx_server.runtime.models.loader import LoadedModel, load

SYSTEMS = ("sequential", "batch", "engine")
PREFILL_SETTINGS = ("2048x8", "512x8", "512x1")
"""Of mlx-lm's BatchGenerator: its default, and two smaller ones that do better on a CPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench throughput`."""
    add = parser.add_argument
    add(
        "--model",
        default="random:mini",
        help="any model that is served, also random ones like random:llama-3-8b-4bit",
    )
    add("--workload", nargs="+", default=["uniform"], choices=tuple(WORKLOADS), help="one table each")
    add(
        "--num-requests",
        nargs="+",
        type=_positive,
        default=[None],
        metavar="N",
        help="only the first N requests of the workload; several make a table each",
    )
    add("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS, help="which to compare; default: all")
    add("--repeat", type=_positive, default=3, metavar="N", help="turns of each system; medians are shown")
    add("--seed", type=int, default=0, help="of the prompts and lengths")
    add(
        "--batch-prefill",
        nargs="+",
        type=_prefill_setting,
        default=[_prefill_setting(text) for text in PREFILL_SETTINGS],
        metavar="STEPxBATCH",
        help="prefill_step_size and prefill_batch_size of mlx-lm's BatchGenerator, a row each; "
        f"the best is compared with; default: {' '.join(PREFILL_SETTINGS)}",
    )
    add("--max-num-seqs", type=_positive, default=32, help="most requests at once, in every batching system")
    add("--max-num-batched-tokens", type=_positive, default=2048, help="the engine's token budget of a step")
    add("--attention-backend", nargs="+", default=["auto"], help="of the engine, a row each")
    add("--kv-cache-memory", default="2GiB", help="of the engine")
    add("--profile", action="store_true", help="then watch the engine once more: attention's share of the time")
    add("--json", type=Path, metavar="FILE", help="write every turn there too")


def run(args: argparse.Namespace) -> int:
    """Prints one table a workload; progress goes to stderr. Raises `ServeError` and its kinds."""
    if args.json is not None:
        _check_writable(args.json)
    loaded = _load(args.model)
    systems = _systems(args, loaded)
    warm_up = make_warm_up(loaded.vocab_size)
    environment = describe_environment()
    documents = []
    for name, count in itertools.product(args.workload, args.num_requests):
        workload = make_workload(name, loaded.vocab_size, args.seed).first(count)
        rows = compare(systems, workload, warm_up, type(loaded.model), num_turns=args.repeat, on_turn=_report_turn)
        print(f"\n{_title(args.model, workload)}\n\n{render_rows(rows)}", flush=True)
        profiles = _profiles(systems, workload, warm_up) if args.profile else {}
        documents.append(as_document(workload, rows, profiles))
    if args.json is not None:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        document = {"benchmark": "throughput", "environment": environment, "settings": settings, "results": documents}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


def _check_writable(path: Path) -> None:
    """Before the measuring, which may take an hour."""
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror}.") from error


def _load(name: str) -> LoadedModel:
    """On this thread, for the engine's thread too: a first call computes what a model keeps beside its weights
    (frequencies of rope, say), which no other thread could do after us."""
    loaded = load(name)
    mx.eval(loaded.model(mx.array([[0]]), cache=make_prompt_cache(loaded.model)))
    return loaded


def _systems(args: argparse.Namespace, loaded: LoadedModel) -> list[System]:
    systems: list[System] = []
    if "sequential" in args.systems:
        systems.append(Sequential(loaded.model, _tokenizer(loaded)))
    if "batch" in args.systems:
        systems += [Batched(loaded.model, step, batch, args.max_num_seqs) for step, batch in args.batch_prefill]
    if "engine" in args.systems:
        systems += [
            Engine(loaded, backend, args.max_num_seqs, args.max_num_batched_tokens, args.kv_cache_memory)
            for backend in args.attention_backend
        ]
    return systems


def _tokenizer(loaded: LoadedModel) -> Any | None:
    """mlx-lm's own, without end tokens: lengths are fixed, so nothing may stop early."""
    if loaded.folder is None:
        return None
    tokenizer = load_tokenizer(loaded.folder)
    tokenizer.eos_token_ids = ()
    return tokenizer


def _profiles(systems: Sequence[System], workload: Workload, warm_up: Workload) -> dict[str, Profile]:
    """Of each engine row, by label; prints a line each."""
    profiles = {}
    for system in systems:
        if isinstance(system, Engine):
            profiles[system.label] = profile = profile_turn(system, workload, warm_up)
            print(f"{system.label}: {describe_profile(profile)}", flush=True)
    return profiles


def _title(model: str, workload: Workload) -> str:
    return (
        f"{model}, {workload.name}: {len(workload.requests)} requests, "
        f"{workload.num_prompt_tokens:,} prompt and {workload.num_output_tokens:,} output tokens"
    )


def _report_turn(system: System, number: int, turn: Turn) -> None:
    print(f"turn {number + 1}, {system.label}: {turn.elapsed_s:.1f} s", file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _prefill_setting(text: str) -> tuple[int, int]:
    step, _, batch = text.partition("x")
    return _positive(step), _positive(batch)
