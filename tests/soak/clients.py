"""Clients with different behaviour: polite, leaving early, reading slowly, never finishing a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from tests.soak.requests import MESSAGES, RESPONSES, Ask, any_ask
from tests.soak.worlds import Server

HUNG_S = 60.0
"""Seconds after which a request counts as hanging."""

_LATER = (429, 503)
_DOCUMENTED = {200, 400, 401, 403, 404, 408, 413, *_LATER}
_LAST = {MESSAGES: "event: message_stop", RESPONSES: "event: response."}


@dataclass(slots=True)
class Tally:
    """What happened: answers by status, requests by behaviour, and failures."""

    statuses: Counter[int] = field(default_factory=Counter)
    manners: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.statuses.total()


class Clients:
    """Sends requests to a server until `is_over`, and counts the results."""

    def __init__(self, server: Server, http: httpx.AsyncClient, is_over: Callable[[], bool]) -> None:
        self._server = server
        self._http = http
        self._is_over = is_over
        self.tally = Tally()

    async def run(self, number: int) -> None:
        """One client: one request after another, each with another behaviour."""
        rng = random.Random(number)
        manners: list[Callable[[random.Random], Awaitable[None]]]
        manners = [self._polite] * 8 + [self._leaving] * 3 + [self._slow, self._half_open, self._reset, self._stranger]
        while not self._is_over():
            manner = rng.choice(manners)
            await self._bounded(manner, rng)

    async def bursts(self, number: int, size: int, pause_s: float) -> None:
        """From time to time, so many requests at once."""
        rng = random.Random(number)
        while not self._is_over():
            await asyncio.gather(*(self._bounded(self._polite, random.Random(rng.random())) for _ in range(size)))
            self.tally.manners["_burst"] += 1
            await asyncio.sleep(pause_s)

    async def _bounded(self, manner: Callable[[random.Random], Awaitable[None]], rng: random.Random) -> None:
        name = getattr(manner, "__name__", "?")
        self.tally.manners[name] += 1
        try:
            async with asyncio.timeout(HUNG_S):
                await manner(rng)
        except TimeoutError:
            self.tally.problems.append(f"{name} hung for {HUNG_S} s")

    def _key(self, rng: random.Random) -> str:
        return self._server.keys[rng.choice(("default", "default", "interactive", "batch", "tight"))]

    async def _polite(self, rng: random.Random) -> None:
        ask, key = any_ask(rng), self._key(rng)
        response = await self._http.post(ask.path, json=ask.body, headers={"x-api-key": key})
        self._check(ask, response.status_code, response.text)
        if response.status_code == 200 and ask.body.get("store") and not ask.is_stream:
            await self._look_up(f"{RESPONSES}/{response.json()['id']}", key)

    async def _look_up(self, path: str, owner: str) -> None:
        """A stored response, requested with its owner's key and with all other keys."""
        for key in self._server.keys.values():
            response = await self._http.get(path, headers={"x-api-key": key})
            wanted = 200 if key == owner else 404
            self._check(Ask(RESPONSES + "/{response_id}", wanted=wanted), response.status_code, response.text)

    async def _stranger(self, rng: random.Random) -> None:
        ask = any_ask(rng)
        response = await self._http.post(ask.path, json=ask.body, headers={"x-api-key": rng.choice(("", "mlxs_0"))})
        self._check(Ask(ask.path, ask.body, wanted=401), response.status_code, response.text)

    def _check(self, ask: Ask, status: int, text: str) -> None:
        self.tally.statuses[status] += 1
        self.tally.paths[ask.path] += 1
        where = f"{ask.path} {str(ask.body)[:300]}"
        if status not in _DOCUMENTED or (status != ask.wanted and status not in _LATER):
            self.tally.problems.append(f"{status} instead of {ask.wanted}: {where}: {text[:300]}")
        elif status == 200 and ask.is_stream:
            self._check_stream(ask, text)
        elif status == 200 and ask.is_json:
            choice = json.loads(text)["choices"][0]
            if choice["finish_reason"] == "stop":
                json.loads(choice["message"]["content"])

    def _check_stream(self, ask: Ask, text: str) -> None:
        if _LAST.get(ask.path, "data: [DONE]") not in text[-8000:]:
            self.tally.problems.append(f"a stream without its end: {ask.path} {ask.body}: {text[-300:]}")
        if '"error":{' in text and '"code":503' not in text:
            self.tally.problems.append(f"a stream with an error: {ask.path} {ask.body}: {text[-500:]}")

    async def _leaving(self, rng: random.Random) -> None:
        """Closes the connection at once, or after some bytes."""
        async with self._sent(any_ask(rng), rng) as reader:
            for _ in range(rng.choice((0, 0, 1, 5))):
                await reader.read(200)

    async def _slow(self, rng: random.Random) -> None:
        """Reads few bytes at a time. The server may close such a connection."""
        async with self._sent(any_ask(rng), rng, receive_bytes=2048) as reader:
            for _ in range(60):
                if self._is_over() or not await reader.read(100):
                    return
                await asyncio.sleep(0.05)

    async def _half_open(self, rng: random.Random) -> None:
        """Sends a part of a request and then nothing; the server closes the connection."""
        whole = self._bytes(any_ask(rng), rng)
        async with self._connected() as (reader, writer):
            writer.write(whole[: rng.randrange(1, len(whole) - 1)])
            await writer.drain()
            await reader.read()

    async def _reset(self, rng: random.Random) -> None:
        """Resets the connection in the middle of an answer, as when a machine goes down."""
        async with self._connected() as (reader, writer):
            writer.write(self._bytes(any_ask(rng), rng))
            await reader.read(50)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _bytes(self, ask: Ask, rng: random.Random) -> bytes:
        body = json.dumps(ask.body).encode()
        head = f"POST {ask.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
        return f"{head}x-api-key: {self._key(rng)}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    @contextlib.asynccontextmanager
    async def _sent(self, ask: Ask, rng: random.Random, receive_bytes: int = 0) -> AsyncIterator[asyncio.StreamReader]:
        async with self._connected(receive_bytes) as (reader, writer):
            writer.write(self._bytes(ask, rng))
            await writer.drain()
            yield reader

    @contextlib.asynccontextmanager
    async def _connected(
        self, receive_bytes: int = 0
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        connection = socket.socket()
        connection.setblocking(False)
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._server.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=max(receive_bytes, 1024))
        try:
            with contextlib.suppress(ConnectionError):
                yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
