"""What agents send to the Responses API: namespaces of functions, histories that began elsewhere, token counts."""

from __future__ import annotations

import json
import typing
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseInputItemParam

from mlx_server.api.openai.responses.items import KINDS, PASSED_OVER
from tests.api.fakes import say
from tests.api.openai.responses.test_responses import asked, create, post
from tests.api.sse import bodies as event_bodies
from tests.api.worlds import World

pytestmark = pytest.mark.asyncio(loop_scope="session")


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}


FILES = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files.",
    "tools": [function("read"), function("ls")],
}
CALL = '<tool_call>\n{"name": "mcp__files__read", "arguments": {"a": "x"}}\n</tool_call>'


def watch(world: World) -> list[Any]:
    """The messages and tools that templates will be given."""
    world.engine.max_model_len = 4000
    seen: list[Any] = []
    formatted = world.engine.chat.format

    def watching(messages: Any, tools: Any, *rest: Any) -> Any:
        seen.append((messages, tools))
        return formatted(messages, tools, *rest)

    world.engine.chat.format = watching  # type: ignore[method-assign]
    return seen


async def test_functions_of_a_namespace_are_called_and_given_back_with_it(world: World):
    seen = watch(world)
    world.engine.script = say(CALL)
    body = await create(world, tools=[function("plain"), FILES])
    _, tools = seen[0]
    assert [tool["function"]["name"] for tool in tools] == ["plain", "mcp__files__read", "mcp__files__ls"]
    (call,) = body["output"]
    assert (call["name"], call["namespace"], json.loads(call["arguments"])) == ("read", "mcp__files", {"a": "x"})
    assert body["tools"][1] == FILES
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "text"}
    for history in ({"input": [call, output]}, {"previous_response_id": body["id"], "input": [output]}):
        await create(world, tools=[FILES], **history)
        messages, _ = seen[-1]
        (called,) = next(message["tool_calls"] for message in messages if "tool_calls" in message)
        assert called["function"] == {"name": "mcp__files__read", "arguments": {"a": "x"}}
        assert messages[-1]["name"] == "mcp__files__read"


async def test_streamed_calls_have_the_namespace_too(world: World):
    world.engine.max_model_len = 4000
    world.engine.script = say(CALL)
    answer = await post(world, tools=[FILES], stream=True)
    events = event_bodies(answer.text)
    items = [event["item"] for event in events if event["type"].startswith("response.output_item")]
    assert [(item["name"], item["namespace"]) for item in items] == [("read", "mcp__files")] * 2
    assert next(event["name"] for event in events if event["type"].endswith("arguments.done")) == "read"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "read", "namespace": "mcp__files"},
        {"type": "function", "name": "mcp__files__read"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "read", "namespace": "mcp__files"}],
        },
    ],
)
async def test_a_function_of_a_namespace_can_be_forced(world: World, choice: Any):
    world.engine.max_model_len = 4000
    world.engine.script = say(CALL)
    await create(world, tools=[FILES], tool_choice=choice)
    assert world.engine.requests[-1].constraint is not None


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{**FILES, "tools": [{"type": "web_search", "name": "f"}]}], "tools[0].tools[0].type"),
        ([{**FILES, "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([FILES, function("mcp__files__read")], "tools"),
        ([{**FILES, "tools": [function(f"f{number}") for number in range(2049)]}], "tools"),
    ],
)
async def test_what_is_wrong_in_a_namespace_is_named(world: World, tools: Any, param: str):
    answer = await post(world, tools=tools)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_tools_of_openai_s_servers_are_left_out_beside_others(world: World, caplog: pytest.LogCaptureFixture):
    """Codex offers them in every request; alone they are refused."""
    world.engine.max_model_len = 4000
    hosted = [{"type": "web_search", "external_web_access": False}, {"type": "image_generation"}]
    search = {"type": "tool_search", "execution": "client", "parameters": {}}
    await create(world, tools=[function("f")])
    body = await create(world, tools=[*hosted, function("f"), search])
    assert [tool["type"] for tool in body["tools"]] == ["web_search", "image_generation", "function", "tool_search"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, hosted[0]]}
    await create(world, tools=[*hosted, function("f")], tool_choice=allowed)
    alone, beside, chosen = world.engine.requests
    assert beside.prompt_token_ids == chosen.prompt_token_ids == alone.prompt_token_ids
    assert "web_search" in caplog.text
    for forced in (
        {"tools": hosted},
        {"tools": [*hosted, function("f")], "tool_choice": {"type": "web_search"}},
        {"tools": [*hosted, function("f")], "tool_choice": {**allowed, "tools": hosted}},
        {"tools": [function("f"), {"type": "web"}]},
    ):
        assert (await post(world, **forced)).status_code == 400


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Do it."},
    {"type": "reasoning", "summary": [], "encrypted_content": "???"},
    {"type": "compaction", "encrypted_content": "???"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "*** Begin", "status": "completed"},
    {"type": "custom_tool_call_output", "call_id": "a", "output": "Done."},
    {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"},
    {"type": "local_shell_call_output", "call_id": "b", "output": "README"},
    {"type": "shell_call", "call_id": "c", "action": {"commands": ["pwd"]}, "status": "completed"},
    {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "/home", "stderr": ""}]},
    {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "find", "arguments": '{"q": 1}', "output": "it"},
    {"role": "assistant", "content": "All done."},
    {"role": "user", "content": "Thanks."},
]


