"""A clock that jumps, a disk that is full, a process that is killed: what clients and files notice of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_server.api.auth.key_file import KeyFile
from mlx_server.api.auth.keys import FLUSH_S
from tests.api.sse import bodies
from tests.soak.requests import TEXT, seeded
from tests.soak.worlds import Server, serving

pytestmark = pytest.mark.slow

NUM_STREAMS = 4
LONG = {"prompt": [5, 6, 7], "max_tokens": 600, "ignore_eos": True, "stream": True}


async def ask(server: Server, http: httpx.AsyncClient, tier: str = "default", **body: Any) -> httpx.Response:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, **body}
    return await http.post(TEXT, json=body, headers={"x-api-key": server.keys[tier]})


async def go_wrong_during_streams(server: Server, http: httpx.AsyncClient) -> list[httpx.Response]:
    """Lets the fault begin while some streams run and others wait; the answers to them."""
    tasks = [asyncio.create_task(ask(server, http, **LONG)) for _ in range(NUM_STREAMS)]
    async with asyncio.timeout(20):
        headers = {"x-api-key": server.keys["default"]}
        while (await http.get("/load", headers=headers)).json()["server_load"] < NUM_STREAMS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    server.process.send_signal(signal.SIGUSR2)
    return await asyncio.gather(*tasks)


def is_whole(response: httpx.Response) -> bool:
    return response.status_code == 200 and bodies(response.text)[-1]["choices"][0]["finish_reason"] == "length"


async def ended(server: Server) -> int:
    server.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        return await server.process.wait()


async def test_a_wall_clock_that_jumps_ends_nothing_and_opens_nothing(tmp_path: Path):
    """No time limit, rate or queue reads it: streams and waiting requests finish, and a key without a request left
    in its minute gets none by a jump of ten years."""
    async with (
        serving(tmp_path, "tests.attack.faulty", "clock") as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):
        statuses = [(await ask(server, http, "tight")).status_code for _ in range(20)]
        streams = await go_wrong_during_streams(server, http)
        statuses += [(await ask(server, http, "tight")).status_code for _ in range(20)]
        assert all(is_whole(stream) for stream in streams)
        assert statuses == [200] * 30 + [429] * 10
        refused = await ask(server, http, "tight")
        assert 0 < float(refused.headers["retry-after"]) <= 60
        waiting = await asyncio.gather(*(ask(server, http, max_tokens=30) for _ in range(20)))
        assert [response.status_code for response in waiting] == [200] * 20
        assert (await http.get("/metrics")).status_code == 200
        await server.settled(http)
        assert await ended(server) == 0
    assert "Traceback" not in server.log


async def test_a_disk_that_fills_while_serving_costs_log_lines_and_usage_alone(tmp_path: Path):
    async with (
        serving(tmp_path, "tests.attack.faulty", "disk") as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):
        streams = await go_wrong_during_streams(server, http)
        num_bytes = len(server.log)
        assert all(is_whole(stream) for stream in streams)
        assert [(await ask(server, http, tier)).status_code for tier in server.keys] == [200] * len(server.keys)
        stored = await http.post(
            "/v1/responses",
            json={"input": "Hi", "max_output_tokens": 16},
            headers={"x-api-key": server.keys["default"]},
        )
        path = f"/v1/responses/{stored.json()['id']}"
        assert (await http.get(path, headers={"x-api-key": server.keys["default"]})).status_code == 200
        await server.settled(http)
        assert await ended(server) == 0
    assert len(server.log) == num_bytes
    assert is_intact(tmp_path / "keys.sqlite", len(server.keys))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux may mount a small file system")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> None:
    """To the last byte."""
    with (folder / "filler").open("wb", buffering=0) as file, pytest.raises(OSError) as caught:  # noqa: PT012
        while True:
            file.write(b"x" * 4096)
    assert caught.value.errno == errno.ENOSPC


async def test_a_disk_without_space_costs_log_lines_and_usage_alone(disk: Path):
    """Model, keys and log are on it; once there is room again, both are written again."""
    async with serving(disk) as server, httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        keys = {"x-api-key": server.keys["default"]}
        streams = [asyncio.create_task(ask(server, http, **LONG)) for _ in range(NUM_STREAMS)]
        await asyncio.sleep(0.1)
        fill(disk)
        num_bytes = len(server.log)
        assert all(is_whole(stream) for stream in await asyncio.gather(*streams))
        assert [(await ask(server, http, tier)).status_code for tier in server.keys] == [200] * len(server.keys)
        stored = await http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 16}, headers=keys)
        assert (await http.get(f"/v1/responses/{stored.json()['id']}", headers=keys)).status_code == 200
        await asyncio.sleep(FLUSH_S + 1)
        assert (await ask(server, http)).status_code == 200
        assert len(server.log) - num_bytes < 4096  # what was left of its last page
        (disk / "filler").unlink()
        assert (await ask(server, http)).status_code == 200
        await server.settled(http)
        assert await ended(server) == 0
        assert len(server.log) > num_bytes
        assert is_intact(disk / "keys.sqlite", len(server.keys))
        with KeyFile(disk / "keys.sqlite") as file:
            used = {record.tier: record.num_requests for record in file.records()}
        assert 2 <= used["default"] < NUM_STREAMS + 4, "that of the full disk is lost, what came behind it is not"


def is_intact(path: Path, num_keys: int) -> bool:
    with contextlib.closing(sqlite3.connect(path)) as db:
        found = db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with KeyFile(path) as file:
        return found and len(file.records()) >= num_keys


@pytest.mark.attack
@pytest.mark.timeout(120)
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.6, 4.9, 5.0, 5.02, 5.04, 5.06, 5.1, 5.2, 5.4])
async def test_a_killed_server_comes_back_whole(tmp_path: Path, after_s: float):
    """As the kernel kills it that is out of memory, so long after the first request: while it is read, while streams
    run, while usage is written (every 5 s). Started again in the same folder, it has the same keys and answers, and
    has counted no usage twice."""
    answers: list[str] = []
    async with serving(tmp_path) as server, httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        answers.append((await ask(server, http, **seeded(1).body)).text)
        tasks = [asyncio.create_task(ask(server, http, **LONG)) for _ in range(NUM_STREAMS)]
        await asyncio.sleep(after_s)
        server.process.kill()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, httpx.TransportError) or end.status_code == 200 for end in ends)
    assert is_intact(tmp_path / "keys.sqlite", len(server.keys))
    async with serving(tmp_path, keys=server.keys) as again, httpx.AsyncClient(base_url=again.url, timeout=30) as http:
        answers.append((await ask(again, http, **seeded(1).body)).text)
        await again.settled(http)
        assert await ended(again) == 0
    first, second = (httpx.Response(200, text=text).json()["choices"] for text in answers)
    assert first == second
    with KeyFile(tmp_path / "keys.sqlite") as file:
        used = {record.tier: record.num_requests for record in file.records()}
    assert 1 <= used["default"] <= 2 + NUM_STREAMS
