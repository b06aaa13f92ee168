"""The series of sleep mode: how long the sleep routes take, failed ones included, and which are under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest

from mlx_server.api.app import create_app
from mlx_server.config import Config
from mlx_server.errors import ModelLoadError
from mlx_server.observability.series import render
from mlx_server.observability.server_metrics import SleepMetrics, SleepOperation
from tests.api.fakes import FakeEngine, fake_pool
from tests.observability.test_metrics import samples

IN_FLIGHT = "vllm:sleep_mode_operations_in_flight{operation=%s}"
COUNT = "vllm:sleep_mode_operation_duration_seconds_count{operation=%s}"


@dataclass
class HeldEngine(FakeEngine):
    """Loads and stops when `may_go_on`; `refusal` is what it cannot be loaded for."""

    refusal: Exception | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        self.has_begun.set()
        await self.may_go_on.wait()
        if self.refusal is not None:
            raise self.refusal
        await super().start()

    async def stop(self) -> None:
        self.has_begun.set()
        await self.may_go_on.wait()
        await super().stop()


@dataclass
class World:
    engine: HeldEngine
    http: httpx.AsyncClient

    async def readings(self, name: str) -> list[float]:
        """Of sleep, of giving up the cache alone, and of waking."""
        found = samples((await self.http.get("/metrics")).content)
        return [found[name % operation] for operation in ("sleep", "release_kv_cache_memory", "wake")]

    async def held(self, path: str) -> tuple[list[float], httpx.Response]:
        """What is in flight while the route is held, and its answer."""
        self.engine.has_begun.clear()
        self.engine.may_go_on.clear()
        answer = asyncio.create_task(self.http.post(path))
        await self.engine.has_begun.wait()
        readings = await self.readings(IN_FLIGHT)
        self.engine.may_go_on.set()
        return readings, await answer


@pytest.fixture
async def world() -> AsyncIterator[World]:
    engine = HeldEngine()
    engine.may_go_on.set()
    pool = fake_pool(engine)
    await pool.start()
    transport = httpx.ASGITransport(create_app(pool, Config()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield World(engine, http)
    await pool.stop(0.0)


async def test_sleeping_and_waking_are_in_flight_while_they_run_and_timed_when_they_end(world: World):
    assert await world.readings(IN_FLIGHT) == await world.readings(COUNT) == [0, 0, 0]
    in_flight, answer = await world.held("/sleep")
    assert (in_flight, answer.status_code) == ([1, 0, 0], 200)
    assert (await world.readings(IN_FLIGHT), await world.readings(COUNT)) == ([0, 0, 0], [1, 0, 0])
    in_flight, answer = await world.held("/wake_up")
    assert (in_flight, answer.status_code) == ([0, 0, 1], 200)
    assert (await world.readings(IN_FLIGHT), await world.readings(COUNT)) == ([0, 0, 0], [1, 0, 1])


async def test_waking_that_fails_is_timed_too_and_no_longer_in_flight(world: World):
    assert (await world.http.post("/sleep")).status_code == 200
    world.engine.refusal = ModelLoadError("no such file")
    in_flight, answer = await world.held("/wake_up")
    assert (in_flight, answer.status_code) == ([0, 0, 1], 503)
    assert (await world.readings(IN_FLIGHT), await world.readings(COUNT)) == ([0, 0, 0], [1, 0, 1])


async def test_what_is_refused_before_it_begins_is_no_operation(world: World):
    assert (await world.http.post("/sleep?mode=soon")).status_code == 400
    assert (await world.http.get("/is_sleeping")).status_code == 200
    assert await world.readings(COUNT) == [0, 0, 0]


def test_an_operation_lasts_from_its_begin_to_its_end_on_one_clock():
    times = iter((10.0, 10.5, 20.0, 50.0))
    metrics = SleepMetrics(clock=lambda: next(times))
    with metrics.measured(SleepOperation.WAKE):
        pass
    with pytest.raises(RuntimeError), metrics.measured(SleepOperation.WAKE):
        raise RuntimeError
    found = samples(render([], {"sleep": metrics}))
    name = "vllm:sleep_mode_operation_duration_seconds"
    assert (found[f"{name}_sum{{operation=wake}}"], found[f"{name}_count{{operation=wake}}"]) == (30.5, 2)
    buckets = {le: found[f"{name}_bucket{{le={le},operation=wake}}"] for le in ("0.1", "1.0", "10.0", "30.0", "+Inf")}
    assert buckets == {"0.1": 0, "1.0": 1, "10.0": 1, "30.0": 2, "+Inf": 2}
