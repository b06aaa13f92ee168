"""The small worlds of the HTTP tests: a real server on loopback, and an engine without a model behind it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_server import errors
from mlx_server.api.app import create_app
from mlx_server.api.context import ServerContext
from mlx_server.api.http.connections import ConnectionGate, room_for_connections
from mlx_server.api.http.listener import listen
from mlx_server.api.server import uvicorn_config
from mlx_server.config import Config, ServerConfig
from mlx_server.pool.model_pool import ModelPool
from mlx_server.tiers import Tier, default_tiers
from tests.api.fakes import FakeEngine, fake_pool


async def until(condition: Callable[[], object]) -> None:
    """Waits until `condition` holds; fails after half a minute."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 -- it is about objects that know no events
            await asyncio.sleep(0.001)


async def passed(seconds: float) -> None:
    """So much time, in pieces: on a machine that is late, timers that repeat run as often as on one that is not."""
    for _ in range(20):
        await asyncio.sleep(seconds / 20)


class Switch:
    """The application that the server runs: whichever the test has put in."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        await self.app(scope, receive, send)


class Site:
    """The running server, and clients of it. `serve` puts a pool behind it."""

    def __init__(self, switch: Switch, url: str, http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
        self.url = url
        self.http = http
        self.openai = client
        self._switch = switch
        self._at_end = contextlib.ExitStack()

    def serve(self, pool: ModelPool, config: Config, clock: Callable[[], float] = time.monotonic) -> ServerContext:
        app = create_app(pool, config, clock=clock)
        self._switch.app = app
        context = app.state.context
        assert isinstance(context, ServerContext)
        self.close()
        self._at_end.callback(context.keys.close)
        return context

    def close(self) -> None:
        self._at_end.close()


@contextlib.asynccontextmanager
async def running(app: Any, **settings: Any) -> AsyncIterator[str]:
    """Serves `app` on a free port of the loopback address."""
    with listen(ServerConfig(port=0)) as listener:
        config = ServerConfig(**settings)
        gate = ConnectionGate(config.max_connections or room_for_connections())
        server = uvicorn.Server(uvicorn_config(app, config, gate))
        serving = asyncio.create_task(server._serve([listener]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


class World:
    """One test's engine, the application in front of it, and clients of it."""

    def __init__(self, site: Site, config: Config) -> None:
        self.engine = FakeEngine()
        self.pool = fake_pool(self.engine, aliases=("alias",))
        self.url = site.url
        self.http = site.http
        self.openai = site.openai
        self.now_s = 1000.0
        """Of the clock of the quotas."""
        self._site = site
        self.configure(config)

    def hold_formatting(self, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
        """From now on a chat's prompt is made when the second event is set; the first says that one has begun."""
        is_formatting, may_go_on = threading.Event(), threading.Event()
        formatted = self.engine.chat.format

        def slow(*args: Any) -> Any:
            is_formatting.set()
            may_go_on.wait(5)
            return formatted(*args)

        monkeypatch.setattr(self.engine.chat, "format", slow)
        return is_formatting, may_go_on

    def configure(self, config: Config) -> None:
        self.context = self._site.serve(self.pool, config, lambda: self.now_s)

    def configure_server(self, *tiers: Tier, **settings: Any) -> None:
        declared = {**default_tiers(), **{tier.name: tier for tier in tiers}}
        self.configure(Config(server=replace(ServerConfig(), **settings), tiers=declared))

    async def chat(self, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        """A chat by plain HTTP; one user message unless given."""
        json = {"messages": user("Hi"), **body}
        return await self.http.post("/v1/chat/completions", json=json, headers=headers)

    async def complete(self, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "Hi", **body}, headers=headers)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection, for what no client library sends."""
        url = httpx.URL(self.url)
        return await asyncio.open_connection(url.host, url.port)

    async def settle(self) -> None:
        """Waits until nothing is in progress."""
        await until(lambda: not self.context.generations.num_in_progress and not self.engine.open)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


ALL_ERRORS: list[tuple[errors.ServeError, int, str, str | None]] = [
    (errors.InvalidRequestError("m", "p"), 400, "BadRequestError", "p"),
    (errors.ContextLengthError("m", "input_tokens"), 400, "BadRequestError", "input_tokens"),
    (errors.ModelNotFoundError("x"), 404, "NotFoundError", "model"),
    (errors.AuthenticationError("m"), 401, "AuthenticationError", None),
    (errors.PermissionDeniedError("m"), 403, "PermissionDeniedError", None),
    (errors.UnsupportedError("m"), 501, "NotImplementedError", None),
    (errors.QuotaExceededError("m", 3.2), 429, "RateLimitError", None),
    (errors.QueueFullError("m", "max_num_waiting", 3.2), 503, "ServiceUnavailableError", None),
    (errors.QueueTimeoutError("m", 3.2), 503, "ServiceUnavailableError", None),
    (errors.OverloadedError("m", 3.2), 503, "ServiceUnavailableError", None),
    (errors.InsufficientMemoryError("m"), 507, "InsufficientStorageError", None),
    (errors.EngineDeadError("m"), 503, "ServiceUnavailableError", None),
    (errors.ModelLoadError("m"), 501, "NotImplementedError", None),
    (errors.UnknownModelError("m"), 404, "NotFoundError", "model"),
    (errors.DownloadError("m"), 503, "ServiceUnavailableError", None),
    (errors.InsufficientStorageError("m"), 507, "InsufficientStorageError", None),
    (errors.ConfigError("m"), 500, "InternalServerError", None),
]
"""Each kind of error, and the status, type and parameter that HTTP gives it."""
