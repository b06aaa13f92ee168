"""The application: middlewares and routes, put together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlx_server.api import admin, dashboard, llama_cpp, probes
from mlx_server.api.answers.chat_plan import ChatPlanner
from mlx_server.api.answers.generation_service import GenerationService
from mlx_server.api.answers.images import ImageLoader
from mlx_server.api.anthropic import messages
from mlx_server.api.auth.fleet_quotas import FleetQuotas
from mlx_server.api.auth.keys import KeyRing
from mlx_server.api.auth.quotas import Quotas
from mlx_server.api.context import ServerContext
from mlx_server.api.errors import OpenAIError, error_responses, install_error_handlers
from mlx_server.api.http.access import AccessMiddleware
from mlx_server.api.http.middleware import ExchangeMiddleware, allow_origins
from mlx_server.api.http.text_turns import TextWorkers
from mlx_server.api.ollama import chat as ollama_chat
from mlx_server.api.ollama import models as ollama_models
from mlx_server.api.openai import chat, completions, models, tokenization, vectors
from mlx_server.api.openai.responses import conversations
from mlx_server.api.openai.responses import routes as responses
from mlx_server.api.shared_store import SharedStore
from mlx_server.config import Config
from mlx_server.environment import version
from mlx_server.observability.tracing import Tracing, open_tracing
from mlx_server.pool.model_pool import ModelPool

_ROUTES = (
    probes,
    models,
    chat,
    completions,
    llama_cpp,
    messages,
    responses,
    conversations,
    vectors,
    tokenization,
    admin,
    ollama_chat,
    ollama_models,
    dashboard,
)


def create_app(
    pool: ModelPool,
    config: Config,
    tracing: Tracing | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    now_ms: Callable[[], int] | None = None,
) -> FastAPI:
    """The HTTP application for `pool`, which the caller starts and stops.

    `tracing` is by default what `config` says. `clock` is the clock of quotas; `now_ms` replaces the clock of a shared
    store. Raises `ConfigError` for keys that cannot be read.
    """
    keys = KeyRing(config)
    store = None if config.fleet.shared_store is None else SharedStore(config.fleet.shared_store, now_ms)
    quotas = Quotas(keys.usage, clock) if store is None else FleetQuotas(store, keys.usage, clock)
    text_workers = TextWorkers(config.scheduler.max_num_waiting)
    app = FastAPI(title="mlx-serve", version=version(), responses=error_responses(OpenAIError))
    chats = ChatPlanner(ImageLoader(config.server))
    context = ServerContext(pool, config, keys, quotas, GenerationService(quotas), text_workers, chats, store)
    app.state.context = context
    app.router.routes.insert(0, Route("/openapi.json", _document_route(app), include_in_schema=False))
    for routes in _ROUTES:
        app.include_router(routes.router)
    install_error_handlers(app)
    # The last middleware added is the outermost.
    app.add_middleware(AccessMiddleware, server=config.server, keys=keys)
    allow_origins(app, config.server)
    app.add_middleware(ExchangeMiddleware, metrics=context.http_metrics, quotas=quotas)
    (tracing or open_tracing(config.observability)).instrument(app)
    return app


def _document_route(app: FastAPI) -> Callable[[Request], Awaitable[Response]]:
    """Answers with the OpenAPI document in place of FastAPI's own route, which makes it on the event loop's thread (a
    second) and encodes it for each request."""
    making: asyncio.Task[bytes] | None = None

    async def document(request: Request) -> Response:
        nonlocal making
        if making is None:
            making = asyncio.create_task(asyncio.to_thread(lambda: bytes(JSONResponse(app.openapi()).body)))
        return Response(await asyncio.shield(making), media_type="application/json")

    return document
