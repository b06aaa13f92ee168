"""Two servers of a fleet, with a shared store and with engines without a model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from mlx_server.api import shared_store
from mlx_server.api.app import create_app
from mlx_server.api.auth import fleet_quotas
from mlx_server.api.auth.key_file import KeyFile
from mlx_server.api.context import ServerContext
from mlx_server.config import Config, ServerConfig
from mlx_server.fleet import FleetConfig
from mlx_server.tiers import Tier, default_tiers
from tests.api.fakes import FakeEngine, fake_pool
from tests.api.worlds import running, until

PROMPT = [5] * 10


class Server:
    """One of the fleet: an engine without a model, the application in front of it, and a client."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        self.engine = FakeEngine()
        self.pool = fake_pool(self.engine)
        self.app = create_app(self.pool, config, clock=clock, now_ms=lambda: round(1000 * clock()))
        self.http = httpx.AsyncClient()

    @property
    def context(self) -> ServerContext:
        context = self.app.state.context
        assert isinstance(context, ServerContext)
        return context

    @property
    def store(self) -> shared_store.SharedStore:
        assert self.context.shared_store is not None
        return self.context.shared_store

    async def ask(self, key: str, **body: Any) -> httpx.Response:
        json = {"prompt": PROMPT, "max_tokens": 4, **body}
        return await self.http.post("/v1/completions", json=json, headers={"x-api-key": key})

    async def respond(self, key: str = "", **body: Any) -> httpx.Response:
        json = {"model": "fake", "input": "Hi", **body}
        return await self.http.post("/v1/responses", json=json, headers={"x-api-key": key})

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        await self.pool.start()
        async with running(self.app) as url, httpx.AsyncClient(base_url=url, timeout=60) as self.http:
            try:
                yield self
            finally:
                await until(lambda: not self.context.generations.num_in_progress)
                await self.context.quotas.close()
                await self.store.close()
                await self.pool.stop(0.0)


class Fleet:
    """Two servers with the same keys. A router gives them requests in turn."""

    def __init__(self, url: str, key_file: Path) -> None:
        self.now_s = 1_000_000.0
        self.url = url
        self.key_file = key_file
        self.servers: list[Server] = []
        self.turns: Iterator[Server] = iter(())
        self._stack = contextlib.AsyncExitStack()

    async def start(self, num_keys: int = 1, **tier: Any) -> list[str]:
        """Starts the servers; keys of a tier with these limits."""
        with KeyFile.create(self.key_file) as file:
            keys = [file.add("paid", "").text for _ in range(num_keys)]
        tiers = {**default_tiers(), "paid": Tier(name="paid", **tier)}
        fleet, server = FleetConfig(shared_store=self.url), ServerConfig(key_file=str(self.key_file))
        config = Config(fleet=fleet, server=server, tiers=tiers)
        for _ in range(2):
            one = Server(config, lambda: self.now_s)
            self.servers.append(await self._stack.enter_async_context(one.running()))
        self.turns = itertools.cycle(self.servers)
        return keys

    async def statuses(self, key: str, num: int, **body: Any) -> list[int]:
        return [(await next(self.turns).ask(key, **body)).status_code for _ in range(num)]

    async def reported(self) -> None:
        """Waits until the store has all that the servers have counted."""
        for server in self.servers:
            quotas = server.context.quotas
            assert isinstance(quotas, fleet_quotas.FleetQuotas)
            shares = quotas._shares.values()
            await until(lambda shares=shares: not any(share.has_unreported(self.now_s) for share in shares))

    async def stop(self) -> None:
        await self._stack.aclose()
