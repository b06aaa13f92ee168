"""Keys of three tiers over a real engine: who starts first, who starts at last, and who shares whose prefixes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from mlx_server.api.auth.key_file import KeyFile
from mlx_server.api.context import ServerContext
from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig, ServerConfig
from mlx_server.outputs import EngineStats
from mlx_server.pool.model_pool import ModelPool, build_pool
from mlx_server.request import Priority
from mlx_server.tiers import Tier, default_tiers
from tests.api.worlds import Site, until
from tests.engine_worlds import make_folder, random_prompts

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_SEATS = 2
NUM_BLOCKS = 64
TIERS = {
    "high": Tier(name="high", priority=Priority.HIGH),
    "normal": Tier(name="normal"),
    "low": Tier(name="low", priority=Priority.LOW, max_num_waiting=4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama"))


@dataclass
class Saturated:
    """A server with two seats, a key of each tier, and `other`, a second one of NORMAL."""

    http: httpx.AsyncClient
    context: ServerContext
    keys: dict[str, str]

    def stats(self) -> EngineStats:
        return self.context.pool.engines()[0].stats()

    async def ask(self, tier: str, num_tokens: int = 4, num_answers: int = 1, **body: Any) -> None:
        body = {"prompt": [7, 8, 9], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, **body}
        headers = {"x-api-key": self.keys[tier]}
        response = await self.http.post("/v1/completions", json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        assert response.json()["usage"]["completion_tokens"] == num_tokens * num_answers * body.get("n", 1)


@contextlib.asynccontextmanager
async def saturated(site: Site, folder: Path, path: Path, aging_rate: float) -> AsyncIterator[Saturated]:
    config = Config(
        model=ModelConfig(model=str(folder), served_model_name="tiny", max_model_len=512),
        cache=CacheConfig(num_kv_blocks=NUM_BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEATS, max_num_batched_tokens=64, aging_rate=aging_rate),
        server=ServerConfig(key_file=str(path)),
        tiers={**default_tiers(), **TIERS},
    )
    with KeyFile.create(path) as file:
        keys = {name: file.add(tier, "").text for name, tier in [*zip(TIERS, TIERS), ("other", "normal")]}
    pool = build_pool(config)
    await pool.start()
    try:
        world = Saturated(site.http, site.serve(pool, config), keys)
        yield world
        await until(lambda: world.stats().num_free_blocks == NUM_BLOCKS)
    finally:
        await pool.stop(0.0)


async def test_better_tiers_start_first(site: Site, folder: Path, tmp_path: Path):
    async with saturated(site, folder, tmp_path / "keys", aging_rate=1e-6) as world:
        running = [asyncio.create_task(world.ask("high", 400, prompt=prompt)) for prompt in random_prompts([5, 6])]
        await until(lambda: world.stats().num_running == NUM_SEATS)
        ended: list[str] = []

        async def wait_for_a_turn(tier: str) -> None:
            await world.ask(tier)
            ended.append(tier)

        order = ["low"] * 4 + ["normal"] * 4 + ["high"] * 4
        waiting = []
        for num_waiting, tier in enumerate(order, start=1):
            waiting.append(asyncio.create_task(wait_for_a_turn(tier)))
            await until(lambda num=num_waiting: world.stats().num_waiting == num)
        assert all(not task.done() for task in running), "the seats were taken for as long as the others came"
        await asyncio.gather(*running, *waiting)
    assert ended == ["high"] * 4 + ["normal"] * 4 + ["low"] * 4


async def test_a_request_for_many_answers_enters_the_queue_bit_by_bit(site: Site, folder: Path, tmp_path: Path):
    """The tier's queue has four places, which eight answers or prompts do not fill."""
    async with saturated(site, folder, tmp_path / "keys", aging_rate=1e-6) as world:
        many = [
            asyncio.create_task(world.ask("low", 50, n=8)),
            asyncio.create_task(world.ask("low", 50, prompt=random_prompts([5] * 8), num_answers=8)),
        ]
        await until(lambda: world.stats().num_running == NUM_SEATS)
        assert world.stats().num_waiting <= 2
        await world.ask("low")
        await asyncio.gather(*many)


async def test_a_key_does_not_wait_for_the_many_requests_of_another(site: Site, folder: Path, tmp_path: Path):
    async with saturated(site, folder, tmp_path / "keys", aging_rate=0.1) as world:
        running = [asyncio.create_task(world.ask("normal", 200, prompt=prompt)) for prompt in random_prompts([5, 6])]
        await until(lambda: world.stats().num_running == NUM_SEATS)
        ended: list[str] = []

        async def wait_for_a_turn(key: str) -> None:
            await world.ask(key)
            ended.append(key)

        waiting = []
        for num_waiting, key in enumerate(["normal"] * 20 + ["other"] * 2, start=1):
            waiting.append(asyncio.create_task(wait_for_a_turn(key)))
            await until(lambda num=num_waiting: world.stats().num_waiting == num)
        assert all(not task.done() for task in running), "the seats were taken for as long as the others came"
        await asyncio.gather(*running, *waiting)
    assert ended[:6].count("other") == 2, ended


