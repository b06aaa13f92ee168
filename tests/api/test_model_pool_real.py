"""Several tiny models behind one real server: one budget, one MLX thread, and the answers each would give alone."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from mlx_server.api.context import ServerContext
from mlx_server.api.dashboard import snapshot
from mlx_server.config import CacheConfig, Config, MemoryConfig, ModelConfig, PoolConfig, SchedulerConfig
from mlx_server.engine import parts
from mlx_server.engine.engine import EngineState
from mlx_server.engine.memory.need import estimate_need
from mlx_server.model_entries import ModelEntry
from mlx_server.outputs import SchedulerOutput
from mlx_server.pool.model_pool import ModelPool, build_pool
from mlx_server.pool.pooled_model import ModelState
from mlx_server.runtime.model_runner import ModelRunner
from tests import architectures
from tests.adapter_files import write_adapter
from tests.api.worlds import Site, until
from tests.block_drafters import drafter_config, save_drafter, their_drafter
from tests.cli.test_cli_models import READY
from tests.device_memory import active_bytes, held_bytes
from tests.drafters import draft_always
from tests.engine_worlds import built, make_folder, plain_greedy, random_prompts
from tests.tiny_models import describe_model_folder

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

ARCHITECTURES = {"a": "llama", "b": "qwen3", "c": "gemma3_text"}
PROMPTS = random_prompts([5, 40, 70, 100], seed=3)
MAX_TOKENS = 8


@dataclass
class PoolWorld:
    """A pool behind the site's server."""

    pool: ModelPool
    context: ServerContext
    http: httpx.AsyncClient

    async def complete(self, model: str, prompt: list[int], **body: Any) -> httpx.Response:
        settings = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return await self.http.post("/v1/completions", json={"model": model, "prompt": prompt, **settings, **body})

    async def token_ids(self, model: str, prompt: list[int], **body: Any) -> list[int]:
        response = await self.complete(model, prompt, **body)
        assert response.status_code == 200, response.text
        return list(response.json()["choices"][0]["token_ids"])

    async def num_cached(self, model: str, prompt: list[int]) -> int:
        usage = (await self.complete(model, prompt)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async def admin(self, verb: str, model: str) -> httpx.Response:
        return await self.http.post(f"/admin/models/{verb}", json={"model": model})

    async def states(self) -> dict[str, str]:
        models = (await self.http.get("/admin/models")).json()["models"]
        return {model["id"]: model["state"] for model in models}

    def num_loads(self) -> Counter[str]:
        return Counter({model.name: model.num_loads for model in self.pool.models()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_folder(root / name, architecture) for name, architecture in ARCHITECTURES.items()}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What each model answers to each prompt by plain mlx-lm."""
    num_tokens = [MAX_TOKENS] * len(PROMPTS)
    return {name: plain_greedy(architecture, PROMPTS, num_tokens) for name, architecture in ARCHITECTURES.items()}


def config_of(folders: dict[str, Path], num_kv_blocks: int = 48) -> Config:
    """The models, each with a KV pool of that many blocks at first."""
    return Config(
        model=ModelConfig(max_model_len=1024),
        cache=CacheConfig(num_kv_blocks=num_kv_blocks),
        memory=MemoryConfig(memory_limit="2GiB", memory_reserve="0"),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
        pool=PoolConfig(residency_s=0.5),
        models=tuple(ModelEntry(id=name, model=str(folder)) for name, folder in folders.items()),
    )


def with_room_for(num_models: int, config: Config) -> Config:
    """The largest of them fit together, and no more."""
    needs = sorted((estimate_need(config.for_model(entry)).total_bytes for entry in config.models), reverse=True)
    limit = sum(needs[:num_models]) + min(needs) // 2
    return replace(config, memory=MemoryConfig(memory_limit=str(limit), memory_reserve="0"))


@pytest_asyncio.fixture(loop_scope="session")
async def serve(site: Site) -> AsyncIterator[Any]:
    pools: list[ModelPool] = []

    async def start(config: Config) -> PoolWorld:
        pool = build_pool(config)
        pools.append(pool)
        await pool.start()
        return PoolWorld(pool, site.serve(pool, config), site.http)

    yield start
    for pool in pools:
        await pool.stop(0.0)
        assert pool.budget.held_bytes == 0


@pytest.mark.parametrize("when_full", ["wait", "fail"])
async def test_three_models_in_a_budget_for_two(
    serve: Any, folders: dict[str, Path], alone: dict[str, list[list[int]]], when_full: str
):
    config = with_room_for(2, config_of(folders, num_kv_blocks=8))  # so small that nothing can be cut off it
    world = await serve(replace(config, pool=replace(config.pool, when_full=when_full)))
    for name in "abc":  # what is kept for good, like compiled kernels, is there from now on
        await world.token_ids(name, PROMPTS[0])
        await world.admin("unload", name)
    baseline, resident = held_bytes(), psutil.Process().memory_info().rss
    loads_before = world.num_loads()
    rng = random.Random(1)
    order = [(rng.choice("abc"), rng.randrange(len(PROMPTS))) for _ in range(24)]
    at_once = asyncio.Semaphore(12)
    most_loaded = 0

    async def request(name: str, index: int) -> int:
        nonlocal most_loaded
        async with at_once:
            response = await world.complete(name, PROMPTS[index])
        most_loaded = max(most_loaded, len(world.pool.engines()))
        if response.status_code == 200:
            assert response.json()["choices"][0]["token_ids"] == alone[name][index]
        else:
            assert "in use" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) > 0
        return response.status_code

    statuses = Counter(await asyncio.gather(*(request(*one) for one in order)))
    assert sum(statuses.values()) == len(order)
    assert set(statuses) == ({200} if when_full == "wait" else {200, 503})
    assert statuses[200] >= len(order) // 4
    assert most_loaded == 2
    loads = world.num_loads() - loads_before
    assert set(loads) == {"a", "b", "c"} if when_full == "wait" else len(loads) >= 2
    assert sum(loads.values()) <= len(order)
    await until(lambda: all(model.num_users == 0 for model in world.pool.models()))
    for name in "abc":
        await world.admin("unload", name)
    assert set((await world.states()).values()) == {"unloaded"}
    assert world.pool.budget.held_bytes == 0
    assert held_bytes() <= baseline * 1.05 + 2**17
    assert psutil.Process().memory_info().rss <= resident * 1.05 + 16 * 2**20


async def test_idle_blocks_make_room_before_a_model_has_to_go(
    serve: Any, folders: dict[str, Path], alone: dict[str, list[list[int]]]
):
    world = await serve(with_room_for(2, config_of(folders)))
    for name in "abc":
        assert await world.token_ids(name, PROMPTS[3]) == alone[name][3]
    assert set((await world.states()).values()) == {"ready"}
    assert world.pool.budget.held_bytes <= world.pool.budget.limit_bytes
    for name in "abc":
        assert await world.token_ids(name, PROMPTS[2]) == alone[name][2]
    for engine in world.pool.engines():
        engine.scheduler.check_integrity()


async def test_no_prefix_is_shared_between_models_nor_with_an_earlier_load(serve: Any, folders: dict[str, Path]):
    same = dict.fromkeys(("a", "twin"), folders["a"])
    world = await serve(config_of({**same, "b": folders["b"]}))
    prompt = PROMPTS[3]
    assert await world.num_cached("a", prompt) == 0
    assert await world.num_cached("a", prompt) == 96
    assert await world.num_cached("twin", prompt) == 0
    assert await world.num_cached("b", prompt) == 0
    await world.admin("unload", "a")
    assert await world.num_cached("a", prompt) == 0


@pytest.mark.parametrize("kind", ["draft model", pytest.param("block drafter", marks=pytest.mark.full)])
async def test_a_model_and_its_drafter_come_back_as_they_were(
    serve: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """Unloaded and loaded again, with adapters and grammars: answers are those without drafts, and nothing stays."""
    draft_always(monkeypatch)
    own = drafter_config("dflash", dict(built("qwen3").config))
    drafter = folders["b"] if kind == "draft model" else save_drafter(tmp_path / "drafter", own, their_drafter(own))
    adapter = {"adapter": f"terse={write_adapter(folders['b'], tmp_path / 'terse')}"}
    overrides = {"plain": adapter, "drafted": {**adapter, "draft_model": str(drafter)}}
    models = tuple(ModelEntry(id=name, model=str(folders["b"]), overrides=more) for name, more in overrides.items())
    settings = SchedulerConfig(max_num_seqs=32, max_draft_tokens=3, speculate="model")  # all of them draft at a time
    world = await serve(replace(config_of(folders), models=models, scheduler=settings))
    likely = {"max_tokens": 30, "logit_bias": {"5": 30, "6": 30}}
    bodies = [likely, {**likely, "temperature": 0.8, "seed": 1}, {"structured_outputs": {"regex": "(ab|cd){3,9}x"}}]
    held = []
    for _ in range(3):
        answers = {
            name: await asyncio.gather(
                *(
                    world.token_ids(name + adapter, prompt, **body)
                    for adapter in ("", ":terse")
                    for prompt, body in zip(PROMPTS, bodies)
                )
            )
            for name in overrides
        }
        assert answers["drafted"] == answers["plain"]
        for engine in world.pool.engines():
            loaded = engine._loaded_parts()
            engine.scheduler.check_integrity()
            assert (loaded.draft is not None) == (engine.model_name == "drafted")
            assert loaded.draft is None or engine.stats().num_accepted_tokens > 10
            assert loaded.reset_prefix_cache(), "no request holds a block, of the drafter's neither"
        for name in overrides:
            assert (await world.admin("unload", name)).status_code == 200
        held.append(active_bytes())
    assert held[2] <= held[0] * 1.05 + 2**17
    assert world.num_loads() == {"plain": 3, "drafted": 3}


async def test_two_models_decode_at_once_as_they_would_alone(
    serve: Any, folders: dict[str, Path], alone: dict[str, list[list[int]]]
):
    world = await serve(config_of(folders))
    for name in "ab":
        await world.token_ids(name, PROMPTS[0])
    jobs = [(name, index) for index in range(len(PROMPTS)) for name in "ab"] * 2
    answering = asyncio.gather(*(world.token_ids(name, PROMPTS[index]) for name, index in jobs))
    await until(lambda: [engine.scheduler.num_running > 1 for engine in world.pool.engines()] == [True, True])
    answers = await answering
    assert answers == [alone[name][index] for name, index in jobs]
    for engine in world.pool.engines():
        engine.scheduler.check_integrity()


async def test_a_long_prompt_of_one_model_is_cut_up_while_another_decodes(
    serve: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    """Alone, the prompt takes as many tokens a step as fit; beside another's streams, as many as the aim of a step
    allows. Here a token takes 0.2 ms at least and the aim is 1 ms, so that is the least there is, a block, on however
    fast a machine."""
    launch = ModelRunner.launch

    def launch_slowly(self: ModelRunner, step: SchedulerOutput) -> Any:
        time.sleep(0.0002 * sum(chunk.num_tokens for chunk in step.chunks))
        return launch(self, step)

    monkeypatch.setattr(ModelRunner, "launch", launch_slowly)
    config = config_of({name: folders[name] for name in "ab"})
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512, target_step_ms=1.0)
    world = await serve(replace(config, scheduler=scheduler))
    (long,) = random_prompts([900])
    first, second = random_prompts([900, 900], seed=9)
    for name in "ab":
        await world.token_ids(name, PROMPTS[0])
    engine = next(engine for engine in world.pool.engines() if engine.model_name == "b")

    async def num_steps(prompt: list[int]) -> int:
        before = engine.stats().num_steps
        await world.token_ids("b", prompt, max_tokens=1)
        return engine.stats().num_steps - before

    assert await num_steps(long) <= 3
    stream = asyncio.create_task(world.complete("a", PROMPTS[0], max_tokens=900))
    other = world.pool.find("a").engine
    assert other is not None
    await until(lambda: other.num_streams == 1)
    steps_before = other.stats().num_steps
    assert await num_steps(first) > 20
    assert other.stats().num_steps - steps_before >= 20
    stream.cancel()
    await until(lambda: other.num_streams == 0)
    assert await num_steps(second) <= 3


async def test_others_decode_while_a_model_is_loaded(serve: Any, folders: dict[str, Path]):
    world = await serve(config_of({name: folders[name] for name in "ab"}))
    await world.token_ids("a", PROMPTS[0])
    engine = world.pool.find("a").engine
    assert engine is not None
    stream = asyncio.create_task(world.complete("a", PROMPTS[0], max_tokens=900))
    await until(lambda: engine.num_streams == 1)
    before = engine.stats().num_steps
    waiting = [asyncio.create_task(world.token_ids("b", PROMPTS[1])) for _ in range(5)]
    await until(lambda: world.pool.find("b").is_ready)
    assert engine.stats().num_steps - before >= 5
    assert not stream.done()
    answers = await asyncio.gather(*waiting)
    assert answers.count(answers[0]) == 5
    assert world.num_loads() == {"a": 1, "b": 1}
    stream.cancel()


READERS = ("/v1/models", "/v1/models/a", "/api/tags", "/api/ps", "/server_info", "/model_info", "/v1/loads", "/metrics")


@pytest.mark.parametrize("state", [EngineState.LOADING, EngineState.STOPPED, EngineState.DEAD])
async def test_models_are_described_while_one_is_loaded_or_freed(
    state: EngineState, serve: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    """Its engine then has no context, tokenizer or encoder that could be read."""
    world = await serve(config_of({"a": folders["a"]}))
    gate = threading.Event()
    if state is EngineState.STOPPED:
        await world.admin("load", "a")
    if state is EngineState.DEAD:
        await world.admin("load", "a")
        monkeypatch.setattr(parts, "wait_for_device", lambda: gate.wait(60))
        monkeypatch.setattr(ModelRunner, "launch", None)
        assert (await world.complete("a", PROMPTS[0])).status_code == 503
        changing = asyncio.create_task(world.admin("unload", "a"))
    else:
        world.pool._around.thread.call(lambda: gate.wait(60))
        changing = asyncio.create_task(world.admin("load" if state is EngineState.LOADING else "unload", "a"))
    try:
        await until(lambda: (engine := world.pool.find("a").engine) is not None and engine.state is state)
        for path in READERS:
            response = await world.http.get(path)
            assert response.status_code == 200, (path, response.text)
        shown = await world.http.post("/api/show", json={"model": "a"})
        assert shown.status_code == 200, shown.text
        assert (await world.http.post("/flush_cache")).json() == {"success": True}
        assert snapshot(world.pool)["models"][0]["name"] == "a"
        assert not changing.done()
    finally:
        gate.set()
    assert (await changing).status_code == 200


async def test_a_broken_model_is_distinguished_and_served_once_it_is_repaired(
    serve: Any, folders: dict[str, Path], tmp_path: Path, alone: dict[str, list[list[int]]]
):
    broken = make_folder(tmp_path / "broken", "qwen3")
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    config = config_of({"a": folders["a"], "broken": broken})
    world = await serve(replace(config, models=(*config.models,)))
    before = held_bytes()
    for response in (await world.complete("broken", PROMPTS[0]), await world.complete("broken", PROMPTS[0])):
        assert response.status_code == 503
        assert "is not loaded: " in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "30"
    anthropic = await world.http.post(
        "/v1/messages", json={"model": "broken", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    )
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (503, "overloaded_error")
    assert await world.token_ids("a", PROMPTS[1]) == alone["a"][1]
    assert await world.states() == {"a": "ready", "broken": "failed"}
    assert (await world.http.get("/health")).status_code == 200
    await world.admin("unload", "a")
    assert held_bytes() <= before * 1.05 + 1000
    weights.write_bytes(whole)
    assert (await world.admin("load", "broken")).json()["state"] == "ready"
    assert await world.token_ids("broken", PROMPTS[1]) == alone["b"][1]


async def test_what_never_fits_is_507_with_the_numbers(serve: Any, folders: dict[str, Path]):
    config = config_of({"a": folders["a"]})
    world = await serve(replace(config, memory=MemoryConfig(memory_limit="1MB", memory_reserve="0")))
    response = await world.complete("a", PROMPTS[0])
    assert (response.status_code, response.headers["x-should-retry"]) == (507, "false")
    assert "the limit is 1 MiB" in response.json()["error"]["message"]
    assert (await world.states()) == {"a": "failed"}


async def test_what_cannot_be_served_unloads_nobody(serve: Any, folders: dict[str, Path], tmp_path: Path):
    """Its configuration shows it, before room is made for it."""
    olmo = describe_model_folder(architectures.config_of("olmo"), tmp_path / "olmo")
    config = with_room_for(1, config_of({"a": folders["a"]}, num_kv_blocks=8))
    world = await serve(replace(config, models=(*config.models, ModelEntry(id="olmo", model=str(olmo)))))
    await world.token_ids("a", PROMPTS[0])
    response = await world.complete("olmo", PROMPTS[0])
    assert response.status_code == 503
    assert "needs the package ai2-olmo" in response.json()["error"]["message"]
    assert await world.states() == {"a": "ready", "olmo": "failed"}
    assert world.num_loads() == {"a": 1, "olmo": 0}


async def test_models_are_led_by_hand_and_put_to_sleep(serve: Any, folders: dict[str, Path]):
    world = await serve(config_of({name: folders[name] for name in "ab"}))
    listed = (await world.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["state"]) for card in listed] == [("a", "unloaded"), ("b", "unloaded")]
    assert (await world.http.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await world.http.get("/health")).status_code == 200
    loaded = (await world.admin("load", "b")).json()
    assert (loaded["state"], loaded["num_loads"], loaded["num_requests"]) == ("ready", 1, 0)
    assert set(loaded) >= set(READY)  # what the command line shows
    memory = (await world.http.get("/admin/models")).json()["memory"]
    assert memory["held_bytes"] == loaded["held_bytes"] > 0
    assert (await world.http.get("/is_sleeping")).json() == {"is_sleeping": False}
    slept = await world.http.post("/sleep?level=2&mode=wait")
    assert slept.json() == {"status": "sleeping", "level": 2}
    assert (await world.http.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await world.http.post("/wake_up")).json() == {"status": "awake", "tags": None}
    assert await world.states() == {"a": "ready", "b": "unloaded"}
    assert (await world.admin("load", "nope")).status_code == 404
    assert (await world.http.post("/admin/models/load", json={})).status_code == 400


async def test_unloading_by_hand_ends_what_does_not_end_in_time(serve: Any, folders: dict[str, Path]):
    world = await serve(config_of({"a": folders["a"]}))
    stream = asyncio.create_task(world.complete("a", PROMPTS[0], max_tokens=900))
    await until(lambda: world.pool.find("a").num_users == 1)
    await until(lambda: world.context.generations.num_in_progress == 1)
    gone = await world.http.post("/admin/models/unload", json={"model": "a", "drain_timeout_s": 0})
    assert gone.json()["state"] == "unloaded"
    assert (await stream).status_code == 503
    assert len(await world.token_ids("a", PROMPTS[0])) == MAX_TOKENS


async def test_all_models_drain_at_once_before_sleep(serve: Any, folders: dict[str, Path]):
    world = await serve(config_of({name: folders[name] for name in "ab"}))
    streams = [asyncio.create_task(world.complete(name, PROMPTS[0], max_tokens=900)) for name in "ab"]
    await until(lambda: world.context.generations.num_in_progress == 2)
    slept = asyncio.create_task(world.http.post("/sleep?mode=wait"))
    await until(lambda: all(world.pool.find(name).state is ModelState.DRAINING for name in "ab"))
    assert [stream.done() for stream in streams] == [False, False]
    await world.http.post("/sleep?mode=abort")
    assert (await slept).json()["status"] == "sleeping"
    assert [(await stream).status_code for stream in streams] == [503, 503]


@pytest.mark.parametrize("path", ["/admin/models/unload", "/sleep?mode=abort"])
async def test_a_drain_is_ended_sooner_by_asking_again(serve: Any, folders: dict[str, Path], path: str):
    """Until then, the server is not asleep."""
    world = await serve(config_of({"a": folders["a"]}))
    stream = asyncio.create_task(world.complete("a", PROMPTS[0], max_tokens=900))
    await until(lambda: world.context.generations.num_in_progress == 1)
    slow = world.http.post("/admin/models/unload", json={"model": "a", "drain_timeout_s": 600})
    first = asyncio.create_task(slow)
    await until(lambda: world.pool.find("a").state is ModelState.DRAINING)
    assert (await world.http.get("/is_sleeping")).json() == {"is_sleeping": False}
    gone = await world.http.post(path, json={"model": "a", "drain_timeout_s": 0} if "admin" in path else None)
    assert gone.status_code == 200
    assert (await world.http.get("/is_sleeping")).json() == {"is_sleeping": True}
    assert (await stream).status_code == 503
    assert (await first).json()["state"] == "unloaded"


@pytest.mark.parametrize("name", ["../a", "..", "/etc", "models/../../a", "a/../a", "%2e%2e/a", "~"])
async def test_a_client_cannot_name_a_path(serve: Any, folders: dict[str, Path], name: str):
    config = config_of({"a": folders["a"]})
    world = await serve(replace(config, pool=PoolConfig(model_folders=str(folders["b"].parent), pulled_models=True)))
    for asked in (name, str(folders["b"])):
        response = await world.complete(asked, PROMPTS[0])
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
        assert (await world.admin("load", asked)).status_code == 404
    assert len(await world.token_ids("b", PROMPTS[0])) == MAX_TOKENS
    assert "b" in [card["id"] for card in (await world.http.get("/v1/models")).json()["data"]]
