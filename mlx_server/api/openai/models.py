"""GET /v1/models and /v1/models/{id}, in one form for the clients of OpenAI and of Anthropic."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from mlx_server.api.auth.authentication import caller_of
from mlx_server.api.context import Context
from mlx_server.engine.embeddings import capabilities
from mlx_server.pool.catalog import Offer
from mlx_server.pool.model_pool import ModelPool

router = APIRouter(tags=["models"])

OWNER = "mlx-serve"


@router.get("/v1/models")
async def list_models(request: Request, context: Context) -> dict[str, Any]:
    """Every model that the caller may use, loaded or not, each followed by its adapters; the default one first."""
    cards = [_card(request, context.pool, offer) for offer in await context.pool.offered(caller_of(request).tier)]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {"first_id": None, "last_id": None}
    return {"object": "list", "data": cards, **ends, "has_more": False}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request, context: Context) -> dict[str, Any]:
    if not model:
        return await list_models(request, context)
    context.pool.check_access(caller_of(request).tier, model)
    return _card(request, context.pool, context.pool.offer(model))


def _card(request: Request, pool: ModelPool, offer: Offer) -> dict[str, Any]:
    model = pool.model_of(offer)
    engine = model.loaded_engine
    limit = capable_of = None  # known only while the model is loaded: they depend on its files and on free memory
    if engine is not None:
        limit = engine.max_model_len
        pooling = None if engine.pooling is None else engine.pooling.spec
        capable_of = capabilities(pooling, sees=engine.vision is not None)
    card = {
        "id": offer.name,
        "object": "model",
        "type": "model",
        "display_name": offer.name,
        "lifecycle": "active",
        "created": model.created_s,
        "created_at": datetime.fromtimestamp(model.created_s, UTC).isoformat(),
        "owned_by": OWNER,
        "root": offer.root,
        "quantize": offer.spec.config.model.quantize,
        "parent": offer.parent,
        "max_model_len": limit,
        "max_input_tokens": limit,
        "capabilities": capable_of,
        "state": model.state.value,
    }
    if "anthropic-version" in request.headers:
        del card["capabilities"]  # theirs are an object with other members
    return card
