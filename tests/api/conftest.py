"""One HTTP server for the whole session, and one bundled model; other tests have an engine of their own each, and all
an application of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from mlx_server.config import Config
from mlx_server.pool.model_pool import ModelPool
from tests.api.real_worlds import RealWorld, started
from tests.api.rich_worlds import enrich
from tests.api.worlds import Site, Switch, World, running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def site() -> AsyncIterator[Site]:
    switch = Switch()
    async with (
        running(switch) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        site = Site(switch, url, http, client)
        yield site
        site.close()


@pytest_asyncio.fixture(loop_scope="session")
async def world(site: Site) -> AsyncIterator[World]:
    world = World(site, Config())
    await world.pool.start()
    yield world
    await world.settle()
    await world.pool.stop(0.0)


@pytest.fixture
def rich_world(world: World) -> World:
    return enrich(world)


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def bundled(bundled_model: Path) -> AsyncIterator[tuple[ModelPool, Config]]:
    async with started(bundled_model, "smollm2") as model:
        yield model


@pytest_asyncio.fixture(loop_scope="session")
async def real(site: Site, bundled: tuple[ModelPool, Config]) -> AsyncIterator[RealWorld]:
    world = RealWorld(site, site.serve(*bundled))
    yield world
    await world.settled()
