"""Offline throughput: this engine and mlx-lm's own ways to generate, on the same prompts and weights, in one process.

The systems take turns (A B C A B C). In each turn a system starts with empty caches, is warmed up with two short
requests, and then gets the whole workload at once. Outputs have a fixed length, and are greedy except for chats. Model
calls and positions are counted at the model, in the same way for all systems; a draft model's are not.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_server.bench.arguments import add_json_argument, changed_options, crossed_numbers, from_1, refuse_options
from mlx_server.bench.instruments import write_figures
from mlx_server.bench.systems import (
    CHAT_WORKLOADS,
    SPECULATE,
    WORKLOADS,
    Batched,
    OurEngine,
    Sequential,
    System,
    Workload,
    check_lengths,
    make_chat_workload,
    make_warm_up,
    make_workload,
)
from mlx_server.bench.tables import document_of, format_bytes, format_rate, print_progress, render_items
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.runtime.models.loader import LoadedModel, load

SYSTEMS = ("sequential", "batch", "engine")
_OF_ENGINE = ("max_num_batched_tokens", "attention_backend", "kv_cache_memory", "speculate", "draft_model")
_TURN_FIGURES = ("elapsed_s", "num_model_calls", "num_prompt_tokens_computed", "peak_memory_bytes")
PREFILL_SETTINGS = ("2048x8", "512x8", "512x1")
"""Of mlx-lm's `BatchGenerator`: its default, and two smaller settings that are faster on a CPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench throughput`."""
    add = parser.add_argument
    add(
        "--model",
        default="random:mini",
        help="any model that can be served, also random ones like random:llama-3-8b-4bit",
    )
    choices = (*WORKLOADS, *CHAT_WORKLOADS)
    add(
        "--workload",
        nargs="+",
        default=["uniform"],
        choices=choices,
        help="one table for each; the last three are chats",
    )
    add(
        "--num-requests",
        nargs="+",
        type=from_1,
        default=[None],
        metavar="N",
        help="only the first N requests of the workload; one table for each N",
    )
    add("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS, help="systems to compare; default: all")
    add("--repeat", type=from_1, default=3, metavar="N", help="turns of each system; medians are shown")
    add("--seed", type=int, default=0, help="of the prompts and lengths")
    add(
        "--batch-prefill",
        nargs="+",
        type=_prefill_setting,
        default=[_prefill_setting(text) for text in PREFILL_SETTINGS],
        metavar="STEPxBATCH",
        help="prefill_step_size and prefill_batch_size of mlx-lm's BatchGenerator, one row for each; ratios are to the "
        f"fastest; default: {' '.join(PREFILL_SETTINGS)}",
    )
    add("--max-num-seqs", type=from_1, default=32, help="most requests at once, in every batching system")
    add("--max-num-batched-tokens", type=from_1, default=2048, help="the engine's token budget of a step")
    add("--attention-backend", nargs="+", default=["auto"], help="of the engine, one row for each")
    add("--kv-cache-memory", default="2GiB", help="of the engine")
    add("--speculate", nargs="+", default=["auto"], choices=SPECULATE, help="of the engine, one row for each")
    add("--draft-model", help="of the engine, for --speculate auto and model")
    add_json_argument(parser, "every turn")


def run(args: argparse.Namespace) -> int:
    """Prints a table for each workload and number of requests. Raises `ServeError` and its kinds."""
    _check_options(args)
    loaded = _load(args.model)
    systems = _systems(args, loaded)
    warm_up = make_warm_up(loaded.vocab_size)
    documents = []
    workloads = [
        _workload(name, loaded, args.seed).first(count)
        for name, count in itertools.product(args.workload, args.num_requests)
    ]
    for workload in workloads:
        rows = compare(systems, workload, warm_up, loaded.model, num_turns=args.repeat)
        print(f"\n{_title(args.model, workload)}\n\n{render_rows(rows)}", flush=True)
        documents.append(as_document(workload, rows))
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    write_figures(args.json, "throughput", settings=settings, results=documents)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for options that change none of the systems. One that is given its default passes."""
    given, shown = changed_options(args, add_arguments), ", ".join(args.systems)
    if "engine" not in args.systems:
        refuse_options(given, _OF_ENGINE, shown)
    if "batch" not in args.systems:
        refuse_options(given, ("batch_prefill",), shown)
    if args.systems == ["sequential"]:
        refuse_options(given, ("max_num_seqs",), shown)
    if not {"auto", "model"} & set(args.speculate):
        refuse_options(args, ("draft_model",), "these systems, none of which drafts with a model")


def _load(name: str) -> LoadedModel:
    """Loads the model and calls it once on this thread: arrays that a model computes at its first call, such as rope
    frequencies, could not be computed by the engine's thread later."""
    loaded = load(name)
    mx.eval(loaded.model(mx.array([[0]]), cache=make_prompt_cache(loaded.model)))
    return loaded


def _workload(name: str, loaded: LoadedModel, seed: int) -> Workload:
    if name not in CHAT_WORKLOADS:
        return make_workload(name, loaded.vocab_size, seed)
    return make_chat_workload(name, None if loaded.folder is None else Tokenizer.from_folder(loaded.folder), seed)


def _systems(args: argparse.Namespace, loaded: LoadedModel) -> list[System]:
    systems: list[System] = []
    if "sequential" in args.systems:
        systems.append(Sequential(loaded.model))
    if "batch" in args.systems:
        systems += [Batched(loaded.model, step, batch, args.max_num_seqs) for step, batch in args.batch_prefill]
    if "engine" in args.systems:
        systems += [
            OurEngine(
                loaded,
                backend,
                args.max_num_seqs,
                args.max_num_batched_tokens,
                args.kv_cache_memory,
                speculate,
                None if speculate in ("off", "ngram", "mtp") else args.draft_model,
            )
            for backend in args.attention_backend
            for speculate in args.speculate
        ]
    return systems


def _title(model: str, workload: Workload) -> str:
    return (
        f"{model}, {workload.name}: {len(workload.requests)} requests, "
        f"{workload.num_prompt_tokens:,} prompt and {workload.num_output_tokens:,} output tokens"
    )


def _prefill_setting(text: str) -> tuple[int, ...]:
    return tuple(crossed_numbers(text, 2))


@dataclass(frozen=True, slots=True)
class Turn:
    """One system's run over the workload, from the first prompt to the last token.

    `num_prompt_tokens_computed` counts the positions run through the model, less one for each output token except a
    request's last: prompts, padding, rejected drafts, and rows of requests that have ended.
    """

    elapsed_s: float
    num_model_calls: int
    num_prompt_tokens_computed: int
    peak_memory_bytes: int
    num_cached_tokens: int | None
    token_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """All turns of one system."""

    system: System
    workload: Workload
    turns: tuple[Turn, ...]

    @property
    def output_rates(self) -> tuple[float, ...]:
        """Output tokens per second of each turn."""
        return tuple(self.workload.num_output_tokens / turn.elapsed_s for turn in self.turns)

    @property
    def output_rate(self) -> float:
        """The median of `output_rates`."""
        return statistics.median(self.output_rates)

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second in the median turn."""
        return self.output_rate * (1 + self.workload.num_prompt_tokens / self.workload.num_output_tokens)

    @property
    def tokens_per_call(self) -> float:
        """Output tokens of all requests for each call of the model in the first turn, calls for prompts included."""
        return self.workload.num_output_tokens / self.turns[0].num_model_calls

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens from a prefix cache in the first turn; None without such a cache."""
        num_cached = self.turns[0].num_cached_tokens
        return None if num_cached is None else num_cached / self.workload.num_prompt_tokens

    @property
    def peak_memory_bytes(self) -> int:
        return max(turn.peak_memory_bytes for turn in self.turns)

    def num_equal_outputs(self, other: Row) -> int:
        """Requests with the same output tokens as in the other row, in the first turns."""
        return sum(mine == theirs for mine, theirs in zip(self.turns[0].token_ids, other.turns[0].token_ids))


def compare(
    systems: Sequence[System],
    workload: Workload,
    warm_up: Workload,
    model: Any,
    *,
    num_turns: int,
) -> tuple[Row, ...]:
    """Gives each system `num_turns` turns, in rotation, so that a slow minute affects all of them, and prints
    their times as progress."""
    turns: list[list[Turn]] = [[] for _ in systems]
    for number in range(num_turns):
        for system, taken in zip(systems, turns):
            taken.append(take_turn(system, workload, warm_up, model))
            print_progress(f"turn {number + 1}, {system.label}: {taken[-1].elapsed_s:.1f} s")
    return tuple(Row(system, workload, tuple(taken)) for system, taken in zip(systems, turns))


def take_turn(system: System, workload: Workload, warm_up: Workload, model: Any) -> Turn:
    """One session: a warm-up, then the workload, measured. Raises `ServeError` if an output has the wrong length."""
    with system.session() as generate:
        generate(warm_up)
        _forget_memory()
        with count_model_calls(model) as calls:
            start_s = time.perf_counter()
            generated = generate(workload)
            elapsed_s = time.perf_counter() - start_s
        peak_memory_bytes = mx.get_peak_memory()
    _forget_memory()
    check_lengths(workload, generated, system.label)
    return Turn(
        elapsed_s=elapsed_s,
        num_model_calls=calls.num_calls,
        num_prompt_tokens_computed=calls.num_positions - workload.num_output_tokens + len(workload.requests),
        peak_memory_bytes=peak_memory_bytes + generated.num_host_bytes,
        num_cached_tokens=generated.num_cached_tokens,
        token_ids=generated.token_ids,
    )


@dataclass(slots=True)
class ModelCalls:
    """`num_positions` sums the sizes of the `[batch, length]` token ids of all calls, padding included."""

    num_calls: int = 0
    num_positions: int = 0


@contextmanager
def count_model_calls(model: Any) -> Iterator[ModelCalls]:
    """Counts the calls of this model, and not those of a draft model of the same class. It replaces `__call__` of the
    class, where Python looks it up."""
    calls, model_class = ModelCalls(), type(model)
    original = model_class.__call__

    def counted(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            calls.num_calls += 1
            calls.num_positions += inputs.size
        return original(self, inputs, *args, **kwargs)

    model_class.__call__ = counted
    try:
        yield calls
    finally:
        model_class.__call__ = original


def _forget_memory() -> None:
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()


def render_rows(rows: Sequence[Row]) -> str:
    """The table. Ratios are to the fastest setting of mlx-lm's `BatchGenerator`, if there is one."""
    batched = [row.output_rate for row in rows if isinstance(row.system, Batched)]
    fastest = max(batched, default=None)

    def against_batch(row: Row) -> str:
        return "" if fastest is None else f"{row.output_rate / fastest:.2f}x"

    return render_items(
        rows,
        {
            "system": lambda row: row.system.label,
            "output tok/s": lambda row: format_rate(row.output_rate),
            "(range)": lambda row: f"{format_rate(min(row.output_rates))}-{format_rate(max(row.output_rates))}",
            "total tok/s": lambda row: format_rate(row.total_rate),
            "vs batch": against_batch,
            "prompt tokens computed": lambda row: f"{row.turns[0].num_prompt_tokens_computed:,}",
            "model calls": lambda row: f"{row.turns[0].num_model_calls:,}",
            "tokens a call": lambda row: f"{row.tokens_per_call:.2f}",
            "peak memory": lambda row: format_bytes(row.peak_memory_bytes),
            "prefix hits": lambda row: "none" if row.hit_rate is None else f"{row.hit_rate:.1%}",
            "outputs as first row": lambda row: f"{row.num_equal_outputs(rows[0])}/{len(row.workload.requests)}",
        },
    )


def as_document(workload: Workload, rows: Sequence[Row]) -> dict[str, Any]:
    """The same for JSON, with every turn."""
    return {
        "workload": workload.name,
        "num_requests": len(workload.requests),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
        "systems": [
            {
                "label": row.system.label,
                "output_tokens_per_s": row.output_rate,
                "total_tokens_per_s": row.total_rate,
                "output_tokens_per_model_call": row.tokens_per_call,
                "prefix_hit_rate": row.hit_rate,
                "num_outputs_as_first_row": row.num_equal_outputs(rows[0]),
                "turns": [document_of(turn, *_TURN_FIGURES) for turn in row.turns],
            }
            for row in rows
        ],
    }
