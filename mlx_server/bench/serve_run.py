"""One measured run: a load on a server, to the result document that `bench serve` writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from mlx_server.bench.mooncake import TraceLine
from mlx_server.bench.serve_arrivals import Arrivals
from mlx_server.bench.serve_client import COMPLETIONS, DEFAULT_TIER, RequestRecord, StreamClient, Tier, list_models
from mlx_server.bench.serve_datasets import Prompt
from mlx_server.bench.serve_drafts import describe_drafts, parse_drafts
from mlx_server.bench.serve_intruder import NUM_ANSWER_TOKENS, intrude
from mlx_server.bench.serve_load import send_all
from mlx_server.bench.serve_prompts import Prompts, user_message
from mlx_server.bench.serve_report import describe_requests, summarise
from mlx_server.bench.serve_workloads import Plan, Replay, Shape, make_plan, plan_dataset, warm_up_sessions
from mlx_server.errors import ServeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server: `model` is None for the first that it lists; `transport` replaces the network."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: str = COMPLETIONS
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    transport: httpx.AsyncBaseTransport | None = None


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A workload of made-up prompts."""

    shape: Shape


@dataclass(frozen=True, slots=True)
class Recorded:
    """A workload from a file. `output_len` is for prompts that do not say theirs."""

    lines: Sequence[Prompt] | Sequence[TraceLine]
    output_len: int
    replay: Replay


@dataclass(frozen=True, slots=True)
class Intruder:
    """Streams that decode while a long prompt arrives."""

    num_streams: int
    num_stream_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent, when, and by whom. `goodput` maps figures to limits in ms; no tiers is one, with the
    target's key. `arrivals` of None is each session at its own recorded time, or all at once."""

    name: str
    workload: MadeUp | Recorded | Intruder
    arrivals: Arrivals | None = None
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)
    tiers: Sequence[Tier] = ()


OnStart = Callable[[int], None]
"""Told how many requests will be measured."""

OnDone = Callable[[RequestRecord], None]


async def measure(
    target: Target,
    load: Load,
    *,
    on_start: OnStart = lambda num_requests: None,
    on_done: OnDone = lambda record: None,
) -> dict[str, Any]:
    """Calibrates, warms up, and measures once. Raises `ServeError` for a server that cannot be measured."""
    tiers = load.tiers or (Tier(DEFAULT_TIER.name, target.api_key),)
    model = target.model or await first_model(target, tiers[0].api_key)
    client = StreamClient(
        target.base_url, model, endpoint=target.endpoint, extra_body=target.extra_body, transport=target.transport
    )
    try:
        prompts = await Prompts.calibrate(client, load.seed, tiers[0])
        if isinstance(load.workload, Intruder):
            result = await _intrude(client, prompts, load, load.workload, tiers[0])
        else:
            plan = _plan(load, load.workload, prompts)
            on_start(plan.num_requests)
            result = await _send(client, prompts, load, plan, tiers, on_done)
    except ServeError as error:
        raise ServeError(f"{target.base_url} cannot be measured: {error}") from error
    finally:
        await client.close()
    return {"model_id": model, "backend": target.endpoint, "workload": load.name, "seed": load.seed, **result}


async def first_model(target: Target, api_key: str | None) -> str:
    """The model that the server lists first. Raises `ServeError`."""
    try:
        return (await list_models(target.base_url, api_key, transport=target.transport))[0]
    except httpx.ConnectError as error:
        raise ServeError(
            f"{target.base_url} cannot be measured: no server answers there. Start one, or set --base-url."
        ) from error
    except httpx.HTTPError as error:
        raise ServeError(f"{target.base_url} cannot be measured: {error or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServeError(
            f"{target.base_url} does not answer like an OpenAI-compatible server: /v1/models names no model "
            f"({error!r}); name it with --model."
        ) from error


def _plan(load: Load, workload: MadeUp | Recorded, prompts: Prompts) -> Plan:
    if isinstance(workload, Recorded):
        return plan_dataset(workload.lines, prompts, output_len=workload.output_len, replay=workload.replay)
    return make_plan(workload.shape, prompts, f"{load.name}:{load.seed}")


async def _send(
    client: StreamClient, prompts: Prompts, load: Load, plan: Plan, tiers: Sequence[Tier], on_done: OnDone
) -> dict[str, Any]:
    warm_up = warm_up_sessions(plan, prompts, load.num_warmups)
    await send_all(client, warm_up, max_concurrency=load.max_concurrency, tiers=tiers[:1])
    await send_all(client, plan.prelude, max_concurrency=1, tiers=tiers[:1])
    drafts = parse_drafts(await client.scrape())
    clock = asyncio.get_running_loop().time
    start_s = clock()
    records = await send_all(
        client,
        plan.sessions,
        times_s=load.arrivals.times_s(len(plan.sessions), load.seed) if load.arrivals else None,
        max_concurrency=load.max_concurrency,
        tiers=tiers,
        seed=load.seed,
        on_done=on_done,
    )
    duration_s = clock() - start_s
    return {
        "num_prompts": plan.num_requests,
        "max_concurrency": load.max_concurrency,
        "request_rate": load.arrivals.rate if load.arrivals else "inf",
        "burstiness": load.arrivals.burstiness if load.arrivals else 1.0,
        **(load.arrivals.describe_ramp() if load.arrivals else {}),
        **summarise(records, duration_s, load.goodput),
        **({"tiers": _by_tier(records, tiers, duration_s, load.goodput)} if load.tiers else {}),
        **describe_drafts(drafts, parse_drafts(await client.scrape())),
        **describe_requests(records),
    }


def _by_tier(
    records: Sequence[RequestRecord], tiers: Sequence[Tier], duration_s: float, goodput: Mapping[str, float]
) -> dict[str, Any]:
    return {
        tier.name: summarise([record for record in records if record.group == tier.name], duration_s, goodput)
        for tier in tiers
    }


async def _intrude(
    client: StreamClient, prompts: Prompts, load: Load, intruder: Intruder, tier: Tier
) -> dict[str, Any]:
    for _ in range(load.num_warmups):
        await client.stream([user_message(prompts.text(intruder.num_tokens))], NUM_ANSWER_TOKENS, tier)
    clock = asyncio.get_running_loop().time
    start_s = clock()
    intrusion = await intrude(
        client,
        prompts,
        num_streams=intruder.num_streams,
        num_stream_tokens=intruder.num_stream_tokens,
        num_tokens=intruder.num_tokens,
        tier=tier,
    )
    duration_s = clock() - start_s
    intrusion.check()
    return {
        "num_prompts": len(intrusion.records),
        **summarise(intrusion.records, duration_s, load.goodput),
        "num_streams": intruder.num_streams,
        "intruder_prompt_tokens": intrusion.intruder.num_prompt_tokens,
        "intruder_ttft_ms": 1e3 * intrusion.intruder.ttft_s,
        "worst_gap_ms": 1e3 * intrusion.worst_gap_s,
        "worst_gap_before_ms": 1e3 * intrusion.worst_gap_before_s,
        **describe_requests(intrusion.records),
    }
