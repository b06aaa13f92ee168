"""One measured run: sends a load to a server and makes the result document."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from mlx_server.bench.serve.client import (
    DEFAULT_TIER,
    Message,
    RequestRecord,
    StreamClient,
    Target,
    Tier,
    connect,
)
from mlx_server.bench.serve.report import added_counts, describe_counters, describe_requests, summarise
from mlx_server.bench.serve.workloads import (
    Plan,
    Prompts,
    Recorded,
    Session,
    Shape,
    make_plan,
    user_message,
    warm_up_sessions,
)
from mlx_server.bench.tables import print_progress
from mlx_server.errors import ServeError

_NUM_TOKENS_BEFORE = 8
"""Tokens that each stream must have received before the long prompt is sent."""

_MOST_COUNTED = 1.01
"""Output tokens that a server counts, by those that a run received, if nobody else uses it."""

_NUM_INTRUDER_TOKENS = 8
"""Output tokens of the long prompt."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`rate` conversations a second, with gaps from a gamma distribution of shape `burstiness`: 1 is a Poisson process,
    less makes bursts, more makes the gaps more even."""

    rate: float
    burstiness: float = 1.0

    def times_s(self, count: int, seed: int) -> list[float]:
        """Times of `count` conversations since the start of the run. They are scaled so that the last one begins at
        `count / rate`: runs with different seeds have the same rate."""
        rng = random.Random(f"arrivals:{seed}")
        times = list(accumulate(rng.gammavariate(self.burstiness, 1.0 / self.burstiness) for _ in range(count)))
        if not times or times[-1] == 0.0:
            return times
        scale = count / self.rate / times[-1]
        return [time * scale for time in times]


@dataclass(frozen=True, slots=True)
class Intruder:
    """Streams that decode while a long prompt arrives."""

    num_streams: int
    num_stream_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent, when, and by whom. `goodput` maps figures to limits in ms. Without `tiers` there is one, with the
    target's key. Without `arrivals`, sessions start at their recorded times, or else all at once."""

    name: str
    workload: Shape | Recorded | Intruder
    arrivals: Arrivals | None = None
    max_concurrency: int | None = None
    num_warmups: int = 0
    seed: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)
    tiers: Sequence[Tier] = ()


OnDone = Callable[[RequestRecord], object]


async def measure(
    target: Target,
    load: Load,
    *,
    on_start: Callable[[int], None] = lambda num_requests: None,
    on_done: OnDone = lambda record: None,
) -> dict[str, Any]:
    """Calibrates, warms up, and measures once. `on_start` gets the number of requests, `on_done` each finished one.
    Raises `ServeError` for a server that cannot be measured."""
    tiers = load.tiers or (Tier(DEFAULT_TIER.name, target.api_key),)
    async with connect(target, tiers[0].api_key) as client:
        try:
            # Each workload has its own text, or one would find the beginning of another's in the prefix cache.
            prompts = await Prompts.calibrate(client, f"{load.name}:{load.seed}", tiers[0])
            if isinstance(load.workload, Intruder):
                result = await _intrude(client, prompts, load, load.workload, tiers[0])
            else:
                plan = _plan(load, load.workload, prompts)
                on_start(plan.num_requests)
                result = await _send(client, prompts, load, plan, tiers, on_done)
        except ServeError as error:
            raise ServeError(f"{target.base_url} cannot be measured: {error}") from error
    return {"model_id": client.model, "backend": target.endpoint, "workload": load.name, "seed": load.seed, **result}


def _plan(load: Load, workload: Shape | Recorded, prompts: Prompts) -> Plan:
    if isinstance(workload, Recorded):
        return workload.plan(prompts)
    return make_plan(workload, prompts, f"{load.name}:{load.seed}")


async def _send(
    client: StreamClient, prompts: Prompts, load: Load, plan: Plan, tiers: Sequence[Tier], on_done: OnDone
) -> dict[str, Any]:
    warm_up = warm_up_sessions(plan, prompts, load.num_warmups)
    check_warm_up(await send_all(client, warm_up, max_concurrency=load.max_concurrency, tiers=tiers[:1]))
    for warmed in await send_all(client, plan.prelude, max_concurrency=1, tiers=tiers[:1]):
        if not warmed.is_complete:
            raise ServeError(f"the request that warms the shared prefix failed: {warmed.error}")
    before = await client.scrape()
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
    after = await client.scrape()
    by_tier = {
        tier.name: summarise([record for record in records if record.group == tier.name], duration_s, load.goodput)
        for tier in load.tiers
    }
    return {
        "num_prompts": plan.num_requests,
        "max_concurrency": load.max_concurrency,
        "request_rate": load.arrivals.rate if load.arrivals else "inf",
        "burstiness": load.arrivals.burstiness if load.arrivals else 1.0,
        **summarise(records, duration_s, load.goodput),
        **({"tiers": by_tier} if by_tier else {}),
        **_counters(before, after, records),
        **describe_requests(records),
    }


