"""docs/parameters.md and the protocols of one endpoint each agree, field by field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessageParams
from anthropic.types.message_create_params import MessageCreateParamsBase as MessageParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from mlx_server.api.anthropic.messages import MessagesRequest
from mlx_server.api.llama_cpp import InfillRequest
from mlx_server.api.openai.fields import GenerationFields, Refused
from mlx_server.api.openai.responses.request import ResponsesRequest
from tests.api.fakes import say
from tests.api.rich_worlds import ask
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"
ROW = re.compile(r"^\| `(?P<field>\w+)` \| (?P<status>honoured|ignored|refused) \| ?(?P<remark>.*)\|$", re.MULTILINE)
BODIES = {"/v1/messages": MessagesRequest, "/v1/responses": ResponsesRequest, "/infill": InfillRequest}
BASES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"max_tokens": 5, "messages": user("Hi")},
    "/v1/responses": {"input": "Hi"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
}
DOCUMENTED = {
    "/v1/messages": BetaMessageParams.__annotations__ | MessageParams.__annotations__,
    "/v1/responses": ResponseParams.__annotations__,
    "/infill": dict.fromkeys(
        [
            "input_prefix",
            "input_suffix",
            "input_extra",
            "prompt",
            "n_predict",
            "n_indent",
            "t_max_predict_ms",
            "t_max_prompt_ms",
            "samplers",
            "seed",
            "cache_prompt",
            "id_slot",
            "return_tokens",
            "response_fields",
            "stop",
            "stream",
            "temperature",
        ]
    ),
}
"""The fields of each protocol's own clients; those of /infill are llama.cpp's beside the ones of completions."""

PUBLIC_NAMES = {"stop": "stop_sequences"}
ASKS = {
    "top_logprobs": 3,
    "mcp_servers": [{"url": "x"}],
    "n": 2,
    "prompt_logprobs": 2,
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "add_special_tokens"), True),
}

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
        "conversation": ("conv_x", {}),
        "truncation": ("auto", {}),
        "background": (True, {}),
        "store": (False, {}),
        "max_output_tokens": (2, {}),
        "tools": ([FUNCTION], {}),
        "tool_choice": ("required", {"tools": [FUNCTION]}),
        "parallel_tool_calls": (False, {}),
        "text": ({"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, {}),
        "reasoning": ({"effort": "low"}, {}),
        "metadata": ({"a": "b"}, {}),
        "user": ("me", {}),
        "prompt_cache_key": ("k", {}),
        "safety_identifier": ("s", {}),
        "max_tool_calls": (3, {}),
        "stream_options": ({}, {}),
        "include": (["message.output_text.logprobs"], {}),
    },
    "/infill": {
        "input_prefix": ("c", {}),
        "input_suffix": ("c", {}),
        "input_extra": ([{"text": "c"}], {}),
        "prompt": ("c", {}),
        "n_predict": (2, {}),
        "max_tokens": (2, {}),
        "n_indent": (4, {}),
        "samplers": (["infill"], {}),
        "seed": (5, {}),
        "stop": (["l"], {}),
        "return_tokens": (True, {}),
        "response_fields": (["content"], {}),
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
    "/infill": [],
}
"""Fields within fields that the page says are honoured: two requests that must not be the same."""


def statuses(path: str) -> dict[str, str]:
    """What the page says of each field of a route."""
    return {row["field"]: row["status"] for row in rows(path)}


def rows(path: str) -> list[re.Match[str]]:
    section = PAGE.read_text(encoding="utf-8").partition(f"## POST {path}\n")[2].partition("\n## ")[0]
    return list(ROW.finditer(section))


@pytest.mark.parametrize("path", BASES)
async def test_every_field_of_its_own_is_listed(path: str):
    names = PUBLIC_NAMES if path == "/v1/messages" else {}
    known = {names.get(name, name): field for name, field in BODIES[path].model_fields.items()}
    found = statuses(path)
    assert len(rows(path)) == len(found)
    listed = {field for field, status in found.items() if status != "ignored"}
    assert known.keys() - GenerationFields.model_fields.keys() <= listed <= known.keys()
    for name in listed:
        is_refused = any(isinstance(mark, Refused) for mark in known[name].metadata)
        assert found[name] == ("refused" if is_refused else "honoured"), name


@pytest.mark.parametrize("path", BASES)
async def test_every_field_that_the_protocol_documents_is_listed(path: str):
    assert set(DOCUMENTED[path]) <= statuses(path).keys()
    assert not [row["field"] for row in rows(path) if row["status"] == "ignored" and not row["remark"].strip()]


@pytest.mark.parametrize("path", BASES)
async def test_refused_fields_are_refused_and_ignored_ones_change_nothing(rich_world: World, path: str):
    world = rich_world
    for field, status in statuses(path).items():
        world.engine.requests.clear()
        if status == "refused":
            answer = await world.http.post(path, json={**BASES[path], field: ASKS.get(field, "x")})
            assert answer.status_code == 400, field
            assert field in answer.json()["error"]["message"]
        elif status == "ignored":
            bodies = BASES[path], {**BASES[path], field: {"a": "b"}}
            answers = [await world.http.post(path, json=body) for body in bodies]
            assert [answer.status_code for answer in answers] == [200, 200], field
            first, second = world.engine.requests
            assert (first.prompt_token_ids, first.sampling) == (second.prompt_token_ids, second.sampling)


@pytest.mark.parametrize("path", BASES)
async def test_honoured_fields_change_something(rich_world: World, path: str):
    if path == "/infill":
        rich_world.engine.script = say("Hello\n world\n")
    for field, status in statuses(path).items():
        if status == "honoured":
            if field == "t_max_predict_ms":
                continue  # tests/api/test_infill.py has a clock for it
            value, needed = HONOURED[path].get(field) or EVERYWHERE[field]
            base = {**BASES[path], **needed}
            without = await ask(rich_world, path, base)
            assert await ask(rich_world, path, base) == without, "the comparison is not stable"
            assert await ask(rich_world, path, {**base, field: value}) != without, field
    for first, second in INSIDE[path]:
        found = [await ask(rich_world, path, {**BASES[path], "max_tokens": 500, **body}) for body in (first, second)]
        assert found[0] != found[1], second
