"""Anthropic's messages, as the stock Anthropic client sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
import pytest_asyncio

from mlx_server.engine.request_stream import GenerationRequest
from mlx_server.request import Priority
from tests.api.fakes import say
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER: Any = {
    "name": "weather",
    "description": "The weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest_asyncio.fixture(loop_scope="session")
async def client(world: World) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key="unused", max_retries=0) as client:
        yield client


async def post(world: World, **body: Any) -> httpx.Response:
    return await world.http.post("/v1/messages", json={"max_tokens": 100, "messages": user("Hi"), **body})


def asked(world: World) -> str:
    """The prompt of the only request, special tokens included."""
    (request,) = world.engine.requests
    return world.engine.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


async def test_a_message_has_text_reason_and_usage(world: World, client: anthropic.AsyncAnthropic):
    world.engine.num_cached_tokens = 3
    message = await client.messages.create(model="fake", max_tokens=100, messages=user("Hi"))
    (block,) = message.content
    assert (block.type, block.text) == ("text", "Hello world")
    assert (message.role, message.model, message.stop_reason) == ("assistant", "fake", "end_turn")
    assert message.id.startswith("msg_")
    assert message._request_id == message.id.removeprefix("msg_")
    num_prompt = len(world.engine.requests[0].prompt_token_ids)
    assert message.usage.input_tokens == num_prompt - 3
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.cache_creation_input_tokens == 0
    assert message.usage.output_tokens == 7  # H e l l o, " world", and the end of sequence
    assert asked(world) == "<|user|>Hi<|end|><|assistant|>"


async def test_the_limit_is_a_stop_reason(world: World, client: anthropic.AsyncAnthropic):
    message = await client.messages.create(model="fake", max_tokens=2, messages=user("Hi"))
    assert message.stop_reason == "max_tokens"
    assert world.engine.requests[0].sampling.max_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_beyond_the_context_ends_with_the_context(world: World, stream: bool):
    world.engine.max_model_len = 60
    world.engine.script = say("a" * 100)
    answer = await post(world, max_tokens=64_000, stream=stream)
    assert answer.status_code == 200
    assert "model_context_window_exceeded" in answer.text


async def test_models_are_listed_for_this_client_too(world: World, client: anthropic.AsyncAnthropic):
    page = await client.models.list()
    (model,) = page.data
    assert (model.id, model.type, model.display_name, page.has_more) == ("fake", "model", "fake", False)
    assert model.max_input_tokens == world.engine.max_model_len
    one = await client.models.retrieve("fake")
    assert one.created_at == model.created_at
    assert (one.capabilities, model.capabilities) == (None, None)  # an object here, a list in other protocols


async def test_a_stop_sequence_is_named(client: anthropic.AsyncAnthropic):
    message = await client.messages.create(
        model="fake", max_tokens=100, messages=user("Hi"), stop_sequences=["xyz", "wor"]
    )
    assert message.content[0].text == "Hello "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "wor")


async def test_parameters_reach_the_sampler(world: World):
    more = {"temperature": 0.5, "top_k": 5, "top_p": 0.75, "min_p": 0.125, "seed": 4, "priority": 1, "cache_salt": "s"}
    assert (await post(world, **more, speculate=False)).status_code == 200
    (request,) = world.engine.requests
    sampling = request.sampling
    assert not sampling.speculate
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.75, 0.125)
    assert (sampling.seed, request.priority, request.extra_keys) == (4, Priority.LOW, ("key:anonymous", "s"))


async def test_what_only_hosted_models_know_is_tolerated(world: World):
    cached = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    response = await post(
        world,
        messages=user([cached]),
        metadata={"user_id": "u"},
        service_tier="auto",
        container=None,
        context_management={"edits": []},
        tools=[],
    )
    assert response.status_code == 200
    assert asked(world) == "<|user|>Hi<|end|><|assistant|>"


async def test_the_system_prompt_comes_first_as_text_or_blocks(world: World):
    await post(world, system="Be nice.")
    assert asked(world).startswith("<|system|>Be nice.<|end|><|user|>")
    world.engine.requests.clear()
    await post(world, system=[{"type": "text", "text": "Be nice."}, {"type": "text", "text": "Be brief."}])
    assert asked(world).startswith("<|system|>Be nice.\nBe brief.<|end|><|user|>")


async def test_turns_of_one_role_are_joined_and_late_instructions_are_the_user_s(world: World):
    late = {"role": "system", "content": "Now in French."}
    await post(world, messages=[*user("Hi"), *user([{"type": "text", "text": "there"}]), late])
    assert asked(world) == "<|user|>Hi\nthere\nNow in French.<|end|><|assistant|>"


async def test_the_last_message_may_begin_the_answer(world: World, client: anthropic.AsyncAnthropic):
    messages: Any = [*user("Hi"), {"role": "assistant", "content": "Well,"}]
    message = await client.messages.create(model="fake", max_tokens=100, messages=messages)
    assert asked(world) == "<|user|>Hi<|end|><|assistant|>Well,"
    assert message.content[0].text == "Hello world"


@pytest.mark.parametrize("content", ["", []])
async def test_an_empty_last_answer_begins_nothing(world: World, content: Any):
    await post(world, messages=[*user("Hi"), {"role": "assistant", "content": content}])
    assert asked(world) == "<|user|>Hi<|end|><|assistant|>"


async def test_billing_headers_do_not_spoil_the_prefix(world: World):
    header = "x-anthropic-billing-header: cc_version=2.1.{}; cch={};"
    prompts = []
    for index, marker in enumerate(("aaa", "bbb")):
        blocks = [header.format(index, marker), "Be nice.", f"{header.format(index, marker)}\nBe brief."]
        await post(world, system=[{"type": "text", "text": text} for text in blocks])
        prompts.append(world.engine.requests[-1].prompt_token_ids)
        world.engine.requests.clear()
        proxied = [{"role": "system", "content": "\n".join(blocks)}, *user("Hi")]
        await world.http.post("/v1/chat/completions", json={"messages": proxied})
        prompts.append(world.engine.requests[-1].prompt_token_ids)
        world.engine.requests.clear()
    await post(world, system="Be nice.\nBe brief.")
    assert prompts == [world.engine.requests[0].prompt_token_ids] * 4


async def test_other_mentions_of_the_header_stay(world: World):
    await post(world, system="What is x-anthropic-billing-header: for?")
    assert "What is x-anthropic-billing-header: for?" in asked(world)


async def test_a_tool_is_called(world: World, client: anthropic.AsyncAnthropic):
    world.engine.script = say("Let me see." + CALL)
    message = await client.messages.create(model="fake", max_tokens=100, messages=user("Hi"), tools=[WEATHER])
    text, call = message.content
    assert (text.type, text.text) == ("text", "Let me see.")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
    assert message.stop_reason == "tool_use"
    assert '"description": "The weather"' in asked(world)


async def test_several_tools_are_called_unless_only_one_may_be(world: World, client: anthropic.AsyncAnthropic):
    world.engine.script = say(CALL + CALL.replace("Rome", "Oslo"))
    for is_alone in (False, True):
        message = await client.messages.create(
            model="fake",
            max_tokens=100,
            messages=user("Hi"),
            tools=[WEATHER],
            tool_choice={"type": "auto", "disable_parallel_tool_use": is_alone},
        )
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [call.input["city"] for call in calls] == ["Rome"] if is_alone else ["Rome", "Oslo"]
        assert len({call.id for call in calls}) == len(calls)


async def test_the_client_library_runs_tools_by_itself(world: World, client: anthropic.AsyncAnthropic):
    """It asks for a conversation that the server keeps, and goes on without one if the error says so."""

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    def answer(request: GenerationRequest) -> str:
        prompt = world.engine.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        return "Fine." if "sunny in Rome" in prompt else CALL

    world.engine.script, world.engine.max_model_len = answer, 2000
    runner = client.beta.messages.tool_runner(model="fake", max_tokens=100, messages=user("Hi"), tools=[weather])
    assert [block.type for message in [one async for one in runner] for block in message.content] == [
        "tool_use",
        "text",
    ]


async def test_arguments_with_a_line_break_in_a_text_are_repaired(world: World, client: anthropic.AsyncAnthropic):
    """Models forget to escape it; the client's library would refuse the stream."""
    world.engine.script = say(CALL.replace("Rome", "Ro\nme"))
    asked = {"model": "fake", "max_tokens": 100, "messages": user("Hi"), "tools": [WEATHER]}
    message = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    assert message.content[0].input == streamed.content[0].input == {"city": "Ro\nme"}


