"""The end of a whole server process with two real models and sixteen streams open."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.api.sse import bodies
from tests.engine_worlds import make_folder, random_prompts

pytestmark = pytest.mark.slow

NUM_STREAMS = 16
MODELS = {"a": "llama", "b": "qwen3"}


class Server:
    """A running process."""

    def __init__(self, process: Process, url: str) -> None:
        self.process = process
        self.url = url
        self.port = int(url.rpartition(":")[2])

    async def ended(self) -> tuple[int, str]:
        """Exit code and standard error."""
        async with asyncio.timeout(30):
            _, errors = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


@contextlib.asynccontextmanager
async def server(folder: Path, drain_timeout_s: float) -> AsyncIterator[Server]:
    models = "".join(
        f'[[models]]\nid = "{name}"\nmodel = "{make_folder(folder / name, architecture)}"\npinned = true\n'
        for name, architecture in MODELS.items()
    )
    config = folder / "config.toml"
    config.write_text(
        f"[server]\nport = 0\ndrain_timeout_s = {drain_timeout_s}\n[cache]\nnum_kv_blocks = 256\n"
        f"[model]\nmax_model_len = 2048\n[scheduler]\nmax_num_seqs = 16\n{models}"
    )
    arguments = ["-m", "tests.api.life_real", str(config)]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE, stderr=PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        match = re.match(r"mlx-serve is ready: (http://127\.0\.0\.1:\d+)/v1", line)
        assert match is not None, (line, (await process.communicate())[1].decode())
        yield Server(process, match.group(1))
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def stream(http: httpx.AsyncClient, index: int, max_tokens: int) -> list[dict]:
    """All events of one answer, the last one its end or its error."""
    (prompt,) = random_prompts([20], seed=index)
    body = {"model": "ab"[index % 2], "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    response = await http.post("/v1/completions", json=body)
    if response.status_code != 200:
        return [response.json()]
    return bodies(response.text)


async def open_streams(http: httpx.AsyncClient, max_tokens: int) -> list[asyncio.Task[list[dict]]]:
    """Sixteen answers on their way, eight of each model."""
    for index in range(2):
        await stream(http, index, 1)
    tasks = [asyncio.create_task(stream(http, index, max_tokens)) for index in range(NUM_STREAMS)]
    async with asyncio.timeout(20):
        while (await http.get("/load")).json()["server_load"] < NUM_STREAMS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return tasks


def ends_well(events: list[dict]) -> bool:
    return "choices" in events[-1] and events[-1]["choices"][0]["finish_reason"] == "length"


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        return True
    return False


@pytest.mark.parametrize(("drain_timeout_s", "max_tokens"), [(60.0, 150), (0.2, 1500)])
async def test_a_signal_during_sixteen_streams(tmp_path: Path, drain_timeout_s: float, max_tokens: int):
    """All finish in time, or else all get an error event; the process ends with 0, and its port is free."""
    async with (
        server(tmp_path, drain_timeout_s) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60, limits=httpx.Limits(max_connections=32)) as http,
    ):
        tasks = await open_streams(http, max_tokens)
        assert not is_free(running.port)
        running.process.send_signal(signal.SIGTERM)
        answers = await asyncio.gather(*tasks)
        code, errors = await running.ended()
    if drain_timeout_s > 1.0:
        assert all(ends_well(events) for events in answers)
    else:
        assert [events[-1]["error"]["code"] for events in answers if not ends_well(events)] == [503] * NUM_STREAMS
        assert "requests use it: their time is over" in errors
    assert code == 0
    assert "Traceback" not in errors
    frozen, left = re.findall(r"^frozen: (\d+), left: (\d+)$", errors, re.MULTILINE)[0]
    assert int(frozen) > 50_000, "imported objects are not collected"
    assert int(left) < 2**16, "models are"
    assert is_free(running.port)


async def test_a_device_that_is_gone_fails_all_streams_and_the_process(tmp_path: Path):
    async with (
        server(tmp_path, 60.0) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60, limits=httpx.Limits(max_connections=32)) as http,
    ):
        tasks = await open_streams(http, 1500)
        running.process.send_signal(signal.SIGUSR1)
        answers = await asyncio.gather(*tasks)
        code, errors = await running.ended()
    assert [events[-1]["error"]["code"] for events in answers] == [503] * NUM_STREAMS
    assert all("the device is gone" in events[-1]["error"]["message"] for events in answers)
    assert code == 1
    assert "The device computes nothing any more: the device is gone" in errors
    assert is_free(running.port)
