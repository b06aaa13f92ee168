"""The live page at `/` and `/dashboard`: its files, and the events that feed them: what it shows of each model, once a
second."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from mlx_server.api.auth.authentication import PAGE_FILES, RequireAdmin, caller_of
from mlx_server.api.auth.key_file import KeyFile
from mlx_server.api.auth.keys import Caller, key_file_path
from mlx_server.api.context import Context, ServerContext
from mlx_server.api.http import sse
from mlx_server.config import BLOCK_SIZE
from mlx_server.engine.engine import AsyncEngine, EngineState
from mlx_server.engine.models.facts import read_preparation
from mlx_server.errors import ConfigError
from mlx_server.observability.engine_metrics import Histogram, RequestSummary
from mlx_server.pool.model_pool import ModelPool
from mlx_server.pool.pooled_model import PooledModel
from mlx_server.request import Request as EngineRequest
from mlx_server.request import RequestStatus

router = APIRouter(include_in_schema=False)

PERIOD_S = 1.0

MAX_REQUESTS = 50
"""Requests in progress that are listed; the rest is counted."""

MAX_KEYS = 100
"""Keys that are listed."""

KEYS_EVERY = 5
"""Snapshots, of which one has the keys."""

MAX_CELLS = 2048
"""Cells of the block map: of a larger pool, evenly spaced blocks are shown."""

_SERVING = (EngineState.READY, EngineState.DRAINING)

_FOLDER = Path(__file__).parent
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/")
@router.get("/dashboard")
async def page() -> Response:
    return FileResponse(_FOLDER / "page.html", headers=_HEADERS)


def _file(name: str) -> Callable[[], Awaitable[Response]]:
    kind = "text/javascript" if name.endswith(".js") else "text/css"

    async def send() -> Response:
        return FileResponse(_FOLDER / name, headers=_HEADERS, media_type=kind)

    return send


for _name in sorted(PAGE_FILES):
    router.get(f"/dashboard/{_name}")(_file(_name))


@router.get("/dashboard/events", dependencies=[RequireAdmin])
async def events(request: Request, context: Context) -> Response:
    """One snapshot of all models a second, as server-sent events, until the client leaves, its key is revoked or the
    server ends."""
    return sse.event_stream(partial(_tell, context, caller_of(request)), 0)


async def _tell(context: ServerContext, caller: Caller, out: sse.PieceWriter) -> None:
    own_key = () if caller.key_id is None else (caller.key_id,)
    num_told = 0
    while not context.keys.revoked(own_key):
        told = snapshot(context.pool) | {"pulls": [fetch.reading() for fetch in context.fetches.running()]}
        if num_told % KEYS_EVERY == 0:
            told |= {"keys": await asyncio.to_thread(_key_records, context), "tiers": _tier_limits(context)}
        out.write(sse.data(told))
        await out.drain()
        if context.generations.is_draining or context.pool.death() is not None:
            return  # the process is about to end, and waits for open streams
        num_told += 1
        await asyncio.sleep(PERIOD_S)


def snapshot(pool: ModelPool) -> dict[str, Any]:
    """All models as they are now. Costs the same for any number of waiting requests and blocks. No text of
    prompts or answers is in it."""
    return {"time_s": time.time(), "models": [_model(model) for model in pool.models()]}


def _model(model: PooledModel) -> dict[str, Any]:
    engine = model.engine
    error = model.failure if engine is None else engine.error
    is_dead = engine is not None and engine.state is EngineState.DEAD
    reading: dict[str, Any] = {
        "name": model.name,
        "state": EngineState.DEAD.value if is_dead else model.state.value,
        "error": None if error is None else str(error),
        "load_progress": model.load_progress,
        "preparing": read_preparation(model.spec.root),
        "pinned": model.spec.is_pinned,
    }
    if engine is not None and engine.state in _SERVING:
        reading |= {
            "stats": _stats(engine),
            "tiers": list(_tiers(engine)),
            "requests": list(_requests(engine)),
            "recent": [_summary(summary) for summary in reversed(engine.metrics.recent)],
        }
    return reading


def _key_records(context: ServerContext) -> list[dict[str, Any]]:
    """Of those that are not revoked, the last used ones, with what they have used. Reads the file of keys."""
    path = key_file_path(context.config.server)
    try:
        if not path.exists():
            return []
        with KeyFile(path) as file:
            records = [record for record in file.records() if record.revoked_s is None]
    except (ConfigError, OSError, sqlite3.Error):
        return []  # the log and the next request that brings a key tell of it
    records.sort(key=lambda record: record.last_used_s or record.created_s, reverse=True)
    return [dataclasses.asdict(record) for record in records[:MAX_KEYS]]


def _tier_limits(context: ServerContext) -> list[dict[str, Any]]:
    return [
        {
            "name": tier.name,
            "priority": tier.priority.name.lower(),
            "requests_per_minute": tier.requests_per_minute,
            "tokens_per_minute": tier.tokens_per_minute,
            "max_concurrent_requests": tier.max_concurrent_requests,
            "refused": context.quotas.refused[tier.name],
        }
        for tier in context.config.tiers.values()
    ]


def _stats(engine: AsyncEngine) -> dict[str, Any]:
    stats, histograms = engine.stats(), engine.metrics.by_name
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "generated_tokens": stats.num_generated_tokens,
        "computed_prompt_tokens": stats.num_prompt_tokens_computed,
        "prefix_query_tokens": stats.num_prefix_query_tokens,
        "prefix_hit_tokens": stats.num_prefix_hit_tokens,
        "preemptions": stats.num_preemptions,
        "model_calls": stats.num_model_calls,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "busy_s": stats.busy_time_s,
        "idle_s": stats.idle_time_s,
        "ttft_s": _sums(histograms["time_to_first_token_seconds"]),
        "itl_s": _sums(histograms["inter_token_latency_seconds"]),
        "memory_bytes": stats.weight_bytes + stats.kv_pool_bytes,
        "pressure_level": stats.pressure_level,
        "blocks": stats.num_blocks,
        "max_blocks": max(stats.num_blocks, stats.max_num_blocks),
        "free_blocks": stats.num_free_blocks,
        "cached_blocks": stats.num_cached_blocks,
        "block_size": BLOCK_SIZE,
        "block_map": "".join(str(state.value) for state in engine.scheduler.blocks.states(MAX_CELLS)),
    }


def _sums(histogram: Histogram) -> dict[str, float]:
    return {"sum": histogram.total, "count": histogram.count}


def _tiers(engine: AsyncEngine) -> Iterator[dict[str, Any]]:
    scheduler = engine.scheduler
    running = Counter(request.tier for request in scheduler.running())
    waiting = scheduler.num_waiting_by_tier
    for tier in sorted({*running, *waiting}):
        yield {"name": tier, "running": running[tier], "waiting": waiting.get(tier, 0)}


def _requests(engine: AsyncEngine) -> Iterator[dict[str, Any]]:
    """Running ones by effective priority, then waiting ones in the order of their turns."""
    now = time.monotonic()
    for request in islice(engine.scheduler.in_order(), MAX_REQUESTS):
        yield {
            "id": request.request_id,
            "tier": request.tier,
            "state": _state(request),
            "effective_priority": engine.scheduler.effective_priority(request, now),
            "prompt_tokens": request.num_prompt_tokens,
            "computed_tokens": min(request.num_computed_tokens, request.num_prompt_tokens),
            "output_tokens": request.num_output_tokens,
            "age_s": now - request.arrival_s,
        }


def _state(request: EngineRequest) -> str:
    if request.status is RequestStatus.WAITING:
        return "preempted" if request.num_preemptions else "waiting"
    return "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"


def _summary(summary: RequestSummary) -> dict[str, Any]:
    return {
        "id": summary.request_id,
        "tier": summary.tier,
        "finish_reason": summary.finish_reason.value,
        "prompt_tokens": summary.num_prompt_tokens,
        "cached_tokens": summary.num_cached_tokens,
        "output_tokens": summary.num_output_tokens,
        "queue_s": summary.queue_s,
        "ttft_s": summary.ttft_s,
        "tpot_s": summary.tpot_s,
    }
