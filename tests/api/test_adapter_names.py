"""Adapters over HTTP: names of their own beside their model's, in one engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from mlx_server.api.server import _described
from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.engine.engine import AsyncEngine
from mlx_server.pool.model_pool import ModelPool, build_pool
from mlx_server.tiers import Tier
from tests.adapter_files import plain_model, write_adapter, write_model
from tests.api.fakes import FakeEngine, fake_pool
from tests.api.worlds import Site, World, until
from tests.engine_worlds import random_prompts
from tests.tiny_models import reference_generate

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPTS = random_prompts((40, 5, 33), seed=5)
MAX_TOKENS = 6


@dataclass
class AdapterWorld:
    """A tiny model with two adapters behind the site's server; at most two requests run at a time."""

    folder: Path
    paths: dict[str | None, Path | None]
    http: httpx.AsyncClient
    pool: ModelPool

    @property
    def engine(self) -> AsyncEngine:
        return self.pool.engines()[0]

    def url(self, model: str) -> str:
        return f"/v1/models/{model}"

    async def token_ids(self, model: str, prompt: list[int]) -> list[int]:
        body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        response = await self.http.post("/v1/completions", json={**body, "return_token_ids": True})
        assert response.status_code == 200, response.text
        assert response.json()["model"].startswith("tiny")
        return list(response.json()["choices"][0]["token_ids"])

    def plain(self, adapter: str | None) -> list[list[int]]:
        model = plain_model(self.folder, self.paths[adapter])
        return [reference_generate(model, prompt, MAX_TOKENS).token_ids for prompt in PROMPTS]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tuned(site: Site, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AdapterWorld]:
    root = tmp_path_factory.mktemp("adapters")
    folder = write_model("llama", root / "base")
    terse = write_adapter(folder, root / "terse", seed=1)
    formal = write_adapter(folder, root / "v2", rank=2, num_layers=1, seed=2)
    config = Config(
        model=ModelConfig(
            model=str(folder), served_model_name="tiny", adapter=f"{terse}:formal={formal}", max_model_len=512
        ),
        cache=CacheConfig(num_kv_blocks=32),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
    )
    pool = build_pool(config)
    await pool.start()
    site.serve(pool, config)
    paths = {None: None, "terse": terse, "formal": formal}
    yield AdapterWorld(folder, paths, site.http, pool)
    await pool.stop(0.0)


async def test_models_and_adapters_are_listed_and_found(tuned: AdapterWorld):
    cards = (await tuned.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"], card["root"], card["max_model_len"]) for card in cards] == [
        ("tiny", None, str(tuned.folder), 512),
        ("tiny:terse", "tiny", str(tuned.paths["terse"]), 512),
        ("tiny:formal", "tiny", str(tuned.paths["formal"]), 512),
    ]
    for card in cards:
        assert (await tuned.http.get(tuned.url(card["id"]))).json() == card
    assert (await tuned.http.get(tuned.url(f"{tuned.folder}:formal"))).json() == cards[2]
    (model,) = (await tuned.http.get("/admin/models")).json()["models"]
    assert (model["id"], model["adapters"]) == ("tiny", ["terse", "formal"])


async def test_the_line_at_the_start_names_them(tuned: AdapterWorld):
    described = _described(tuned.pool.find(None))
    assert described.startswith("model tiny, tiny:terse, tiny:formal: context of 512 tokens")


async def test_each_name_answers_with_its_adapter(tuned: AdapterWorld):
    names = {None: "tiny", "terse": "tiny:terse", "formal": "tiny:formal"}
    steps = tuned.engine.stats().num_steps
    tasks = {
        adapter: [asyncio.create_task(tuned.token_ids(name, prompt)) for prompt in PROMPTS]
        for adapter, name in names.items()
    }
    answers = {adapter: await asyncio.gather(*some) for adapter, some in tasks.items()}
    assert answers == {adapter: tuned.plain(adapter) for adapter in names}
    assert len({str(some) for some in answers.values()}) == 3
    assert tuned.engine.stats().num_steps > steps


