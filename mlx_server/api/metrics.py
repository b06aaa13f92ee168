"""What Prometheus, routers and autoscalers scrape."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from mlx_server.api.context import Context
from mlx_server.engine.engine import EngineState
from mlx_server.observability.series import CONTENT_TYPE, EngineReading, render
from mlx_server.observability.server_metrics import ModelReading, PoolMetrics, QuotaMetrics
from mlx_server.pool.pooled_model import ModelState

router = APIRouter(tags=["probes"])

_LOADED = (EngineState.READY, EngineState.DRAINING)


@router.get(
    "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
)
@router.head("/metrics", include_in_schema=False)
async def metrics(context: Context) -> Response:
    """Prometheus' text format: vLLM's series, and ours. A model that was unloaded keeps its counters; one that was
    never loaded has a state only."""
    readings = [
        EngineReading(
            engine.model_name,
            engine.stats(),
            engine.metrics,
            is_prefix_caching=context.config.cache.prefix_caching,
            is_loaded=engine.state in _LOADED,
        )
        for engine in context.pool.counted_engines()
    ]
    quotas = QuotaMetrics({tier: context.quotas.refused[tier] for tier in context.config.tiers})
    models = [
        ModelReading(model.name, model.state, {result.value: number for result, number in model.loads.items()})
        for model in context.pool.models()
    ]
    pool = PoolMetrics(models, list(ModelState))
    others = [pool, context.sleep_metrics, context.http_metrics, quotas, context.process_metrics]
    text = render(readings, others)
    return Response(text, media_type=CONTENT_TYPE)
