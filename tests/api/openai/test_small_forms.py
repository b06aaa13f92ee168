"""Small differences in what clients send and expect."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.api.fakes import say
from tests.api.rich_worlds import ask
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_minus_one_is_no_limit_of_a_chat(world: World, field: str):
    assert (await world.chat(**{field: -1})).status_code == 200
    assert world.engine.requests[-1].sampling.max_tokens is None
    refused = await world.chat(**{field: -2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


async def test_minus_one_is_no_limit_of_a_text(world: World):
    assert (await world.complete(max_tokens=-1)).status_code == 200
    assert world.engine.requests[-1].sampling.max_tokens is None
    refused = await world.complete(max_tokens=-2)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("choice", [None, "auto", "none"])
async def test_an_empty_list_of_tools_is_none(world: World, choice: str | None):
    assert (await world.chat(tools=[], tool_choice=choice)).status_code == 200
    await world.chat()
    assert world.engine.requests[0].prompt_token_ids == world.engine.requests[1].prompt_token_ids


@pytest.mark.parametrize("max_tokens", [1, 5])
async def test_metrics_have_no_null(world: World, max_tokens: int):
    metrics = (await world.chat(max_tokens=max_tokens)).json()["metrics"]
    assert None not in metrics.values()
    assert ("mean_itl_ms" in metrics) == (max_tokens > 1)


async def test_completions_always_have_prompt_logprobs(world: World):
    (choice,) = (await world.complete()).json()["choices"]
    assert choice["prompt_logprobs"] is None


@pytest.mark.parametrize("key", ["abc", "1.5", ""])
async def test_errors_of_logit_bias_name_the_key(world: World, key: str):
    error = (await world.chat(logit_bias={key: 1})).json()["error"]
    assert error["param"].startswith("logit_bias")
    assert f'"{key}"' in error["message"]


TOOLS = [
    ({"type": "bash_20250124", "name": "bash"}, "command"),
    ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}, "old_str"),
    ({"type": "memory_20250818", "name": "memory"}, "new_path"),
]


@pytest.mark.parametrize(("tool", "member"), TOOLS)
async def test_anthropics_tools_that_the_client_runs_are_functions(world: World, tool: dict[str, Any], member: str):
    world.engine.max_model_len = 4000
    call = json.dumps({"name": tool["name"], "arguments": {member: "x"}})
    world.engine.script = say(f"<tool_call>\n{call}\n</tool_call>")
    asks = {"max_tokens": 500, "messages": user("Hi"), "tools": [tool]}
    answer = await world.http.post("/v1/messages", json=asks)
    assert answer.status_code == 200, answer.text
    (block,) = answer.json()["content"]
    assert (block["name"], block["input"]) == (tool["name"], {member: "x"})
    prompt = world.engine.tokenizer.decode(world.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert member in prompt
    refused = await world.http.post(
        "/v1/messages", json={**asks, "tools": [{"type": "web_search_20250305", "name": "w"}]}
    )
    assert refused.status_code == 400


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1//chat/completions"])
async def test_a_doubled_slash_gets_a_hint(world: World, path: str):
    answer = await world.http.post(f"{world.url}{path}", json={"messages": user("Hi")})
    assert answer.status_code == 404
    assert "but /v1/chat/completions is; remove the doubled slash" in answer.json()["error"]["message"]


async def test_a_compressed_body_gets_a_hint(world: World):
    body = gzip.compress(json.dumps({"messages": user("Hi")}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await world.http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert "encoded as gzip" in answer.json()["error"]["message"]
    assert not world.engine.requests


@pytest.mark.parametrize(
    ("switch", "is_on"),
    [
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": False}, False),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
async def test_hosted_services_switches_are_that_of_the_template(rich_world: World, switch: Any, is_on: bool):
    path, base = "/v1/chat/completions", {"messages": user("Hi")}
    own = {**base, "chat_template_kwargs": {"enable_thinking": is_on}}
    assert await ask(rich_world, path, {**base, **switch}) == await ask(rich_world, path, own)


@pytest.mark.parametrize(
    ("reasoning", "same"),
    [
        ({"effort": "low"}, {"reasoning_effort": "low"}),
        ({"effort": "none"}, {"reasoning_effort": "none"}),
        ({"max_tokens": 1}, {"thinking_token_budget": 1}),
        ({"exclude": True}, {"include_reasoning": False}),
        ({"enabled": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"effort": "low", "exclude": False}, {"reasoning_effort": "low"}),
    ],
)
async def test_openrouters_reasoning_is_that_of_the_other_fields(rich_world: World, reasoning: Any, same: Any):
    path, base = "/v1/chat/completions", {"messages": user("Hi")}
    found = await ask(rich_world, path, {**base, "reasoning": reasoning})
    assert found == await ask(rich_world, path, {**base, **same})
    assert found != await ask(rich_world, path, base)
    own = {**base, "reasoning_effort": "low"}
    assert await ask(rich_world, path, {**own, "reasoning": {"effort": "high"}}) == await ask(rich_world, path, own)
