"""An OpenAI-compatible server without a network, with scripted token times; words count as tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Script = Callable[["Asked"], list[float]]
"""Seconds from a request's arrival to each of its tokens."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the server received it; `num_open` includes this request."""

    path: str
    body: dict[str, Any]
    key: str | None
    arrived_s: float
    num_open: int

    @property
    def prompt(self) -> str:
        if "prompt" in self.body:
            return str(self.body["prompt"])
        return "".join(message["content"] for message in self.body["messages"])

    @property
    def num_tokens(self) -> int:
        return int(self.body["max_tokens"])


def evenly(ttft_s: float, gap_s: float) -> Script:
    return lambda asked: [ttft_s + gap_s * index for index in range(asked.num_tokens)]


@dataclass
class ScriptedServer(httpx.AsyncBaseTransport):
    script: Script = field(default_factory=lambda: evenly(0.1, 0.01))
    status: int = 200
    refused_key: str | None = None
    scrapes: list[str] = field(default_factory=list)
    """The successive answers of `/metrics`; without any there is no such route."""
    asked: list[Asked] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "scripted"}]})
        if request.method == "GET":
            return httpx.Response(200, text=self.scrapes.pop(0)) if self.scrapes else httpx.Response(404)
        key = request.headers.get("authorization", "").removeprefix("Bearer ") or None
        if self.status != 200 or (key is not None and key == self.refused_key):
            return httpx.Response(self.status if self.status != 200 else 401, json={"error": {"message": "busy"}})
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        body = json.loads(await request.aread())
        asked = Asked(request.url.path, body, key, asyncio.get_running_loop().time(), self.num_open)
        self.asked.append(asked)
        return httpx.Response(200, stream=_Answer(self, asked))

    @property
    def measured(self) -> list[Asked]:
        """The requests after the two of the calibration."""
        return self.asked[2:]


class _Answer(httpx.AsyncByteStream):
    def __init__(self, server: ScriptedServer, asked: Asked) -> None:
        self._server, self._asked = server, asked

    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop, asked = asyncio.get_running_loop(), self._asked
        times_s = self._server.script(asked)
        if "messages" in asked.body:
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for index, time_s in enumerate(times_s):
            await asyncio.sleep(asked.arrived_s + time_s - loop.time())
            yield _event({"choices": [self._choice(f" a{index}", None)]})
        yield _event({"choices": [self._choice("", "length")]})
        usage = {
            "prompt_tokens": len(asked.prompt.split()) + (7 if "messages" in asked.body else 0),
            "completion_tokens": len(times_s),
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        self._server.num_open -= 1

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        said = {"delta": {"content": text}} if "messages" in self._asked.body else {"text": text}
        return {**said, "finish_reason": finish_reason}


class TimedEvents(httpx.AsyncBaseTransport):
    """Answers every request with the same server-sent lines at given times."""

    def __init__(self, *events: tuple[float, object]) -> None:
        self._events = events

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=_Timed(self._events))


class _Timed(httpx.AsyncByteStream):
    def __init__(self, events: tuple[tuple[float, object], ...]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for time_s, event in self._events:
            await asyncio.sleep(start_s + time_s - loop.time())
            yield event if isinstance(event, bytes) else _event(event)


def _event(event: object) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()
