"""Responses in the background, as the stock OpenAI client sees them."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from typing import Any

import httpx
import openai
import pytest

from mlx_server.api.openai.responses import background
from mlx_server.errors import EngineDeadError, OverloadedError
from tests.api.fakes import say
from tests.api.worlds import World, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY: dict[str, Any] = {"model": "fake", "input": "Hi", "background": True}


def numbers(text: str) -> list[int]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line)["sequence_number"] for line in lines]


async def begin_stream(world: World, num_events: int) -> tuple[str, list[int]]:
    """The id of a response, and the numbers of its first events, at which its client has left."""
    found: list[int] = []
    response_id = ""
    async with world.http.stream("POST", "/v1/responses", json={**BODY, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                response_id = response_id or event["response"]["id"]
                found.append(event["sequence_number"])
                if len(found) == num_events:
                    return response_id, found
    raise AssertionError


async def test_a_response_is_polled_until_it_has_ended(world: World):
    world.engine.gate.clear()
    begun = await world.openai.responses.create(**BODY)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    assert (await world.openai.responses.retrieve(begun.id)).status == "in_progress"
    assert world.context.generations.num_in_progress == 1
    world.engine.gate.set()
    await world.settle()
    await until(lambda: not world.context.background.is_running(begun.id))
    ended = await world.openai.responses.retrieve(begun.id)
    assert (ended.status, ended.output_text, ended.background) == ("completed", "Hello world", True)
    following = await world.openai.responses.create(model="fake", input="And?", previous_response_id=begun.id)
    assert following.background is False
    with pytest.raises(openai.BadRequestError, match="background: true and stream: true"):
        await world.openai.responses.retrieve(begun.id, stream=True)


async def test_the_model_is_held_until_the_response_has_ended(world: World):
    world.engine.gate.clear()
    begun = await world.openai.responses.create(**BODY)
    (model,) = world.pool.models()
    assert not model.is_idle
    stopping = asyncio.create_task(world.pool.stop(60.0))
    await asyncio.sleep(0.05)
    assert not stopping.done(), "the drain waits for it"
    world.engine.gate.set()
    await stopping
    assert (await world.openai.responses.retrieve(begun.id)).status == "completed"


async def test_a_stream_goes_on_without_its_client_and_is_resumed(world: World):
    world.engine.pause_after = 3
    response_id, first = await begin_stream(world, 4)
    await until(lambda: world.engine.num_paused)
    assert not world.engine.aborted
    path = f"/v1/responses/{response_id}?stream=true"
    readers = [asyncio.create_task(world.http.get(f"{path}{after}")) for after in ("", f"&starting_after={first[-1]}")]
    await asyncio.sleep(0.02)
    world.engine.resume()
    whole, rest = [(await reader).text for reader in readers]
    assert numbers(whole) == list(range(len(numbers(whole))))
    assert numbers(rest) == numbers(whole)[len(first) :]
    assert whole.endswith(rest)
    assert (await world.http.get(path)).text == whole, "also after its end"
    last = json.loads(whole.strip().split("data: ")[-1])
    assert (last["type"], last["response"]) == (
        "response.completed",
        (await world.http.get(f"/v1/responses/{response_id}")).json(),
    )
    assert (await world.http.get(f"{path}&starting_after={numbers(whole)[-1]}")).text == ""


async def test_the_client_s_helper_resumes_a_stream(world: World):
    response_id, _ = await begin_stream(world, 1)
    async with world.openai.responses.stream(response_id=response_id, starting_after=2) as stream:
        events = [event async for event in stream]
        assert (await stream.get_final_response()).output_text == "Hello world"
    assert events[0].sequence_number == 3


async def test_it_can_be_cancelled_and_deleted(world: World):
    world.engine.pause_after = 3
    begun = await world.openai.responses.create(**BODY)
    await until(lambda: world.engine.num_paused)
    assert (await world.openai.responses.cancel(begun.id)).status == "cancelled"
    await world.settle()
    again = await world.openai.responses.cancel(begun.id)
    assert (again.status, again.output_text) == ("cancelled", "Hel")
    world.engine.num_paused = 0
    begun = await world.openai.responses.create(**BODY)
    await until(lambda: world.engine.num_paused)
    await world.openai.responses.delete(begun.id)
    await world.settle()
    assert len(world.engine.aborted) == 2
    with pytest.raises(openai.NotFoundError):
        await world.openai.responses.retrieve(begun.id)


async def test_errors_before_and_after_the_beginning(world: World):
    world.engine.refuse_with = OverloadedError("Full.", 1.0)
    assert (await world.http.post("/v1/responses", json=BODY)).status_code == 503
    world.engine.refuse_with = None
    world.engine.fail_with = EngineDeadError("The engine has died.")
    begun = await world.openai.responses.create(**BODY)
    await world.settle()
    await until(lambda: not world.context.background.is_running(begun.id))
    failed = await world.openai.responses.retrieve(begun.id)
    assert failed.error is not None
    assert (failed.status, failed.error.message) == ("failed", "The engine has died.")


async def test_it_is_added_to_its_conversation(world: World):
    made = await world.openai.conversations.create()
    begun = await world.openai.responses.create(conversation=made.id, **BODY)
    await until(lambda: not world.context.background.is_running(begun.id))
    items = world.openai.conversations.items
    assert [item.type for item in (await items.list(made.id)).data] == ["message", "message"]


def response_id_of(answer: httpx.Response) -> str:
    """Of a stream."""
    return str(json.loads(answer.text.split("data: ")[1].split("\n")[0])["response"]["id"])


async def stream_to_its_end(world: World, key: str = "") -> str:
    answer = await world.http.post("/v1/responses", json={**BODY, "stream": True}, headers={"x-api-key": key})
    response_id = response_id_of(answer)
    await until(lambda: not world.context.background.is_running(response_id))
    return response_id


async def test_events_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "MAX_EVENT_BYTES", 3000)
    monkeypatch.setattr(background, "MAX_ENDED", 2)
    ids = [await stream_to_its_end(world) for _ in range(3)]
    found = [await world.http.get(f"/v1/responses/{response_id}?stream=true") for response_id in ids]
    assert [answer.json()["error"]["param"] for answer in found] == ["stream", "starting_after", "starting_after"]
    first_kept = int(found[2].json()["error"]["message"].split("starting_after to ")[1].split()[0]) + 1
    rest = await world.http.get(f"/v1/responses/{ids[2]}?stream=true&starting_after={first_kept - 1}")
    assert numbers(rest.text)[0] == first_kept
    assert len(rest.text) <= 3000


async def test_no_key_s_events_push_out_those_of_another(world: World, monkeypatch: pytest.MonkeyPatch):
    world.configure_server(api_key="ours", admin_key="theirs")
    monkeypatch.setattr(background, "MAX_ENDED", 2)
    kept = await stream_to_its_end(world, "ours")
    answer = await world.http.get(f"/v1/responses/{kept}?stream=true", headers={"x-api-key": "ours"})
    ids = [await stream_to_its_end(world, "theirs") for _ in range(3)]

    async def statuses() -> list[int]:
        asked = [(kept, "ours"), *((response_id, "theirs") for response_id in ids)]
        return [
            (await world.http.get(f"/v1/responses/{each}?stream=true", headers={"x-api-key": key})).status_code
            for each, key in asked
        ]

    assert await statuses() == [200, 400, 200, 200]
    monkeypatch.setattr(background, "MAX_ENDED_BYTES", 3 * len(answer.content))
    ids.append(await stream_to_its_end(world, "theirs"))
    assert await statuses() == [200, 400, 400, 200, 200]
    monkeypatch.setattr(background, "MAX_ENDED_BYTES", 2 * len(answer.content) + 10)
    ids.append(await stream_to_its_end(world, "theirs"))
    assert await statuses() == [200, 400, 400, 400, 400, 200]


async def test_what_is_in_progress_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "MAX_RUNNING_BYTES", 8000)
    world.configure_server(api_key="ours", admin_key="theirs")
    world.engine.gate.clear()
    body = {**BODY, "metadata": {"a": "x" * 1000}}

    async def post(key: str) -> httpx.Response:
        return await world.http.post("/v1/responses", json=body, headers={"x-api-key": key})

    answers = [await post("ours") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert "responses in the background would hold" in answers[-1].text
    assert (await post("theirs")).status_code == 200, "within an equal share"
    assert (await post("theirs")).status_code == 429
    for response_id in [answer.json()["id"] for answer in answers[:2]]:
        cancelled = await world.http.post(f"/v1/responses/{response_id}/cancel", headers={"x-api-key": "ours"})
        assert cancelled.status_code == 200
        await until(lambda: not world.context.background.is_running(response_id))  # noqa: B023
    assert (await post("ours")).status_code == 200
    world.engine.gate.set()
    await world.settle()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_is_counted_is_what_is_held(world: World, is_streamed: bool):
    world.engine.gate.clear()
    body = {**BODY, "stream": is_streamed, "metadata": {"a": "x" * 1_000_000}}
    runs = world.context.background._running

    async def begin() -> None:
        async with world.http.stream("POST", "/v1/responses", json=body) as answer:
            assert answer.status_code == 200
            await anext(answer.aiter_raw())

    await begin()
    tracemalloc.start()
    try:
        for _ in range(3):
            await begin()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counted = sum([run.num_held + run.num_bytes for run in list(runs.values())[1:]])
    world.engine.gate.set()
    await world.settle()
    assert 0.8 * held < counted < 1.2 * held


async def test_events_that_nobody_can_read_are_not_kept(world: World):
    world.engine.gate.clear()
    begun = await world.openai.responses.create(**BODY)
    assert world.context.background._running[begun.id].num_bytes == 0
    world.engine.gate.set()
    await until(lambda: not world.context.background.is_running(begun.id))
    assert not world.context.background._ended


async def test_a_response_in_progress_is_kept_however_many_follow(world: World):
    world.engine.pause_after = 3
    begun = await world.openai.responses.create(**BODY)
    await until(lambda: world.engine.num_paused)
    world.engine.pause_after = None
    world.context.records.max_records = 2
    for _ in range(3):
        await world.openai.responses.create(model="fake", input="Hi")
    assert (await world.openai.responses.cancel(begun.id)).status == "cancelled"
    await world.settle()


async def test_a_long_stream_is_read_in_pieces(world: World):
    world.engine.script = say("word " * 300)
    response_id = await stream_to_its_end(world)
    whole = (await world.http.get(f"/v1/responses/{response_id}?stream=true")).text
    assert numbers(whole) == list(range(len(numbers(whole))))
    assert len(numbers(whole)) > 3 * background._AT_ONCE


async def test_only_its_key_reads_its_events(world: World):
    world.configure_server(api_key="ours", admin_key="theirs")
    answer = await world.http.post("/v1/responses", json={**BODY, "stream": True}, headers={"x-api-key": "ours"})
    path = f"/v1/responses/{response_id_of(answer)}?stream=true"
    assert (await world.http.get(path, headers={"x-api-key": "theirs"})).status_code == 404
    assert (await world.http.get(path, headers={"x-api-key": "ours"})).text == answer.text