def _counters(before: str, after: str, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """`describe_counters`; nothing, with a word, if the server also answered others in the run, and so counts them."""
    num_counted = added_counts(before, after)["vllm:generation_tokens"]
    num_own = sum(record.num_output_tokens for record in records)
    if num_counted <= _MOST_COUNTED * num_own or not all(record.is_complete for record in records):
        return describe_counters(before, after)
    print_progress(
        f"Figures by the server's counters are left out: it made {num_counted:,} output tokens in the run, which has "
        f"{num_own:,}. Measure a server that nobody else uses."
    )
    return {}


def check_warm_up(records: Sequence[RequestRecord]) -> None:
    """Says how many of these warm-up requests failed. Raises `ServeError` if all did."""
    errors = [record.error for record in records if not record.is_complete]
    if errors and len(errors) == len(records):
        raise ServeError(f"all {len(errors)} warm-up requests failed: {errors[0]}")
    if errors:
        print_progress(f"{len(errors)} of {len(records)} warm-up requests failed: {errors[0]}")


async def send_all(
    client: StreamClient,
    sessions: Sequence[Session],
    *,
    times_s: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    tiers: Sequence[Tier] = (DEFAULT_TIER,),
    seed: int = 0,
    on_done: OnDone = lambda record: None,
) -> list[RequestRecord]:
    """Sends all sessions; a record for each request, in the sessions' order.

    Session i starts `times_s[i]` seconds from now (default: at its own time of arrival, or at once), and waits while
    `max_concurrency` others are open. Tiers are drawn by weight. A session ends at its first failure.
    """
    clock = asyncio.get_running_loop().time
    start_s = clock()
    gate = asyncio.Semaphore(max_concurrency or max(len(sessions), 1))
    chosen = random.Random(f"tiers:{seed}").choices(tiers, [tier.weight for tier in tiers], k=len(sessions))

    async def one(session: Session, tier: Tier, time_s: float) -> list[RequestRecord]:
        await asyncio.sleep(start_s + time_s - clock())
        async with gate:
            return await _send_session(client, session, tier, on_done)

    if times_s is None:
        times_s = [session.arrival_s or 0.0 for session in sessions]
    done = await asyncio.gather(*map(one, sessions, chosen, times_s))
    return [record for records in done for record in records]


async def _send_session(client: StreamClient, session: Session, tier: Tier, on_done: OnDone) -> list[RequestRecord]:
    """Sends the turns of one conversation; each request has all messages so far."""
    messages: list[Message] = []
    records: list[RequestRecord] = []
    for turn in session.turns:
        messages += turn.messages
        record = await client.stream(messages, turn.max_tokens, tier)
        records.append(record)
        on_done(record)
        if not record.is_complete:
            break
        messages.append({"role": "assistant", "content": record.text})
    return records


async def start_streams(
    client: StreamClient, texts: Sequence[str], max_tokens: int, tier: Tier
) -> list[asyncio.Task[RequestRecord]]:
    """Starts a stream for each text. Returns when each has `_NUM_TOKENS_BEFORE` tokens, or one has ended."""
    num_waiting = len(texts)
    all_decode = asyncio.Event()

    def on_token(record: RequestRecord) -> None:
        nonlocal num_waiting
        num_waiting -= len(record.token_times_s) == _NUM_TOKENS_BEFORE
        if not num_waiting:
            all_decode.set()

    streams = [
        asyncio.create_task(client.stream([user_message(text)], max_tokens, tier, group="stream", on_token=on_token))
        for text in texts
    ]
    waiting = asyncio.ensure_future(all_decode.wait())
    await asyncio.wait({waiting, *streams}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return streams


async def _intrude(
    client: StreamClient, prompts: Prompts, load: Load, intruder: Intruder, tier: Tier
) -> dict[str, Any]:
    warm_up = [user_message(prompts.text(intruder.num_tokens)) for _ in range(load.num_warmups)]
    check_warm_up([await client.stream([message], _NUM_INTRUDER_TOKENS, tier) for message in warm_up])
    before = await client.scrape()
    clock = asyncio.get_running_loop().time
    start_s = clock()
    texts = [prompts.text(32) for _ in range(intruder.num_streams)]
    streams = await start_streams(client, texts, intruder.num_stream_tokens, tier)
    long_prompt = [user_message(prompts.text(intruder.num_tokens))]
    intrusion = await client.stream(long_prompt, _NUM_INTRUDER_TOKENS, tier, group="intruder")
    records = [intrusion, *await asyncio.gather(*streams)]
    duration_s = clock() - start_s
    after = await client.scrape()
    return {
        "num_prompts": len(records),
        **summarise(records, duration_s, load.goodput),
        "num_streams": intruder.num_streams,
        **describe_intrusion(*records),
        **_counters(before, after, records),
        **describe_requests(records),
    }


def describe_intrusion(intruder: RequestRecord, *streams: RequestRecord) -> dict[str, float]:
    """How a long prompt affected decoding streams: their worst gap that overlaps the time from its sending to its first
    token, and the worst gap before. Raises `ServeError` if the prompt failed or a stream ended too early."""
    if not intruder.is_complete:
        raise ServeError(f"the long prompt failed: {intruder.error}")
    start_s, end_s = intruder.sent_s, intruder.token_times_s[0]
    if any(not stream.is_complete or stream.token_times_s[-1] < end_s for stream in streams):
        raise ServeError("a stream ended before the long prompt's first token; raise --output-len")
    pairs = [pair for stream in streams for pair in pairwise(stream.token_times_s)]
    during = [later - earlier for earlier, later in pairs if earlier < end_s and later > start_s]
    before = [later - earlier for earlier, later in pairs if later <= start_s]
    return {
        "intruder_prompt_tokens": intruder.num_prompt_tokens,
        "intruder_ttft_ms": 1e3 * intruder.ttft_s,
        "worst_gap_ms": 1e3 * max(during, default=0.0),
        "worst_gap_before_ms": 1e3 * max(before, default=0.0),
    }
