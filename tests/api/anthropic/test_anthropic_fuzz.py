"""Odd bodies for the Messages and Responses routes: never a 500, always the documented shape of errors."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlx_server.api.anthropic.messages import CountTokensRequest, MessagesRequest
from mlx_server.api.openai.responses.request import ResponsesRequest
from tests.api.test_fuzz import ODD, random_body
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/messages": (MessagesRequest, {"max_tokens": 50, "messages": user("Hi")}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": user("Hi")}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
}
KINDS: list[Any] = [None, 5, [], {}, "x", "text", "image", "document", "thinking", "tool_use", "tool_result"]
ITEM_KINDS = ["message", "reasoning", "function_call", "function_call_output", "output_text", "input_text", "refusal"]
FIELDS = ["text", "thinking", "id", "name", "input", "content", "source", "tool_use_id", "is_error", "cache_control"]
ITEM_FIELDS = ["role", "content", "summary", "call_id", "name", "arguments", "output", "text", "id", "status"]


def odd_piece(chance: random.Random) -> dict[str, Any]:
    """A block or an item with some fields of any kind of them."""
    fields = chance.sample([*FIELDS, *ITEM_FIELDS], k=chance.choice([0, 2, 6, 12]))
    piece = {field: chance.choice([*ODD, "user", [{"type": "text", "text": "a"}]]) for field in fields}
    return {"type": chance.choice([*KINDS, *ITEM_KINDS]), **piece}


def check_error(path: str, answer: dict[str, Any]) -> None:
    keys = {"type", "message"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
    assert answer["error"].keys() == keys
    assert answer["error"]["message"]


@pytest.mark.parametrize("path", ROUTES)
async def test_odd_bodies(world: World, path: str):
    chance = random.Random(path)
    model, base = ROUTES[path]
    aliases = {"json_schema": "schema", "truncation_strategy": "truncation"}
    fields = [aliases.get(name, name) for name in model.model_fields]
    seen = set()
    for _ in range(50):
        body = random_body(chance, fields, base)
        response = await world.http.post(path, json=body)
        assert response.status_code in {200, 400, 404, 501}, (body, response.text)
        if response.status_code != 200:
            check_error(path, response.json())
        else:
            assert "InternalServerError" not in response.text
            assert "event: error" not in response.text
        seen.add(response.status_code)
    assert {200, 400} <= seen


@pytest.mark.parametrize("path", ROUTES)
async def test_odd_conversations(world: World, path: str):
    chance = random.Random(path)
    seen = set()
    for _ in range(100):
        pieces = [odd_piece(chance) for _ in range(chance.choice([1, 2, 3]))]
        role = chance.choice(["user", "assistant", "system"])
        message = {"role": role, "content": pieces}
        body = {"input": [*pieces, message]} if path == "/v1/responses" else {"messages": [message]}
        response = await world.http.post(path, json={"max_tokens": 5, **body})
        assert response.status_code in {200, 400, 501}, (body, response.text)
        if response.status_code != 200:
            check_error(path, response.json())
        seen.add(response.status_code)
    assert 400 in seen
