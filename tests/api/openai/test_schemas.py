"""Schemas over HTTP: closed on every route unless told otherwise, in every client's form; answers say what of them was
not enforced."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.api.fakes import shared_tokenizer
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORCED = '<tool_call>\n{"name": "f", "arguments": '
CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user("Hi")},
    TEXT: {"prompt": "Hi"},
    MESSAGES: {"messages": user("Hi"), "max_tokens": 50},
    RESPONSES: {"input": "Hi"},
}
FUNCTION = {"name": "f", "parameters": SCHEMA}
WAYS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, ""),
    (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}, ""),
    (CHAT, {"format": SCHEMA}, ""),
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}, FORCED),
    (TEXT, {"json_schema": SCHEMA}, ""),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, ""),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}, FORCED),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}, ""),
    (RESPONSES, {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}, FORCED),
]


def admits(world: World, text: str) -> bool:
    """Whether the last request's output may begin with `text`."""
    constraint = world.engine.requests[-1].constraint
    assert constraint is not None
    return all(constraint.accept(token) for token in shared_tokenizer().encode(text, add_special_tokens=False))


async def ask(world: World, path: str, **body: Any) -> Any:
    world.engine.max_model_len = 4000
    answer = await world.http.post(path, json={**BASES[path], **body})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize(("path", "body", "before"), WAYS)
async def test_schemas_are_closed_on_every_route(world: World, path: str, body: dict[str, Any], before: str):
    for others, is_open in (({}, False), ({"open_schemas": True}, True), ({"open_schemas": False}, False)):
        await ask(world, path, **body, **others)
        assert admits(world, before + '{"a": 1, "b"') == is_open
        await ask(world, path, **body, **others)
        assert admits(world, before + '{"a": 1}')


async def test_the_setting_opens_them_and_a_request_closes_its_own(world: World):
    world.configure_server(open_schemas=True)
    for others, is_open in (({}, True), ({"open_schemas": False}, False)):
        await ask(world, TEXT, json_schema=SCHEMA, **others)
        assert admits(world, '{"a": 1, "b"') == is_open


async def test_gbnf_is_held_to(world: World):
    await ask(world, CHAT, grammar='root ::= "yes" | "no"')
    assert admits(world, "yes")
    await ask(world, CHAT, grammar='root ::= "yes" | "no"')
    assert not admits(world, "maybe")


@pytest.mark.parametrize(
    "body",
    [
        {"grammar": "root ::= nothing"},
        {"grammar": 5},
        {"format": "poem"},
        {"format": 5},
        {"grammar": 'start: "a"', "format": "json"},
    ],
)
async def test_what_is_no_grammar_or_format_is_named(world: World, body: dict[str, Any]):
    answer = await world.http.post(CHAT, json={**BASES[CHAT], **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in body


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    toys: set[str]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    toys: set[str]


class Home(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_pydantics_unions_and_sets_are_served_and_the_answer_says_what_is_not_enforced(
    world: World, path: str, stream: bool
):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": Home.model_json_schema()}}
    answer = await ask(world, path, response_format=schema, stream=stream)
    assert answer.headers["x-schema-not-enforced"] == "uniqueItems"
    assert admits(world, '{"pet": {"kind": "dog", "toys": ["a"]}}')
    assert "x-schema-not-enforced" not in (await ask(world, path, json_schema=SCHEMA)).headers


async def test_pydantics_forms_are_parameters_of_tools(world: World):
    tool = {"type": "function", "function": {"name": "f", "parameters": Home.model_json_schema()}}
    answer = await ask(world, CHAT, tools=[tool], tool_choice="required")
    assert answer.headers["x-schema-not-enforced"] == "uniqueItems"
    assert admits(world, FORCED + '{"pet": {"kind": "cat", "toys": []}}')
