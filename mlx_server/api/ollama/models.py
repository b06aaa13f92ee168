"""The models: GET /api/tags, /api/ps and /api/version, POST /api/show; for admins POST /api/pull and DELETE
/api/delete. Other routes that change models are refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BeforeValidator
from starlette.responses import JSONResponse, Response

from mlx_server.api.admin import begin_pull
from mlx_server.api.auth.authentication import RequireAdmin, caller_of
from mlx_server.api.context import Context
from mlx_server.api.errors import error_info
from mlx_server.api.http import sse
from mlx_server.api.http.body import AnyTypeRoute
from mlx_server.api.http.middleware import until_disconnect
from mlx_server.api.ollama.output import NDJSON, line, timestamp
from mlx_server.api.ollama.request import ERROR_RESPONSES, ModelBody, default_true, find_name, listed
from mlx_server.api.openai.fields import Bool
from mlx_server.engine.embeddings import capabilities
from mlx_server.engine.fair_slots import shielded
from mlx_server.engine.models.facts import ModelFacts, read_facts
from mlx_server.engine.models.store import Fetch, remove_stored
from mlx_server.environment import version
from mlx_server.errors import InvalidRequestError, PermissionDeniedError, UnsupportedError
from mlx_server.pool.catalog import Offer
from mlx_server.pool.model_pool import ModelPool
from mlx_server.pool.pooled_model import PooledModel
from mlx_server.sampling_params import SamplingParams

OLLAMA_VERSION = "0.32.15"
"""The release of Ollama whose API these routes follow: some clients refuse older servers."""

_FORMAT = "safetensors"
_PULL_PERIOD_S = 0.5
_SUCCESS = {"status": "success"}
_FOR_EVER_S = 200 * 365 * 86400.0
"""Clients show this as `Forever`."""

_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}

router = APIRouter(tags=["ollama"], route_class=AnyTypeRoute, responses=ERROR_RESPONSES)
admins = APIRouter(dependencies=[RequireAdmin], route_class=AnyTypeRoute)


@router.get("/api/version")
@router.head("/api/version", include_in_schema=False)
async def api_version() -> dict[str, str]:
    """The release of Ollama whose API these routes follow, and this server's version."""
    return {"version": OLLAMA_VERSION, "mlx_serve": version()}


@router.get("/api/tags")
@router.head("/api/tags", include_in_schema=False)
async def tags(request: Request, context: Context) -> dict[str, Any]:
    """Every model that the caller may use."""
    found = await context.pool.offered(caller_of(request).tier)
    seen = [_is_seeing(context.pool, offer) for offer in found]
    return {"models": await asyncio.to_thread(lambda: list(map(_card, found, seen)))}


@router.get("/api/ps")
async def running(request: Request, context: Context) -> dict[str, Any]:
    """The loaded models, and when each will be unloaded if it stays idle."""
    tier, pool = caller_of(request).tier, context.pool
    models = [model for model in pool.models() if model.is_loaded and pool.may_use(tier, model.name)]
    now_s, clock_s = time.time(), time.monotonic()
    facts = await asyncio.to_thread(lambda: [read_facts(model.spec.root) for model in models])
    return {"models": [_running(model, known, now_s, clock_s) for model, known in zip(models, facts)]}


@router.post("/api/show")
async def show(body: ModelBody, request: Request, context: Context) -> dict[str, Any]:
    """Facts of a model, loaded or not."""
    pool = context.pool
    name = await find_name(pool, body.model)
    pool.check_access(caller_of(request).tier, name)
    offer = pool.offer(name)
    facts = await asyncio.to_thread(read_facts, offer.spec.root)
    return _description(pool, offer, facts)


def _is_seeing(pool: ModelPool, offer: Offer) -> bool | None:
    """Whether a loaded model takes images; None for a model that is not loaded."""
    engine = pool.model_of(offer).loaded_engine
    return None if engine is None else engine.vision is not None


def _card(offer: Offer, sees: bool | None) -> dict[str, Any]:
    name, facts = listed(offer.name), read_facts(offer.spec.root)
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(0.0 if facts is None else facts.modified_s),
        "size": 0 if facts is None else facts.num_bytes,
        "digest": "" if facts is None else facts.digest,
        "details": _details(offer.parent, facts),
        "capabilities": _capabilities(offer, facts, sees),
    }


def _details(parent: str | None, facts: ModelFacts | None) -> dict[str, Any]:
    family = "" if facts is None else facts.family
    return {
        "parent_model": parent or "",
        "format": _FORMAT,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if facts is None else _amount(facts.num_parameters),
        "quantization_level": "" if facts is None else facts.quantization,
    }


