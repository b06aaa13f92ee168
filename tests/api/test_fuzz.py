"""Whatever clients send, the answer is one of the documented ones: never a 500, never a hanging request."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from mlx_server.api.admin import AbortBody
from mlx_server.api.openai.chat import ChatCompletionRequest
from mlx_server.api.openai.completions import CompletionRequest
from mlx_server.api.openai.tokenization import DetokenizeBody, TokenizeBody
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x", None]}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
NAMED_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BAD_CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, 2**64, -(2**63)),
    *("", "a", "5", "\x00", "\u2028", "é👩‍👩‍👧", "none", "auto", "required", "left", "x" * 700),
    *([], [[]], [None], [0], [1, 2, 3], [1] * 700, ["a", "b"], [{}], [[1], ["a"]], [TOOL], [BAD_CALL]),
    *({}, {"a": 1}, {"5": 1.0}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, NAMED_SCHEMA),
    *({"include_usage": True}, {"enable_thinking": False}, {"type": "function", "function": {"name": "f"}}),
    *(SCHEMA, {"regex": "a+"}, {"regex": "("}, {"choice": ["a", "b"]}, {"grammar": 'start: "a"'}),
    *(user("Hi"), user([{"type": "text", "text": 5}]), [{"role": "tool", "content": "x"}]),
    [{"role": "assistant", "tool_calls": [{"function": {}}]}],
]
ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": user("Hi")}),
    "/v1/chat/completions/render": (ChatCompletionRequest, {"messages": user("Hi")}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/completions/render": (CompletionRequest, {"prompt": "Hi"}),
    "/tokenize": (TokenizeBody, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
    "/abort_requests": (AbortBody, {}),
}
DOCUMENTED = {200, 400, 404, 501}


def random_body(chance: random.Random, fields: list[str], base: dict[str, Any]) -> dict[str, Any]:
    body = dict(base)
    for field in chance.sample(fields, k=min(len(fields), chance.choice([0, 1, 1, 2, 3, 6]))):
        body[field] = chance.choice(ODD)
    return body


@pytest.mark.parametrize("path", ROUTES)
async def test_odd_bodies_get_a_documented_answer(world: World, path: str):
    chance = random.Random(path)
    model, base = ROUTES[path]
    seen = set()
    for _ in range(150 if "completions" in path else 40):
        body = random_body(chance, list(model.model_fields), base)
        response = await world.http.post(path, json=body)
        assert response.status_code in DOCUMENTED, (body, response.text)
        check_answer(response.text, response.status_code)
        seen.add(response.status_code)
    assert {200, 400} <= seen


def check_answer(text: str, status: int) -> None:
    if status != 200:
        error = json.loads(text)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == status
        assert error["message"]
    elif text.startswith("data: "):
        assert text.endswith("data: [DONE]\n\n")
        assert '"error"' not in text


@pytest.mark.parametrize("path", ROUTES)
async def test_bodies_that_are_no_object(world: World, path: str):
    for value in ODD:
        if not isinstance(value, dict):
            response = await world.http.post(path, json=value)
            assert response.status_code == 400, value
            check_answer(response.text, 400)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize("field", ["temperature", "seed", "max_tokens", "min_p"])
async def test_numbers_that_are_none(world: World, field: str, number: str):
    content = f'{{"prompt": "Hi", "{field}": {number}}}'
    headers = {"content-type": "application/json"}
    response = await world.http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    check_answer(response.text, 400)


@pytest.mark.parametrize("number", ["1e999", "-1E+400", "1" + "0" * 400 + ".0"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages", "/api/chat"])
async def test_numbers_that_are_too_large_where_anything_may_be(world: World, path: str, number: str):
    """In a tool's schema they could not be written again, for the model or in the answer."""
    schema = f'{{"type": "object", "properties": {{"a": {{"type": "number", "default": [1, {number}]}}}}}}'
    openai = f'"function": {{"name": "f", "parameters": {schema}}}'
    tool = f'{{"type": "function", "name": "f", "parameters": {schema}, {openai}}}'
    given = '"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]'
    if path == "/v1/messages":
        tool = f'{{"name": "f", "input_schema": {schema}}}'
    if path == "/v1/responses":
        given = '"input": "Hi"'
    content = f'{{{given}, "stream": false, "tools": [{tool}]}}'
    headers = {"content-type": "application/json"}
    response = await world.http.post(path, content=content, headers=headers)
    assert response.status_code == 400, response.text
    assert "too large" in response.text
    content = content.replace(number, '"1e999 is a text"')
    assert (await world.http.post(path, content=content, headers=headers)).status_code == 200


def deep(depth: int, nest: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = nest(value)
    return value


@pytest.mark.parametrize("nest", [lambda value: [value], lambda value: {"a": value}, lambda value: {"items": value}])
@pytest.mark.parametrize(
    "field", ["guided_json", "structured_outputs", "chat_template_kwargs", "logit_bias", "tools", "stop"]
)
async def test_deeply_nested_values(world: World, field: str, nest: Callable[[Any], Any]):
    response = await world.chat(**{field: deep(900, nest)})
    assert response.status_code in DOCUMENTED
    check_answer(response.text, response.status_code)
