"""What structured requests cost the streams beside them, over HTTP: the ITL of plain streams alone, beside plain
guests, and beside as many structured ones.

Guests are short chats that follow each other for as long as the streams last. Each structured guest has a schema that
the server has not seen, so that compiling it counts, too. The conditions take turns, in another order each round,
after a round that is not measured. Gaps count from the moment when guests begin until the first stream ends.

example:
  mlx-serve bench structured --num-streams 8 --num-guests 4 --num-rounds 7
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

from mlx_server.bench.arguments import (
    above_0,
    add_json_argument,
    add_key_argument,
    add_server_arguments,
    api_key,
    from_1,
)
from mlx_server.bench.serve.client import CHAT, RequestRecord, StreamClient, Target, Tier, connect
from mlx_server.bench.serve.run import NUM_TOKENS_BEFORE, in_background, start_streams
from mlx_server.bench.serve.workloads import Prompts, user_message
from mlx_server.bench.tables import document_of, render_table, write_json
from mlx_server.errors import ServeError

ALONE, PLAIN, STRUCTURED = CONDITIONS = ("alone", "plain guests", "structured guests")
_NUM_WORDS = 48


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass of one condition. `gaps_s` are those between tokens of the streams, pooled."""

    condition: str
    gaps_s: tuple[float, ...]
    num_guests_done: int

    @property
    def mean_itl_ms(self) -> float:
        return 1e3 * statistics.fmean(self.gaps_s)

    @property
    def p99_itl_ms(self) -> float:
        return 1e3 * statistics.quantiles(self.gaps_s, n=100, method="inclusive")[98]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What runs beside each other."""

    num_streams: int = 8
    num_guests: int = 4
    num_stream_tokens: int = 256
    num_guest_tokens: int = 48
    seed: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench structured`."""
    add = parser.add_argument
    add_server_arguments(parser)
    add_key_argument(parser)
    add("--num-streams", type=from_1, default=8, metavar="N", help="plain streams whose ITL is measured")
    add("--num-guests", type=from_1, default=4, metavar="N", help="guests at a time")
    add("--output-len", type=from_1, default=256, metavar="TOKENS", help="of each stream")
    add("--guest-len", type=from_1, default=48, metavar="TOKENS", help="most tokens of each guest")
    add("--num-rounds", type=from_1, default=5, metavar="N", help="measured turns of each condition")
    add("--max-rise", type=above_0, default=0.1, metavar="SHARE", help="largest rise beside plain guests that is good")
    add("--seed", type=int, default=0, help="of prompts and schemas")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a table and the rise; 1 if structured guests cost more than `--max-rise` over plain ones."""
    target = Target(base_url=args.base_url, model=args.model, api_key=api_key(args))
    setup = Setup(
        num_streams=args.num_streams,
        num_guests=args.num_guests,
        num_stream_tokens=args.output_len,
        num_guest_tokens=args.guest_len,
        seed=args.seed,
    )
    turns = asyncio.run(measure(target, setup, args.num_rounds))
    print(render(turns))
    rise = rise_of(turns, STRUCTURED, PLAIN)
    print(f"ITL beside structured guests, over that beside plain ones: {rise:+.1%} (limit {args.max_rise:+.0%})")
    write_json(args.json, as_document(turns))
    return 0 if rise <= args.max_rise else 1


async def measure(target: Target, setup: Setup, num_rounds: int) -> list[Turn]:
    """`num_rounds` turns of each condition, after one that is dropped. Raises `ServeError`."""
    turns: list[Turn] = []
    async with (
        connect(target, target.api_key) as streams,
        connect(replace(target, endpoint=CHAT, model=streams.model)) as guests,
    ):
        bench = _Bench(streams, guests, setup, Tier("all", target.api_key))
        for number in range(num_rounds + 1):
            first = number % len(CONDITIONS)
            measured = [await bench.turn(condition) for condition in (*CONDITIONS[first:], *CONDITIONS[:first])]
            turns += measured if number else []
    return turns


class _Bench:
    """Runs turns. No two requests have the same prompt or the same schema."""

    def __init__(self, streams: StreamClient, guests: StreamClient, setup: Setup, tier: Tier) -> None:
        self._streams = streams
        self._guests = guests
        self._setup = setup
        self._tier = tier
        self._prompts = Prompts(1.0, setup.seed)
        self._schemas = _schemas(setup.seed)

    async def turn(self, condition: str) -> Turn:
        setup = self._setup
        texts = [self._prompts.words(_NUM_WORDS) for _ in range(setup.num_streams)]
        streams = await start_streams(self._streams, texts, setup.num_stream_tokens, self._tier)
        done: list[RequestRecord] = []
        num_guests = 0 if condition == ALONE else setup.num_guests
        async with in_background(self._entertain(condition, done) for _ in range(num_guests)) as guests:
            await asyncio.wait({*streams, *guests}, return_when=asyncio.FIRST_COMPLETED)
        records = await asyncio.gather(*streams)
        gaps_s = _gaps(records)
        if num_guests and not done:
            raise ServeError("no guest ended beside the streams; raise --output-len, or lower --guest-len")
        return Turn(condition, gaps_s, len(done))

    async def _entertain(self, condition: str, done: list[RequestRecord]) -> None:
        """Sends guests one after the other, until cancelled. Raises `ServeError` for one that failed."""
        while True:
            extra = {"response_format": next(self._schemas), "ignore_eos": None} if condition == STRUCTURED else {}
            prompt = user_message(self._prompts.words(_NUM_WORDS))
            record = await self._guests.stream([prompt], self._setup.num_guest_tokens, self._tier, extra_body=extra)
            if not record.is_complete:
                raise ServeError(f"a guest failed: {record.error}")
            done.append(record)


def _schemas(seed: int) -> Iterator[dict[str, Any]]:
    """Formats that ask for an object each, none like another."""
    for number in count():
        names = [f"{name}_{seed}_{number}" for name in ("name", "kind", "size", "tags")]
        kinds = (
            {"type": "string", "maxLength": 20},
            {"enum": ["red", "green", "blue"]},
            {"type": "integer", "minimum": 0, "maximum": 10_000},
            {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
        )
        schema = {
            "type": "object",
            "properties": dict(zip(names, kinds)),
            "required": names,
            "additionalProperties": False,
        }
        yield {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def _gaps(records: Sequence[RequestRecord]) -> tuple[float, ...]:
    """Gaps while all streams ran and the guests had begun. Raises `ServeError` if there are hardly any."""
    failed = next((record for record in records if not record.is_complete), None)
    if failed is not None:
        raise ServeError(f"a stream failed: {failed.error}")
    if any(len(record.token_times_s) < NUM_TOKENS_BEFORE for record in records):
        raise ServeError("the streams ended before all had begun; raise --output-len")
    begin_s = max(record.token_times_s[NUM_TOKENS_BEFORE - 1] for record in records)
    end_s = min(record.token_times_s[-1] for record in records)
    gaps = [
        later - earlier
        for record in records
        for earlier, later in pairwise(record.token_times_s)
        if begin_s <= earlier and later <= end_s
    ]
    if len(gaps) < 2 * len(records):
        raise ServeError("a stream ended before there were gaps to measure; raise --output-len")
    return tuple(gaps)


def median_itl_ms(turns: Sequence[Turn], condition: str) -> float:
    """The median of the turns' mean ITLs."""
    return statistics.median(turn.mean_itl_ms for turn in turns if turn.condition == condition)


