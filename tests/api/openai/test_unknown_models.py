"""Names of models that are not served: every protocol's errors name the nearest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from mlx_server.api.auth.key_file import KeyFile
from mlx_server.pool.catalog import model_not_found
from mlx_server.tiers import Tier
from tests.api.fakes import FakeEngine, fake_pool
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": user("Hi"), "stream": True},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": user("Hi"), "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": user("Hi")},
    "/tokenize": {"prompt": "Hi"},
}


@pytest.mark.parametrize("path", PATHS)
async def test_the_nearest_model_is_named_in_the_protocol_s_shape(world: World, path: str):
    answer = await world.http.post(path, json={**PATHS[path], "model": "org/Fakes"})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (404, "false")
    error = answer.json()["error"]
    assert error["message"] == "The model `org/Fakes` does not exist. Did you mean `fake`?"
    assert error["type"] == ("not_found_error" if "messages" in path else "NotFoundError")


@pytest.mark.parametrize("path", PATHS)
async def test_ollama_s_tag_is_known_everywhere(world: World, path: str):
    """Apps send the names that /api/tags lists to other routes, too."""
    (listed,) = (await world.http.get("/api/tags")).json()["models"]
    assert listed["name"] == "fake:latest"
    for name in (listed["name"], "alias:latest"):
        assert (await world.http.post(path, json={**PATHS[path], "model": name})).status_code == 200
        assert (await world.http.get(f"/v1/models/{name}")).json()["id"] == "fake"
    unknown = await world.http.post(path, json={**PATHS[path], "model": "fakes:latest"})
    assert (unknown.status_code, "`fakes:latest`" in unknown.text) == (404, True)


async def test_an_adapter_may_be_called_latest():
    pool = fake_pool(FakeEngine(adapters=("latest",)))
    assert pool.offer("fake:latest").adapter == "latest"
    assert pool.offer("fake:latest:latest").adapter == "latest"


async def test_stock_clients_show_it(world: World):
    with pytest.raises(openai.NotFoundError, match="Did you mean `fake`"):
        await world.openai.models.retrieve("fakee")
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key="unused", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="Did you mean `fake`"):
            await client.messages.create(model="faker", max_tokens=5, messages=user("Hi"))


async def test_what_resembles_nothing_is_sent_to_the_list(world: World):
    error = (await world.chat(model="gpt-4o")).json()["error"]
    assert error["message"] == "The model `gpt-4o` does not exist. GET /v1/models lists what is served."


async def test_a_key_is_told_of_models_that_it_may_use_only(world: World, tmp_path: Path):
    path = tmp_path / "keys.sqlite"
    with KeyFile.create(path) as file:
        world.configure_server(Tier(name="paid", models=("elsewhere",)), key_file=str(path))
        headers = {"x-api-key": file.add("paid", "").text}
        assert "GET /v1/models" in (await world.chat(model="fakes", headers=headers)).json()["error"]["message"]
        world.configure_server(Tier(name="paid", models=("elsewhere", "fake")), key_file=str(path))
        assert "`fake`?" in (await world.chat(model="fakes", headers=headers)).json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("smollm2-135m", "SmolLM2-135M-Instruct-4bit"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct-4bit"),
        ("qwen3-4b", "mlx-community/Qwen3-4B-4bit"),
        ("claude-sonnet-4-5", None),
    ],
)
async def test_makers_case_and_sizes_do_not_count(name: str, nearest: str | None):
    message = model_not_found(name, ["SmolLM2-135M-Instruct-4bit", "mlx-community/Qwen3-4B-4bit", "gemma"]).message
    assert message.endswith(f"Did you mean `{nearest}`?" if nearest else "GET /v1/models lists what is served.")
