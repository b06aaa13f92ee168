"""Routes for admins: prefix caches, requests in progress, and the models of the pool."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response

from mlx_server.api.auth.authentication import RequireAdmin
from mlx_server.api.context import Context, ServerContext
from mlx_server.api.http.body import JsonRoute
from mlx_server.api.http.middleware import until_disconnect
from mlx_server.engine.fair_slots import shielded
from mlx_server.engine.models.facts import folder_of, read_preparation
from mlx_server.engine.models.store import Fetch, can_be_fetched
from mlx_server.errors import InvalidRequestError, ModelNotFoundError, PermissionDeniedError
from mlx_server.observability.server_metrics import SleepOperation
from mlx_server.pool.pooled_model import ModelState, PooledModel

router = APIRouter(tags=["admin"], route_class=JsonRoute, dependencies=[RequireAdmin])


@router.post("/reset_prefix_cache")
@router.post("/flush_cache", include_in_schema=False)
@router.get("/flush_cache", include_in_schema=False)
async def reset_prefix_cache(context: Context) -> dict[str, bool]:
    """Drops all cached prefixes; `success` is false while requests hold blocks."""
    results = [engine.reset_prefix_cache() for engine in context.pool.engines()]
    return {"success": all(results)}


class AbortBody(BaseModel):
    """Which requests to end: vLLM's `request_ids`, or SGLang's `rid` or `abort_all`."""

    request_ids: list[str] | None = None
    rid: str | None = None
    abort_all: bool | None = None


@router.post("/abort_requests")
@router.post("/abort_request", include_in_schema=False)
async def abort_requests(body: AbortBody, context: Context) -> dict[str, int]:
    """Ends requests with the finish reason `abort`, by the client's ids or the ids of responses. Unknown ids are
    ignored."""
    if body.abort_all:
        return {"aborted": context.generations.abort()}
    if body.request_ids is None and body.rid is None:
        raise InvalidRequestError("Name the requests to end in request_ids.", "request_ids")
    ids = {*(body.request_ids or ()), body.rid or ""}
    return {"aborted": context.generations.abort(ids)}


@router.get("/admin/models")
async def list_models(context: Context) -> dict[str, Any]:
    """All models that are configured or have been asked for, with their state and memory, pulls in progress, and the
    memory budget."""
    budget = context.pool.budget
    return {
        "models": [_reading(model) for model in context.pool.models()],
        "pulls": [fetch.reading() for fetch in context.fetches.running()],
        "memory": {
            "limit_bytes": budget.limit_bytes,
            "held_bytes": budget.held_bytes,
            "free_bytes": budget.free_bytes,
        },
    }


class LoadBody(BaseModel):
    model: str = Field(min_length=1)


class UnloadBody(LoadBody):
    drain_timeout_s: float | None = Field(None, ge=0.0)


@router.post("/admin/models/pull")
async def pull(body: LoadBody, request: Request, context: Context) -> dict[str, str]:
    """Pulls a model, by its id on the hub or its served name. Answers when it is there, or with the reason why not. The
    pull goes on if the caller leaves; `GET /admin/models` shows its progress."""
    fetch = await begin_pull(context, body.model)
    if fetch is not None:
        await until_disconnect(request, shielded(fetch.done))
    return {"model": body.model, "status": "pulled"}


async def begin_pull(context: ServerContext, name: str) -> Fetch | None:
    """The pull of a model, by its served name or its hub id; one in progress is joined. None if the model is there. The
    pull of a configured model that cannot be pulled fails with the reason. Raises `ModelNotFoundError` for others that
    cannot, and `PermissionDeniedError` for a model that this server would not serve."""
    offer = context.pool.look_up(name)
    model = name if offer is None else offer.spec.root
    if offer is not None and await asyncio.to_thread(folder_of, model) is not None:
        return None
    if offer is None and not can_be_fetched(model):
        raise ModelNotFoundError(name, "Models are pulled by their hub id, like mlx-community/Qwen3-0.6B-4bit.")
    if offer is None and not context.config.pool.pulled_models:
        raise PermissionDeniedError(
            f"This server serves only the models of its configuration, and {name} is not one of them. Start it with "
            "--pulled-models to let clients pull and use others."
        )
    return context.fetches.join(model)


@router.post("/admin/models/load")
async def load(body: LoadBody, context: Context) -> dict[str, Any]:
    """Loads a model. Answers when it is ready, or with the reason why not."""
    return _reading(await context.pool.load(body.model))


@router.post("/admin/models/unload")
async def unload(body: UnloadBody, context: Context) -> dict[str, Any]:
    """Unloads a model, and answers when its memory is free. Its requests in progress, and those that wait for it to be
    loaded, may finish within `drain_timeout_s`, by default the timeout at shutdown; asking again can only shorten that
    time. The next request for the model loads it again."""
    timeout_s = body.drain_timeout_s
    if timeout_s is None:
        timeout_s = context.config.server.drain_timeout_s
    return _reading(await context.pool.unload(body.model, timeout_s))


class AdapterBody(BaseModel):
    lora_name: str = Field(min_length=1, max_length=1024)


class LoadAdapterBody(AdapterBody):
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool | None = None


_AS_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.post("/v1/load_lora_adapter", response_class=Response, responses=_AS_TEXT)
async def load_lora_adapter(body: LoadAdapterBody, context: Context) -> Response:
    """vLLM's route: loads an adapter of a model, from a folder of the server or the hub. Answers when requests may name
    it, or with the reason why not. The load goes on if the caller leaves."""
    adapters = context.pool.adapters
    await shielded(adapters.load(body.lora_name, body.lora_path, in_place=bool(body.load_inplace)))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=Response, responses=_AS_TEXT)
async def unload_lora_adapter(body: AdapterBody, context: Context) -> Response:
    """vLLM's route: new requests cannot name the adapter any more. Those in progress keep it until they end."""
    context.pool.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/sleep")
