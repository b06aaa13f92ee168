"""Routes and headers that report the state of the server to supervisors, routers, load balancers and Prometheus."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.context import Context, ServerContext
from mlx_server.config import BLOCK_SIZE, Config
from mlx_server.engine.engine import AsyncEngine
from mlx_server.environment import version
from mlx_server.observability.series import CONTENT_TYPE, EngineReading, render
from mlx_server.outputs import EngineStats
from mlx_server.pool.pooled_model import PooledModel

router = APIRouter(tags=["probes"])

REQUEST_HEADER = "endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"


_NOT_READY = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}


@router.get(
    "/health",
    response_class=Response,
    responses={503: {"description": "Not now", "content": {"application/json": {"schema": _NOT_READY}}}},
)
@router.head("/health", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def health(context: Context) -> Response:
    """200 when requests are served; 503 while the server is starting or draining, or when only a restart helps. Models
    that are not loaded do not matter."""
    reason = _unready_reason(context)
    if reason is None:
        return Response()
    return JSONResponse({"status": reason}, 503, {"retry-after": "1"})


def _unready_reason(context: ServerContext) -> str | None:
    if context.pool.is_stopping:
        return "draining"
    if context.pool.is_starting:
        return "loading"
    return None if context.pool.death() is None else "dead"


@router.get("/version")
async def get_version() -> dict[str, str]:
    return {"version": version()}


@router.get("/load")
async def load(context: Context) -> dict[str, int]:
    """The number of generations in progress, including queued ones."""
    return {"server_load": context.generations.num_in_progress}


@router.get("/v1/loads")
async def loads(context: Context) -> dict[str, Any]:
    """The load of each engine, with the names that SGLang's routers read."""
    return {
        "timestamp": time.time(),
        "version": version(),
        "loads": [_load(rank, engine, context.config) for rank, engine in enumerate(context.pool.engines())],
    }


def _load(rank: int, engine: AsyncEngine, config: Config) -> dict[str, Any]:
    stats = engine.stats()
    usage = round(stats.kv_usage, 4)
    max_seqs = config.scheduler.max_num_seqs
    return {
        "dp_rank": rank,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_used_tokens": (stats.num_blocks - stats.num_free_blocks) * BLOCK_SIZE // stats.num_layer_groups,
        "max_total_num_tokens": stats.max_tokens,
        "token_usage": usage,
        "gen_throughput": _ratio(stats.num_generated_tokens, stats.busy_time_s),
        "cache_hit_rate": _ratio(stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens),
        "utilization": _ratio(stats.num_running, max_seqs),
        "max_running_requests": max_seqs,
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


@router.get("/server_info")
@router.get("/get_server_info", include_in_schema=False)
async def server_info(request: Request, context: Context) -> dict[str, Any]:
    """What the routers of vLLM and SGLang ask of a worker, in one body."""
    model = _default_model(request, context)
    num_blocks = 0 if model.engine is None else model.engine.stats().max_tokens // BLOCK_SIZE
    return {
        **_identity(model),
        "tp_size": 1,
        "dp_size": 1,
        "version": version(),
        "kv_block_size": BLOCK_SIZE,
        "effective_attention_block_size": BLOCK_SIZE,
        "vllm_config": {
            "model_config": {"model": model.spec.root},
            "cache_config": {"block_size": BLOCK_SIZE, "num_gpu_blocks": num_blocks},
        },
    }


@router.get("/kv_event_sources")
async def kv_event_sources(context: Context) -> dict[str, Any]:
    """Where routers can subscribe to KV events, as vLLM answers it: an entry for each model that was loaded; empty
    without --kv-events."""
    return {} if context.pool.events is None else context.pool.events.sources()


@router.get("/model_info")
@router.get("/get_model_info", include_in_schema=False)
async def model_info(request: Request, context: Context) -> dict[str, Any]:
    """The default model, with the names of SGLang."""
    return {**_identity(_default_model(request, context)), "is_generation": True}


def _default_model(request: Request, context: ServerContext) -> PooledModel:
    context.pool.check_access(caller_of(request).tier, None)
    return context.pool.find(None)


def _identity(model: PooledModel) -> dict[str, Any]:
    return {"model_path": model.spec.root, "served_model_name": model.name, "tokenizer_path": model.spec.root}


def load_headers(requested: Mapping[str, str], stats: EngineStats) -> dict[str, str]:
    """The header with KV usage and queue length, in the format that `requested` (request headers) names: ORCA's, as
    vLLM has it."""
    wanted = requested.get(REQUEST_HEADER, "").upper()
    used = round(stats.kv_usage, 4)
    if wanted == "JSON":
        metrics = {"kv_cache_usage_perc": used, "num_requests_waiting": stats.num_waiting}
        return {RESPONSE_HEADER: "JSON " + json.dumps({"named_metrics": metrics})}
    if wanted == "TEXT":
        text = f"named_metrics.kv_cache_usage_perc={used}, named_metrics.num_requests_waiting={stats.num_waiting}"
        return {RESPONSE_HEADER: "TEXT " + text}
    return {}


@router.get(
    "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
)
@router.head("/metrics", include_in_schema=False)
async def metrics(context: Context) -> Response:
    """Prometheus' text format: vLLM's series and our own. An unloaded model keeps its counters; one that was never
    loaded has a state only."""
    return Response(await context.scrapes.answer(lambda: _exposition(context)), media_type=CONTENT_TYPE)


def _exposition(context: ServerContext) -> bytes:
    readings = [
        EngineReading(
            engine.model_name,
            engine.stats(),
            engine.metrics,
            is_prefix_caching=context.config.cache.prefix_caching,
            is_loaded=engine.state.is_loaded,
        )
        for engine in context.pool.counted_engines()
    ]
    others = {
        "models": context.pool.models(),
        "sleep": context.sleep_metrics,
        "http": context.http_metrics,
        "quota_refusals": {tier: context.quotas.refused[tier] for tier in context.config.tiers},
        "process": context.process,
        "kv_disk": context.pool.disk,
        "shared_store": context.shared_store,
        "kv_events": context.pool.events,
    }
    return render(readings, others)
