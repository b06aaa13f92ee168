"""Everything around generation: models, probes, tokens, administration."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.errors import EngineDeadError
from mlx_server.pool.pooled_model import ModelState
from tests.api.fakes import NUM_BLOCKS
from tests.api.worlds import World, until, user
from tests.text_worlds import make_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_models_are_listed_and_found(world: World):
    (card,) = (await world.openai.models.list()).data
    assert (card.id, card.object) == ("fake", "model")
    assert abs(card.created - time.time()) < 60
    assert card.model_dump()["state"] == "ready"
    assert card.model_dump()["max_model_len"] == world.engine.max_model_len
    assert card.model_dump()["root"] == "/models/fake"
    assert (await world.openai.models.retrieve("fake")).id == "fake"
    assert (await world.openai.models.retrieve("alias")).id == "fake"
    assert (await world.http.get("/v1/models/")).json() == (await world.http.get("/v1/models")).json()
    assert (await world.http.get("/v1/models/a/b")).status_code == 404


async def test_a_model_that_is_not_loaded_is_listed_without_a_limit(world: World):
    await world.pool.unload("fake", 0.0)
    (card,) = (await world.http.get("/v1/models")).json()["data"]
    assert (card["max_model_len"], card["state"]) == (None, "unloaded")
    assert (await world.http.get("/health")).status_code == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_is_an_empty_200(world: World, method: str):
    response = await world.http.request(method, "/health")
    assert (response.status_code, response.content) == (200, b"")
    assert (await world.http.get("/ping")).status_code == 200
    assert (await world.http.post("/ping")).status_code == 200


async def test_health_tells_what_is_wrong(world: World):
    world.engine.die(EngineDeadError("bad luck"))
    response = await world.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "dead"})


async def test_a_model_is_in_use_until_the_answer_is_sent_or_the_client_is_gone(world: World):
    model = world.pool.find("fake")
    world.engine.gate.clear()
    whole, stream = (asyncio.create_task(world.chat(stream=stream)) for stream in (False, True))
    gone = asyncio.create_task(world.chat(stream=True))
    await until(lambda: len(world.engine.open) == 3)
    assert model.num_users == 3
    assert not model.is_idle
    gone.cancel()
    await until(lambda: model.num_users == 2)
    world.engine.gate.set()
    await asyncio.gather(whole, stream)
    await until(lambda: model.num_users == 0)
    assert (await world.http.post("/tokenize", json={"prompt": "Hi"})).status_code == 200
    await until(lambda: model.is_idle)


async def test_a_draining_server_refuses_work_and_finishes_what_it_has(world: World):
    world.engine.gate.clear()
    open_request = asyncio.create_task(world.chat())
    await until(lambda: world.engine.open)
    draining = asyncio.create_task(world.pool.stop(600.0))
    await asyncio.sleep(0)
    assert (await world.http.get("/health")).json() == {"status": "draining"}
    refused = await world.chat()
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    world.engine.gate.set()
    assert (await open_request).status_code == 200
    await draining


async def test_draining_gives_up_in_time(world: World):
    world.engine.gate.clear()
    open_request = asyncio.create_task(world.chat())
    await until(lambda: world.engine.open)
    await world.pool.stop(0.01)
    assert (await open_request).status_code == 503


@pytest.mark.parametrize("asked", ["unload", "sleep", "stop"])
async def test_requests_that_are_being_read_are_answered_before_the_model_goes(
    world: World, asked: str, monkeypatch: pytest.MonkeyPatch
):
    is_formatting, may_go_on = world.hold_formatting(monkeypatch)
    reading = asyncio.create_task(world.chat())
    await until(is_formatting.is_set)
    if asked == "unload":
        going = asyncio.create_task(world.http.post("/admin/models/unload", json={"model": "fake"}))
    elif asked == "sleep":
        going = asyncio.create_task(world.http.post("/sleep?mode=wait"))
    else:
        going = asyncio.create_task(world.pool.stop(600.0))
    await until(lambda: world.pool.find("fake").state is ModelState.DRAINING)
    may_go_on.set()
    assert (await reading).status_code == 200
    await going
    assert world.pool.find("fake").is_down


async def test_the_load_is_what_is_in_progress(world: World):
    world.engine.gate.clear()
    requests = [asyncio.create_task(world.chat(n=2)) for _ in range(3)]
    await until(lambda: len(world.engine.open) == 6)
    assert (await world.http.get("/load")).json() == {"server_load": 3}
    (load,) = (await world.http.get("/v1/loads?include=core")).json()["loads"]
    assert load["num_running_reqs"] == 6
    assert load["num_used_tokens"] == 6 * 32
    assert load["max_total_num_tokens"] == NUM_BLOCKS * 32
    assert load["token_usage"] == 0.06
    assert load["utilization"] == round(6 / load["max_running_requests"], 4)
    world.engine.gate.set()
    await asyncio.gather(*requests)


@pytest.mark.parametrize("prefix", ["", "get_"])
async def test_what_routers_ask_of_a_worker(world: World, prefix: str):
    info = (await world.http.get(f"/{prefix}server_info")).json()
    assert (info["model_path"], info["served_model_name"]) == ("/models/fake", "fake")
    assert (info["tp_size"], info["dp_size"]) == (1, 1)
    assert info["vllm_config"] == {
        "model_config": {"model": "/models/fake"},
        "cache_config": {"block_size": 32, "num_gpu_blocks": NUM_BLOCKS},
    }
    model = (await world.http.get(f"/{prefix}model_info")).json()
    assert (model["model_path"], model["is_generation"]) == ("/models/fake", True)
    assert (await world.http.get("/version")).json() == {"version": info["version"]}


async def test_text_becomes_tokens_and_text_again(world: World):
    tokens = (await world.http.post("/tokenize", json={"prompt": "hello world", "return_token_strs": True})).json()
    ids = world.engine.tokenizer.encode("hello world")
    assert tokens == {"count": 2, "max_model_len": 512, "tokens": ids, "token_strs": ["hello", "Ġworld"]}
    text = (await world.http.post("/detokenize", json={"tokens": ids})).json()
    assert text == {"prompt": "hello world", "text": "hello world"}
    assert (await world.http.post("/v1/tokenize", json={"prompt": "a"})).json()["token_strs"] is None


async def test_a_chat_s_tokens_are_those_that_it_is_answered_from(world: World):
    tokens = (await world.http.post("/tokenize", json={"messages": user("Hi")})).json()["tokens"]
    rendered = (await world.http.post("/v1/chat/completions/render", json={"messages": user("Hi")})).json()
    await world.chat()
    assert tokens == rendered["token_ids"] == list(world.engine.requests[0].prompt_token_ids)


async def test_what_changes_a_chat_s_prompt_changes_its_tokens(world: World):
    template = "{{ reasoning_effort }}|{{ documents }}|{{ mood }}|{{ messages[0].content }}"
    world.engine.tokenizer = make_tokenizer(chat_template=template)
    world.engine.chat = ChatFormatter(world.engine.tokenizer)
    body = {
        "messages": user("Hi"),
        "reasoning_effort": "low",
        "documents": [{"text": "x"}],
        "chat_template_kwargs": {"mood": "glad"},
    }
    tokens = (await world.http.post("/tokenize", json=body)).json()["tokens"]
    assert world.engine.tokenizer.decode(tokens) == "low|[{'text': 'x'}]|glad|Hi"
    await world.chat(**body)
    assert tokens == list(world.engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": user("b")}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": user("b"), "chat_template": "x"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "a"}),
        ("/abort_requests", {}),
    ],
)
async def test_what_these_routes_refuse(world: World, path: str, body: dict[str, Any]):
    response = await world.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"]


async def test_rendering_works_while_the_engine_is_full(world: World):
    world.engine.max_open = 0
    body = {"prompt": ["Hi", [5, 6]], "max_tokens": 9, "temperature": 0.5, "cache_salt": "s"}
    first, second = (await world.http.post("/v1/completions/render", json=body)).json()
    assert first["token_ids"] == world.engine.tokenizer.encode("Hi")
    assert second["token_ids"] == [5, 6]
    assert (first["model"], first["features"], first["cache_salt"]) == ("fake", None, "s")
    assert first["sampling_params"]["max_tokens"] == 9
    assert first["sampling_params"]["temperature"] == 0.5
    assert "is_scoring" not in first["sampling_params"]
    assert (await world.complete()).status_code == 503


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/reset_prefix_cache"), ("POST", "/flush_cache"), ("GET", "/flush_cache")]
)
async def test_the_prefix_cache_is_reset_unless_it_is_in_use(world: World, method: str, path: str):
    assert (await world.http.request(method, path)).json() == {"success": True}
    world.engine.is_cache_busy = True
    assert (await world.http.request(method, path)).json() == {"success": False}
    assert world.engine.num_resets == 2


@pytest.mark.parametrize(
    "body",
    [{"request_ids": ["one"]}, {"request_ids": ["chatcmpl-one", "none"]}, {"rid": "one"}],
)
async def test_a_request_can_be_aborted_by_its_id(world: World, body: dict[str, Any]):
    world.engine.pause_after = 2
    first = asyncio.create_task(world.chat(request_id="one", stream_options=None))
    second = asyncio.create_task(world.chat(request_id="two"))
    await until(lambda: world.engine.num_paused == 2)
    assert (await world.http.post("/abort_requests", json=body)).json() == {"aborted": 1}
    answer = (await first).json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["choices"][0]["message"]["content"] == "He"
    assert answer["usage"]["completion_tokens"] == 2
    world.engine.resume()
    assert (await second).json()["choices"][0]["message"]["content"] == "Hello world"


async def test_all_requests_can_be_aborted(world: World):
    world.engine.gate.clear()
    requests = [asyncio.create_task(world.chat(stream=True)) for _ in range(3)]
    await until(lambda: len(world.engine.open) == 3)
    assert (await world.http.post("/abort_request", json={"abort_all": True})).json() == {"aborted": 3}
    for response in await asyncio.gather(*requests):
        assert '"finish_reason":"abort"' in response.text


async def test_the_document_describes_every_route(world: World):
    document = (await world.http.get("/openapi.json")).json()
    assert "/v1/chat/completions" in document["paths"]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert {"4XX", "5XX"} <= operation["responses"].keys(), path
            assert "422" not in operation["responses"], path
