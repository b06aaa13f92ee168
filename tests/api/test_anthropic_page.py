"""docs/anthropic-and-responses.md and the bodies agree, field by field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlx_server.api.anthropic.messages import MessagesRequest
from mlx_server.api.openai.fields import GenerationFields
from mlx_server.api.openai.responses.request import ResponsesRequest
from tests.api.rich_worlds import ask
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = Path(__file__).parents[2] / "docs" / "anthropic-and-responses.md"
ROW = re.compile(r"^\| (?P<fields>`.+?`) \| (?P<status>honoured|tolerated|refused) \|", re.MULTILINE)
BASES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"max_tokens": 5, "messages": user("Hi")},
    "/v1/responses": {"input": "Hi"},
}
MODELS = {"/v1/messages": MessagesRequest, "/v1/responses": ResponsesRequest}
PUBLIC_NAMES = {"stop": "stop_sequences"}
ASKS = {"top_logprobs": 3, "truncation": "auto", "background": True, "mcp_servers": [{"url": "x"}]}

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
THINKING = {"type": "enabled", "budget_tokens": 5}
# For each honoured field: a value that changes what the engine is asked or what the client sees, and what else the
# request needs, in both requests that are compared.
HONOURED: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "/v1/messages": {
        "messages": (user("Ho"), {}),
        "max_tokens": (2, {}),
        "system": ("Be brief.", {}),
        "stop_sequences": (["l"], {"max_tokens": 50}),
        "tools": ([TOOL], {}),
        "tool_choice": ({"type": "any"}, {"tools": [TOOL]}),
        "thinking": (THINKING, {}),
        "output_config": ({"effort": "low"}, {}),
        "output_format": ({"type": "json_schema", "schema": SCHEMA}, {}),
    },
    "/v1/responses": {
        "input": ("Ho", {}),
        "instructions": ("Be brief.", {}),
        "previous_response_id": ("resp_x", {}),
        "store": (False, {}),
        "max_output_tokens": (2, {}),
        "tools": ([FUNCTION], {}),
        "tool_choice": ("required", {"tools": [FUNCTION]}),
        "parallel_tool_calls": (False, {}),
        "text": ({"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, {}),
        "reasoning": ({"effort": "low"}, {}),
        "metadata": ({"a": "b"}, {}),
        "user": ("me", {}),
    },
}
EVERYWHERE: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("nobody", {}),
    "stream": (True, {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "top_k": (5, {}),
    "chat_template_kwargs": ({"mood": "glad"}, {}),
}
INSIDE: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "/v1/messages": [
        ({"thinking": THINKING}, {"thinking": {**THINKING, "display": "omitted"}}),
        ({"thinking": {"type": "enabled"}}, {"thinking": THINKING}),
        ({}, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
    "/v1/responses": [],
}
"""Fields within fields that the page says are honoured: two requests that must not be the same."""


def statuses(path: str) -> dict[str, str]:
    """What the page says of each field of a route."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## POST {path}")[2].partition("\n## ")[0]
    return {field: row["status"] for row in ROW.finditer(section) for field in re.findall(r"`(\w+)`", row["fields"])}


@pytest.mark.parametrize("path", BASES)
async def test_every_field_of_its_own_is_listed(path: str):
    declared = {
        PUBLIC_NAMES.get(name, name) for name in set(MODELS[path].model_fields) - set(GenerationFields.model_fields)
    }
    listed = {field for field, status in statuses(path).items() if status != "tolerated"}
    assert declared - {"include"} <= listed
    known = {PUBLIC_NAMES.get(name, name) for name in MODELS[path].model_fields}
    assert listed <= known


@pytest.mark.parametrize("path", BASES)
async def test_refused_fields_are_refused_and_tolerated_ones_change_nothing(world: World, path: str):
    for field, status in statuses(path).items():
        world.engine.requests.clear()
        if status == "refused":
            answer = await world.http.post(path, json={**BASES[path], field: ASKS.get(field, "x")})
            assert answer.status_code == 400, field
            assert field in answer.json()["error"]["message"]
        elif status == "tolerated":
            value = ["x"] if field == "include" else {"a": "b"}
            answers = [await world.http.post(path, json=body) for body in (BASES[path], {**BASES[path], field: value})]
            assert [answer.status_code for answer in answers] == [200, 200], field
            first, second = world.engine.requests
            assert (first.prompt_token_ids, first.sampling) == (second.prompt_token_ids, second.sampling)


@pytest.mark.parametrize("path", BASES)
async def test_honoured_fields_change_something(rich_world: World, path: str):
    for field, status in statuses(path).items():
        if status == "honoured":
            value, needed = HONOURED[path].get(field) or EVERYWHERE[field]
            base = {**BASES[path], **needed}
            without = await ask(rich_world, path, base)
            assert await ask(rich_world, path, base) == without, "the comparison is not stable"
            assert await ask(rich_world, path, {**base, field: value}) != without, field
    for first, second in INSIDE[path]:
        found = [await ask(rich_world, path, {**BASES[path], "max_tokens": 500, **body}) for body in (first, second)]
        assert found[0] != found[1], second
