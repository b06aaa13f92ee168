"""Streams of the Responses API: the exact events, and the client library's reading of them."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from pydantic_core import to_json

from mlx_server.api.http import sse, text_turns
from mlx_server.api.openai import exchange
from mlx_server.api.openai.responses import output, store
from mlx_server.errors import EngineDeadError
from tests.api.fakes import say
from tests.api.worlds import World, passed, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def events(world: World, **body: Any) -> list[dict[str, Any]]:
    """Every event of a stream; their names, numbers, and the client's types, are checked on the way."""
    response = await world.http.post("/v1/responses", json={"input": "Hi", "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for number, event in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        assert content["sequence_number"] == number
        EVENT.validate_python(content)
        found.append(content)
    return found


async def watch(world: World, started: asyncio.Future[str]) -> list[dict[str, Any]]:
    """The events of a stream; `started` gets the response's id with the first of them."""
    found = []
    async with world.http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if not started.done():
                    started.set_result(found[0]["response"]["id"])
    return found


def outline(stream: list[dict[str, Any]]) -> list[str]:
    """Types of events with the item they are about; repeated ones once."""
    names: list[str] = []
    for event in stream:
        name = event["type"].removeprefix("response.")
        if "output_index" in event:
            name = f"{name} {event['output_index']}"
        if not names or names[-1] != name:
            names.append(name)
    return names


TEXT = [
    "output_item.added 0",
    "content_part.added 0",
    "output_text.delta 0",
    "output_text.done 0",
    "content_part.done 0",
    "output_item.done 0",
]


async def test_a_text_is_one_item(world: World):
    stream = await events(world)
    assert outline(stream) == ["created", "in_progress", *TEXT, "completed"]
    created, last = stream[0]["response"], stream[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert "".join(event.get("delta", "") for event in stream) == "Hello world"
    (done,) = [event for event in stream if event["type"] == "response.output_text.done"]
    assert done["text"] == "Hello world"
    assert [event["item"] for event in stream if event["type"] == "response.output_item.done"] == last["output"]
    assert (last["status"], last["usage"]["output_tokens"]) == ("completed", 7)
    assert len({event["item_id"] for event in stream if "item_id" in event}) == 1


async def test_reasoning_text_and_calls_are_items_in_order(world: World):
    world.engine.script = say("<think>Hmm.</think>Well." + CALL + CALL.replace("Rome", "Oslo"))
    stream = await events(world, tools=[WEATHER])
    reasoning = [line.replace("output_text", "reasoning_text") for line in TEXT]
    calls = [
        [
            f"output_item.added {index}",
            f"function_call_arguments.delta {index}",
            f"function_call_arguments.done {index}",
            f"output_item.done {index}",
        ]
        for index in (2, 3)
    ]
    text = [line.replace("0", "1") for line in TEXT]
    assert outline(stream) == ["created", "in_progress", *reasoning, *text, *calls[0], *calls[1], "completed"]
    output = stream[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [json.loads(item["arguments"])["city"] for item in output[2:]] == ["Rome", "Oslo"]


async def test_reasoning_stands_in_the_summary_for_clients_that_ask_for_one(world: World):
    world.engine.script = say("<think>Hmm.</think>Well.")
    stream = await events(world, reasoning={"summary": "auto"})
    summary = [
        line.replace("output_text", "reasoning_summary_text").replace("content_part", "reasoning_summary_part")
        for line in TEXT
    ]
    text = [line.replace("0", "1") for line in TEXT]
    assert outline(stream) == ["created", "in_progress", *summary, *text, "completed"]
    deltas = [event["delta"] for event in stream if event["type"] == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "Hmm."
    last = stream[-1]["response"]
    reasoning = last["output"][0]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Hmm."}]
    assert "content" not in reasoning, "clients that show both would show it twice"
    assert last["reasoning"]["summary"] == "auto"
    whole = (await world.http.post("/v1/responses", json={"input": "Hi", "reasoning": {"summary": "auto"}})).json()
    assert whole["output"][0]["summary"] == reasoning["summary"]


async def test_a_stream_joins_to_the_same_response(world: World):
    world.engine.script = say("<think>Hmm.</think>Well." + CALL)
    whole = await world.openai.responses.create(model="fake", input="Hi", tools=[WEATHER])
    async with world.openai.responses.stream(model="fake", input="Hi", tools=[WEATHER]) as stream:
        async for _ in stream:
            pass
        joined = await stream.get_final_response()

    def stripped(response: Any) -> list[dict[str, Any]]:
        changing = {"id", "call_id", "parsed_arguments"}
        items = [item.model_dump(exclude=changing) for item in response.output]
        for item in items:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return items

    assert stripped(joined) == stripped(whole)
    assert joined.status == "completed"
    assert await world.openai.responses.retrieve(joined.id)


@pytest.mark.parametrize("stream", [True, False])
async def test_what_answers_repeat_is_not_encoded_on_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    """A megabyte of tools takes 8 ms, in which all streams would stand still."""
    sizes: list[int] = []

    def watched(*args: Any, **options: Any) -> bytes:
        encoded = to_json(*args, **options)
        if threading.current_thread() is threading.main_thread():
            sizes.append(len(encoded))
        return encoded

    for module in (exchange, output, sse, store, text_turns):
        monkeypatch.setattr(module, "to_json", watched)
    world.engine.max_model_len = 20_000
    tools = [{**WEATHER, "description": "é\u2028" * 2000}]
    answer = await world.http.post("/v1/responses", json={"input": "Hi", "stream": stream, "tools": tools})
    assert answer.text.count("é") >= 2000 * (3 if stream else 1)
    if stream:
        assert len(answer.text.splitlines()) == answer.text.count("\n"), "clients of SSE end lines where Unicode does"
    assert sizes
    assert max(sizes) < 2000


async def test_an_empty_answer_has_no_item(world: World):
    world.engine.script = say("")
    assert outline(await events(world)) == ["created", "in_progress", "completed"]


async def test_the_limit_ends_the_stream_as_incomplete(world: World):
    last = (await events(world, max_output_tokens=2))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


async def test_an_error_on_the_way_fails_the_response(world: World):
    world.engine.fail_with = EngineDeadError("The engine has died.")
    last = (await events(world))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "The engine has died."}
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
    kept = await world.openai.responses.retrieve(last["response"]["id"])
    assert (kept.status, kept.output_text) == ("failed", "H")


async def test_a_silent_stream_is_kept_alive(world: World):
    world.configure_server(sse_keep_alive_s=0.02)
    world.engine.gate.clear()
    body = {"input": "Hi", "stream": True}
    answering = asyncio.create_task(world.http.post("/v1/responses", json=body))
    await until(lambda: world.engine.open)
    await passed(0.3)
    world.engine.gate.set()
    assert (await answering).text.count(": keep-alive\n\n") >= 2


async def test_a_stream_can_be_cancelled(world: World):
    world.engine.pause_after = 3
    started: asyncio.Future[str] = asyncio.Future()
    answering = asyncio.create_task(watch(world, started))
    response_id = await started
    await until(lambda: world.engine.num_paused)
    assert (await world.openai.responses.retrieve(response_id)).status == "in_progress"
    refused = await world.http.post("/v1/responses", json={"input": "Hi", "previous_response_id": response_id})
    assert "still in progress" in refused.text
    assert (await world.openai.responses.cancel(response_id)).status == "cancelled"
    last = (await answering)[-1]
    assert last["response"]["status"] == "cancelled"
    assert last["response"]["output"][0]["status"] == "incomplete"
    kept = await world.openai.responses.cancel(response_id)
    assert (kept.status, kept.output[0].type) == ("cancelled", "message")


async def test_a_client_that_leaves_cancels_its_response(world: World):
    world.configure_server(sse_keep_alive_s=0.05)
    world.engine.gate.clear()
    async with world.http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                response_id = json.loads(line.removeprefix("data: "))["response"]["id"]
                break
    await world.settle()
    assert len(world.engine.aborted) == 1
    assert (await world.openai.responses.retrieve(response_id)).status == "cancelled"


async def test_what_was_written_for_a_client_that_leaves_is_kept(world: World):
    world.engine.script = say("<think>Hmm.</think>Well then.")
    world.engine.pause_after = len(world.engine.tokenizer.encode("<think>Hmm.</think>Well t", add_special_tokens=False))
    async with world.http.stream("POST", "/v1/responses", json={"input": "Hi", "stream": True}) as response:
        async for line in response.aiter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if event.get("type") == "response.created":
                response_id = event["response"]["id"]
            if event.get("type") == "response.output_text.delta":
                break
    await world.settle()
    kept = await world.openai.responses.retrieve(response_id)
    assert [(item.type, item.status) for item in kept.output] == [("reasoning", "completed"), ("message", "incomplete")]
    assert kept.output_text
    assert "Well then.".startswith(kept.output_text)


async def test_a_stream_that_was_deleted_stays_so(world: World):
    world.engine.pause_after = 3
    started: asyncio.Future[str] = asyncio.Future()
    answering = asyncio.create_task(watch(world, started))
    response_id = await started
    await until(lambda: world.engine.num_paused)
    await world.openai.responses.delete(response_id)
    world.engine.resume()
    assert (await answering)[-1]["response"]["status"] == "completed"
    assert (await world.http.get(f"/v1/responses/{response_id}")).status_code == 404
