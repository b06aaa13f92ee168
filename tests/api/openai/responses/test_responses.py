"""The Responses API, as the stock OpenAI client sees it."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from mlx_server.api.app import create_app
from mlx_server.api.errors import NotFoundError
from mlx_server.api.openai.responses.items import referenced_ids
from mlx_server.api.openai.responses.store import KeptItem, KeptItems, KeptRecords, Record, RecordStore
from mlx_server.config import Config
from tests.api.fakes import say
from tests.api.worlds import World

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def post(world: World, **body: Any) -> httpx.Response:
    return await world.http.post("/v1/responses", json={"input": "Hi", **body})


async def create(world: World, **body: Any) -> dict[str, Any]:
    """A response's body, which the client's types accept."""
    answer = await post(world, **body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    Response.model_validate(found)
    assert isinstance(found, dict)
    return found


def turn(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def asked(world: World) -> str:
    """The last prompt, special tokens included."""
    return world.engine.tokenizer.decode(world.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def test_a_response_has_text_status_and_usage(world: World):
    world.engine.num_cached_tokens = 3
    response = await world.openai.responses.create(model="fake", input="Hi", instructions="Be nice.")
    assert response.output_text == "Hello world"
    assert (response.status, response.model, response.error) == ("completed", "fake", None)
    assert response.id.startswith("resp_")
    assert response.usage is not None
    num_prompt = len(world.engine.requests[0].prompt_token_ids)
    assert response.usage.input_tokens == num_prompt
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.output_tokens == 7
    assert response.usage.total_tokens == num_prompt + 7
    assert asked(world) == "<|system|>Be nice.<|end|><|user|>Hi<|end|><|assistant|>"


async def test_a_response_repeats_what_was_asked(world: World):
    body = await create(
        world, metadata={"a": "b"}, temperature=0.5, tools=[WEATHER], max_output_tokens=50, reasoning={"effort": "low"}
    )
    assert (body["metadata"], body["temperature"], body["top_p"]) == ({"a": "b"}, 0.5, 1.0)
    assert (body["tools"], body["tool_choice"]) == ([{**WEATHER, "description": None}], "auto")
    assert body["parallel_tool_calls"] is True
    assert (body["max_output_tokens"], body["reasoning"]["effort"], body["store"]) == (50, "low", True)


async def test_the_limit_makes_it_incomplete(world: World):
    body = await create(world, max_output_tokens=2)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"


async def test_parameters_reach_the_sampler(world: World):
    more = {"cache_salt": "s", "truncation": "disabled", "background": False, "speculate": False}
    await create(world, temperature=0.5, top_p=0.75, seed=4, **more)
    (request,) = world.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, request.extra_keys) == (
        0.5,
        0.75,
        4,
        ("key:anonymous", "s"),
    )
    assert not sampling.speculate


async def test_input_may_be_a_list_of_items(world: World):
    await create(
        world,
        instructions="Be nice.",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": "you"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
            {"role": "system", "content": "Now in French."},
            {"role": "user", "content": "Again"},
        ],
    )
    assert asked(world) == (
        "<|system|>Be nice.\nBe brief.<|end|><|user|>Hi\nyou<|end|><|assistant|>Hello<|end|>"
        "<|user|>Now in French.\nAgain<|end|><|assistant|>"
    )


async def test_a_function_is_called_and_its_output_goes_back(world: World):
    world.engine.max_model_len = 2000
    world.engine.script = say("Let me see." + CALL)
    first = await world.openai.responses.create(model="fake", input="Weather?", tools=[WEATHER])
    message, call = first.output
    assert (message.type, first.output_text) == ("message", "Let me see.")
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Rome"}')
    seen = []
    formatted = world.engine.chat.format

    def watching(messages: Any, *rest: Any) -> Any:
        seen.extend(messages)
        return formatted(messages, *rest)

    world.engine.chat.format = watching  # type: ignore[method-assign]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    arguments: list[Any] = [
        {"previous_response_id": first.id, "input": [output]},
        {"input": [{"role": "user", "content": "Weather?"}, *(item.model_dump() for item in first.output), output]},
        {
            "input": [
                {"role": "user", "content": "Weather?"},
                {"type": "item_reference", "id": message.id},
                {"id": call.id},
                output,
            ]
        },
    ]
    for argument in arguments:
        seen.clear()
        await world.openai.responses.create(model="fake", tools=[WEATHER], **argument)
        user, assistant, result = seen
        assert user == {"role": "user", "content": "Weather?"}
        assert assistant["content"] == "Let me see."
        assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
        assert result == {"role": "tool", "tool_call_id": call.call_id, "name": "weather", "content": "sunny"}


async def test_a_call_that_was_cut_off_does_not_end_the_conversation(world: World):
    world.engine.max_model_len = 2000
    world.engine.script = say(CALL)
    first = await create(world, input="Weather?", tools=[WEATHER], max_output_tokens=45)
    call = first["output"][-1]
    assert (call["type"], first["status"]) == ("function_call", "incomplete")
    assert call["arguments"] == '{"city": "Ro'
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "arguments are no JSON"}
    await create(world, previous_response_id=first["id"], input=[output], tools=[WEATHER])
    assert json.dumps({"invalid_json": call["arguments"]}) in asked(world)


async def test_a_call_that_a_stop_string_has_cut_off_is_incomplete(world: World):
    world.engine.script = say(CALL)
    body = await create(world, tools=[WEATHER], stop="ome")
    assert (body["status"], body["completed_at"], body["incomplete_details"]) == ("incomplete", None, None)
    assert [(item["arguments"], item["status"]) for item in body["output"]] == [('{"city": "R', "incomplete")]
    body = await create(world, tools=[WEATHER], stop="</tool_call>")
    assert (body["status"], body["output"][0]["status"]) == ("completed", "completed")


@pytest.mark.parametrize(
    ("choice", "is_shown", "is_forced"),
    [
        ("auto", True, False),
        ("none", False, False),
        ("required", True, True),
        ({"type": "function", "name": "weather"}, True, True),
    ],
)
async def test_tool_choices(world: World, choice: Any, is_shown: bool, is_forced: bool):
    world.engine.script = say(CALL)
    await create(world, tools=[WEATHER], tool_choice=choice)
    assert ("weather" in asked(world)) == is_shown
    assert (world.engine.requests[0].constraint is not None) == is_forced


async def test_no_tools_may_be_named_as_such(world: World):
    await create(world, tools=[], tool_choice="auto")


async def test_reasoning_is_an_item_before_the_answer(world: World):
    world.engine.script = say("<think>Hmm.</think>Yes.")
    response = await world.openai.responses.create(model="fake", input="Hi")
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["Hmm."]
    assert (message.type, response.output_text) == ("message", "Yes.")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 6


async def test_reasoning_and_effort_reach_the_template(world: World):
    seen = []
    formatted = world.engine.chat.format

    def watching(messages: Any, tools: Any, options: Any, *cut: Any) -> Any:
        seen.append((messages[0], options.reasoning_effort))
        return formatted(messages, tools, options, *cut)

    world.engine.chat.format = watching  # type: ignore[method-assign]
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    answer = {"role": "assistant", "content": "Yes."}
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "???"}
    await create(world, input=[sealed, reasoning, answer], reasoning={"effort": "high", "summary": "auto"})
    whole = {**reasoning, "content": [{"type": "reasoning_text", "text": "long"}]}
    await create(world, input=[whole, answer])
    assert seen == [
        ({"role": "assistant", "content": "Yes.", "reasoning": "short"}, "high"),
        ({"role": "assistant", "content": "Yes.", "reasoning": "long"}, None),
    ]


@pytest.mark.parametrize(
    ("wanted", "is_constrained"),
    [
        ({"type": "text"}, False),
        ({"type": "json_object"}, True),
        ({"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}, True),
    ],
)
async def test_text_formats(world: World, wanted: Any, is_constrained: bool):
    body = await create(world, text={"format": wanted, "verbosity": "low"})
    assert (world.engine.requests[0].constraint is not None) == is_constrained
    assert body["text"]["format"] == wanted


async def test_a_conversation_goes_on_from_a_response(world: World):
    first = await create(world, input="One", instructions="Be nice.")
    second = await create(world, input="Two", previous_response_id=first["id"])
    assert asked(world) == "<|user|>One<|end|><|assistant|>Hello world<|end|><|user|>Two<|end|><|assistant|>"
    assert second["previous_response_id"] == first["id"]
    await create(world, input="Three", previous_response_id=second["id"])
    assert asked(world).startswith("<|user|>One<|end|><|assistant|>Hello world<|end|><|user|>Two<|end|><|assistant|>")
    assert asked(world).endswith("<|user|>Three<|end|><|assistant|>")


async def test_a_response_is_kept_until_it_is_deleted(world: World):
    client = world.openai.responses
    response = await client.create(model="fake", input="Hi")
    assert (await client.retrieve(response.id)).model_dump() == response.model_dump()
    await client.delete(response.id)
    for forgotten in (client.retrieve, client.delete, client.cancel):
        with pytest.raises(openai.NotFoundError, match=response.id):
            await forgotten(response.id)
    with pytest.raises(openai.BadRequestError, match="not kept here") as caught:
        await client.create(model="fake", input="Hi", previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"


async def test_a_response_that_must_not_be_stored_is_not(world: World):
    response = await world.openai.responses.create(model="fake", input="Hi", store=False)
    assert (await world.http.get(f"/v1/responses/{response.id}")).status_code == 404


async def test_what_is_kept_is_sent_without_being_parsed(world: World, monkeypatch: pytest.MonkeyPatch):
    """All streams would stand still meanwhile: a kept response may have a megabyte of tools."""
    tools = [{**WEATHER, "description": "é\u2028"}]
    made = await create(world, input=[turn("Hi"), turn("Ho")], tools=tools, instructions="Be nice.")
    monkeypatch.setattr(KeptItem, "read", None)
    path = f"/v1/responses/{made['id']}"
    assert (await world.http.get(path)).json() == made
    listed = (await world.http.get(f"{path}/input_items?order=asc")).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["Hi", "Ho"]
    assert (listed["first_id"], listed["has_more"]) == (listed["data"][0]["id"], False)


async def test_input_items_come_in_pages(world: World):
    client = world.openai.responses
    first = await client.create(model="fake", input="One")
    second = await client.create(model="fake", input="Two", previous_response_id=first.id)
    page = await client.input_items.list(second.id, order="asc", limit=2)
    one, answer = page.data
    assert one.model_dump(include={"type", "role"}) == {"type": "message", "role": "user"}
    assert answer.id == first.output[0].id
    assert page.has_more
    every = [item.id async for item in client.input_items.list(second.id, limit=1)]
    assert len(every) == 3
    assert every[-1] == one.id
    assert (await world.http.get(f"/v1/responses/{second.id}/input_items?after=x")).status_code == 400


async def test_items_of_one_id_are_paged_once_each(world: World):
    client = world.openai.responses
    calls: Any = [
        {"type": "local_shell_call", "id": "same", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "same", "output": "a.txt"},
    ]
    first = await client.create(model="fake", input=calls)
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    second = await client.create(model="fake", input=[*calls, reference], previous_response_id=first.id)
    ids = [item.id async for item in client.input_items.list(second.id, limit=1, order="asc")]
    assert (len(ids), len({*ids}), ids[0], ids[2]) == (6, 6, "same", first.output[0].id)
    kept = (await world.http.get(f"/v1/responses/{second.id}/input_items?order=asc")).json()["data"]
    assert [item.get("call_id", item["id"]) for item in kept[:2] + kept[3:5]] == ["same"] * 4


async def test_what_has_ended_cannot_be_cancelled(world: World):
    response = await world.openai.responses.create(model="fake", input="Hi")
    with pytest.raises(openai.BadRequestError, match="ended already: completed"):
        await world.openai.responses.cancel(response.id)


async def test_a_kept_response_is_not_streamed_again(world: World):
    response = await world.openai.responses.create(model="fake", input="Hi")
    answer = await world.http.get(f"/v1/responses/{response.id}?stream=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


IMAGE = {"type": "input_image", "image_url": "data:"}
BAD: list[tuple[dict[str, Any], int, str | None]] = [
    ({"input": None}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": ["Hi"]}, 400, "input"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, 400, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": ["Hi"]}]}, 400, "input[0].content[0]"),
    ({"input": [{"role": "user"}]}, 400, "input[0].content"),
    ({"input": [{"role": "cat", "content": "Hi"}]}, 400, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].id"),
    ({"input": [{"type": "item_reference"}]}, 400, "input[0].id"),
    ({"input": [{"id": "x"}]}, 400, "input[0].id"),
    ({"input": [{"id": ["x"], "role": "user", "content": "Hi"}]}, 400, "input[0].id"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, 400, "input"),
    ({"input": [{"type": "nonsense_call", "id": "x"}]}, 400, "input[0].type"),
    ({"input": [{"type": ["message"], "role": "user", "content": "Hi"}]}, 400, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, 400, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "1"}]}, 400, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, 400, "input[0].output"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, 400, "input[0].content"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools[0].name"),
    ({"tools": [{**WEATHER, "parameters": [1]}]}, 400, "tools[0].parameters"),
    (
        {"tools": [WEATHER, {"type": "namespace", "name": "n", "tools": [{**WEATHER, "parameters": "x"}]}]},
        400,
        "tools[1].tools[0].parameters",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, 400, "tool_choice"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": []}}, 400, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": ["weather"]}}, 400, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, 400, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format.schema"),
    ({"text": {"format": {"type": "poem"}}}, 400, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, 400, "text.format.schema"),
    ({"background": True, "store": False}, 400, "store"),
    ({"conversation": "c"}, 404, None),
    ({"conversation": {"id": "c"}}, 404, None),
    ({"conversation": "c", "previous_response_id": "r"}, 400, "conversation"),
    ({"truncation": "middle"}, 400, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, 400, "include"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"model": "nobody"}, 404, "model"),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD, ids=lambda value: str(value)[:40])
async def test_what_is_wrong_is_named(world: World, body: dict[str, Any], status: int, param: str | None):
    answer = await post(world, **body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    assert not world.engine.requests


@pytest.mark.parametrize(
    ("choice", "message"),
    [({"type": "function"}, '{"type": "function", "name": ...}'), ({"type": "allowed_tools"}, "of type allowed_tools")],
)
async def test_choices_of_tools_are_told_in_this_protocols_form(world: World, choice: dict[str, Any], message: str):
    assert message in (await post(world, tools=[WEATHER], tool_choice=choice)).json()["error"]["message"]


def stored(response_id: str, num_items: int = 0) -> Record:
    items = [KeptItem.of({"id": f"{response_id}{index}", "text": "x" * 100}) for index in range(num_items)]
    return Record(response_id, "completed", b"{}", KeptItems.of(items))


async def test_the_store_forgets_what_was_not_used_for_longest():
    kept = KeptRecords(RecordStore(max_records=2), None, "owner")
    for response_id in ("a", "b"):
        kept.put(stored(response_id))
    assert await kept.find("a") is not None
    kept.put(stored("c"))
    assert [await kept.find(response_id) is not None for response_id in ("a", "b", "c")] == [True, False, True]
    kept.update(stored("b"))
    with pytest.raises(NotFoundError):
        await kept.get("b")


async def test_what_is_counted_is_what_is_held():
    store = RecordStore()
    kept = KeptRecords(store, None, "owner")
    tracemalloc.start()
    try:
        for index in range(20):
            kept.put(stored(f"{index:03}", num_items=500))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 * held < store.of("response", "owner").num_bytes < 1.2 * held


async def test_one_owner_cannot_push_out_what_another_keeps():
    one = stored("a", num_items=10).num_bytes
    store = RecordStore(max_records=100, max_bytes=10 * one + one // 2)
    modest, greedy = KeptRecords(store, None, "modest"), KeptRecords(store, None, "greedy")
    for name in "abc":
        modest.put(stored(name, num_items=10))
    for index in range(50):
        greedy.put(stored(f"g{index}", num_items=10))
    assert all([await modest.find(name) is not None for name in "abc"])
    assert sum([await greedy.find(f"g{index}") is not None for index in range(50)]) == 7
    assert await greedy.find("g49") is not None
    for name in "defgh":  # more than a half: its own go first
        modest.put(stored(name, num_items=10))
    assert [await modest.find(name) is not None for name in "abcdefgh"] == [False] * 3 + [True] * 5


async def test_what_is_in_progress_is_not_pushed_out_and_counts_when_it_has_ended():
    store = RecordStore(max_records=2)
    kept, owned = KeptRecords(store, None, "owner"), store.of("response", "owner")
    kept.put(replace(stored("r", num_items=5), status="in_progress"))
    assert owned.num_bytes == 0
    for name in "abc":
        kept.put(stored(name))
    assert (await kept.get("r")).is_in_progress
    assert not await kept.find_items(["r1"])
    kept.update(stored("r", num_items=5))
    assert list(owned.records) == ["c", "r"]
    assert owned.num_bytes == sum(record.num_bytes for record in owned.records.values())
    assert (await kept.find_items(["r1"])).keys() == {"r1"}
    kept.put(replace(stored("s"), status="in_progress"))
    await kept.delete("s")
    kept.update(stored("s"))
    assert await kept.find("s") is None


async def test_a_response_that_grows_is_counted_again():
    store = RecordStore()
    kept, owned = KeptRecords(store, None, "owner"), store.of("response", "owner")
    kept.put(stored("a"))
    before = owned.num_bytes
    kept.update(replace(stored("a"), output=KeptItems.of([KeptItem.of({"id": "m", "text": "x" * 5000})])))
    assert owned.num_bytes > before + 5000
    await kept.delete("a")
    assert owned.num_bytes == 0


async def test_items_are_found_without_walking_the_records(monkeypatch: pytest.MonkeyPatch):
    """All of them may have a million items, and a reference may be to one that is not kept."""
    kept = KeptRecords(RecordStore(max_records=20), None, "owner")
    for index in range(21):
        kept.put(stored(f"r{index}-", num_items=3))
    monkeypatch.setattr(Record, "items", None)
    assert (await kept.find_items(["r0-1", "r1-1", "r20-1", "none"])).keys() == {"r1-1", "r20-1"}


async def test_an_item_is_found_until_the_last_record_that_has_it_is_gone():
    kept = KeptRecords(RecordStore(max_records=2), None, "owner")
    item, other = (KeptItem.of({"id": "same", "text": text}) for text in ("a", "b"))
    for record_id, found in (("r1", item), ("r2", item), ("r3", other)):
        kept.put(Record(record_id, "completed", b"{}", KeptItems.of([found])))
    assert await kept.find_items(["same"]) == {"same": other}
    await kept.delete("r3")
    assert await kept.find_items(["same"]) == {"same": item}, "r1 was pushed out, but r2 has it, too"
    await kept.delete("r2")
    assert await kept.find_items(["same"]) == {}
    assert not kept._owned.items


async def test_fields_that_nobody_reads_are_not_kept(world: World):
    junk = {"junk": ["x"] * 10}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "One", **junk}], **junk},
        {"type": "reasoning", "summary": [], "encrypted_content": "secret", **junk},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **junk},
        {"type": "function_call_output", "call_id": "c", "output": "done", **junk},
    ]
    response = await create(world, input=items)
    kept = (await world.http.get(f"/v1/responses/{response['id']}/input_items?order=asc")).json()["data"]
    assert [item["type"] for item in kept] == ["message", "reasoning", "function_call", "function_call_output"]
    assert "junk" not in json.dumps(kept)
    assert "secret" not in json.dumps(kept)
    assert kept[0]["content"] == [{"type": "input_text", "text": "One"}]


async def test_an_item_is_referred_to_once(world: World):
    first = await create(world, input="One")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert (await post(world, input=[reference])).status_code == 200
    twice = await post(world, input=[reference, reference])
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "input[1].id")


async def test_what_a_response_goes_on_from_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch):
    first = await create(world, input="One")
    monkeypatch.setattr("mlx_server.api.openai.responses.reading.MAX_BODY_BYTES", 300)
    for body in (
        {"input": "Two", "previous_response_id": first["id"]},
        {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}]},
    ):
        refused = await post(world, **body)
        assert refused.status_code == 400
        assert "at most 300" in refused.json()["error"]["message"]


@pytest.mark.parametrize("is_referenced", [False, True])
async def test_the_store_is_bounded_by_size_too(world: World, is_referenced: bool):
    app = create_app(world.pool, Config())
    app.state.context = replace(app.state.context, records=RecordStore(max_bytes=5500))
    ids: list[str] = []
    text = "x" * 200
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:

        async def ask(**body: Any) -> None:
            ids.append((await http.post("/v1/responses", json=body)).json()["id"])

        await ask(input=text)
        if is_referenced:
            items = (await http.get(f"/v1/responses/{ids[0]}/input_items")).json()["data"]
            await ask(input=[{"role": "user", "content": text}, {"type": "item_reference", "id": items[0]["id"]}])
        else:
            await ask(input=text, previous_response_id=ids[0])
        await ask(input="Hi")
        kept = [(await http.get(f"/v1/responses/{response_id}")).status_code == 200 for response_id in ids]
    assert kept == [False, True, True]  # the second holds the first one's items, too


async def test_a_response_is_there_only_for_the_key_that_made_it(world: World):
    world.configure_server(api_key="ours", admin_key="theirs")
    path = "/v1/responses"
    ours, theirs = {"authorization": "Bearer ours"}, {"x-api-key": "theirs"}
    response_id = (await world.http.post(path, json={"input": "Hi"}, headers=ours)).json()["id"]
    mine = f"{path}/{response_id}"
    for method, where in (("GET", mine), ("DELETE", mine), ("POST", f"{mine}/cancel"), ("GET", f"{mine}/input_items")):
        assert (await world.http.request(method, where, headers=theirs)).status_code == 404
    following = {"input": "And?", "previous_response_id": response_id}
    refused = await world.http.post(path, json=following, headers=theirs)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    assert (await world.http.get(mine, headers={"x-api-key": "ours"})).json()["id"] == response_id
    assert (await world.http.post(path, json=following, headers=ours)).status_code == 200


async def test_a_text_is_not_searched_for_references():
    class Text(str):
        __slots__ = ()

        def __iter__(self) -> Any:
            raise AssertionError("this would stall all streams for seconds")

    assert referenced_ids(Text("Hi")) == set()
