"""vLLM's routes for adapters, which change a server while it serves."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from mlx_server.config import CacheConfig, Config, PoolConfig, SchedulerConfig, ServerConfig
from mlx_server.engine.loading import find_content
from mlx_server.model_entries import Adapter, ModelEntry
from mlx_server.pool import pool_adapters
from mlx_server.pool.model_pool import ModelPool, build_pool
from mlx_server.pool.pooled_model import ModelState
from mlx_server.pool.room import RoomMaker
from mlx_server.tiers import Tier, default_tiers
from tests.adapter_files import plain_model, write_adapter, write_model
from tests.api.worlds import Site, until
from tests.engine_worlds import random_prompts
from tests.tiny_models import reference_generate

pytestmark = pytest.mark.asyncio(loop_scope="session")

(PROMPT,) = random_prompts((40,), seed=5)
MAX_TOKENS = 6
ALLOWED = ("small", "other", "other:mine", "one", "own", "own:mine")


@dataclass
class TwoModels:
    """Two tiny models of the same weights, the first one the default, and adapters for them on the disk."""

    folder: Path
    paths: dict[str, Path]
    http: httpx.AsyncClient
    pool: ModelPool

    async def post(self, verb: str, key: str = "admin", **body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        response = await self.http.post(f"/v1/{verb}_lora_adapter", json=body, headers=headers)
        if response.status_code == 200:
            assert response.headers["content-type"] == "text/plain; charset=utf-8"
            return 200, response.text
        return response.status_code, response.json()["error"]

    async def load(self, name: str, path: str, **more: Any) -> None:
        answer = await self.post("load", lora_name=name, lora_path=str(self.paths[path]), **more)
        assert answer == (200, f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, name: str) -> None:
        answer = await self.post("unload", lora_name=name)
        assert answer == (200, f"Success: LoRA adapter '{name}' removed successfully.")

    async def ask(self, model: str, max_tokens: int = MAX_TOKENS, key: str = "key") -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {key}"}
        return await self.http.post("/v1/completions", json={**body, "return_token_ids": True}, headers=headers)

    async def token_ids(self, model: str, max_tokens: int = MAX_TOKENS) -> list[int]:
        response = await self.ask(model, max_tokens)
        assert response.status_code == 200, response.text
        return list(response.json()["choices"][0]["token_ids"])

    def plain(self, path: str | None, max_tokens: int = MAX_TOKENS) -> list[int]:
        model = plain_model(self.folder, None if path is None else self.paths[path])
        return reference_generate(model, PROMPT, max_tokens).token_ids

    async def vectors(self, model: str) -> list[list[float]]:
        """Of more inputs than the engine takes at a time."""
        body = {"model": model, "input": random_prompts((200,) * 48)}
        response = await self.http.post("/v1/embeddings", json=body, headers={"Authorization": "Bearer key"})
        assert response.status_code == 200, response.text
        return [item["embedding"] for item in response.json()["data"]]

    async def listed(self) -> list[tuple[str, str | None, str]]:
        cards = (await self.http.get("/v1/models", headers={"Authorization": "Bearer key"})).json()["data"]
        return [(card["id"], card["parent"], card["root"]) for card in cards]


@pytest_asyncio.fixture(loop_scope="session")
async def world(site: Site, tmp_path: Path) -> AsyncIterator[TwoModels]:
    folder = write_model("llama", tmp_path / "base")
    paths = {"one": write_adapter(folder, tmp_path / "one", seed=1)}
    paths["two"] = write_adapter(folder, tmp_path / "two", rank=2, num_layers=1, seed=2)
    own = {"max_model_len": 512, "num_kv_blocks": 32}
    config = Config(
        models=tuple(
            ModelEntry(id=name, model=str(folder), overrides=own | more)
            for name, more in (("small", {}), ("other", {"pooling": "mean"}), ("small:big", {}))
        ),
        cache=CacheConfig(num_kv_blocks=32),
        pool=PoolConfig(model_folders=str(tmp_path / "found")),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        server=ServerConfig(api_key="key", admin_key="admin"),
        tiers={**default_tiers(), "default": Tier(name="default", models=ALLOWED)},
    )
    pool = build_pool(config)
    await pool.start()
    site.serve(pool, config)
    yield TwoModels(folder, paths, site.http, pool)
    await pool.stop(0.0)


async def test_an_adapter_comes_is_used_and_goes(world: TwoModels):
    plain = await world.token_ids("small")
    held = world.pool.find("small").held_bytes
    await world.load("one", "one")
    assert world.pool.find("small").held_bytes > held
    root = str(world.folder)
    mine = ("small:one", "small", str(world.paths["one"]))
    assert await world.listed() == [("small", None, root), mine, ("other", None, root)]
    for name in ("small:one", "one"):  # as this server names it, and as clients of vLLM do
        response = await world.ask(name)
        assert response.json()["model"] == "small:one"
        assert response.json()["choices"][0]["token_ids"] == world.plain("one")
    assert await world.token_ids("small") == plain == world.plain(None)
    (status, error) = await world.post("load", lora_name="one", lora_path=str(world.paths["two"]))
    assert (status, error["message"]) == (
        400,
        "The adapter small:one is loaded already; send load_inplace true to replace it.",
    )
    await world.load("small:one", "two", load_inplace=True)
    assert await world.token_ids("one") == world.plain("two") != world.plain("one")
    await world.unload("one")
    assert (await world.ask("one")).status_code == 404
    error = (await world.ask("small:one")).json()["error"]
    assert error["message"] == "The model `small:one` does not exist. Did you mean `small`?"
    await until(lambda: world.pool.find("small").held_bytes == held)
    assert (await world.post("unload", lora_name="one"))[0] == 404


async def test_it_is_its_models_own_and_comes_back_with_it(world: TwoModels):
    """The model was not loaded; then it is unloaded."""
    await world.load("other:mine", "one")
    model = world.pool.find("other")
    assert (model.state, model.num_loads) == (ModelState.READY, 1)
    assert world.pool.find("small").state is ModelState.UNLOADED
    assert (await world.ask("small:mine")).status_code == (await world.ask("mine")).status_code == 404
    assert await world.token_ids("other:mine") == world.plain("one")
    await world.pool.unload("other", 0.0)
    assert ("other:mine", "other", str(world.paths["one"])) in await world.listed()
    assert await world.token_ids("other:mine") == world.plain("one")
    assert model.num_loads == 2
    await world.pool.unload("other", 0.0)
    await world.unload("other:mine")
    assert (await world.ask("other:mine")).status_code == 404
    assert await world.token_ids("other") == world.plain(None)


async def test_a_stream_in_progress_keeps_it(world: TwoModels):
    await world.load("one", "one")
    held, num_tokens = world.pool.find("small").held_bytes, 100
    asked = asyncio.create_task(world.token_ids("one", num_tokens))
    await until(lambda: world.pool.find("small").engine.num_streams == 1)
    await world.unload("one")
    assert (await world.ask("one")).status_code == 404
    assert 'running_lora_adapters="small:one"' in (await world.http.get("/metrics")).text
    assert await asked == world.plain("one", num_tokens)
    await until(lambda: world.pool.find("small").held_bytes < held)


async def test_one_that_goes_while_its_model_is_loading_is_freed(world: TwoModels):
    await world.load("other:mine", "one")
    await world.pool.unload("other", 0.0)
    model = world.pool.find("other")
    asked = asyncio.create_task(world.token_ids("other"))
    await until(lambda: model.engine is not None)
    await world.unload("other:mine")
    assert await asked == world.plain(None)
    await until(lambda: set(model.engine._loaded_parts().loaded.adapters.keys) == {None})


async def test_one_that_goes_when_it_has_just_been_loaded_is_gone(world: TwoModels, monkeypatch: pytest.MonkeyPatch):
    await world.load("one", "one")
    pool, adapters = world.pool, world.pool.find("small").engine.adapters
    load = adapters._load

    async def load_and_go(*args: Any) -> None:
        await load(*args)
        pool.adapters.unload("one")

    monkeypatch.setattr(adapters, "_load", load_and_go)
    await world.load("one", "two", load_inplace=True)
    assert (await world.ask("small:one")).status_code == 404
    monkeypatch.undo()
    await world.load("one", "two")
    assert await world.token_ids("one") == world.plain("two")


async def test_all_vectors_of_a_request_are_of_one_adapter(world: TwoModels):
    await world.load("other:mine", "one")
    engine, expected = world.pool.find("other").engine, await world.vectors("other:mine")
    asked = asyncio.create_task(world.vectors("other:mine"))
    await until(lambda: engine.num_streams > 0)
    await world.load("other:mine", "two", load_inplace=True)
    await world.unload("other:mine")
    assert not asked.done()
    assert np.allclose(await asked, expected, atol=1e-4)
    await until(lambda: set(engine._loaded_parts().loaded.adapters.keys) == {None})


async def test_loads_do_not_wait_for_a_slow_fetch_of_another(world: TwoModels, monkeypatch: pytest.MonkeyPatch):
    fetching, fetched = threading.Event(), threading.Event()

    def fetch(adapter: Adapter) -> Adapter:
        if adapter.name == "slow":
            fetching.set()
            fetched.wait()
        return find_content(adapter)

    monkeypatch.setattr(pool_adapters, "find_content", fetch)
    slow = [asyncio.create_task(world.post("load", lora_name="slow", lora_path=str(world.paths["two"])))]
    slow.append(asyncio.create_task(world.post("load", lora_name="slow", lora_path=str(world.paths["one"]))))
    await until(fetching.is_set)
    await world.load("one", "one")
    assert await world.token_ids("one") == world.plain("one")
    fetched.set()
    assert sorted([status for status, _ in await asyncio.gather(*slow)]) == [200, 400], "they have one name"


async def test_no_room_is_made_for_what_is_there(world: TwoModels, monkeypatch: pytest.MonkeyPatch):
    await world.load("one", "one")
    monkeypatch.delattr(RoomMaker, "make_at_once")
    await world.load("one", "one", load_inplace=True)
    await world.load("again", "one")
    assert await world.token_ids("one") == world.plain("one")


async def test_a_model_whose_folder_is_gone_is_there_as_long_as_it_is_loaded(world: TwoModels):
    folder = shutil.copytree(world.folder, world.folder.parent / "found" / "own")
    await world.load("own:mine", "one")
    offers = ["own", "own:mine"]
    assert [offer.name for offer in await world.pool.offered()][-2:] == offers
    shutil.rmtree(folder)
    assert await world.token_ids("own:mine") == world.plain("one")
    await world.pool.unload("own", 0.0)
    assert not set(offers) & {offer.name for offer in await world.pool.offered()}
    for name in (*offers, "own:other"):
        assert (await world.ask(name)).status_code == 404
        status, error = await world.post("load", lora_name=f"{name}:new", lora_path=str(world.paths["two"]))
        assert status == 404
        assert error["message"].startswith(f"The model `{name}` does not exist.")
        assert "There is" not in error["message"]


async def test_an_unload_of_the_model_ends_a_load_of_an_adapter(world: TwoModels, monkeypatch: pytest.MonkeyPatch):
    await world.token_ids("small")
    engine, started = world.pool.find("small").engine, asyncio.Event()

    async def never(*_: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine.adapters, "_add", never)
    loading = asyncio.create_task(world.post("load", lora_name="one", lora_path=str(world.paths["one"])))
    await started.wait()
    await world.pool.unload("small", 0.0)
    status, error = await loading
    assert (status, error["message"]) == (503, "The model small was unloaded; load the adapter again.")
    assert await world.token_ids("small") == world.plain(None)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"lora_name": "one", "lora_path": "/nowhere"}, 404, "There is no folder /nowhere: an adapter is a folder, or"),
        ({"lora_name": "b", "lora_path": "/" + "b" * 300}, 400, "cannot be used: [Errno"),
        ({"lora_name": "b", "lora_path": "~nobody-of-that-name/b"}, 400, "the home folder ~nobody-of-that-name is"),
        ({"lora_name": "one"}, 400, "lora_path: Field required"),
        ({"lora_name": "", "lora_path": "/x"}, 400, "lora_name: String should have at least 1 character"),
        ({"lora_name": "a\nb", "lora_path": "/x"}, 400, "lora_name is 'a\\nb' and lora_path is '/x': the name must be"),
        ({"lora_name": "a/b", "lora_path": "/x"}, 400, "lora_name is 'a/b' and lora_path is '/x': the name must be"),
        ({"lora_name": "b", "lora_path": "/x:c=/y"}, 400, "a folder without `:` or an id of the hub"),
        (
            {"lora_name": "b", "lora_path": "owner/b"},
            503,
            "The adapter b: Cannot fetch owner/b from the hub, and it is",
        ),
        ({"lora_name": "nobody:b", "lora_path": "/x"}, 404, "The model `nobody` does not exist"),
        ({"lora_name": "big", "lora_path": "BASE"}, 400, "The name small:big is a model's: give the adapter another."),
        ({"lora_name": "b", "lora_path": "BASE"}, 400, "The adapter BASE has no adapter_config.json and no adapters."),
    ],
)
async def test_what_cannot_be_loaded_is_refused_with_the_reason(
    world: TwoModels, body: dict[str, str], status: int, words: str
):
    base = str(world.folder)
    got, error = await world.post("load", **{name: value.replace("BASE", base) for name, value in body.items()})
    assert got == status
    assert words.replace("BASE", base) in error["message"]
    assert [name for name, *_ in await world.listed()] == ["small", "other"]


async def test_only_admins_change_adapters_and_tiers_say_who_uses_them(world: TwoModels):
    for verb in ("load", "unload"):
        assert (await world.post(verb, "key", lora_name="one", lora_path=str(world.paths["one"])))[0] == 403
    await world.load("one", "one")
    await world.load("two", "two")
    assert (await world.ask("small:one")).status_code == 200
    assert (await world.ask("small:two")).status_code == 403
    assert [name for name, *_ in await world.listed()] == ["small", "small:one", "other"]