def _amount(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def _capabilities(offer: Offer, facts: ModelFacts | None, sees: bool | None) -> list[str]:
    """`sees` None: decided by the model's folder."""
    if facts is None:
        return capabilities(None, sees=bool(sees))
    return facts.capabilities(offer.spec.root, offer.spec.config.model.pooling, sees)


def _running(model: PooledModel, facts: ModelFacts | None, now_s: float, clock_s: float) -> dict[str, Any]:
    name, idle_ttl_s, engine = listed(model.name), model.idle_ttl_s, model.loaded_engine
    idle_s = clock_s - model.last_used_s if model.is_idle else 0.0
    left_s = _FOR_EVER_S if idle_ttl_s is None else min(max(0.0, idle_ttl_s - idle_s), _FOR_EVER_S)
    return {
        "name": name,
        "model": name,
        "size": model.held_bytes,
        "size_vram": model.held_bytes,
        "digest": "" if facts is None else facts.digest,
        "details": _details(None, facts),
        "expires_at": timestamp(now_s + left_s),
        "context_length": 0 if engine is None else engine.max_model_len,
    }


def _description(pool: ModelPool, offer: Offer, facts: ModelFacts | None) -> dict[str, Any]:
    engine = pool.model_of(offer).loaded_engine
    sampling = None if engine is None else engine.default_sampling
    return {
        "license": "" if facts is None else facts.license,
        "modelfile": f"FROM {offer.spec.name}\n",
        "parameters": "" if sampling is None else _parameters(sampling),
        "template": "" if facts is None else facts.chat_template,
        "details": _details(offer.parent, facts),
        "model_info": {}
        if facts is None
        else dict(_model_info(offer.name, facts, None if engine is None else engine.max_model_len)),
        "capabilities": _capabilities(offer, facts, _is_seeing(pool, offer)),
        "modified_at": timestamp(0.0 if facts is None else facts.modified_s),
    }


def _parameters(sampling: SamplingParams) -> str:
    """The sampling defaults of the model's folder, one a line."""
    lines = ((theirs, getattr(sampling, ours), getattr(SamplingParams(), ours)) for theirs, ours in _SAMPLING.items())
    return "\n".join(f"{name:<30} {json.dumps(value)}" for name, value, usual in lines if value != usual)


def _model_info(name: str, facts: ModelFacts, max_model_len: int | None) -> Iterator[tuple[str, Any]]:
    """Under GGUF's names. The context is the served one while the model is loaded, else the model's own."""
    family, config = facts.family, facts.config
    yield "general.architecture", family
    yield "general.basename", name  # editors show it
    yield "general.parameter_count", facts.num_parameters
    yield f"{family}.context_length", max_model_len or facts.context_length
    for name, key in _INFO.items():
        if isinstance(config.get(key), int | float):
            yield f"{family}.{name}", config[key]


_INFO: Mapping[str, str] = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "rope.freq_base": "rope_theta",
}


class PullRequest(ModelBody):
    """The body of POST /api/pull."""

    stream: Annotated[Bool, BeforeValidator(default_true)] = True


@admins.post("/api/pull", responses=sse.openapi_responses("status", media_type=NDJSON))
async def pull(body: PullRequest, request: Request, context: Context) -> Response:
    """Fetches a model that is not here yet, with lines of progress unless `stream` is false."""
    name = await find_name(context.pool, body.model)
    assert name is not None
    fetch = await begin_pull(context, name)
    if fetch is None:
        return _streamed(None) if body.stream else JSONResponse(_SUCCESS)
    if not body.stream:
        await until_disconnect(request, shielded(fetch.done))
        return JSONResponse(_SUCCESS)
    await asyncio.wait((fetch.done,), timeout=_PULL_PERIOD_S)
    if fetch.done.done():  # an error that comes at once gets a status
        fetch.done.result()
    return _streamed(fetch)


def _streamed(fetch: Fetch | None) -> Response:
    return sse.EventStream(partial(_write_progress, fetch), 0, media_type=NDJSON)


async def _write_progress(fetch: Fetch | None, out: sse.PieceWriter) -> None:
    """Progress in Ollama's form: the manifest, bytes, success. `fetch` is None for a model that is here."""

    async def write(body: dict[str, Any]) -> None:
        out.write(line(body))
        await out.drain()

    await write({"status": "pulling manifest"})
    if fetch is not None:
        digest = hashlib.sha256(fetch.name.encode()).hexdigest()  # clients group bytes by it
        part: dict[str, Any] = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}"}
        while not fetch.done.done():
            read = fetch.reading()
            num_bytes, total = read["done_bytes"], read["total_bytes"]
            await write({**part, **({} if not total else {"total": total, "completed": min(num_bytes, total)})})
            await asyncio.wait((fetch.done,), timeout=_PULL_PERIOD_S)
        error = fetch.done.exception()
        if error is not None:
            return await write(error_info(error if isinstance(error, Exception) else RuntimeError()).ollama_body())
    return await write(_SUCCESS)


@admins.delete("/api/delete")
async def delete(body: ModelBody, context: Context) -> Response:
    """Deletes a pulled model from this machine, unloaded first."""
    name = await find_name(context.pool, body.model)
    assert name is not None
    offer = context.pool.offer(name)
    if context.pool.is_configured(offer):
        raise PermissionDeniedError(
            f"{offer.spec.name} is in the server's configuration. Remove it there, then delete it with "
            "`mlx-serve models rm`."
        )
    await context.pool.unload(name, context.config.server.drain_timeout_s)
    if not await asyncio.to_thread(remove_stored, name):
        raise InvalidRequestError(f"{name} was not pulled: it is in a folder of models. Delete it there.", "model")
    return Response()


@admins.post("/api/copy", status_code=501)
@admins.post("/api/create", status_code=501)
@admins.post("/api/push", status_code=501)
async def unsupported(request: Request) -> None:
    """Not supported: models are folders, made by mlx-lm's tools and named in the configuration."""
    raise UnsupportedError(
        f"{request.url.path} is not served: models are folders in mlx-lm format. Name one under [[models]] in the "
        "configuration, with aliases and adapters of its own."
    )


router.include_router(admins)
