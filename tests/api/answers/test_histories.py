"""Histories of agents on a model that reads text only: what tools have returned that is no text, and tools that ran on
the server where the history began. No such turn may end a session."""

from __future__ import annotations

import json
import logging
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types import ContentBlockParam
from anthropic.types.beta import BetaContentBlockParam

from mlx_server.api.anthropic.conversation import PASSED_OVER
from mlx_server.engine.text import messages as media
from tests.api.answers.test_media_parts import CHAT, IMAGE, OTHER_SERVERS, PDF, PNG, RESPONSES, TEXT
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
MEDIA = {
    **dict.fromkeys(("image_url", "input_image", "image", "computer_screenshot"), "image"),
    **dict.fromkeys(("input_audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file"), "file"),
}


def note(medium: str) -> str:
    return f"[{medium} omitted: this model reads text only]"


async def read(world: World, path: str, body: dict[str, Any]) -> str:
    """The prompt that the engine got."""
    world.engine.max_model_len = 4000
    response = await world.http.post(path, json=body)
    assert response.status_code == 200, response.text
    prompt = world.engine.requests[-1].prompt_token_ids
    return world.engine.tokenizer.decode(prompt, skip_special_tokens=False)


@pytest.mark.parametrize("kind", [*CHAT, *OTHER_SERVERS])
@pytest.mark.parametrize("role", ["tool", "assistant"])
async def test_chats_go_on_behind_a_tools_image(world: World, kind: str, role: str):
    part = {"type": kind, **CHAT.get(kind, {kind: PNG})}
    called = {"role": "assistant", "tool_calls": [CALL]}
    result = {"role": role, "tool_call_id": "c", "content": [TEXT, part]}
    prompt = await read(world, "/v1/chat/completions", {"messages": [*user("Look."), called, result, *user("So?")]})
    assert f"What is this?\n{note(MEDIA[kind])}" in prompt
    assert "base64" not in prompt


@pytest.mark.parametrize("kind", [*RESPONSES, *OTHER_SERVERS])
@pytest.mark.parametrize("item", ["function_call", "custom_tool_call"])
async def test_responses_go_on_behind_a_tools_image(world: World, kind: str, item: str):
    part = {"type": kind, **RESPONSES.get(kind, {kind: PNG})}
    call = {"type": item, "call_id": "c", "name": "look", "arguments": "{}", "input": "x"}
    output = {"type": f"{item}_output", "call_id": "c", "output": [{"type": "input_text", "text": "It:"}, part]}
    first = await world.http.post("/v1/responses", json={"input": [*user("Look."), call, output]})
    assert first.status_code == 200, first.text
    asks = {"input": "So?", "previous_response_id": first.json()["id"]}
    prompt = await read(world, "/v1/responses", asks)
    assert f"It:\n{note(MEDIA[kind])}" in prompt
    assert "base64" not in prompt


USE = {"type": "tool_use", "id": "a", "name": "Read", "input": {}}


@pytest.mark.parametrize(
    ("result", "beside", "shown"),
    [
        ([TEXT, IMAGE], [], f"What is this?\n{note('image')}"),
        ([IMAGE, IMAGE], [], f"{note('image')}\n{note('image')}"),
        ([PDF], [], note("document")),
        ([{"type": "document", "source": {"type": "content", "content": [TEXT, IMAGE]}}], [], note("image")),
        ([{"type": "document", "source": {"type": "text", "data": "All."}}], [], "All."),
        ("PDF file read", [PDF], note("document")),  # where Claude Code puts the file itself
        ([], [IMAGE], note("image")),
    ],
)
async def test_messages_go_on_behind_a_tools_image(world: World, result: Any, beside: list[Any], shown: str):
    block = {"type": "tool_result", "tool_use_id": "a", "content": result}
    messages = [*user("Look."), {"role": "assistant", "content": [USE]}, *user([block, *beside])]
    asks = {"max_tokens": 5, "messages": messages}
    assert shown in await read(world, "/v1/messages", asks)
    counted = await world.http.post("/v1/messages/count_tokens", json=asks)
    assert counted.json()["input_tokens"] == len(world.engine.requests[-1].prompt_token_ids)


