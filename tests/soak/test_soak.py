"""Mixed load on a whole server, for seconds by default, after which its state must be the same as before.

SOAK_MINUTES is how long `./scripts/test -m soak` takes (default 3).
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.soak.clients import Clients
from tests.soak.requests import seeded
from tests.soak.worlds import Server, State, serving

MINUTES = float(os.environ.get("SOAK_MINUTES", "3"))
NUM_CLIENTS = 12
BURST = 40
NUM_SEEDED = 12
MAX_GROWTH_BYTES = 48 * 2**20
"""Allowed growth of resident memory from the second to the last quarter: the allocator's arenas in a process of 350
MiB."""


@pytest.mark.parametrize(
    ("seconds", "min_requests"),
    [
        pytest.param(3.0, 20, id="short", marks=pytest.mark.slow),
        pytest.param(60 * MINUTES, 500, id="long", marks=[pytest.mark.soak, pytest.mark.timeout(60 * MINUTES + 300)]),
    ],
)
async def test_a_server_under_mixed_load_stays_as_it_was(tmp_path: Path, seconds: float, min_requests: int):
    limits = httpx.Limits(max_connections=200, keepalive_expiry=2.0)
    async with serving(tmp_path) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as http:
            before = await answers_alone(server, http)
            empty = server.state()
            clients, states = await under_load(server, http, seconds)
            await server.settled(http)
            after = await answers_alone(server, http)
        left = await few_descriptors(server, empty.num_descriptors)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            code = await server.process.wait()
    tally, (early, late) = clients.tally, resident_bytes(states)
    print(
        f"\n{seconds:.0f} s: {tally.num_requests} answers {dict(tally.statuses)} of {dict(tally.paths)}; manners "
        f"{dict(tally.manners)}; resident {early / 2**20:.0f} -> {late / 2**20:.0f} MiB; descriptors "
        f"{empty.num_descriptors} -> most {max(state.num_descriptors for state in states)} -> {left.num_descriptors}; "
        f"threads {empty.num_threads} -> {left.num_threads}"
    )
    assert not tally.problems, (len(tally.problems), tally.problems[:5])
    assert after == before
    assert code == 0
    assert "Traceback" not in server.log, server.log[-3000:]
    assert late - early < MAX_GROWTH_BYTES
    assert left.num_descriptors <= empty.num_descriptors
    assert tally.num_requests >= min_requests
    assert {"_polite", "_leaving", "_slow", "_half_open", "_reset", "_stranger", "_burst"} <= set(tally.manners)


async def answers_alone(server: Server, http: httpx.AsyncClient) -> list[str]:
    """Text and logprobs of the seeded requests, each computed without cached prefixes."""
    found = []
    for ask in map(seeded, range(NUM_SEEDED)):
        await server.forget_prefixes(http)
        response = await http.post(ask.path, json=ask.body, headers={"x-api-key": server.keys["default"]})
        assert response.status_code == 200, response.text
        found.append(str(response.json()["choices"]))
    return found


async def under_load(server: Server, http: httpx.AsyncClient, seconds: float) -> tuple[Clients, list[State]]:
    deadline_s = time.monotonic() + seconds
    clients = Clients(server, http, lambda: time.monotonic() > deadline_s)
    states: list[State] = []

    async def watch() -> None:
        while True:
            states.append(server.state())
            await asyncio.sleep(min(1.0, seconds / 20))

    watching = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(clients.run(number))
        group.create_task(clients.bursts(NUM_CLIENTS, BURST, pause_s=10.0))
    watching.cancel()
    return clients, states


def resident_bytes(states: Sequence[State]) -> tuple[float, float]:
    """Medians of the second and of the last quarter of the samples."""
    quarter = max(1, len(states) // 4)
    early, late = states[quarter : 2 * quarter] or states, states[-quarter:]
    return statistics.median(s.resident_bytes for s in early), statistics.median(s.resident_bytes for s in late)


async def few_descriptors(server: Server, wanted: int) -> State:
    """The state after connections that end by themselves have ended."""
    for _ in range(100):
        if server.state().num_descriptors <= wanted:
            break
        await asyncio.sleep(0.1)
    return server.state()