async def test_a_history_that_began_elsewhere_is_read(world: World):
    seen = watch(world)
    await create(world, input=HISTORY)
    messages, _ = seen[0]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [
        {"name": "patch", "arguments": {"input": "*** Begin"}},
        {"name": "local_shell", "arguments": {"action": {"type": "exec", "command": ["ls"]}}},
        {"name": "shell", "arguments": {"action": {"commands": ["pwd"]}}},
        {"name": "find", "arguments": {"q": 1}},
    ]
    results = [(message["name"], message["content"]) for message in messages if message["role"] == "tool"]
    assert results == [
        ("patch", "Done."),
        ("local_shell", "README"),
        ("shell", '[{"stdout": "/home", "stderr": ""}]'),
        ("find", "it"),
    ]
    assert "?" not in json.dumps(messages)
    assert messages[-2]["content"] == "All done."


async def test_every_item_that_the_official_client_knows_is_read_or_passed_over():
    kinds = set()
    for form in typing.get_args(ResponseInputItemParam):
        (kind,) = typing.get_args(typing.get_type_hints(form)["type"])[:1] or (None,)
        kinds.add(kind if isinstance(kind, str) else "message")
    assert kinds - {"item_reference"} <= KINDS.keys() | PASSED_OVER
    assert not KINDS.keys() & PASSED_OVER


@pytest.mark.parametrize("kind", sorted(PASSED_OVER))
async def test_what_is_passed_over_leaves_no_trace(world: World, kind: str):
    item = {"type": kind, "id": "x", "role": "assistant", "tools": [1], "output": {"a": "secret"}, "result": "secret"}
    await create(world, input=[item, {"role": "user", "content": "Hi"}])
    assert asked(world) == "<|user|>Hi<|end|><|assistant|>"


async def test_input_tokens_are_those_of_the_response(world: World):
    world.engine.max_model_len = 4000
    asks: dict[str, Any] = {"input": HISTORY, "tools": [FILES], "instructions": "Be nice."}
    counted = (await world.http.post("/v1/responses/input_tokens", json=asks)).json()
    assert not world.engine.requests
    body = await create(world, **asks)
    assert counted == {"object": "response.input_tokens", "input_tokens": body["usage"]["input_tokens"]}


async def test_nothing_is_compacted(world: World):
    answer = await world.http.post("/v1/responses/compact", json={"model": "fake", "input": HISTORY})
    assert answer.status_code == 501
    assert "Ask the model for a summary" in answer.json()["error"]["message"]


NULLABLE = {
    *("completed_at", "incomplete_details", "previous_response_id", "instructions", "error", "reasoning", "user"),
    *("usage", "max_output_tokens", "max_tool_calls", "safety_identifier", "prompt_cache_key"),
}
REQUIRED = NULLABLE | {
    *("id", "object", "created_at", "status", "model", "output", "tools", "tool_choice", "truncation", "text"),
    *("parallel_tool_calls", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "store"),
    *("background", "service_tier", "metadata"),
}
"""Of the Open Responses specification's `ResponseResource`."""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_every_field_of_the_specification(world: World, stream: bool):
    asks = {"prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 3, "presence_penalty": 0.5}
    answer = await post(world, stream=stream, **asks)
    bodies = (
        [answer.json()]
        if not stream
        else [event["response"] for event in event_bodies(answer.text) if "response" in event]
        if stream
        else [answer.json()]
    )
    for body in bodies:
        Response.model_validate(body)
        assert body.keys() >= REQUIRED
        assert not [name for name in REQUIRED - NULLABLE if body[name] is None]
        assert {name: body[name] for name in asks} == asks
        assert (body["completed_at"] is not None) == (body["status"] == "completed")
    assert bodies[-1]["completed_at"] >= bodies[-1]["created_at"]


async def test_the_client_counts(world: World):
    counted = await world.openai.responses.input_tokens.count(model="fake", input="Hi")
    assert counted.input_tokens > 0
    with pytest.raises(openai.APIStatusError, match="does not compact"):
        await world.openai.responses.compact(model="fake", input="Hi")
