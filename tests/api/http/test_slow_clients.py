"""Clients that send or take their bytes too slowly, or too many of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send

from mlx_server.api.http import sse
from mlx_server.api.http.connections import MIN_BYTES_PER_S
from tests.api.worlds import running, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

TIMEOUT_S = 0.3
PIECE, NUM_PIECES = b"data: %b\n\n" % (b"x" * 65536), 1000
HEAD = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n"


class App:
    """Answers with the length of the body it got; `/flood` with more than any buffer holds, `/events` likewise and as
    a stream of events. `events` are what happened to its requests, `num_pieces` how many pieces were written."""

    def __init__(self) -> None:
        self.url = ""
        self.events: list[str] = []
        self.num_pieces = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.events.append("asked")
        if scope["path"] == "/flood":
            await self._flood(receive, send)
        elif scope["path"] == "/events":
            await sse.EventStream(self._write_events, 0, lambda: self.events.append("gone"))(scope, receive, send)
        elif scope["path"] == "/refuse":
            await self._answer(send, b"no")
        else:
            await self._echo(receive, send)

    async def _echo(self, receive: Receive, send: Send) -> None:
        num_bytes, has_more = 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.events.append("gone")
                return
            num_bytes, has_more = num_bytes + len(message["body"]), message["more_body"]
        await self._answer(send, b"%d" % num_bytes)

    async def _answer(self, send: Send, body: bytes) -> None:
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _flood(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.ensure_future(receive())
        while not leaving.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        self.events.append("gone")

    async def _write_events(self, writer: sse.PieceWriter) -> None:
        for self.num_pieces in range(NUM_PIECES):
            writer.write(PIECE)
            await writer.drain()
            await asyncio.sleep(0)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.url.removeprefix("http://").split(":")
        return await asyncio.open_connection(host, int(port))


@pytest_asyncio.fixture(loop_scope="session")
async def app() -> AsyncIterator[App]:
    app = App()
    async with running(app, client_timeout_s=TIMEOUT_S) as app.url:
        yield app


async def ends(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes the connection, which must be soon."""
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionResetError):
            return await reader.read()
    return b""


@pytest.mark.parametrize(
    "sent",
    [b"", b"P", b"POST /echo HTTP/1.1\r\nhost:", HEAD, HEAD + b"\r\n", HEAD + b"\r\n12345"],
    ids=["nothing", "a byte", "half a line", "no end of the head", "no body", "half a body"],
)
async def test_a_client_that_never_finishes_is_left(app: App, sent: bytes):
    reader, writer = await app.connect()
    writer.write(sent)
    assert await ends(reader) == b""
    writer.close()
    assert app.events == ([] if b"\r\n\r\n" not in sent else ["asked", "gone"])


async def test_dripping_does_not_help(app: App):
    reader, writer = await app.connect()
    closing = asyncio.ensure_future(ends(reader))
    writer.write(HEAD)
    while not closing.done():
        writer.write(b"x-a: b\r\n")
        await asyncio.sleep(TIMEOUT_S / 20)
    assert await closing == b""
    writer.close()


async def test_nor_does_it_behind_an_answer_that_needed_no_body(app: App):
    """TCP may lose an answer to who goes on sending; not again and again."""
    answers = [await drip_a_refused_body(app) for _ in range(3)]
    assert any(answer.endswith(b"no") for answer in answers)


async def drip_a_refused_body(app: App) -> bytes:
    reader, writer = await app.connect()
    writer.write(HEAD.replace(b"/echo", b"/refuse").replace(b"10", b"1000000") + b"\r\n")
    closing = asyncio.ensure_future(ends(reader))
    while not closing.done():
        writer.write(b"x")
        await asyncio.sleep(TIMEOUT_S / 20)
    writer.close()
    return await closing


async def test_having_sent_much_does_not_pay_for_silence(app: App):
    """At the least rate, what was sent would be good for ten times the timeout."""
    num_bytes = int(10 * TIMEOUT_S * MIN_BYTES_PER_S)
    reader, writer = await app.connect()
    writer.write(HEAD.replace(b"10", b"%d" % (num_bytes + 1)) + b"\r\n" + b"x" * num_bytes)
    async with asyncio.timeout(5 * TIMEOUT_S):
        assert await ends(reader) == b""
    writer.close()


