"""The live page at `/` and `/dashboard`: its files, and a snapshot of all models once a second, as server-sent
events."""

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
from starlette.responses import FileResponse, PlainTextResponse, Response

from mlx_server.api.auth.authentication import PAGE_FILES, RequireAdmin, caller_of
from mlx_server.api.auth.key_file import KeyFile
from mlx_server.api.auth.keys import Caller, key_file_path
from mlx_server.api.context import Context, ServerContext
from mlx_server.api.http import sse
from mlx_server.config import BLOCK_SIZE
from mlx_server.engine.engine import AsyncEngine, EngineState
from mlx_server.engine.models.facts import read_preparation
from mlx_server.environment import exists
from mlx_server.errors import ConfigError
from mlx_server.observability.engine_metrics import Histogram
from mlx_server.pool.model_pool import ModelPool
from mlx_server.pool.pooled_model import PooledModel
from mlx_server.request import Request as EngineRequest
from mlx_server.request import RequestStatus

router = APIRouter(include_in_schema=False)

PERIOD_S = 1.0

MAX_REQUESTS = 50
"""Requests in progress that are listed; the others are only counted."""

MAX_KEYS = 100
"""Keys that are listed."""

KEYS_EVERY = 5
"""One in so many snapshots has the keys."""

MAX_CELLS = 2048
"""Cells of the block map. Of a larger pool, evenly spaced blocks are shown."""

_FOLDER = Path(__file__).parent
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/")
@router.head("/")
@router.get("/dashboard")
async def page(request: Request, context: Context) -> Response:
    """The page; at `/` on Ollama's port the answer that Ollama's clients check for."""
    if request.url.path == "/" and request.scope["server"][1] == context.config.server.ollama_port:
        return PlainTextResponse("Ollama is running")
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
    """A snapshot of all models once a second, as server-sent events, until the client leaves, its key is revoked or the
    server ends."""
    return sse.EventStream(partial(_send_snapshots, context, caller_of(request)), 0)


async def _send_snapshots(context: ServerContext, caller: Caller, out: sse.PieceWriter) -> None:
    own_key = () if caller.key_id is None else (caller.key_id,)
    num_sent = 0
    while not context.keys.revoked(own_key):
        shown = snapshot(context.pool) | {"pulls": [fetch.reading() for fetch in context.fetches.running()]}
        if num_sent % KEYS_EVERY == 0:
            shown |= {"keys": await asyncio.to_thread(_key_records, context), "tiers": _tier_limits(context)}
        out.write(sse.data(shown))
        await out.drain()
        if context.pool.is_stopping or context.pool.death() is not None:
            return  # the process is about to end, and waits for open streams
        num_sent += 1
        await asyncio.sleep(PERIOD_S)


def snapshot(pool: ModelPool) -> dict[str, Any]:
    """All models as they are now. The cost does not depend on the number of waiting requests and blocks. Contains no
    text of prompts or answers."""
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
        "adapters": list(model.spec.names.adapters),
    }
    if engine is not None and engine.state.is_loaded:
        reading |= {
            "stats": _stats(engine),
            "tiers": list(_tiers(engine)),
            "requests": list(_requests(engine)),
            "recent": [dataclasses.asdict(summary) for summary in reversed(engine.metrics.recent)],
        }
    return reading


def _key_records(context: ServerContext) -> list[dict[str, Any]]:
    """The keys that are not revoked, last used first, with their usage. Reads the key file."""
    path = key_file_path(context.config.server)
    try:
        if not exists(path):
            return []
        with KeyFile(path) as file:
            records = [record for record in file.records() if record.revoked_s is None]
    except (ConfigError, OSError, sqlite3.Error):
        return []  # the next request with a key logs it
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
    """All of `EngineStats`, and what the page draws beside it."""
    stats, histograms = engine.stats(), engine.metrics.by_name
    return {
        **{field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)},
        "num_preemptions": stats.num_preemptions,
        "ttft_s": _sums(histograms["time_to_first_token_seconds"]),
        "itl_s": _sums(histograms["inter_token_latency_seconds"]),
        "memory_bytes": stats.weight_bytes + stats.kv_pool_bytes,
        "max_blocks": max(stats.num_blocks, stats.max_num_blocks),
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
    """Running requests by effective priority, then waiting ones in the order in which they will run."""
    now = time.monotonic()
    for request in islice(engine.scheduler.in_order(), MAX_REQUESTS):
        yield {
            "request_id": request.request_id,
            "tier": request.tier,
            "state": _state(request),
            "effective_priority": engine.scheduler.effective_priority(request, now),
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_computed_tokens": min(request.num_computed_tokens, request.num_prompt_tokens),
            "num_output_tokens": request.num_output_tokens,
            "age_s": now - request.arrival_s,
        }


def _state(request: EngineRequest) -> str:
    if request.status is RequestStatus.WAITING:
        return "preempted" if request.num_preemptions else "waiting"
    return "prefill" if request.num_computed_tokens < request.num_prompt_tokens else "decode"
