"""Refusals of Anthropic's routes: always in Anthropic's shape."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from mlx_server import errors
from tests.api.worlds import ALL_ERRORS, World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATHS = ["/v1/messages", "/v1/messages/count_tokens"]
TOOL = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def answer(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [*user("Hi"), {"role": "assistant", "content": list(blocks)}]


@pytest.mark.parametrize(("error", "status", "kind", "param"), ALL_ERRORS, ids=lambda value: type(value).__name__)
async def test_an_error_has_its_status(world: World, error: errors.ServeError, status: int, kind: str, param: str):
    world.engine.refuse_with = error
    response = await world.http.post("/v1/messages", json={"max_tokens": 5, "messages": user("Hi")})
    assert response.status_code == status
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["message"] == error.message


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: "),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: "),
    ({"messages": user("")}, "messages has no content"),
    ({"messages": user(None)}, "messages[0].content: Input should be a valid string; messages[0].content: Input"),
    ({"system": 5}, "system: Input should be a valid string, got 5; system: Input should be a valid list, got 5"),
    ({"messages": user([{"type": "tool_reference", "tool_name": "f"}])}, "messages[0].content[0] is of type tool_ref"),
    ({"messages": user([IMAGE])}, "messages[0].content[0] is of type image"),
    ({"messages": user([{"type": "text", "text": 5}])}, "messages[0].content[0].text must be a string"),
    ({"messages": user([USE])}, "messages[0].content[0] is of type tool_use"),
    ({"messages": user([{"type": "tool_result", "content": "x"}])}, "messages[0].content[0].tool_use_id must be"),
    (
        {"messages": user([{"type": "tool_result", "tool_use_id": "a", "content": 5}])},
        "messages[0].content[0].content must be a string or a list",
    ),
    ({"messages": answer({**USE, "input": "x"})}, "messages[1].content[0].input must be an object"),
    ({"messages": answer(USE)}, "The last message has tool_use blocks"),
    ({"system": [IMAGE]}, "system[0] is of type image"),
    ({"tools": [{"name": ""}]}, "tools[0].name: "),
    ({"tools": [{"name": "web_search", "type": "web_search_20250305"}]}, "tools[0] is of type web_search_20250305"),
    (
        {"tools": [TOOL, {**TOOL, "name": "g", "input_schema": {"$ref": "x.json"}}], "tool_choice": {"type": "any"}},
        "tools[1].input_schema cannot be compiled: Resource 'json-schema:///x.json' is not present",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names g"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "must have the name of a tool"),
    ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, "tool_choice.type: "),
    ({"thinking": {"type": "loud"}}, "thinking.type: "),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: "),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
        "output_config.format.schema cannot be compiled",
    ),
    ({"output_format": {"type": "json_schema", "schema": {"type": "nothing"}}}, "output_format.schema cannot be"),
    ({"n": 2}, "n is not supported"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=lambda value: str(value)[:40])
async def test_what_is_wrong_is_named(world: World, body: dict[str, Any], message: str):
    response = await world.http.post("/v1/messages", json={"max_tokens": 5, "messages": user("Hi"), **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert not world.engine.requests


@pytest.mark.parametrize("limit", [None, 0, "5"])
async def test_a_limit_must_be_given(world: World, limit: Any):
    response = await world.http.post("/v1/messages", json={"max_tokens": limit, "messages": user("Hi")})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("max_tokens: ")


@pytest.mark.parametrize("path", PATHS)
async def test_every_refusal_has_the_shape(world: World, path: str):
    body = {"max_tokens": 5, "messages": user("Hi")}
    no_json = await world.http.post(path, content=b"{", headers={"content-type": "application/json"})
    no_model = await world.http.post(path, json={**body, "model": "nobody"})
    no_method = await world.http.get(path)
    world.configure_server(api_key="sesame")
    no_key = await world.http.post(path, json=body)
    found = [(r.status_code, r.json()["type"], r.json()["error"]["type"]) for r in (no_json, no_model, no_key)]
    assert found == [
        (400, "error", "invalid_request_error"),
        (404, "error", "not_found_error"),
        (401, "error", "authentication_error"),
    ]
    assert (no_method.status_code, no_method.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_the_key_opens_by_either_header(world: World):
    world.configure_server(api_key="sesame")
    keys: list[dict[str, Any]] = [{"api_key": "sesame"}, {"auth_token": "sesame"}]
    for key in keys:
        async with anthropic.AsyncAnthropic(base_url=world.url, max_retries=0, **key) as client:
            message = await client.messages.create(model="fake", max_tokens=5, messages=user("Hi"))
            assert message.content
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError, match="X-Api-Key"):
            await client.messages.create(model="fake", max_tokens=5, messages=user("Hi"))


async def test_the_client_library_knows_the_errors(world: World):
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key="x", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(model="nobody", max_tokens=5, messages=user("Hi"))
        with pytest.raises(anthropic.BadRequestError, match="too long"):
            await client.messages.create(model="fake", max_tokens=5, messages=user("Hi" * 600))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["fake", "nobody"])
async def test_every_answer_has_its_id_where_the_client_library_reads_it(world: World, path: str, model: str):
    body = {"max_tokens": 5, "messages": user("Hi"), "model": model}
    answer = await world.http.post(path, json=body, headers={"x-request-id": "mine-1"})
    assert answer.status_code == (200 if model == "fake" else 404)
    assert answer.headers.get_list("request-id") == ["mine-1"]
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key="x", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(model="fake", max_tokens=5, messages=[])
        assert refused.value.request_id == refused.value.response.headers["x-request-id"]


async def test_the_document_tells_the_shape(world: World):
    document = (await world.http.get("/openapi.json")).json()
    shapes = {}
    for path in (*PATHS, "/v1/chat/completions"):
        content = document["paths"][path]["post"]["responses"]["4XX"]["content"]["application/json"]
        schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        shapes[path] = set(schema["required"])
    assert shapes == {**{path: {"type", "error"} for path in PATHS}, "/v1/chat/completions": {"error"}}
