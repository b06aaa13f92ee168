"""Anthropic's streams: the exact events, and the client library's reading of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from mlx_server.errors import EngineDeadError
from tests.api.fakes import say
from tests.api.worlds import World, passed, until, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER: Any = {"name": "weather", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THINKING: Any = {"type": "adaptive"}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest_asyncio.fixture(loop_scope="session")
async def client(world: World) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key="unused", max_retries=0) as client:
        yield client


async def events(world: World, **body: Any) -> list[dict[str, Any]]:
    """Every event of a stream; their names, and the client's types, are checked on the way."""
    body = {"max_tokens": 300, "messages": user("Hi"), "stream": True, **body}
    response = await world.http.post("/v1/messages", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        if content["type"] not in ("ping", "error"):
            EVENT.validate_python(content)
        found.append(content)
    return found


def outline(stream: list[dict[str, Any]]) -> list[str]:
    """Types of events, deltas by their own type and block; repeated ones once."""
    names = []
    for event in stream:
        name = event["type"]
        if name == "content_block_delta":
            name = event["delta"]["type"]
        if "index" in event:
            name = f"{name} {event['index']}"
        if not names or names[-1] != name:
            names.append(name)
    return names


async def test_a_text_is_one_block(world: World):
    world.engine.num_cached_tokens = 3
    stream = await events(world)
    assert outline(stream) == [
        "message_start",
        "ping",
        "content_block_start 0",
        "text_delta 0",
        "content_block_stop 0",
        "message_delta",
        "message_stop",
    ]
    start, end = stream[0]["message"], stream[-2]
    num_prompt = len(world.engine.requests[0].prompt_token_ids)
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"] == {**end["usage"], "output_tokens": 0}
    assert stream[2]["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in stream if event["type"] == "content_block_delta") == (
        "Hello world"
    )
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == {
        "input_tokens": num_prompt - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 0},
    }


async def test_thinking_text_and_calls_are_blocks_in_order(world: World):
    world.engine.script = say("<think>Hmm.</think>Well." + CALL + CALL.replace("Rome", "Oslo"))
    stream = await events(world, tools=[WEATHER], thinking=THINKING)
    assert outline(stream) == [
        "message_start",
        "ping",
        "content_block_start 0",
        "thinking_delta 0",
        "signature_delta 0",
        "content_block_stop 0",
        "content_block_start 1",
        "text_delta 1",
        "content_block_stop 1",
        "content_block_start 2",
        "input_json_delta 2",
        "content_block_stop 2",
        "content_block_start 3",
        "input_json_delta 3",
        "content_block_stop 3",
        "message_delta",
        "message_stop",
    ]
    assert stream[-2]["delta"]["stop_reason"] == "tool_use"


async def test_an_empty_answer_has_no_block(world: World):
    world.engine.script = say("")
    assert outline(await events(world)) == ["message_start", "ping", "message_delta", "message_stop"]


async def test_hidden_thinking_leaves_nothing(world: World):
    world.engine.script = say("<think>Hmm.</think>Yes.")
    stream = await events(world)
    assert "thinking_delta 0" not in outline(stream)
    assert stream[-2]["usage"]["output_tokens_details"]["thinking_tokens"] == 6


async def test_a_stream_joins_to_the_same_message(world: World, client: anthropic.AsyncAnthropic):
    world.engine.script = say("<think>Hmm.</think>Well." + CALL)
    arguments: Any = {
        "model": "fake",
        "max_tokens": 300,
        "messages": user("Hi"),
        "tools": [WEATHER],
        "thinking": THINKING,
    }
    whole = await client.messages.create(**arguments)
    async with client.messages.stream(**arguments) as stream:
        async for _ in stream:
            pass
        joined = await stream.get_final_message()

    def stripped(message: Any) -> dict[str, Any]:
        body: dict[str, Any] = message.model_dump()
        del body["id"]
        for block in body["content"]:
            block.pop("id", None)
            block.pop("parsed_output", None)
        return body

    assert stripped(joined) == stripped(whole)
    assert [block.type for block in joined.content] == ["thinking", "text", "tool_use"]


async def test_a_stop_sequence_ends_the_stream(world: World):
    end = (await events(world, stop_sequences=["wor"]))[-2]
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "wor"}


async def test_a_silent_stream_pings(world: World):
    world.configure_server(sse_keep_alive_s=0.02)
    world.engine.num_cached_tokens = 3
    world.engine.gate.clear()
    answering = asyncio.create_task(events(world))
    await until(lambda: world.engine.open)
    await passed(0.3)
    world.engine.gate.set()
    stream = await answering
    assert [event["type"] for event in stream[:4]] == ["message_start", "ping", "ping", "ping"]
    assert stream[-1]["type"] == "message_stop"
    before, after = stream[0]["message"]["usage"], stream[-2]["usage"]
    assert (before["cache_read_input_tokens"], after["cache_read_input_tokens"]) == (0, 3)
    assert before["input_tokens"] == after["input_tokens"] + 3


async def test_pings_can_be_turned_off(world: World):
    world.configure_server(sse_keep_alive_s=0.0)
    world.engine.gate.clear()
    answering = asyncio.create_task(events(world))
    await until(lambda: world.engine.open)
    await asyncio.sleep(0.05)
    world.engine.gate.set()
    assert [event["type"] for event in await answering].count("ping") == 1


async def test_an_error_on_the_way_is_the_last_event(world: World, client: anthropic.AsyncAnthropic):
    world.engine.fail_with = EngineDeadError("The engine has died.")
    stream = await events(world)
    assert stream[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "The engine has died."}}
    assert "message_stop" not in outline(stream)
    with pytest.raises(anthropic.APIStatusError, match="has died"):
        async for _ in await client.messages.create(model="fake", max_tokens=100, messages=user("Hi"), stream=True):
            pass


async def test_an_abort_ends_the_message(world: World):
    world.engine.pause_after = 3
    answering = asyncio.create_task(events(world))
    await until(lambda: world.engine.num_paused)
    await world.http.post("/abort_requests", json={"abort_all": True})
    stream = await answering
    assert stream[-2]["delta"]["stop_reason"] == "max_tokens"
    assert outline(stream)[-3:] == ["content_block_stop 0", "message_delta", "message_stop"]


@pytest.mark.parametrize("is_paused", [True, False])
async def test_a_client_that_leaves_ends_its_request(world: World, is_paused: bool):
    if is_paused:
        world.engine.pause_after = 3
    else:
        world.configure_server(sse_keep_alive_s=0.05)
        world.engine.gate.clear()
    body = {"max_tokens": 300, "messages": user("Hi"), "stream": True}
    async with world.http.stream("POST", "/v1/messages", json=body) as response:
        lines = response.aiter_lines()  # kept: dropping the iterator would hang up at once
        await anext(lines)
        await until(lambda: world.engine.num_paused or not is_paused)
    await world.settle()
    assert len(world.engine.aborted) == 1
