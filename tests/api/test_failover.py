"""Two server processes behind a router that sends elsewhere what one refuses: what its clients see when one goes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections import Counter
from collections.abc import Sequence

import httpx
import pytest

from tests.api.test_server_life import Server, server

pytestmark = pytest.mark.slow

NUM_OPEN, NUM_LATER = 20, 40


class Router:
    """Each request goes to the next server in turn, and to the other one when that is gone or says 503 before it has
    sent anything: what SMG and vllm-router do."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.clients = [httpx.AsyncClient(base_url=each.url, timeout=30) for each in servers]
        self.turns = itertools.cycle(range(len(servers)))
        self.began = Counter[int]()

    async def stream(self) -> str:
        """How a client's stream ended: `done`, `error` with an event, `cut` without, or the status."""
        first = next(self.turns)
        status = "refused"
        for index in (first, 1 - first):
            try:
                ending = await self._sent(index)
            except httpx.ConnectError:
                continue
            if ending != "503":
                return ending
            status = ending
        return status

    async def _sent(self, index: int) -> str:
        body = {"prompt": "Hi", "stream": True}
        async with self.clients[index].stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return str(response.status_code)
            self.began[index] += 1
            try:
                lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
            except httpx.RemoteProtocolError:
                return "cut"
        has_error = any("error" in json.loads(line) for line in lines if line.startswith("{"))
        return "error" if has_error else "done" if lines[-1] == "[DONE]" else "cut"

    async def close(self) -> None:
        await asyncio.gather(*(client.aclose() for client in self.clients))


async def began(router: Router, num: int) -> None:
    async with asyncio.timeout(10):
        while router.began.total() < num:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_sixty_requests_over_two_servers_of_which_one_goes(number: int):
    async with server() as going, server() as staying:
        await asyncio.gather(going.ready(), staying.ready())
        router = Router([going, staying])
        streams = [asyncio.create_task(router.stream()) for _ in range(NUM_OPEN)]
        await began(router, NUM_OPEN)
        going.signal(number)
        if number == signal.SIGKILL:
            await going.process.wait()
        else:
            async with asyncio.timeout(10):
                while (await router.clients[0].get("/health")).status_code != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        streams += [asyncio.create_task(router.stream()) for _ in range(NUM_LATER)]
        await began(router, NUM_OPEN + NUM_LATER)
        assert router.began == {0: NUM_OPEN // 2, 1: NUM_OPEN // 2 + NUM_LATER}
        for each in (going, staying):
            if each.process.returncode is None:
                os.kill(each.process.pid, signal.SIGUSR1)  # streams go on
        endings = Counter(await asyncio.gather(*streams))
        if number == signal.SIGTERM:
            assert endings == {"done": NUM_OPEN + NUM_LATER}
            assert (await going.ended())[0] == 0
        else:
            assert endings == {"done": NUM_OPEN // 2 + NUM_LATER, "cut": NUM_OPEN // 2}
        await router.close()