async def test_complete_arguments_that_are_no_json_are_not_lost(world: World, client: anthropic.AsyncAnthropic):
    world.engine.script = say(CALL.replace('"Rome"', '"Rome",'))
    message = await client.messages.create(model="fake", max_tokens=100, messages=user("Hi"), tools=[WEATHER])
    assert message.content[0].input == {"invalid_json": '{"city": "Rome",}'}


async def test_arguments_that_break_off_are_an_empty_object(world: World, client: anthropic.AsyncAnthropic):
    world.engine.script = say(CALL)
    message = await client.messages.create(model="fake", max_tokens=45, messages=user("Hi"), tools=[WEATHER])
    (call,) = message.content
    assert (call.type, call.input, message.stop_reason) == ("tool_use", {}, "max_tokens")
    message = await client.messages.create(
        model="fake", max_tokens=100, messages=user("Hi"), tools=[WEATHER], stop_sequences=["ome"]
    )
    (call,) = message.content
    assert (call.input, message.stop_reason, message.stop_sequence) == ({}, "stop_sequence", "ome")


@pytest.mark.parametrize(
    ("choice", "is_shown", "is_forced"),
    [("auto", True, False), ("none", False, False), ("any", True, True), ("tool", True, True)],
)
async def test_tool_choices(world: World, choice: str, is_shown: bool, is_forced: bool):
    world.engine.script = say(CALL)
    named = {"name": "weather"} if choice == "tool" else {}
    response = await post(world, tools=[WEATHER], tool_choice={"type": choice, **named})
    assert response.status_code == 200, response.text
    assert ("weather" in asked(world)) == is_shown
    assert (world.engine.requests[0].constraint is not None) == is_forced


