"""Messages and responses over the real engine and the bundled model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import jsonschema
import pytest
import pytest_asyncio

from tests.api.real_worlds import RealWorld
from tests.api.worlds import user

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

QUESTION = user("What is the capital of France?")
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL: Any = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}
GREEDY: Any = {"model": "smollm2", "extra_body": {"temperature": 0}}


@pytest_asyncio.fixture(loop_scope="session")
async def client(real: RealWorld) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=real.url, api_key="unused", max_retries=0) as client:
        yield client


async def test_a_message_streams_and_billing_headers_do_not_spoil_its_prefix(client: anthropic.AsyncAnthropic):
    rules = " ".join(f"Rule {number}: answer in one short sentence." for number in range(20))
    usages = []
    for marker in ("aaa", "bbb"):
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={marker};"},
            {"type": "text", "text": rules},
        ]
        async with client.messages.stream(max_tokens=12, messages=QUESTION, system=system, **GREEDY) as stream:
            message = await stream.get_final_message()
        assert "Paris" in message.content[0].text
        usages.append(message.usage)
    num_prompt = usages[0].input_tokens
    assert usages[0].cache_read_input_tokens == 0
    assert usages[1].cache_read_input_tokens == (num_prompt - 1) // 32 * 32
    assert usages[1].input_tokens == num_prompt - usages[1].cache_read_input_tokens


async def test_a_tool_must_be_called_and_its_result_is_read(client: anthropic.AsyncAnthropic):
    arguments: Any = {"max_tokens": 60, "tools": [TOOL], **GREEDY}
    message = await client.messages.create(
        messages=QUESTION, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **arguments
    )
    (call,) = message.content
    assert (call.type, call.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use")
    jsonschema.validate(call.input, SCHEMA)
    result: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 25 degrees."}]
    turns: Any = [*QUESTION, {"role": "assistant", "content": message.content}, *user(result)]
    after = await client.messages.create(messages=turns, **arguments)
    assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) > message.usage.input_tokens


async def test_a_response_follows_its_schema_and_can_be_gone_on_from(real: RealWorld):
    text: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
    events = await real.openai.responses.create(
        input="What is the capital of France?", text=text, max_output_tokens=40, stream=True, **GREEDY
    )
    last = [event async for event in events][-1]
    assert last.type == "response.completed"
    jsonschema.validate(json.loads(last.response.output_text), SCHEMA)
    second = await real.openai.responses.create(
        input="Why?", previous_response_id=last.response.id, max_output_tokens=5, **GREEDY
    )
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > 0
