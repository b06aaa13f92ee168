"""More connections than there may be: who is closed, who is refused, and who is served all the same."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import logging
import os
import socket
import struct
import sys
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from mlx_server.api.http.connections import BoundedProtocol, ConnectionGate, GuardedListener, room_for_connections
from mlx_server.api.server import uvicorn_config
from mlx_server.config import ServerConfig
from tests.api.worlds import World, running, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

GET = b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Peer:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def get(self, path: str) -> bytes:
        """The head of an answer; empty if the connection is closed instead."""
        self.writer.write(GET % path.encode())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            return head + await self.reader.readexactly(int(length.split()[1]))
        return b""

    async def is_closed(self) -> bool:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                return await self.reader.read() == b""
        return True


class Small:
    """A server that may have three connections."""

    def __init__(self, host: str, port: str) -> None:
        self.address = host, int(port)
        self.peers: list[Peer] = []
        self.is_held = asyncio.Event()
        self.num_held = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/hold":
            self.num_held += 1
            await self.is_held.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def connect(self, num: int = 1) -> list[Peer]:
        peers = [Peer(*await asyncio.open_connection(*self.address)) for _ in range(num)]
        self.peers += peers
        return peers

    async def hold(self, num: int) -> list[asyncio.Task[bytes]]:
        """So many busy connections."""
        tasks = [asyncio.create_task(peer.get("/hold")) for peer in await self.connect(num)]
        await until(lambda: self.num_held >= num)
        return tasks


@pytest_asyncio.fixture(loop_scope="session")
async def small() -> AsyncIterator[Small]:
    world = Small("", "0")
    async with running(world, max_connections=3) as url:
        host, port = url.removeprefix("http://").split(":")
        world.address = host, int(port)
        yield world
        world.is_held.set()
        for peer in world.peers:
            peer.writer.close()
        await asyncio.sleep(0)


async def test_the_most_silent_connection_makes_room(small: Small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlx_server.api.http.connections._SILENT_S", 0.0)
    first, second, third = await small.connect(3)
    assert b" 200 " in await first.get("/v1/models")
    (fourth,) = await small.connect()
    assert await second.is_closed()
    assert b" 200 " in await fourth.get("/v1/models")
    assert b" 200 " in await third.get("/v1/models")
    assert b" 200 " in await first.get("/v1/models")


async def test_who_has_just_come_may_ask(small: Small):
    """None has been silent for long: all may stay until they ask, and the most silent goes then."""
    peers = await small.connect(4)
    assert b" 200 " in await peers[3].get("/v1/models")
    assert await peers[0].is_closed()
    assert b" 200 " in await peers[1].get("/v1/models")


async def test_busy_connections_stay_and_others_are_refused_but_for_probes(small: Small):
    held = await small.hold(3)
    probe, other = await small.connect(2)
    assert b" 200 " in await probe.get("/health")
    refused = await other.get("/v1/messages")
    head, _, body = refused.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 5" in head
    assert b"connection: close" in head
    assert b"\r\nx-request-id: " in head
    assert b"\r\nrequest-id: " in head, "as Anthropic's clients read it"
    assert b'"overloaded_error"' in body
    assert b"3 connections are open and busy, which is the limit (--max-connections)" in body
    assert await other.is_closed()
    small.is_held.set()
    assert all(b" 200 " in answer for answer in await asyncio.gather(*held))


async def test_half_a_body_is_silence_too(small: Small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlx_server.api.http.connections._SILENT_S", 0.0)
    held = await small.hold(2)
    (dripping,) = await small.connect()
    dripping.writer.write(b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\nhalf")
    await dripping.reader.readuntil(b"ok")
    (other,) = await small.connect()
    assert await dripping.is_closed()
    assert b" 200 " in await other.get("/v1/models")
    small.is_held.set()
    await asyncio.gather(*held)


class Dummy:
    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Held:
    """What a request holds."""


@pytest.mark.usefixtures("uncollected")
async def test_an_open_connection_holds_nothing_of_its_last_request(small: Small):
    held: list[weakref.ref[Held]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["held"] = Held()
        held.append(weakref.ref(scope["state"]["held"]))
        await small(scope, receive, send)

    async with running(app) as url:
        small.address = "127.0.0.1", int(url.rpartition(":")[2])
        (peer,) = await small.connect()
        for num in (1, 2):
            assert b" 200 " in await peer.get("/")
            await until(lambda: held[-1]() is None)
            assert len(held) == num
        peer.writer.close()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_closed_connection_leaves_nothing_to_collect(small: Small, is_reset: bool):
    """Collections over what thousands leave would stall streams."""
    (peer,) = await small.connect()
    assert b" 200 " in await peer.get("/")
    address = peer.writer.get_extra_info("sockname")
    protocols = [each for each in gc.get_objects() if isinstance(each, BoundedProtocol) and each.client == address]
    left = weakref.ref(protocols.pop())
    if is_reset:
        no_linger = struct.pack("ii", 1, 0)
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
    peer.writer.close()
    await until(lambda: left() is None)


async def test_nobody_holds_more_than_the_extra_connections():
    gate = ConnectionGate(10)
    busy = [Dummy() for _ in range(10)]
    for dummy in busy:
        assert not gate.enter(dummy)
        gate.work_for(dummy)
    crowd = [Dummy() for _ in range(1000)]
    for num, dummy in enumerate(crowd, start=1):
        gate.enter(dummy)
        assert sum(not other.is_aborted for other in crowd[:num]) <= 32
    assert not any(dummy.is_aborted for dummy in busy)
    assert not crowd[-1].is_aborted
    for dummy in crowd:
        if not dummy.is_aborted:
            gate.work_for(dummy)
    late = Dummy()
    assert gate.enter(late)
    assert late.is_aborted


async def test_a_line_a_minute(caplog: pytest.LogCaptureFixture):
    now = 0.0
    gate = ConnectionGate(1, lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(500):
            gate.shed()
        now = 61.0
        gate.shed()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "1 connections closed or refused",
        "500 connections closed or refused",
    ]


@pytest.fixture
def listener() -> Iterator[GuardedListener]:
    plain = socket.create_server(("127.0.0.1", 0))
    guarded = GuardedListener(plain, ConnectionGate(4))
    guarded.setblocking(False)
    yield guarded
    guarded.close()


async def test_connections_are_accepted_a_few_at_a_time(listener: GuardedListener, monkeypatch: pytest.MonkeyPatch):
    """The event loop has its turn between: a crowd that comes at once holds no one up, nor more files than are kept."""
    loop, turns, sizes = asyncio.get_running_loop(), itertools.count(), Counter[int]()
    accept, turn = socket.socket.accept, 0

    def count_turn() -> None:
        nonlocal turn, ticking
        turn = next(turns)
        ticking = loop.call_soon(count_turn)

    def counted(self: socket.socket) -> Any:
        accepted = accept(self)
        sizes[turn] += 1
        return accepted

    ticking = loop.call_soon(count_turn)
    monkeypatch.setattr(socket.socket, "accept", counted)
    config = uvicorn_config(Small("", "0"), ServerConfig(), ConnectionGate(100))
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(listener.getsockname(), timeout=2))
        server = await loop.create_server(asyncio.Protocol, sock=listener, backlog=config.backlog)
        stack.callback(server.close)
        await until(lambda: sizes.total() >= 60)
    ticking.cancel()
    assert max(sizes.values()) <= 17


async def test_what_asyncio_accepts_at_once_does_not_bound_who_may_wait(listener: GuardedListener):
    listener.listen(1)
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(listener.getsockname(), timeout=2))


async def test_without_a_descriptor_a_client_is_sent_away(listener: GuardedListener):
    with contextlib.ExitStack() as files, socket.create_connection(listener.getsockname()) as client:
        with pytest.raises(OSError) as caught:  # noqa: PT012 -- until there is none left
            while True:
                files.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert caught.value.errno == errno.EMFILE
        with pytest.raises(BlockingIOError):
            listener.accept()
        client.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


async def test_a_spare_descriptor_that_another_took_is_not_closed_again(
    listener: GuardedListener, monkeypatch: pytest.MonkeyPatch
):
    """Its number is another's then; the listener has a new one as soon as there is one."""
    closed: list[int] = []

    def fail(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "no file is free")

    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(os, "close", closed.append)
    monkeypatch.setattr(socket.socket, "accept", fail)
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            listener.accept()
    monkeypatch.undo()
    (spare,) = closed
    os.close(spare)
    with pytest.raises(BlockingIOError):
        listener.accept()


