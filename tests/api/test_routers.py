"""Two servers behind the routers that docs/scale-out.md names, started by the files of configs/scale-out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.test_server_life import Server, server
from tests.engine_worlds import make_folder, on_the_cpu
from tests.homes import with_kernels
from tests.ports import HOST, free_ports

CONFIGS = Path(__file__).parents[2] / "configs" / "scale-out"
VENV = Path(__file__).parent / "routers" / ".venv"
PATH = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
INSTALL = f"python -m venv {VENV.relative_to(CONFIGS.parents[1])} && .../bin/pip install smg vllm-router"
NUM_OPEN, NUM_LATER = 20, 40
MAX_S = 120.0


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
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=MAX_S) as http:
            async with asyncio.timeout(MAX_S):
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


@pytest.mark.parametrize(
    ("name", "end"),
    [
        pytest.param("smg", signal.SIGTERM, marks=needs("smg")),
        pytest.param("smg", signal.SIGKILL, marks=[needs("smg"), pytest.mark.full]),
        pytest.param("smg", "death", marks=[needs("smg"), pytest.mark.full]),
        pytest.param("vllm-router", signal.SIGTERM, marks=[needs("vllm-router"), pytest.mark.full]),
        pytest.param("vllm-router", signal.SIGKILL, marks=needs("vllm-router")),
        pytest.param("vllm-router", "death", marks=[needs("vllm-router"), pytest.mark.full]),
    ],
)
async def test_sixty_requests_of_which_one_server_s_goes(name: str, end: int | str, tmp_path: Path):
    """SIGTERM: all are answered. SIGKILL, or a dead engine: only those end that were open there."""
    async with server(drain_timeout_s=MAX_S) as one, server(drain_timeout_s=MAX_S) as other:
        both = [one, other]
        await asyncio.gather(*(each.ready() for each in both))
        async with (
            httpx.AsyncClient() as direct,
            router(name, [each.url for each in both], tmp_path) as http,
            asyncio.timeout(MAX_S),
        ):
            streams = [asyncio.create_task(stream(http)) for _ in range(NUM_OPEN)]
            while sum(num_open := await loads(both, direct)) < NUM_OPEN:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            num_there = max(num_open)
            going, staying = both if num_open[0] == num_there else both[::-1]
            if isinstance(end, int):
                going.signal(end)
            else:
                await direct.post(f"{going.url}/v1/completions", json={"prompt": "die"})
            if end == signal.SIGTERM:
                while (await direct.get(f"{going.url}/health")).status_code != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            else:
                await going.process.wait()
            streams += [asyncio.create_task(stream(http)) for _ in range(NUM_LATER)]
            while (await loads([staying], direct))[0] < NUM_OPEN - num_there + NUM_LATER:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for each in both:
                if each.process.returncode is None:
                    os.kill(each.process.pid, signal.SIGUSR1)  # streams go on
            endings = Counter(await asyncio.gather(*streams))
        if end == signal.SIGTERM:
            assert endings == {"done": NUM_OPEN + NUM_LATER}
            assert (await going.ended())[0] == 0
        else:
            ended = "cut" if (name, end) == ("vllm-router", signal.SIGKILL) else "error"
            assert endings == Counter({"done": NUM_OPEN - num_there + NUM_LATER, ended: num_there})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("smg", marks=needs("smg")),
        pytest.param("vllm-router", marks=[needs("vllm-router"), pytest.mark.full]),
    ],
)
async def test_a_full_server_s_requests_are_answered_by_the_other(name: str, tmp_path: Path):
    async with server("full") as full, server() as other:
        await asyncio.gather(full.ready(), other.ready())
        os.kill(other.process.pid, signal.SIGUSR1)  # it does not hold its streams
        async with router(name, [full.url, other.url], tmp_path) as http, asyncio.timeout(MAX_S):
            assert [await stream(http) for _ in range(6)] == ["done"] * 6


# --- where prefixes are hit -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def model_server(folder: Path, home: Path) -> AsyncIterator[tuple[str, tuple[int, int]]]:
    """A server of a tiny model, with KV events: its address, and the ports of these and of their replay."""
    events, replay = free_ports(2)
    endpoints = ["--kv-events", f"tcp://{HOST}:{events}", "--kv-events-replay", f"tcp://{HOST}:{replay}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mlx_server", "serve", str(folder), "--port", "0", "--served-model-name", "tiny"),
        *(*endpoints, "--kv-events-topic=", "--speculate", "off", "--max-model-len", "2048"),
        env={**os.environ, "MLX_SERVE_HOME": str(with_kernels(home))},
        stdout=PIPE,
        stderr=DEVNULL,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert "is ready" in line
        yield line.split()[3].removesuffix("/v1"), (events, replay)
    finally:
        process.kill()
        await process.communicate()


@on_the_cpu
@pytest.mark.parametrize("name", ROUTERS)
async def test_conversations_hit_their_prefixes_and_both_servers_work(name: str, tmp_path: Path):
    """10 conversations of 4 turns. Of the prompt tokens some 64 % come from a cache, 50 % if servers took turns; and
    neither has much more of them than the other. vLLM's router goes by events, which come after such short answers."""
    folder = make_folder(tmp_path / "model")
    prompt_tokens, cached = Counter[str](), Counter[str]()
    async with (
        model_server(folder, tmp_path / "home") as (first, of_first),
        model_server(folder, tmp_path / "home") as (second, of_second),
    ):
        ports = {"A_EVENTS": of_first[0], "A_REPLAY": of_first[1], "B_EVENTS": of_second[0], "B_REPLAY": of_second[1]}
        more = {key: str(port) for key, port in ports.items()}

        async def talk(http: httpx.AsyncClient, number: int) -> None:
            messages = [{"role": "system", "content": "You are of few words. " * 6}]
            for turn in range(4):
                messages.append({"role": "user", "content": f"{number}.{turn} What about that? " * 7})
                body = {"model": "tiny", "messages": messages, "max_tokens": 48, "ignore_eos": True, "temperature": 0}
                answer = await http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                messages.append({"role": "assistant", "content": "That is as it is."})

        async with router(name, [first, second], tmp_path, "tiny", **more) as http, asyncio.timeout(MAX_S):
            await asyncio.gather(*(talk(http, number) for number in range(10)))
            for url in (first, second):
                text = (await http.get(f"{url}/metrics")).text
                prompt_tokens[url] = metric(text, "vllm:prompt_tokens_total")
                cached[url] = metric(text, "vllm:prefix_cache_hits_total")
                assert (await http.post(f"{url}/sleep")).status_code == 200
                assert (await http.get(f"{url}/is_sleeping")).json() == {"is_sleeping": True}
            await talk(http, 10)  # sleeping servers wake by themselves
    split = {url: num / prompt_tokens.total() for url, num in prompt_tokens.items()}
    assert cached.total() / prompt_tokens.total() >= (0.56 if name == "smg" else 0.45), (cached, prompt_tokens)
    assert min(split.values()) >= 0.2, prompt_tokens  # the router places ten conversations by chance


def metric(text: str, name: str) -> int:
    return int(sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)))