async def test_results_go_back_to_the_model(world: World):
    calls = [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "b", "name": "weather", "input": {"city": "Oslo"}},
    ]
    lost = [{"type": "text", "text": "lost"}, {"type": "tool_reference", "tool_name": "radar"}]
    results = [
        {"type": "text", "text": "Go on."},
        {"type": "tool_result", "tool_use_id": "a", "content": "sunny"},
        {"type": "tool_result", "tool_use_id": "b", "content": lost, "is_error": True},
    ]
    world.engine.max_model_len = 2000
    seen = []
    formatted = world.engine.chat.format

    def watching(messages: Any, *rest: Any) -> Any:
        seen.extend(messages)
        return formatted(messages, *rest)

    world.engine.chat.format = watching  # type: ignore[method-assign]
    messages = [*user("Weather?"), {"role": "assistant", "content": calls}, *user(results)]
    response = await post(world, messages=messages, tools=[WEATHER])
    assert response.status_code == 200, response.text
    assistant, first, second, last = seen[1:]
    assert assistant["content"] == "Let me see."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert first == {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "sunny"}
    assert second == {"role": "tool", "tool_call_id": "b", "name": "weather", "content": "Error: lost\nradar"}
    assert last == {"role": "user", "content": "Go on."}


async def test_thinking_is_shown_to_those_who_ask(world: World, client: anthropic.AsyncAnthropic):
    world.engine.script = say("<think>Hmm.</think>Yes.")
    message = await client.messages.create(model="fake", max_tokens=100, messages=user("Hi"), thinking=THINKING)
    thinking, text = message.content
    assert (thinking.type, thinking.thinking, text.type, text.text) == ("thinking", "Hmm.", "text", "Yes.")
    assert thinking.signature
    usage = (await post(world, thinking=THINKING)).json()["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": 6}
    for other in (None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        body = (await post(world, thinking=other)).json()
        assert [block["type"] for block in body["content"]] == ["text"]
        assert body["content"][0]["text"] == "Yes."


async def test_thinking_comes_back_as_reasoning_and_nothing_else(world: World):
    blocks = [
        {"type": "thinking", "thinking": "Hmm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "???"},
        {"type": "text", "text": "Yes."},
    ]
    await post(world, messages=[*user("Hi"), {"role": "assistant", "content": blocks}, *user("Why?")])
    assert asked(world) == "<|user|>Hi<|end|><|assistant|>Yes.<|end|><|user|>Why?<|end|><|assistant|>"


async def test_the_budget_bounds_the_thinking(world: World):
    await post(world, thinking={"type": "enabled", "budget_tokens": 2})
    constraint = world.engine.requests[0].constraint
    assert constraint is not None
    tokenizer = world.engine.tokenizer
    start, end = (tokenizer.token_to_id(marker) for marker in ("<think>", "</think>"))
    assert start is not None
    for token_id in (start, *tokenizer.encode("ab", add_special_tokens=False)):
        assert constraint.accept(token_id)
    assert list(constraint.forced_tokens()) == [end]
    await post(world, thinking={"type": "adaptive"})
    assert world.engine.requests[1].constraint is None


@pytest.mark.parametrize("field", ["output_config", "output_format"])
async def test_a_schema_makes_the_answer_json(world: World, field: str):
    wanted = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    response = await post(world, **{field: {"format": wanted} if field == "output_config" else wanted})
    assert response.status_code == 200
    assert world.engine.requests[0].constraint is not None


async def test_tokens_are_counted_as_the_prompt_has_them(world: World, client: anthropic.AsyncAnthropic):
    arguments: Any = {"messages": user("Hi"), "system": "Be nice.", "tools": [WEATHER]}
    counted = await client.messages.count_tokens(model="fake", **arguments)
    message = await client.messages.create(model="fake", max_tokens=5, **arguments)
    assert counted.input_tokens == message.usage.input_tokens == len(world.engine.requests[0].prompt_token_ids)
    assert len(world.engine.requests) == 1


async def test_the_effort_reaches_the_template(world: World):
    seen = []
    formatted = world.engine.chat.format

    def watching(messages: Any, tools: Any, options: Any, *cut: Any) -> Any:
        seen.append((options.reasoning_effort, dict(options.template_kwargs)))
        return formatted(messages, tools, options, *cut)

    world.engine.chat.format = watching  # type: ignore[method-assign]
    await post(world, output_config={"effort": "high"}, thinking={"type": "adaptive"})
    await post(world, chat_template_kwargs={"enable_thinking": True, "mood": "glad"})
    assert seen == [("high", {"enable_thinking": True}), (None, {"enable_thinking": True, "mood": "glad"})]