PROGRAM = """
import importlib.util, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, {before})
import mlx_server.runtime
for finder in sys.meta_path:
    finder.find_spec("mlx_lm.utils", importlib.util.find_spec("mlx_lm").submodule_search_locations)
import mlx_server.runtime.models.loader
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
print(*limits)
from mlx_server.api.http.connections import room_for_connections
for asked in None, 20, 400:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    print(room_for_connections(asked), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("before", "with_mlx_lm", "room", "after"),
    [
        ((64, 512), (512, 512), 384, (512, 512)),
        ((300, 3000), (2048, 3000), 2744, (3000, 3000)),
        ((3000, 19_000), (3000, 19_000), 9984, (10_240, 19_000)),
    ],
)
async def test_the_limit_of_open_files_is_raised(
    before: tuple[int, int], with_mlx_lm: tuple[int, int], room: int, after: tuple[int, int]
):
    """mlx-lm sets 2,048 and 4,096, and cannot be imported below. A number that is asked for does not need less: models
    have files, too."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM.format(before=before),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, log = await process.communicate()
    lines = [tuple(map(int, line.split())) for line in output.splitlines()]
    assert lines == [with_mlx_lm, *((asked, *after) for asked in (room, 20, 400))]
    warning = "--max-connections is 400, and the limit of 512 open files allows 384: raise it (`ulimit -n`)."
    assert log.decode().count(warning) == (room == 384)


async def test_here_too_there_is_room(world: World):
    assert room_for_connections() >= 16
    assert (await world.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"http://localhost:8000/v1/models?a=1", "/v1/models", b"a=1"),
        (b"HTTPS://mac.local/v1/", "/v1/", b""),
        (b"http://localhost", "/", b""),
        (b"http://localhost?a=http://b/c", "/", b"a=http://b/c"),
        (b"/http://localhost/v1", "/http://localhost/v1", b""),
        (b"/v1?http://localhost/a", "/v1", b"http://localhost/a"),
    ],
)
async def test_a_proxy_may_name_the_whole_url(target: bytes, path: str, query: bytes):
    asked: list[tuple[str, str, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append((scope["path"], scope["raw_path"].decode(), scope["query_string"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with running(app) as url:
        host, port = url.removeprefix("http://").split(":")
        peer = Peer(*await asyncio.open_connection(host, int(port)))
        peer.writer.write(b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % target)
        assert (await peer.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        peer.writer.close()
    assert asked == [(path, path, query)]