async def test_a_tier_s_queue_is_bounded_and_the_others_are_not(site: Site, folder: Path, tmp_path: Path):
    async with saturated(site, folder, tmp_path / "keys", aging_rate=1e-6) as world:
        running = [asyncio.create_task(world.ask("high", 400, prompt=prompt)) for prompt in random_prompts([5, 6])]
        await until(lambda: world.stats().num_running == NUM_SEATS)
        waiting = [asyncio.create_task(world.ask("low")) for _ in range(4)]
        await until(lambda: world.stats().num_waiting == 4)
        body = {"prompt": [7], "max_tokens": 1}
        refused = await site.http.post("/v1/completions", json=body, headers={"x-api-key": world.keys["low"]})
        assert refused.status_code == 429
        assert "Waiting requests of tier low: 4; the limit is 4" in refused.json()["error"]["message"]
        await asyncio.gather(world.ask("normal"), *running, *waiting)


async def keep_asking(world: Saturated, served: Counter[str], stop: asyncio.Event, most: int) -> None:
    while not stop.is_set() and served["high"] < most:
        await world.ask("high", n=8, prompt=random_prompts([6], seed=served["high"])[0])
        served["high"] += 1


@pytest.mark.parametrize("ages", [True, False])
async def test_a_low_tier_gets_its_turn_by_aging_and_only_by_it(site: Site, folder: Path, tmp_path: Path, ages: bool):
    """Six clients of the best tier want eight answers each, so that one of two seats is never free for long. The low
    request is as urgent as a new high one after 40 ms with aging, and never without."""
    most = 1000 if ages else 24
    served: Counter[str] = Counter()
    stop = asyncio.Event()
    async with saturated(site, folder, tmp_path / "keys", aging_rate=50.0 if ages else 0.0) as world:
        high = [asyncio.create_task(keep_asking(world, served, stop, most)) for _ in range(6)]
        await until(lambda: served["high"] >= 6)
        low = asyncio.create_task(world.ask("low"))
        await asyncio.wait([low, *high], return_when=asyncio.FIRST_COMPLETED)
        num_before = served["high"]
        assert low.done() is ages
        stop.set()
        await asyncio.gather(low, *high)
    assert num_before < most if ages else num_before >= most - 6


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pool(folder: Path) -> AsyncIterator[ModelPool]:
    pool = build_pool(
        Config(
            model=ModelConfig(model=str(folder), served_model_name="tiny"), cache=CacheConfig(num_kv_blocks=NUM_BLOCKS)
        )
    )
    await pool.start()
    yield pool
    await pool.stop(0.0)


@pytest.mark.parametrize(
    ("isolation", "hits"),
    [
        (None, {"ada": 64, "bea": 0, "cleo": 0, "nobody's": 0}),
        ("none", {"ada": 64, "bea": 64, "cleo": 64, "nobody's": 64}),
        ("tier", {"ada": 64, "bea": 64, "cleo": 0, "nobody's": 0}),
        ("key", {"ada": 64, "bea": 0, "cleo": 0, "nobody's": 0}),
    ],
)
async def test_prefixes_are_shared_as_widely_as_configured(
    site: Site, pool: ModelPool, tmp_path: Path, isolation: str | None, hits: dict[str, int]
):
    """What Ada has asked, others ask after her: cached tokens of each one's first request."""
    with KeyFile.create(tmp_path / "keys") as file:
        tiers = {"ada": "high", "bea": "high", "cleo": "low"}
        keys = {name: file.add(tier, name).text for name, tier in tiers.items()}
    config = Config(
        cache=CacheConfig() if isolation is None else CacheConfig(isolation=isolation),
        server=ServerConfig(key_file=str(tmp_path / "keys"), api_key="nobody's"),
        tiers={**default_tiers(), **TIERS},
    )
    site.serve(pool, config)
    (prompt,) = random_prompts([80], seed=len(isolation or ""))

    async def num_cached(key: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1}
        response = await site.http.post("/v1/completions", json=body, headers={"x-api-key": key})
        cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(cached, int)
        return cached

    assert await num_cached(keys["ada"]) == 0
    assert {name: await num_cached(keys.get(name, name)) for name in hits} == hits


async def test_probing_tells_nothing_of_another_key_s_prompt(site: Site, pool: ModelPool, tmp_path: Path):
    """The attack: guess a prompt block by block, and see by `cached_tokens`, or by the time to the first token, which
    guesses somebody else has sent. With the settings that a key file brings, every probe misses, and what the two
    hold are blocks of their own."""
    with KeyFile.create(tmp_path / "keys") as file:
        victim, attacker = (file.add("default", "").text for _ in range(2))
    site.serve(pool, Config(server=ServerConfig(key_file=str(tmp_path / "keys"))))
    (secret,) = random_prompts([160], seed=99)
    engine = pool.engines()[0]

    async def send(key: str, prompt: list[int]) -> int:
        body = {"prompt": prompt, "max_tokens": 1}
        answer = (await site.http.post("/v1/completions", json=body, headers={"x-api-key": key})).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    before = engine.stats()
    assert await send(victim, secret) == 0
    blocks_of_victim = engine.stats().num_cached_blocks - before.num_cached_blocks
    probes = [await send(attacker, [*secret[: 32 * size], size]) for size in range(1, 6)]
    # Later probes may find what the attacker's own earlier ones have left, and no more than that.
    assert probes == [32 * size for size in range(5)]
    assert engine.stats().num_cached_blocks - before.num_cached_blocks >= 2 * blocks_of_victim
    assert await send(victim, secret) == 128
