"""When a stream begins: what ends it before its first token decides the answer's status, as without streaming."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mlx_server.errors import EngineDeadError, InvalidRequestError, QueueTimeoutError, ServeError
from tests.api.http.test_disconnect import hang_up, send
from tests.api.worlds import World, until, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": user("Hi")},
    TEXT: {"prompt": ["Hi", "Ho"], "n": 2},
    MESSAGES: {"messages": user("Hi"), "max_tokens": 20},
    RESPONSES: {"input": "Hi"},
}
EARLY_ENDS: list[tuple[ServeError, int]] = [
    (QueueTimeoutError("Waited too long.", 2.0), 503),
    (EngineDeadError("The engine has died."), 503),
    (InvalidRequestError("The grammar cannot be followed.", "regex"), 400),
]

every_route = pytest.mark.parametrize("path", BODIES)


async def ask(world: World, path: str, stream: bool = True) -> httpx.Response:
    return await world.http.post(path, json={**BODIES[path], "stream": stream})


@every_route
@pytest.mark.parametrize(("error", "status"), EARLY_ENDS, ids=lambda value: str(value))
async def test_an_early_end_has_its_status_whether_streamed_or_not(
    world: World, path: str, error: ServeError, status: int
):
    world.engine.fail_with, world.engine.fail_after = error, 0
    whole, streamed = await ask(world, path, stream=False), await ask(world, path)
    assert (streamed.status_code, streamed.json()) == (status, whole.json())
    for name in ("content-type", "retry-after", "x-should-retry"):
        assert streamed.headers.get(name) == whole.headers.get(name)
    assert not world.context.generations.num_in_progress


async def test_stock_clients_try_streams_again_that_waited_in_vain(world: World):
    world.engine.fail_with, world.engine.fail_after = QueueTimeoutError("Waited too long.", 0.0), 0
    client = world.openai.with_options(max_retries=1)
    with pytest.raises(openai.InternalServerError, match="Waited too long"):
        await client.chat.completions.create(model="fake", messages=user("Hi"), stream=True)
    assert len(world.engine.requests) == 2
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key="unused", max_retries=1) as claude:
        with pytest.raises(anthropic.APIStatusError, match="Waited too long"):
            await claude.messages.create(model="fake", max_tokens=9, messages=user("Hi"), stream=True)
    assert len(world.engine.requests) == 4


@every_route
async def test_a_stream_begins_with_its_first_token(world: World, path: str):
    world.configure_server(sse_keep_alive_s=0.0)
    world.engine.gate.clear()
    answering = asyncio.create_task(begun(world, path))
    await until(lambda: world.engine.open)
    await asyncio.sleep(0.05)
    assert not answering.done()
    world.engine.gate.set()
    assert await answering == 200


@every_route
async def test_or_when_it_may_be_silent_no_longer(world: World, path: str):
    world.configure_server(sse_keep_alive_s=0.02)
    world.engine.gate.clear()
    world.engine.fail_with, world.engine.fail_after = QueueTimeoutError("Waited too long."), 0
    async with world.http.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
        assert response.status_code == 200
        world.engine.gate.set()
        assert "Waited too long." in (await response.aread()).decode()


async def test_one_of_several_choices_begins_the_stream(world: World):
    world.engine.pause_after = 1
    assert await begun(world, TEXT) == 200


@every_route
async def test_a_client_that_leaves_before_the_stream_begins_is_noticed(world: World, path: str):
    world.configure_server(sse_keep_alive_s=0.0)
    world.engine.gate.clear()
    writer = await send(world, {**BODIES[path], "stream": True}, path)
    num_choices = 4 if path == TEXT else 1
    await until(lambda: len(world.engine.open) == num_choices)
    await hang_up(writer)
    await world.settle()
    assert len(world.engine.aborted) == num_choices


async def test_an_abort_before_the_first_token_ends_the_stream_as_usual(world: World):
    world.engine.gate.clear()
    answering = asyncio.create_task(ask(world, CHAT))
    await until(lambda: world.engine.open)
    await world.http.post("/abort_requests", json={"abort_all": True})
    response = await answering
    assert response.status_code == 200
    assert '"finish_reason":"abort"' in response.text


async def begun(world: World, path: str) -> int:
    """Waits for the answer's head, and leaves; its status."""
    async with world.http.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
        return response.status_code