async def test_an_image_of_the_users_is_refused_beside_a_tools(world: World):
    block = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
    messages = [*user("Look."), {"role": "assistant", "content": [USE]}, *user([block]), *user([TEXT, IMAGE])]
    response = await world.http.post("/v1/messages", json={"max_tokens": 5, "messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("messages[3].content[1] is of type image")


async def test_the_log_says_it_once_for_each_medium(world: World, caplog: pytest.LogCaptureFixture):
    media._noted.cache_clear()
    file = {"type": "file", **CHAT["file"]}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url"}, {"type": "image_url"}, file]}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await world.chat(messages=[*user("Hi"), {"role": "assistant", "tool_calls": [CALL]}, result])
    assert [record.args[0] for record in caplog.records if record.name == media.__name__] == ["image", "file"]  # type: ignore[index]


SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "rain"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "s1",
    "content": [{"type": "web_search_result", "title": "Rain", "url": "http://x", "encrypted_content": "SECRET"}],
}
FETCHED = {
    "type": "web_fetch_tool_result",
    "tool_use_id": "s2",
    "content": {"type": "web_fetch_result", "url": "http://y", "content": PDF},
}
MCP = [
    {"type": "mcp_tool_use", "id": "m", "name": "find", "server_name": "s", "input": {"q": 1}},
    {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": [{"type": "text", "text": "It."}]},
]


async def test_tools_of_the_first_server_are_read_as_calls_and_results(world: World):
    said = {"type": "text", "text": "It rains."}
    messages = [*user("Rain?"), {"role": "assistant", "content": [SEARCH, FOUND, FETCHED, *MCP, said]}, *user("Sure?")]
    seen: list[Any] = []
    formatted = world.engine.chat.format

    def watching(messages: Any, *rest: Any) -> Any:
        seen.extend(messages)
        return formatted(messages, *rest)

    world.engine.chat.format = watching  # type: ignore[method-assign]
    await read(world, "/v1/messages", {"max_tokens": 5, "messages": messages})
    calls = [call["function"] for message in seen for call in message.get("tool_calls", ())]
    assert calls == [
        {"name": "web_search", "arguments": {"query": "rain"}},
        {"name": "web_fetch", "arguments": {}},
        {"name": "find", "arguments": {"q": 1}},
    ]
    results = [message["content"] for message in seen if message["role"] == "tool"]
    assert json.loads(results[0]) == {"type": "web_search_result", "title": "Rain", "url": "http://x"}
    assert json.loads(results[1])["content"]["source"] == note("file")
    assert results[2] == "It."
    assert [message["content"] for message in seen[-2:]] == ["It rains.", "Sure?"]


OWN = {
    "tool_addition",
    "tool_removal",
    "text",
    "thinking",
    "tool_use",
    "tool_result",
    "search_result",
    "document",
    "image",
}
BETA = {block for block in get_args(BetaContentBlockParam) if isinstance(block, type)}
WRITTEN = set(get_args(ContentBlockParam)) | BETA
ASSISTANTS = {kind for block in WRITTEN for kind in get_args(get_type_hints(block)["type"])} - OWN


assert {"server_tool_use", "mcp_tool_result", "advisor_tool_result", "compaction"} <= ASSISTANTS


@pytest.mark.parametrize("kind", sorted(ASSISTANTS | PASSED_OVER))
@pytest.mark.parametrize("content", [None, "x", [{"type": "x"}], {"type": "x_error"}, 5])
async def test_no_block_that_a_server_wrote_is_refused(world: World, kind: str, content: Any):
    block = {"type": kind, "id": 7, "tool_use_id": 7, "name": None, "input": "x", "content": content}
    messages = [*user("Hi"), {"role": "assistant", "content": [block, TEXT]}, *user("So?")]
    await read(world, "/v1/messages", {"max_tokens": 5, "messages": messages})


async def test_a_call_without_a_result_leaves_nothing_open(world: World):
    messages = [*user("Rain?"), {"role": "assistant", "content": [SEARCH]}]
    prompt = await read(world, "/v1/messages", {"max_tokens": 5, "messages": messages})
    assert "web_search" not in prompt