def rise_of(turns: Sequence[Turn], condition: str, base: str) -> float:
    """How much larger the ITL of `condition` is, as a share of that of `base`."""
    return median_itl_ms(turns, condition) / median_itl_ms(turns, base) - 1


def render(turns: Sequence[Turn]) -> str:
    """The table for people."""

    def figures(condition: str) -> tuple[str, ...]:
        own = [turn for turn in turns if turn.condition == condition]
        means = [turn.mean_itl_ms for turn in own]
        return (
            condition,
            f"{statistics.median(means):.2f}",
            f"{min(means):.2f}-{max(means):.2f}",
            f"{statistics.median(turn.p99_itl_ms for turn in own):.2f}",
            f"{rise_of(turns, condition, ALONE):+.1%}",
            f"{sum(turn.num_guests_done for turn in own)}",
        )

    header = ("streams beside", "ITL ms", "(range)", "p99 ms", "over alone", "guests done")
    return render_table(header, [figures(condition) for condition in CONDITIONS])


def as_document(turns: Sequence[Turn]) -> dict[str, Any]:
    """The same, with every turn, as JSON-ready values."""
    return {
        "benchmark": "structured",
        "rise_over_plain": rise_of(turns, STRUCTURED, PLAIN),
        "rise_over_alone": rise_of(turns, STRUCTURED, ALONE),
        "turns": [document_of(turn, "condition", "mean_itl_ms", "p99_itl_ms", "num_guests_done") for turn in turns],
    }