async def test_every_protocol_says_which_adapter_has_answered(tuned: AdapterWorld, caplog: pytest.LogCaptureFixture):
    messages = [{"role": "user", "content": "Hi"}]
    chat = {"model": "tiny:formal", "messages": messages, "max_tokens": 2}
    with caplog.at_level("INFO", "mlx_server.requests"):
        bodies = [
            ("/v1/chat/completions", chat),
            ("/v1/messages", chat),
            ("/v1/completions", {"model": "tiny:formal", "prompt": "Hi", "max_tokens": 2}),
            ("/v1/responses", {"model": "tiny:formal", "input": "Hi", "max_output_tokens": 2}),
        ]
        for path, body in bodies:
            response = await tuned.http.post(path, json=body)
            assert (response.status_code, response.json()["model"]) == (200, "tiny:formal"), response.text
    assert [record.fields["model"] for record in caplog.records] == ["tiny:formal"] * len(bodies)
    rendered = await tuned.http.post("/v1/chat/completions/render", json=chat)
    assert rendered.json()["model"] == "tiny:formal"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"])
async def test_an_unknown_adapter_is_no_model_and_the_answer_names_those_there_are(tuned: AdapterWorld, path: str):
    body = {"model": "tiny:other", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    if path == "/v1/completions":
        body = {"model": "tiny:other", "prompt": "Hi"}
    response = await tuned.http.post(path, json=body)
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["message"] == ("The model `tiny:other` does not exist. There is tiny, tiny:terse, tiny:formal.")
    assert error["type"] == ("not_found_error" if path == "/v1/messages" else "NotFoundError")
    assert (await tuned.http.get(tuned.url("tiny:other"))).status_code == 404


async def test_the_adapters_in_use_are_a_series_for_routers(tuned: AdapterWorld):
    """As vLLM names them: two run, one waits for a place."""

    async def info() -> list[str]:
        lines = (await tuned.http.get("/metrics")).text.splitlines()
        return [line.rpartition(" ")[0] for line in lines if line.startswith("vllm:lora_requests_info")]

    def labels(running: str, waiting: str) -> list[str]:
        values = f'max_lora="2",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
        return [f"vllm:lora_requests_info{{{values}}}"]

    assert await info() == labels("", "")
    streams = []
    for model in ("tiny:terse", "tiny", "tiny:formal"):
        body = {"model": model, "prompt": PROMPTS[1], "max_tokens": 480, "ignore_eos": True, "stream": True}
        request = tuned.http.build_request("POST", "/v1/completions", json=body)
        streams.append(asyncio.create_task(tuned.http.send(request)))
        await until(lambda: tuned.engine.num_streams == len(streams))
    await until(lambda: tuned.engine.stats().num_running == 2)
    assert await info() == labels("tiny:terse", "tiny:formal")
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await until(lambda: not tuned.engine.num_streams)
    assert await info() == labels("", "")


@pytest_asyncio.fixture(loop_scope="session")
async def fake(world: World) -> AsyncIterator[World]:
    """With a model that has two adapters instead of the world's own."""
    await world.pool.stop(0.0)
    world.engine = FakeEngine(adapters=("open", "closed"))
    world.pool = fake_pool(world.engine, aliases=("alias",))
    await world.pool.start()
    world.configure_server()
    yield world


async def ask(world: World, model: str | None) -> tuple[int, Any]:
    response = await world.chat(model=model)
    body = response.json()
    return response.status_code, body["model"] if response.status_code == 200 else body["error"]["message"]


async def test_the_engine_gets_the_adapter_by_every_name_of_its_model(fake: World):
    for model in ("fake:open", "alias:open", "/models/fake:open"):
        assert await ask(fake, model) == (200, "fake:open")
    for model in ("fake", "alias", "", None):
        assert await ask(fake, model) == (200, "fake")
    assert [request.adapter for request in fake.engine.requests] == ["open"] * 3 + [None] * 4


async def test_a_tier_may_use_what_it_names_and_no_other_adapter(fake: World):
    fake.configure_server(Tier(name="default", models=("alias:open",)))
    assert await ask(fake, "fake:open") == (200, "fake:open")
    cards = (await fake.http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["fake:open"]
    for model in ("fake", "fake:closed", None):
        status, message = await ask(fake, model)
        assert (status, "may not use the model `fake" in message) == (403, True)
    status, message = await ask(fake, "fake:other")
    assert (status, "closed" in json.dumps(message)) == (404, False)
    fake.configure_server(Tier(name="default", models=("fake",)))
    assert (await ask(fake, "fake"))[0] == 200
    assert (await ask(fake, "fake:open"))[0] == 403
