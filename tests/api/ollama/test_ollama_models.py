"""Ollama's routes about models: which there are, how long they stay, and what changes them."""

from __future__ import annotations

import json
import shutil
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mlx_server.api.ollama.request import NOT_ENFORCED_HEADER
from mlx_server.config import Config, PoolConfig, ServerConfig
from mlx_server.engine.models import store
from mlx_server.errors import DownloadError
from mlx_server.runtime.models.progress import shown
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with one pulled model, `pulled`, of two quantized layers and a norm."""
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return make_model(tmp_path / "models" / "pulled").parent


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "quantization": {"bits": 4, "group_size": 32, "b": {"bits": 8, "group_size": 32}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}<think>"}))
    (folder / "LICENSE").write_text("Do as you please.")
    tensors = {
        "a.weight": ("U32", [2, 4]),  # 8 words of 8 weights
        "a.scales": ("F16", [2, 1]),
        "a.biases": ("F16", [2, 1]),
        "b.weight": ("U32", [1, 4]),  # 4 words of 4 weights, as this layer has it
        "b.scales": ("F16", [1, 1]),
        "norm.weight": ("F16", [6]),
    }
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + 64]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return folder


def serve_pulled(world: World) -> None:
    world.configure(Config(pool=PoolConfig(pulled_models=True)))
    world.pool._catalog._config = world.context.config  # the world's pool is made before its configuration


async def post(world: World, path: str, status: int = 200, **body: Any) -> Any:
    response = await world.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def delete(world: World, **body: Any) -> Any:
    return await world.http.request("DELETE", "/api/delete", json=body)


async def test_models_are_listed_with_a_tag(world: World, stored: Path):
    serve_pulled(world)
    models = (await world.http.get("/api/tags")).json()["models"]
    assert [model["name"] for model in models] == ["fake:latest", "pulled:latest"]
    (_, pulled) = models
    assert pulled["model"] == pulled["name"]
    assert pulled["size"] == sum(path.stat().st_size for path in (stored / "pulled").iterdir())
    assert pulled["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "0.0M",
        "quantization_level": "Q4",
    }
    assert pulled["capabilities"] == ["completion", "tools", "thinking"]
    assert len(pulled["digest"]) == 64
    again = (await world.http.get("/api/tags")).json()["models"][1]
    assert again == pulled
    (stored / "pulled" / "LICENSE").write_text("Do not.")
    assert (await world.http.get("/api/tags")).json()["models"][1]["digest"] != pulled["digest"]


async def test_a_model_is_described_without_being_loaded(world: World, stored: Path):
    serve_pulled(world)
    for name in ("pulled", "pulled:latest", "Pulled"):
        answer = await post(world, "/api/show", model=name)
        assert answer["model_info"] == {
            "general.architecture": "llama",
            "general.basename": "pulled",
            "general.parameter_count": 64 + 16 + 6,
            "llama.context_length": 4096,
            "llama.embedding_length": 64,
            "llama.block_count": 2,
        }
        assert (answer["template"], answer["license"]) == ("{{ messages }}<think>", "Do as you please.")
        assert answer["modelfile"] == "FROM pulled\n"
    assert await post(world, "/api/show", name="fake") == await post(world, "/api/show", model="fake")


async def test_a_broken_folder_is_listed_as_far_as_it_goes(world: World, stored: Path):
    serve_pulled(world)
    (stored / "pulled" / "config.json").write_text("{")
    card = (await world.http.get("/api/tags")).json()["models"][1]
    assert (card["name"], card["size"], card["details"]["family"]) == ("pulled:latest", 0, "")


async def test_loaded_models_tell_when_they_go(world: World):
    async def left() -> timedelta:
        (model,) = (await world.http.get("/api/ps")).json()["models"]
        assert (model["name"], model["context_length"]) == ("fake:latest", world.engine.max_model_len)
        return datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)

    assert (await world.http.get("/api/ps")).json()["models"] != []
    assert await left() > timedelta(days=10_000)


@pytest.mark.parametrize(
    ("keep_alive", "idle_s"),
    [(300, 300.0), ("5m", 300.0), ("1h30m", 5400.0), ("300", 300.0), ("1.5s", 1.5), (-1, None), ("-1m", None)],
    ids=str,
)
async def test_keep_alive_is_the_time_that_a_model_may_idle(world: World, keep_alive: Any, idle_s: float | None):
    model = world.pool.find(None)
    unpin(model)
    await post(world, "/api/chat", messages=user("Hi"), stream=False, keep_alive=keep_alive)
    assert model.idle_ttl_s == idle_s
    await post(world, "/api/chat", messages=user("Hi"), stream=False)
    assert model.idle_ttl_s == idle_s, "until another asks otherwise"
    assert (await world.http.get("/admin/models")).json()["models"][0]["idle_ttl_s"] == idle_s


def unpin(model: Any) -> None:
    from dataclasses import replace

    model.spec = replace(model.spec, is_pinned=False)


async def test_a_pinned_model_stays_until_it_is_to_go_at_once(world: World):
    model = world.pool.find(None)
    assert model.spec.is_pinned
    for keep_alive, noted in (("1s", "keep_alive"), ("5m", "keep_alive"), (-1, None), (None, None)):
        body = {"prompt": "Hi", "stream": False, "keep_alive": keep_alive}
        answer = await world.http.post("/api/generate", json=body)
        assert (answer.status_code, answer.headers.get(NOT_ENFORCED_HEADER)) == (200, noted)
        assert model.idle_ttl_s is None
    await post(world, "/api/generate", prompt="Hi", stream=False, keep_alive=0)
    assert model.idle_ttl_s == 0
    await world.pool.expire_idle()
    assert not model.is_loaded
    assert (await world.http.get("/api/ps")).json() == {"models": []}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_nothing_to_say_loads_and_unloads(world: World, path: str):
    model = world.pool.find(None)
    gone = await post(world, path, model="fake", keep_alive=0)
    assert (gone["done"], gone["done_reason"]) == (True, "unload")
    assert not model.is_loaded
    assert model.idle_ttl_s is None, "forgotten with the model"
    there = await post(world, path, model="fake")
    assert (there["done"], there["done_reason"]) == (True, "load")
    assert there.keys() == gone.keys()
    assert model.is_ready
    assert world.engine.requests == []


async def test_a_model_in_use_goes_when_it_is_idle(world: World):
    model = world.pool.find(None)
    lease = await world.pool.acquire("fake")
    await post(world, "/api/chat", model="fake", keep_alive=0)
    assert model.is_ready
    lease.end()
    await world.pool.expire_idle()
    assert not model.is_loaded


async def test_only_admins_say_how_long_a_model_stays(world: World):
    world.configure_server(api_key="secret", admin_key="admin")
    headers = {"authorization": "Bearer secret"}
    body = {"messages": user("Hi"), "stream": False, "keep_alive": 0}
    answer = await world.http.post("/api/chat", json=body, headers=headers)
    assert (answer.status_code, answer.headers[NOT_ENFORCED_HEADER]) == (200, "keep_alive")
    refused = await world.http.post("/api/chat", json={"keep_alive": 0}, headers=headers)
    assert refused.status_code == 403
    assert world.pool.find(None).idle_ttl_s is None
    assert (await world.http.post("/api/chat", json=body, headers={"x-api-key": "admin"})).status_code == 200
    assert world.pool.find(None).idle_ttl_s == 0


async def test_a_tier_sees_its_own_models_only(world: World):
    from mlx_server.tiers import Tier

    world.configure_server(Tier(models=("other",)))
    assert (await world.http.get("/api/tags")).json() == {"models": []}
    assert (await world.http.get("/api/ps")).json() == {"models": []}
    assert "may not use" in (await post(world, "/api/show", 403, model="fake"))["error"]
    assert "may not use" in (await post(world, "/api/chat", 403, model="fake", messages=user("Hi")))["error"]


# --- what changes the machine -----------------------------------------------------------------------------


async def test_a_model_that_is_here_is_pulled_at_once(world: World, stored: Path):
    serve_pulled(world)
    assert await post(world, "/api/pull", model="pulled:latest", stream=False) == {"status": "success"}
    response = await world.http.post("/api/pull", json={"model": "pulled"})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line) for line in response.text.splitlines()] == [
        {"status": "pulling manifest"},
        {"status": "success"},
    ]


async def test_a_pull_tells_how_far_it_is(world: World, stored: Path, monkeypatch: pytest.MonkeyPatch):
    serve_pulled(world)
    fetched = []

    def fetch(name: str) -> Path:
        fetched.append(name)
        with shown(name, "fetching", 100) as report:
            report(40)
            release.wait(10)
        return stored

    import threading

    release = threading.Event()
    monkeypatch.setattr(store, "resolve_model", fetch)
    parts = []
    async with world.http.stream("POST", "/api/pull", json={"name": "hf.co/owner/new:latest"}) as response:
        async for line in response.aiter_lines():
            parts.append(json.loads(line))
            if parts[-1].get("completed") == 40:
                # The second one waits for the same fetch.
                release.set()
    assert parts[0] == {"status": "pulling manifest"}
    assert parts[1]["total"] == 100
    assert parts[1]["digest"].startswith("sha256:")
    assert parts[1]["status"].startswith("pulling ")
    assert parts[-1] == {"status": "success"}
    assert fetched == ["owner/new"]


async def test_two_pulls_of_a_model_are_one_fetch(world: World, stored: Path, monkeypatch: pytest.MonkeyPatch):
    import asyncio
    import threading

    serve_pulled(world)
    release, fetched = threading.Event(), []

    def fetch(name: str) -> Path:
        fetched.append(name)
        release.wait(10)
        raise DownloadError("The connection is lost.")

    monkeypatch.setattr(store, "resolve_model", fetch)
    whole = asyncio.create_task(world.http.post("/api/pull", json={"model": "owner/new", "stream": False}))
    async with world.http.stream("POST", "/api/pull", json={"model": "owner/new"}) as response:
        read = response.aiter_lines()
        assert json.loads(await anext(read)) == {"status": "pulling manifest"}
        assert json.loads(await anext(read)).keys() == {"status", "digest"}
        release.set()
        *_, last = [json.loads(line) async for line in read]
    assert last == {"error": "The connection is lost."}
    assert ((await whole).status_code, (await whole).json()) == (503, last)
    assert fetched == ["owner/new"]
    again = await world.http.post("/api/pull", json={"model": "owner/new"})
    assert (again.status_code, len(fetched)) == (503, 2), "what fails at once has a status, and may be tried again"
    assert again.headers["retry-after"] == "5"


async def test_pulls_that_lead_nowhere_are_refused(world: World, stored: Path):
    assert "--pulled-models" in (await post(world, "/api/pull", 403, model="owner/new"))["error"]
    serve_pulled(world)
    assert "hub id" in (await post(world, "/api/pull", 404, model="llama3"))["error"]
    assert "model: Field required" in (await post(world, "/api/pull", 400))["error"]
    reason = "There is no model /models/fake: it is not a folder, not a hub id (owner/name), and not `smollm2`."
    assert await post(world, "/api/pull", 404, model="fake") == {"error": reason}, "configured, but not there"
    assert (await post(world, "/admin/models/pull", 404, model="fake"))["error"]["message"] == reason


async def test_pulled_models_can_be_deleted(world: World, stored: Path):
    serve_pulled(world)
    gone = await delete(world, model="pulled:latest")
    assert (gone.status_code, gone.content) == (200, b"")
    assert not (stored / "pulled").exists()
    assert (await delete(world, model="pulled")).status_code == 404
    refused = await delete(world, model="fake")
    assert (refused.status_code, "configuration" in refused.json()["error"]) == (403, True)


async def test_a_model_of_a_folder_is_not_deleted(world: World, stored: Path, tmp_path: Path):
    make_model(tmp_path / "folder" / "other")
    world.configure(Config(pool=PoolConfig(model_folders=str(tmp_path / "folder"))))
    world.pool._catalog._config = world.context.config
    refused = await delete(world, model="other")
    assert (refused.status_code, "folder of models" in refused.json()["error"]) == (400, True)
    assert (tmp_path / "folder" / "other").is_dir()
    shutil.rmtree(tmp_path / "folder")


@pytest.mark.parametrize("path", ["/api/copy", "/api/create", "/api/push"])
async def test_what_is_not_done_says_so(world: World, path: str):
    assert path in (await post(world, path, 501, source="fake", destination="b", model="b"))["error"]


# --- the port ---------------------------------------------------------------------------------------------


async def test_the_version_is_of_ollama(world: World):
    answer = (await world.http.get("/api/version")).json()
    assert tuple(map(int, answer["version"].split("."))) >= (0, 6, 4), "older ones are refused by some clients"
    for path in ("/api/version", "/api/tags"):
        assert (await world.http.head(path)).status_code == 200


async def test_the_root_is_ollamas_on_its_port_only(world: World):
    assert "<html" in (await world.http.get("/")).text
    head = await world.http.head("/")  # so Ollama's own client asks whether a server is there
    assert (head.status_code, head.content) == (200, b"")
    port = world.http.base_url.port
    assert port is not None
    world.configure(Config(server=ServerConfig(ollama_port=port)))
    answer = await world.http.get("/")
    assert (answer.status_code, answer.text) == (200, "Ollama is running")
    assert (await world.http.head("/")).status_code == 200
    assert "<html" in (await world.http.get("/dashboard")).text


async def test_a_port_that_is_taken_is_refused_clearly():
    from mlx_server.api.http.listener import listen_all
    from mlx_server.errors import ServeError

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"127\.0\.0\.1:{port}.*Ollama itself.*--ollama-port"):
            listen_all(ServerConfig(port=0, ollama_port=port))
