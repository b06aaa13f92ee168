"""What a stream looks like on the wire."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from starlette.types import Message, Send

from mlx_server.api.app import create_app
from mlx_server.api.http import sse
from mlx_server.api.http.listener import listen
from mlx_server.api.openai import exchange
from mlx_server.config import Config, ServerConfig
from tests.api.fakes import say
from tests.api.sse import bodies
from tests.api.worlds import World, passed, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_silent_stream_is_kept_alive(world: World):
    world.configure_server(sse_keep_alive_s=0.02)
    world.engine.gate.clear()
    answering = asyncio.create_task(world.chat(stream=True))
    await until(lambda: world.engine.open)
    await passed(0.3)
    world.engine.gate.set()
    text = (await answering).text
    assert text.count(": keep-alive\n\n") >= 2
    assert "".join(body["choices"][0]["delta"].get("content", "") for body in bodies(text)) == "Hello world"


@pytest.mark.parametrize("text", ["plain", "caf\u00e9 \U0001f600", "a\x85b\u2028c\u2029d\x0be\x1cf\ng"])
async def test_an_event_is_one_line_for_all_clients(text: str):
    """httpx, which Ollama's client reads lines with, ends them where Unicode does."""
    template = sse.Template(lambda blank: sse.data({"text": blank}))
    for event in (sse.data({"text": text}), template.fill(text)):
        (line, blank) = event.decode().splitlines()
        assert (json.loads(line.removeprefix("data: ")), blank) == ({"text": text}, "")


async def test_keep_alives_can_be_turned_off(world: World):
    world.configure_server(sse_keep_alive_s=0.0)
    world.engine.gate.clear()
    answering = asyncio.create_task(world.chat(stream=True))
    await until(lambda: world.engine.open)
    await asyncio.sleep(0.05)
    world.engine.gate.set()
    assert "keep-alive" not in (await answering).text


async def test_nothing_comes_behind_the_end_to_a_client_that_is_slow_to_take_it():
    sent: list[bytes] = []
    is_full, is_drained = False, asyncio.Event()

    async def write_stream(writer: sse.PieceWriter) -> None:
        for piece in (b"data: {}\n\n", sse.DONE):
            writer.write(piece)
            await writer.drain()

    async def send(message: Message) -> None:
        nonlocal is_full
        is_full = is_full or message.get("body") == sse.DONE
        if is_full:
            await is_drained.wait()
        sent.append(message.get("body", b""))

    async def receive() -> Message:
        return await asyncio.Future()

    response = sse.EventStream(write_stream, 0.2, lambda: None)
    answering = asyncio.create_task(response({"type": "http", "method": "POST"}, receive, send))
    await asyncio.sleep(0.5)
    is_drained.set()
    await answering
    assert sent[-2:] == [sse.DONE, b""]


async def test_events_are_framed_by_line_feeds_and_not_cached(world: World):
    response = await world.chat(stream=True)
    assert "\r" not in response.text
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"
    for event in response.text.rstrip("\n").split("\n\n"):
        assert event.startswith("data: ")
        assert "\n" not in event


async def test_line_ends_in_the_text_stay_inside_their_event(world: World):
    world.engine.script = say("a\n\nb\r\nc\u2028d")
    text = (await world.chat(stream=True)).text
    assert "".join(body["choices"][0]["delta"].get("content", "") for body in bodies(text)) == "a\n\nb\r\nc\u2028d"


@pytest.mark.parametrize("text", ["", "plain", 'a "quote"\\ \n\u2028 \N{SNOWMAN}', "\0\x7f"])
async def test_a_template_makes_the_same_bytes(text: str):
    for keys in ((), ("delta",), ("reasoning", "reasoning_content")):
        body = {"id": text, "choices": [{"index": 0, "logprobs": None}]} | dict.fromkeys(keys, "")

        def event(text: str, body: Any = body, keys: Any = keys) -> bytes:
            return sse.data({**body, **dict.fromkeys(keys, text)})

        assert sse.Template(event).fill(text) == event(text)


async def stream_to(send: Send, world: World, **body: Any) -> None:
    """A streamed chat of a client that takes messages as `send` does."""
    text = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True, **body}).encode()
    requests = [{"type": "http.request", "body": text, "more_body": False}]

    async def receive() -> Message:
        return requests.pop() if requests else await asyncio.Future()

    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "client": ("127.0.0.1", 1), "server": None, "scheme": "http"}
    await create_app(world.pool, Config())(scope, receive, send)


async def test_all_that_is_there_at_one_time_is_one_piece(world: World):
    """Of several choices, and of tokens that came while the client took nothing."""
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        await asyncio.sleep(0.01)  # the others' tokens come meanwhile

    await stream_to(send, world, n=4)
    pieces = [piece for piece in sent if b'"content":"' in piece]
    assert max(len(bodies(piece.decode())) for piece in pieces) == 4
    assert sum(len(bodies(piece.decode())) for piece in pieces) > 2 * len(pieces)


async def test_log_probabilities_that_a_slow_client_kept_waiting_leave_in_turns(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """Of the event loop, so that other streams go on in between."""
    monkeypatch.setattr(exchange, "MAX_POSITIONS", 3)
    sent: list[tuple[int, int]] = []  # how many positions, in which turn
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def send(message: Message) -> None:
        num_positions = message.get("body", b"").count(b'"top_logprobs"')
        if num_positions:
            sent.append((num_positions, num_turns))
            await asyncio.sleep(0.01)  # the others' tokens come meanwhile

    counting = asyncio.create_task(count())
    await stream_to(send, world, logprobs=True, n=8)
    counting.cancel()
    sizes, turns = zip(*sent)
    assert max(sizes) == 3
    assert sizes.count(3) > 2
    assert len(set(turns)) == len(turns)


async def test_events_with_names():
    assert sse.named("ping", {"type": "ping"}) == b'event: ping\ndata: {"type":"ping"}\n\n'


async def test_load_headers_come_on_request(world: World):
    headers = {"endpoint-load-metrics-format": "JSON"}
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    response = await world.http.post("/v1/chat/completions", json=body, headers=headers)
    report = response.headers["endpoint-load-metrics"].removeprefix("JSON ")
    assert json.loads(report) == {"named_metrics": {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0}}
    headers = {"endpoint-load-metrics-format": "text"}
    response = await world.http.post("/v1/chat/completions", json={**body, "stream": True}, headers=headers)
    expected = "TEXT named_metrics.kv_cache_usage_perc=0.01, named_metrics.num_requests_waiting=0"
    assert response.headers["endpoint-load-metrics"] == expected
    assert "endpoint-load-metrics" not in (await world.chat()).headers


async def test_answers_are_not_held_back_by_the_network_stack():
    """Nagle's algorithm is off on accepted connections."""
    with listen(ServerConfig(port=0)) as listener:
        listener.listen()
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(on_connect, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            assert await accepted
            writer.close()
            await writer.wait_closed()