async def test_a_client_that_is_quick_enough_is_waited_for(app: App):
    """Several times the timeout, at twice the least rate."""
    reader, writer = await app.connect()
    num_bytes, step = 16384, 512
    writer.write(HEAD.replace(b"10", b"%d" % num_bytes) + b"\r\n")
    for _ in range(num_bytes // step):
        writer.write(b"x" * step)
        await asyncio.sleep(step / 8192)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert await reader.readexactly(5) == b"16384"
    writer.close()


async def test_a_kept_connection_may_be_idle(app: App):
    reader, writer = await app.connect()
    for _ in range(3):
        writer.write(HEAD + b"\r\n0123456789")
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(2) == b"10"
        await asyncio.sleep(TIMEOUT_S * 1.5)
    writer.write(b"POST")
    assert await ends(reader) == b""
    writer.close()


async def test_a_client_that_takes_nothing_is_left(app: App):
    _, writer = await app.connect()
    writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
    writer.transport.pause_reading()
    await until(lambda: app.events == ["asked", "gone"])
    writer.transport.abort()


async def test_a_stream_waits_for_a_client_that_takes_nothing_until_it_is_left(app: App):
    """In the buffers of the kernel there is room for some pieces, and none are made for later."""
    _, writer = await app.connect()
    writer.write(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n")
    writer.transport.pause_reading()
    await until(lambda: app.events == ["asked", "gone"])
    assert 0 < app.num_pieces < NUM_PIECES / 4
    writer.transport.abort()


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_stream_is_in_chunks_for_those_who_know_them(app: App, version: bytes):
    reader, writer = await app.connect()
    writer.write(b"GET /events HTTP/%b\r\nhost: x\r\nconnection: close\r\n\r\n" % version)
    async with asyncio.timeout(30):
        head, body = (await reader.readuntil(b"\r\n\r\n")).lower(), await reader.read()
    is_chunked = version == b"1.1"
    assert (b"transfer-encoding: chunked" in head) == is_chunked
    piece = b"%x\r\n%b\r\n" % (len(PIECE), PIECE) if is_chunked else PIECE
    assert body == piece * NUM_PIECES + (b"0\r\n\r\n" if is_chunked else b"")
    writer.close()


async def test_a_client_that_takes_its_time_is_served(app: App):
    reader, writer = await app.connect()
    writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
    for _ in range(8):
        await reader.readexactly(1 << 20)
        await asyncio.sleep(TIMEOUT_S / 4)
    assert app.events == ["asked"]
    writer.transport.abort()
    await until(lambda: app.events == ["asked", "gone"])


async def test_a_head_that_is_too_large_is_refused(app: App):
    reader, writer = await app.connect()
    writer.write(HEAD + b"x-long: " + b"x" * 20_000)
    refused = await ends(reader)
    assert refused.startswith(b"HTTP/1.1 400")
    assert b"The request's head has more than 16384 bytes." in refused
    assert app.events == []
    writer.close()


@pytest.mark.parametrize(("num_bytes", "status"), [(16 * 1024, b"200"), (16 * 1024 + 1, b"400")])
async def test_a_head_is_bounded_to_the_byte_however_it_comes(app: App, num_bytes: int, status: bytes):
    begin, end = b"GET / HTTP/1.1\r\nhost: x\r\nx-long: ", b"\r\n\r\n"
    head = begin + b"x" * (num_bytes - len(begin) - len(end)) + end
    for num_first in (num_bytes, num_bytes - 1, 100):
        reader, writer = await app.connect()
        writer.write(head[:num_first])
        await asyncio.sleep(TIMEOUT_S / 20)
        writer.write(head[num_first:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 " + status)
        writer.close()


async def test_without_a_timeout_it_waits_as_uvicorn_does():
    app = App()
    async with running(app, client_timeout_s=0.0) as app.url:
        reader, writer = await app.connect()
        writer.write(HEAD)
        await asyncio.sleep(TIMEOUT_S * 2)
        writer.write(b"\r\n0123456789")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()