async def sleep(
    context: Context, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort"
) -> dict[str, str | int]:
    """vLLM's route: unloads all models, at the same time and at every level. `abort` ends requests in progress at once;
    with other modes they may finish. A request for a model loads it again."""
    timeout_s = 0.0 if mode == "abort" else context.config.server.drain_timeout_s
    with context.sleep_metrics.measured(SleepOperation.SLEEP):
        await asyncio.gather(*(context.pool.unload(model.name, timeout_s) for model in context.pool.models()))
    return {"status": "sleeping", "level": level}


@router.post("/wake_up")
async def wake_up(context: Context) -> dict[str, Any]:
    """vLLM's route: loads the pinned models, or the default model if none is pinned."""
    with context.sleep_metrics.measured(SleepOperation.WAKE):
        pinned = [model for model in context.pool.models() if model.spec.is_pinned]
        for model in pinned or [context.pool.find(None)]:
            await context.pool.load(model.name)
    return {"status": "awake", "tags": None}


@router.get("/is_sleeping")
async def is_sleeping(context: Context) -> dict[str, bool]:
    """Whether no model is loaded, being loaded or draining."""
    return {"is_sleeping": all(model.is_down for model in context.pool.models())}


def _reading(model: PooledModel) -> dict[str, Any]:
    idle_s = time.monotonic() - model.last_used_s
    return {
        "id": model.name,
        "root": model.spec.root,
        "aliases": list(model.spec.aliases),
        "adapters": list(model.spec.names.adapters),
        "state": model.state.value,
        "reason": None if model.failure is None else str(model.failure),
        "load_progress": round(model.load_progress, 3) if model.state is ModelState.LOADING else None,
        "preparing": read_preparation(model.spec.root),
        "pinned": model.spec.is_pinned,
        "idle_ttl_s": model.idle_ttl_s,
        "held_bytes": model.held_bytes,
        "num_requests": model.num_users,
        "num_loads": model.num_loads,
        "idle_s": round(idle_s, 1) if model.is_idle else None,
    }
