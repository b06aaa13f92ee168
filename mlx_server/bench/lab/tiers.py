"""Over HTTP: what a saturated server leaves of its best tier's latency, and whether its worst one still gets on.

The tier named first is measured, one request after another: alone, and while the clients of all other tiers keep
the server full. The tier named last must get answers meanwhile.

example (a server with the tiers of configs/tiers.toml, and a key of each):
  mlx-serve bench tiers --tier interactive=KEY1 --tier default=KEY2 --tier batch=KEY3 --clients 24
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.bench.arguments import above_0, add_json_argument, add_server_arguments, from_1
from mlx_server.bench.serve.client import RequestRecord, Target, Tier, connect
from mlx_server.bench.serve.command import tier
from mlx_server.bench.serve.report import summarise
from mlx_server.bench.serve.run import in_background
from mlx_server.bench.serve.workloads import Prompts, user_message
from mlx_server.bench.tables import render_items, write_json
from mlx_server.errors import ConfigError, ServeError


@dataclass(frozen=True, slots=True)
class TierLoad:
    """`tiers`: the measured one first. `num_clients` of each other one ask without a pause."""

    tiers: Sequence[Tier]
    num_requests: int
    num_clients: int
    num_prompt_tokens: int
    num_output_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_server_arguments(parser)
    add(
        "--tier", type=tier, action="append", default=[], metavar="NAME=KEY", help="two or more, the measured one first"
    )
    add("--num-requests", type=from_1, default=40, metavar="N", help="of the measured tier, alone and under load each")
    add("--clients", type=from_1, default=16, metavar="N", help="of each other tier; together more than --max-num-seqs")
    add("--input-len", type=from_1, default=256, metavar="TOKENS", help="of every prompt, about")
    add("--output-len", type=from_1, default=32, metavar="TOKENS", help="of every answer")
    add("--max-ratio", type=above_0, default=1.5, metavar="X", help="the aim: p95 TTFT under load over that alone")
    add("--seed", type=int, default=0, help="of prompts")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """1 if the aim was missed, or the last tier got no answer."""
    names = {named.name for named in args.tier}
    if len(names) < 2 or len(names) < len(args.tier):
        raise ConfigError("Name two tiers or more, each once: --tier NAME=KEY --tier NAME=KEY.")
    load = TierLoad(args.tier, args.num_requests, args.clients, args.input_len, args.output_len)
    result = asyncio.run(measure_tiers(Target(base_url=args.base_url, model=args.model), load, args.seed))
    result["max_ratio"] = args.max_ratio
    print(render(result))
    write_json(args.json, result)
    return 0 if is_good(result) else 1


async def measure_tiers(target: Target, load: TierLoad, seed: int) -> dict[str, Any]:
    """The result document. Raises `ServeError` for a server that cannot be measured, or that refuses the load."""
    best, *rest = load.tiers
    others: list[RequestRecord] = []
    async with connect(target, best.api_key) as client:
        prompts = await Prompts.calibrate(client, seed, best)

        async def ask(tier: Tier) -> RequestRecord:
            messages = [user_message(prompts.text(load.num_prompt_tokens))]
            record = await client.stream(messages, load.num_output_tokens, tier)
            if record.error is not None:
                raise ServeError(f"A request of the tier {tier.name} failed: {record.error}")
            return record

        async def keep_asking(tier: Tier) -> None:
            while True:
                others.append(await ask(tier))

        alone = [await ask(best) for _ in range(load.num_requests)]
        crowd = (keep_asking(other) for other in rest for _ in range(load.num_clients))
        async with in_background(crowd) as clients:
            await _until_full(clients, others, load.num_clients)
            start_s = asyncio.get_running_loop().time()
            loaded = [await ask(best) for _ in range(load.num_requests)]
    others = [record for record in others if record.token_times_s[-1] >= start_s]
    return _result(client.model, load, alone, loaded, others)


async def _until_full(clients: Sequence[asyncio.Task[None]], done: Sequence[RequestRecord], num_clients: int) -> None:
    """Returns once as many requests have ended as there are clients of one tier. Raises what has ended a client."""
    while len(done) < num_clients:
        ended, _ = await asyncio.wait(clients, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
        for client in ended:
            client.result()


def _result(
    model: str,
    load: TierLoad,
    alone: Sequence[RequestRecord],
    loaded: Sequence[RequestRecord],
    others: Sequence[RequestRecord],
) -> dict[str, Any]:
    best, worst = load.tiers[0].name, load.tiers[-1].name
    groups = {f"{best}, alone": alone, f"{best}, under load": loaded}
    for named in load.tiers[1:]:
        groups[named.name] = [record for record in others if record.group == named.name]
    figures = {name: _figures(records) for name, records in groups.items()}
    before, under = figures[f"{best}, alone"]["p95_ttft_ms"], figures[f"{best}, under load"]["p95_ttft_ms"]
    return {
        "model_id": model,
        "clients_of_each_other_tier": load.num_clients,
        "groups": figures,
        "p95_ttft_ratio": under / before,
        "last_tier": worst,
        "last_tier_completed": figures[worst]["completed"],
    }


def _figures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    summary = summarise(records, 1.0, {})
    names = ("completed", "median_ttft_ms", "p95_ttft_ms", "p99_ttft_ms", "median_tpot_ms")
    return {
        **{name: summary[name] for name in names},
        "max_ttft_ms": max((1e3 * r.ttft_s for r in records), default=0.0),
    }


def is_good(result: dict[str, Any]) -> bool:
    """Whether the best tier kept its latency and the worst one got on."""
    return bool(result["p95_ttft_ratio"] <= result["max_ratio"] and result["last_tier_completed"] > 0)


def render(result: dict[str, Any]) -> str:
    """A table and two sentences."""
    table = render_items(
        result["groups"].items(),
        {
            "tier": lambda item: item[0],
            "requests": lambda item: str(item[1]["completed"]),
            "median TTFT ms": lambda item: f"{item[1]['median_ttft_ms']:,.0f}",
            "p95 TTFT ms": lambda item: f"{item[1]['p95_ttft_ms']:,.0f}",
            "worst TTFT ms": lambda item: f"{item[1]['max_ttft_ms']:,.0f}",
        },
    )
    verdict = "kept" if result["p95_ttft_ratio"] <= result["max_ratio"] else "MISSED"
    return (
        f"{table}\n"
        f"p95 TTFT under load is {result['p95_ttft_ratio']:.2f} times that alone; the aim of at most "
        f"{result['max_ratio']:g} is {verdict}.\n"
        f"{result['last_tier']} got {result['last_tier_completed']} answers meanwhile."
    )
