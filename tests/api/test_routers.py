"""Two servers behind the routers that docs/scale-out.md names, started by the files of configs/scale-out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.test_server_life import Server, server
from tests.ports import free_ports

HOST = "127.0.0.1"
CONFIGS = Path(__file__).parents[2] / "configs" / "scale-out"
VENV = Path(__file__).parent / "routers" / ".venv"
PATH = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
INSTALL = f"python -m venv {VENV.relative_to(CONFIGS.parents[1])} && .../bin/pip install smg vllm-router"
NUM_OPEN, NUM_LATER = 20, 40
MOST_S = 120.0


def needs(program: str) -> Any:
    missing = shutil.which(program, path=PATH) is None
    return pytest.mark.skipif(missing, reason=f"{program} is not installed: {INSTALL}")


ROUTERS = [pytest.param(name, marks=needs(name)) for name in ("smg", "vllm-router")]
pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def router(
    name: str, servers: Sequence[str], folder: Path, model: str = "fake", **more: str
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router of these servers, when it knows both."""
    (port,) = free_ports(1)
    env = {**os.environ, "PATH": PATH, "PORT": str(port), "MODEL": model, **more}
    if name == "smg":
        workers = [{"id": url[-5:], "url": url, "model_id": model} for url in servers]
        manifest = folder / "workers.json"
        manifest.write_text(json.dumps({"version": 1, "workers": workers}))
        command = [str(CONFIGS / "smg.sh"), "--prometheus-port", str(free_ports(1)[0])]
        env["WORKERS"] = str(manifest)
    else:
        env |= {"A": HOST, "B": HOST}
        env |= {f"{which}_PORT": url.rpartition(":")[2] for which, url in zip("AB", servers, strict=True)}
        command = [str(CONFIGS / "vllm-router.sh"), "--prometheus-port", str(free_ports(1)[0])]
    log = folder / "router.log"
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec("sh", *command, env=env, stdout=said, stderr=said)
    try:
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=MOST_S) as http:
            async with asyncio.timeout(MOST_S):
                while not await knows(http, name, len(servers)):
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.1)
            yield http
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def knows(http: httpx.AsyncClient, name: str, num_servers: int) -> bool:
    """Whether the router has found all servers, and takes them for well."""
    with contextlib.suppress(httpx.TransportError, ValueError):
        if name == "smg":
            workers = (await http.get("/workers")).json()["workers"]
            return len([each for each in workers if each.get("is_healthy")]) == num_servers
        return (await http.get("/readiness")).status_code == 200
    return False


# --- when a server goes ---------------------------------------------------------------------------------------------


async def stream(http: httpx.AsyncClient) -> str:
    """How a client's stream ended: `done`, `error` with an event, `cut` without, or the status."""
    body = {"model": "fake", "prompt": "Hi", "stream": True}
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return str(response.status_code)
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    except httpx.RemoteProtocolError:
        return "cut"
    if any("error" in json.loads(line) for line in lines if line.startswith("{")):
        return "error"
    return "done" if lines and lines[-1] == "[DONE]" else "cut"


async def loads(servers: Sequence[Server], http: httpx.AsyncClient) -> list[int]:
    return [int((await http.get(f"{each.url}/load")).json()["server_load"]) for each in servers]


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_sixty_requests_of_which_one_server_s_goes(name: str, number: int, tmp_path: Path):
    """SIGTERM: all are answered. SIGKILL: only those end that were open there."""
    async with server(drain_timeout_s=MOST_S) as one, server(drain_timeout_s=MOST_S) as other:
        both = [one, other]
        await asyncio.gather(*(each.ready() for each in both))
        async with (
            httpx.AsyncClient() as direct,
            router(name, [each.url for each in both], tmp_path) as http,
            asyncio.timeout(MOST_S),
        ):
            streams = [asyncio.create_task(stream(http)) for _ in range(NUM_OPEN)]
            while sum(num_open := await loads(both, direct)) < NUM_OPEN:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            num_there = max(num_open)
            going, staying = both if num_open[0] == num_there else both[::-1]
            going.signal(number)
            if number == signal.SIGKILL:
                await going.process.wait()
            else:
                while (await direct.get(f"{going.url}/health")).status_code != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            streams += [asyncio.create_task(stream(http)) for _ in range(NUM_LATER)]
            while (await loads([staying], direct))[0] < NUM_OPEN - num_there + NUM_LATER:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for each in both:
                if each.process.returncode is None:
                    os.kill(each.process.pid, signal.SIGUSR1)  # streams go on
            endings = Counter(await asyncio.gather(*streams))
        if number == signal.SIGTERM:
            assert endings == {"done": NUM_OPEN + NUM_LATER}
            assert (await going.ended())[0] == 0
        else:
            ended = "error" if name == "smg" else "cut"
            assert endings == Counter({"done": NUM_OPEN - num_there + NUM_LATER, ended: num_there})
