"""The Conversations API, as the stock OpenAI client sees it."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import openai
import pytest

from mlx_server.api.openai.responses import conversations, reading, store
from tests.api.fakes import say
from tests.api.worlds import World, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def said(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


def asked(world: World) -> str:
    """The last prompt, special tokens included."""
    return world.engine.tokenizer.decode(world.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def texts(world: World, conversation_id: str) -> list[str]:
    """What the conversation has, a page of two at a time."""
    listed = world.openai.conversations.items.list(conversation_id, order="asc", limit=2)
    return [item.content[0].text async for item in listed]  # type: ignore[union-attr]


async def test_a_conversation_is_made_changed_and_deleted(world: World):
    client = world.openai.conversations
    made = await client.create(metadata={"topic": "a"})
    assert (made.object, made.metadata, made.id[:5]) == ("conversation", {"topic": "a"}, "conv_")
    changed = await client.update(made.id, metadata={"topic": "b"})
    assert changed == await client.retrieve(made.id)
    assert (changed.metadata, changed.created_at) == ({"topic": "b"}, made.created_at)
    deleted = await client.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "conversation.deleted", True)
    for forgotten in (client.retrieve, client.delete, client.items.list):
        with pytest.raises(openai.NotFoundError, match=made.id):
            await forgotten(made.id)
    with pytest.raises(openai.NotFoundError, match="no conversation"):
        await world.openai.responses.create(model="fake", input="Hi", conversation=made.id)


async def test_items_are_added_listed_read_and_deleted(world: World):
    client = world.openai.conversations
    made = await client.create(items=[said("One")])
    added = await client.items.create(made.id, items=[said("Two", "assistant"), said("Three")])
    assert ([item.type for item in added.data], added.has_more) == (["message", "message"], False)
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[1].id)
    assert await texts(world, made.id) == ["One", "Two", "Three"]
    newest = await client.items.list(made.id, limit=1)
    assert newest.data[0].id == added.last_id
    after = await client.items.list(made.id, after=added.last_id, include=["message.input_image.image_url"])
    assert next(item.id for item in after.data) == added.first_id
    two = await client.items.retrieve(str(added.first_id), conversation_id=made.id)
    assert (two.role, two.status, two.content[0].type) == ("assistant", "completed", "output_text")  # type: ignore[union-attr]
    assert (await client.items.delete(two.id, conversation_id=made.id)) == made
    assert await texts(world, made.id) == ["One", "Three"]
    for gone in (client.items.retrieve, client.items.delete):
        with pytest.raises(openai.NotFoundError, match=f"no item {two.id}"):
            await gone(two.id, conversation_id=made.id)
    empty = await client.create()
    assert (await client.items.list(empty.id)).data == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_responses_continue_a_conversation_and_add_to_it(world: World, is_streamed: bool):
    world.engine.max_model_len = 2000
    made = await world.openai.conversations.create(items=[said("One")])
    ids = []
    for text in ("Two", "Three"):
        body: Any = {"model": "fake", "input": text, "conversation": made.id, "store": text == "Two"}
        if is_streamed:
            async with world.openai.responses.stream(**body) as stream:
                response = await stream.get_final_response()
        else:
            response = await world.openai.responses.create(**body)
        assert response.conversation is not None
        assert (response.conversation.id, response.previous_response_id) == (made.id, None)
        ids.append(response.output[0].id)
    assert asked(world) == ("<|user|>One\nTwo<|end|><|assistant|>Hello world<|end|><|user|>Three<|end|><|assistant|>")
    assert await texts(world, made.id) == ["One", "Two", "Hello world", "Three", "Hello world"]
    listed = [item.id async for item in world.openai.conversations.items.list(made.id, order="asc")]
    assert [listed[2], listed[4]] == ids
    counted = await world.openai.responses.input_tokens.count(model="fake", input="Four", conversation=made.id)
    one = await world.openai.responses.create(model="fake", input="Four", conversation={"id": made.id})
    assert one.usage is not None
    assert counted.input_tokens == one.usage.input_tokens


async def test_calls_and_their_outputs_are_kept_in_a_conversation(world: World):
    world.engine.max_model_len = 2000
    world.engine.script = say(CALL)
    made = await world.openai.conversations.create()
    body: Any = {"model": "fake", "conversation": made.id, "tools": [WEATHER]}
    first = await world.openai.responses.create(input="Weather?", **body)
    (call,) = first.output
    world.engine.script = say("Sunny.")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}  # type: ignore[union-attr]
    await world.openai.responses.create(input=[output], **body)
    kinds = [item.type async for item in world.openai.conversations.items.list(made.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output", "message"]


async def test_only_what_is_complete_is_added(world: World, caplog: pytest.LogCaptureFixture):
    made = await world.openai.conversations.create()
    world.engine.pause_after = 3
    body = {"input": "Hi", "stream": True, "conversation": made.id}

    async def stream() -> str:
        async with world.http.stream("POST", "/v1/responses", json=body) as response:
            return "".join([line async for line in response.aiter_lines()])

    for ending in ("cancelled", "deleted"):
        answering = asyncio.create_task(stream())
        await until(lambda: world.engine.num_paused)
        if ending == "cancelled":
            world.context.generations.abort()
            assert '"status":"cancelled"' in await answering
            assert await texts(world, made.id) == []
            world.engine.num_paused = 0
        else:
            await world.openai.conversations.delete(made.id)
            world.engine.resume()
            assert '"status":"completed"' in await answering
            assert [record.levelno for record in caplog.records if made.id in record.getMessage()] == [logging.WARNING]
    world.engine.pause_after = None
    made = await world.openai.conversations.create()
    await world.openai.responses.create(model="fake", input="Hi", conversation=made.id, max_output_tokens=2)
    assert await texts(world, made.id) == ["Hi", "He"]


async def test_two_responses_at_a_time_lose_nothing(world: World):
    made = await world.openai.conversations.create()
    world.engine.gate.clear()
    asking = [
        asyncio.create_task(
            world.openai.responses.create(model="fake", input=[{**said(text), "id": "msg_1"}], conversation=made.id)
        )
        for text in "AB"
    ]
    await until(lambda: len(world.engine.requests) == 2)
    world.engine.gate.set()
    await asyncio.gather(*asking)
    found = await texts(world, made.id)
    assert sorted(found) == ["A", "B", "Hello world", "Hello world"]


async def test_items_that_are_added_at_a_time_have_ids_of_their_own(world: World, monkeypatch: pytest.MonkeyPatch):
    made = await world.openai.conversations.create()
    read, num_read = conversations._read, 0

    async def read_together(*args: Any) -> Any:
        nonlocal num_read
        items = await read(*args)
        num_read += 1
        await until(lambda: num_read == 2)
        return items

    monkeypatch.setattr(conversations, "_read", read_together)
    add = world.openai.conversations.items.create
    lists = await asyncio.gather(*(add(made.id, items=[{**said(text), "id": "msg_1"}]) for text in "AB"))
    ids = [item.id async for item in world.openai.conversations.items.list(made.id, order="asc")]
    assert sorted(ids) == sorted(str(added.first_id) for added in lists)
    assert len({*ids}) == 2


async def test_items_of_conversations_can_be_referred_to(world: World):
    made = await world.openai.conversations.create(items=[said("One")])
    (item,) = (await world.openai.conversations.items.list(made.id)).data
    reference: Any = {"type": "item_reference", "id": item.id}
    await world.openai.responses.create(model="fake", input=[reference])
    assert asked(world) == "<|user|>One<|end|><|assistant|>"
    other = await world.openai.conversations.create(items=[reference])
    assert await texts(world, other.id) == ["One"]
    again = await world.openai.conversations.items.create(other.id, items=[reference])
    assert again.first_id != item.id, "pages begin after an id, so no conversation has one twice"
    assert await texts(world, other.id) == ["One", "One"]


async def test_items_with_odd_ids_can_be_read_and_deleted(world: World):
    given = ["a/b", "", "..", "x" * 600, "é\n?#%2F"]
    path = "/v1/conversations"
    made = (await world.http.post(path, json={"items": [{**said("x"), "id": item_id} for item_id in given]})).json()
    items = [item.id async for item in world.openai.conversations.items.list(made["id"], order="asc", limit=1)]
    assert [item_id in given for item_id in items] == [False, False, False, False, True]
    for item_id in items:
        assert (await world.openai.conversations.items.retrieve(item_id, conversation_id=made["id"])).id == item_id
        await world.openai.conversations.items.delete(item_id, conversation_id=made["id"])
    assert await texts(world, made["id"]) == []


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("", {"items": [{"type": "nonsense"}]}, 400, "items[0].type"),
    ("", {"items": [{"role": "user"}]}, 400, "items[0].content"),
    ("", {"items": [{"type": "item_reference", "id": "x"}]}, 400, "items[0].id"),
    ("", {"items": "Hi"}, 400, "items"),
    ("", {"metadata": {"a": 5}}, 400, "metadata.a"),
    ("", {"metadata": {"a": "x" * 513}}, 400, "metadata.a"),
    ("", {"metadata": {str(index): "" for index in range(17)}}, 400, "metadata"),
    ("/conv_x/items", {"items": []}, 404, None),
    ("/conv_x", {"metadata": {}}, 404, None),
    ("/conv_x", {}, 400, "metadata"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
async def test_what_is_wrong_is_named(world: World, path: str, body: dict[str, Any], status: int, param: str | None):
    answer = await world.http.post(f"/v1/conversations{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_a_conversation_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "MAX_MESSAGES", 2)
    monkeypatch.setattr(store, "MAX_BODY_BYTES", 1000)
    path = "/v1/conversations"
    made = (await world.http.post(path, json={"items": [said("One")]})).json()["id"]
    for items, word in (([said("x")] * 2, "3 items"), ([said("x" * 1000)], "and 1000 bytes")):
        for where in (path, f"{path}/{made}/items"):
            given = [said("One"), *items] if where == path else items
            refused = await world.http.post(where, json={"items": given})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items")
            assert word in refused.text
        refused = await world.http.post("/v1/responses", json={"input": items, "conversation": made})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "conversation")
    assert not world.engine.requests
    assert (await world.http.post("/v1/responses", json={"input": "x", "conversation": made})).status_code == 200


async def test_requests_at_the_same_time_do_not_exceed_the_bounds_together(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(reading, "MAX_MESSAGES", 4)
    path = "/v1/conversations"
    made = (await world.http.post(path, json={})).json()["id"]
    world.engine.gate.clear()
    body = {"input": [said("One"), said("Two")], "conversation": made}
    asking = [asyncio.create_task(world.http.post("/v1/responses", json=body)) for _ in range(3)]
    await until(lambda: len(world.engine.requests) == len(asking))
    world.engine.gate.set()
    assert [(await answering).status_code for answering in asking] == [200] * 3
    assert len((await world.http.get(f"{path}/{made}/items")).json()["data"]) == 3
    assert len([record for record in caplog.records if "would have 5 items" in record.getMessage()]) == 2


async def test_a_conversation_is_there_only_for_the_key_that_made_it(world: World):
    world.configure_server(api_key="ours", admin_key="theirs")
    ours, theirs = {"x-api-key": "ours"}, {"x-api-key": "theirs"}
    made = (await world.http.post("/v1/conversations", json={"items": [said("Hi")]}, headers=ours)).json()["id"]
    path = f"/v1/conversations/{made}"
    (item,) = (await world.http.get(f"{path}/items", headers=ours)).json()["data"]
    for method, where in (("GET", ""), ("DELETE", ""), ("GET", "/items"), ("GET", f"/items/{item['id']}")):
        assert (await world.http.request(method, path + where, headers=theirs)).status_code == 404
    body = {"input": "Hi", "conversation": made}
    assert (await world.http.post("/v1/responses", json=body, headers=theirs)).status_code == 404
    assert (await world.http.post("/v1/responses", json=body, headers=ours)).status_code == 200
    assert (await world.http.get(f"/v1/responses/{made}", headers=ours)).status_code == 404, "it is no response"
    assert json.dumps(said("Hi")["content"]) in (await world.http.get(f"{path}/items", headers=ours)).text
