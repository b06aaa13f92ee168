"""Clients that go away: their requests end, wherever they are, and nothing is left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.api.worlds import World, until, user

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def send(world: World, body: dict[str, Any], path: str = "/v1/chat/completions") -> asyncio.StreamWriter:
    """Sends a request on a connection of its own and leaves the answer unread."""
    content = json.dumps(body).encode()
    _, writer = await world.connect()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    return writer


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_queued_request_is_aborted(world: World, stream: bool, n: int):
    world.engine.gate.clear()
    writer = await send(world, {"messages": user("Hi"), "stream": stream, "n": n})
    await until(lambda: len(world.engine.open) == n)
    await hang_up(writer)
    await world.settle()
    assert len(world.engine.aborted) == n


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decoding_request_is_aborted(world: World, stream: bool):
    world.engine.pause_after = 3
    body = {"prompt": ["Hi", "Ho"], "stream": stream}
    writer = await send(world, body, "/v1/completions")
    await until(lambda: world.engine.num_paused == 2)
    await hang_up(writer)
    await world.settle()
    assert len(world.engine.aborted) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_is_being_tokenized_never_reaches_the_engine(
    world: World, stream: bool, monkeypatch: pytest.MonkeyPatch
):
    is_formatting, may_go_on = world.hold_formatting(monkeypatch)
    writer = await send(world, {"messages": user("Hi"), "stream": stream})
    await until(is_formatting.is_set)
    await hang_up(writer)
    await asyncio.sleep(0.05)
    may_go_on.set()
    await asyncio.sleep(0.05)
    assert world.engine.requests == []


async def test_only_the_request_of_the_client_that_left_is_aborted(world: World):
    world.engine.gate.clear()
    leaving = await send(world, {"messages": user("Hi"), "request_id": "leaving"})
    staying = asyncio.create_task(world.chat(request_id="staying"))
    await until(lambda: len(world.engine.open) == 2)
    await hang_up(leaving)
    await until(lambda: len(world.engine.open) == 1)
    assert [request_id.split("-")[1] for request_id in world.engine.aborted] == ["leaving"]
    world.engine.gate.set()
    assert (await staying).json()["choices"][0]["message"]["content"] == "Hello world"


async def test_a_stream_that_the_client_closes_early(world: World):
    world.engine.pause_after = 2
    stream = await world.openai.chat.completions.create(model="fake", messages=user("Hi"), stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content == "e":
            break
    await stream.close()
    await world.settle()
    assert len(world.engine.aborted) == 1


async def test_a_finished_request_is_not_aborted(world: World):
    await world.chat()
    await world.chat(stream=True)
    assert world.engine.aborted == []
