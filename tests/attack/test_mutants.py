"""Thousands of requests that were made wrong, over all routes: no 500, no hanging answer, no death.

ATTACK_REQUESTS is how many (default 3000) `./scripts/test -m attack` sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from mlx_server.api.anthropic.messages import MessagesRequest
from mlx_server.api.openai.chat import ChatCompletionRequest
from mlx_server.api.openai.completions import CompletionRequest
from mlx_server.api.openai.responses.request import ResponsesRequest
from tests.api.worlds import user
from tests.attack.mutants import mutant
from tests.soak.requests import CHAT, MESSAGES, RESPONSES, TEXT, seeded
from tests.soak.worlds import ADMIN_KEY, Server, serving

NUM_ATTACKING = int(os.environ.get("ATTACK_REQUESTS", "3000"))
NUM_AT_ONCE = 8
HUNG_S = 60.0
UNLOAD_SHARE = 0.02
"""Share of the requests to routes that take the model from all others."""

UNLOADING = ("/sleep", "/admin/models/unload")
NO_FAULT = {501, 503, 505, 507}
"""Statuses above 499 that say what is not there: an embedding model, a model that was unloaded, HTTP/3."""


@pytest.mark.parametrize(
    "num_requests",
    [
        pytest.param(100, id="few", marks=pytest.mark.slow),
        pytest.param(NUM_ATTACKING, id="many", marks=[pytest.mark.attack, pytest.mark.timeout(3600)]),
    ],
)
async def test_no_request_breaks_the_server(tmp_path: Path, num_requests: int):
    async with serving(tmp_path) as server, httpx.AsyncClient(base_url=server.url, timeout=HUNG_S) as http:
        routes = await routes_of(http)
        before = await answer(server, http)
        statuses, problems = await attack(server, routes, num_requests)
        print(f"\n{statuses.total()} mutated requests over {len(set(routes))} routes: {dict(sorted(statuses.items()))}")
        assert not problems, (len(problems), problems[:5])
        assert (await http.get("/health")).status_code == 200
        await server.settled(http)
        assert await answer(server, http) == before
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await server.process.wait() == 0
    assert "Traceback" not in server.log, server.log[-3000:]
    assert statuses[200] > num_requests // 20
    assert statuses[400] > num_requests // 10


HUGE = (10**400, -(10**400), 1e308, -1e308)
NUMBERS: Mapping[str, tuple[type[BaseModel], Mapping[str, Any]]] = {
    TEXT: (CompletionRequest, {"prompt": "a"}),
    CHAT: (ChatCompletionRequest, {"messages": user("a")}),
    MESSAGES: (MessagesRequest, {"messages": user("a")}),
    RESPONSES: (ResponsesRequest, {"input": "a"}),
}


@pytest.mark.slow
async def test_no_number_is_too_large(tmp_path: Path):
    """In any field that takes one, alone and in lists and objects: what is too much is refused or cut, and nothing that
    counts it overflows. An integer of JSON has no end, one of a device has."""
    async with serving(tmp_path) as server, httpx.AsyncClient(base_url=server.url, timeout=HUNG_S) as http:
        before, statuses = await answer(server, http), Counter[int]()
        for path, (model, base) in NUMBERS.items():
            for name in numbers_of(model):
                for value in [*HUGE, [HUGE[0]], {"5": HUGE[0]}, {"budget_tokens": HUGE[0], "type": "enabled"}]:
                    body = {"max_tokens": 4, "max_output_tokens": 16, **base, name: value}
                    response = await http.post(path, json=body, headers={"x-api-key": server.keys["default"]})
                    statuses[response.status_code] += 1
                    assert response.status_code in (200, 400), (path, name, value, response.text)
        for token_id in (-1, 2**32, 10**20, 10**400):
            body = {"prompt": [5, token_id], "echo": True}
            response = await http.post(TEXT, json=body, headers={"x-api-key": server.keys["default"]})
            assert response.status_code == 400, (token_id, response.text)
        assert await answer(server, http) == before
    assert "Traceback" not in server.log, server.log[-3000:]
    assert {200, 400} <= set(statuses)
    assert statuses.total() > 200


def numbers_of(model: type[BaseModel]) -> list[str]:
    """Fields that take a number somewhere."""
    return [name for name, field in model.model_fields.items() if re.search("int|float", str(field.annotation))]


async def routes_of(http: httpx.AsyncClient) -> list[tuple[str, str]]:
    """Method and path of each, those that generate five times: there is more to get wrong."""
    document = (await http.get("/openapi.json", headers={"x-api-key": ADMIN_KEY})).json()
    found = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    assert len(found) > 30
    return found + [route for route in found if route[1].startswith("/v1/") and route[0] == "POST"] * 4


async def answer(server: Server, http: httpx.AsyncClient) -> str:
    """Of a request that is right, without what was computed before."""
    await http.post("/wake_up", headers={"x-api-key": ADMIN_KEY})
    await http.post("/admin/models/load", json={"model": "tiny"}, headers={"x-api-key": ADMIN_KEY})
    await server.forget_prefixes(http)
    ask = seeded(3)
    response = await http.post(ask.path, json=ask.body, headers={"x-api-key": server.keys["default"]})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"])


async def attack(
    server: Server, routes: Sequence[tuple[str, str]], num_requests: int
) -> tuple[Counter[int], list[str]]:
    """Statuses, 0 for a connection that was closed without one; and what must not have happened."""
    statuses: Counter[int] = Counter()
    problems: list[str] = []
    keys = [*server.keys.values(), *[server.keys["default"]] * 8, ADMIN_KEY, ADMIN_KEY, "wrong"]
    sane = [route for route in routes if route[1] not in UNLOADING]

    async def sender(number: int) -> None:
        for index in range(number, num_requests, NUM_AT_ONCE):
            rng = random.Random(index)
            content = mutant(rng, routes if rng.random() < UNLOAD_SHARE else sane, keys)
            shown = f"{index}: {content[:400]!r} ... {content[-200:]!r}"
            try:
                async with asyncio.timeout(HUNG_S):
                    status, text = await exchange(server.port, content)
            except TimeoutError:
                problems.append(f"hung for {HUNG_S} s: {shown}")
                continue
            statuses[status] += 1
            if status >= 500 and status not in NO_FAULT:
                problems.append(f"{status} {text[:300]!r}: {shown}")

    await asyncio.gather(*(sender(number) for number in range(NUM_AT_ONCE)))
    return statuses, problems


async def exchange(port: int, content: bytes) -> tuple[int, bytes]:
    """All that comes back, until the server closes the connection; of an endless stream of events, its beginning."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    with contextlib.suppress(ConnectionError):
        writer.write(content)
        while piece := await reader.read(1 << 16):
            received += piece
            if b"/dashboard/events" in content[:40] and len(received) > 500:
                break
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    final = received.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    return int(final.split(None, 2)[1]) if final.startswith(b"HTTP/") else 0, final
