"""What Open Responses' own tests ask over HTTP, but for their image: plain answers, streams, system prompts, tools and
several turns. Each body and each event must be what its specification says, by the types that are made of that."""

from __future__ import annotations

import json
from typing import Any

import openresponses_types
import pytest
from openresponses_types.types import ResponseResource
from pydantic import BaseModel

from tests.api.fakes import say
from tests.api.openai.responses.test_responses import post
from tests.api.sse import bodies as event_bodies
from tests.api.worlds import World

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather somewhere.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call>'


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


EVENTS: dict[str, type[BaseModel]] = {
    str(next(iter(kind.model_fields["type"].annotation))): kind  # type: ignore[call-overload]
    for name, kind in vars(openresponses_types.types).items()
    if name.endswith("StreamingEvent")
}
"""The types of events by what they are called."""


def check(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """Of the right types as they stand: no text is taken for a number."""
    kind.model_validate_json(json.dumps(body), strict=True)


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "basic": ("Hello.", {"input": [message("user", "Say hello in exactly 3 words.")]}, "message"),
    "system": ("Ahoy.", {"input": [message("system", "You are a pirate."), message("user", "Hi.")]}, "message"),
    "tool": (CALL, {"input": [message("user", "Weather in Paris?")], "tools": [WEATHER]}, "function_call"),
    "turns": (
        "Alice.",
        {"input": [message("user", "I am Alice."), message("assistant", "Hi Alice."), message("user", "Who am I?")]},
        "message",
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_whole_answer(world: World, case: str):
    said, asks, kind = CASES[case]
    world.engine.max_model_len = 4000
    world.engine.script = say(said)
    body = (await post(world, **asks)).json()
    check(ResponseResource, body)
    assert (body["object"], body["status"], [item["type"] for item in body["output"]]) == (
        "response",
        "completed",
        [kind],
    )
    assert all(item["status"] == "completed" and item["id"] for item in body["output"])


ITEM_EVENTS = {
    "message": [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ],
    "function_call": [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ],
}


@pytest.mark.parametrize("case", CASES)
async def test_a_stream(world: World, case: str):
    said, asks, kind = CASES[case]
    world.engine.max_model_len = 4000
    world.engine.script = say(said)
    events = event_bodies((await post(world, stream=True, **asks)).text)
    names = [event["type"].removeprefix("response.") for event in events]
    distinct = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    assert distinct == ["created", "in_progress", *ITEM_EVENTS[kind], "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert all(event["output_index"] == 0 for event in events if "item_id" in event or "item" in event)
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    for event in events:
        check(EVENTS[event["type"]], event)
