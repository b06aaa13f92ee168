"""Keys at a server process: made and revoked by the command line beside it, and seen nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.homes import with_kernels

pytestmark = pytest.mark.slow

SHARED, ADMIN = "sesame-open-1234", "master-of-all-1234"


async def cli(home: Path, *arguments: str) -> str:
    """What `mlx-serve` prints."""
    process = await start(home, *arguments)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().strip()


async def start(home: Path, *arguments: str, **environment: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mlx_server", *arguments),
        env={**os.environ, "MLX_SERVE_HOME": str(with_kernels(home)), **environment},
        stdout=PIPE,
        stderr=PIPE,
    )


@contextlib.asynccontextmanager
async def serving(home: Path, *arguments: str, **environment: str) -> AsyncIterator[tuple[Process, httpx.AsyncClient]]:
    model = ("--model", "random:mini", "--num-kv-blocks", "16", "--attention-backend", "reference")
    process = await start(home, "serve", "--port", "0", *model, *arguments, **environment)
    try:
        assert process.stdout is not None
        url = re.search(r"http://[^/]+", (await process.stdout.readline()).decode())
        assert url is not None
        async with httpx.AsyncClient(base_url=url[0], timeout=20) as http:
            yield process, http
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def ask(http: httpx.AsyncClient, key: str | None) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    return (await http.post("/v1/completions", json=body, headers=headers)).status_code


async def test_keys_come_and_go_while_the_server_runs_and_their_usage_outlives_it(tmp_path: Path):
    async with serving(tmp_path) as (process, http):
        assert await ask(http, None) == 200
        first = await cli(tmp_path, "keys", "create")
        assert [await ask(http, key) for key in (None, first)] == [401, 200]
        second = await cli(tmp_path, "keys", "rotate", first.split("_")[1])
        assert [await ask(http, key) for key in (first, second)] == [401, 200]
        await cli(tmp_path, "keys", "revoke", first.split("_")[1])
        assert [await ask(http, key) for key in (first, second, None)] == [401, 401, 401]
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
        assert process.returncode == 0
    (record,) = json.loads(await cli(tmp_path, "keys", "list", "--json"))
    used = {name: record[name] for name in ("num_requests", "num_prompt_tokens", "num_output_tokens")}
    assert used == {"num_requests": 2, "num_prompt_tokens": 6, "num_output_tokens": 8}
    for key in (first, second):
        assert key.split("_")[2] not in log.decode()


async def test_revoking_a_key_ends_what_it_has_open(tmp_path: Path):
    """By the command line, while the answer is 20,000 tokens away."""
    key = await cli(tmp_path, "keys", "create")
    async with serving(tmp_path, "--num-kv-blocks", "640") as (_, http):
        body = {"prompt": [5], "max_tokens": 20_000, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body, headers={"x-api-key": key}) as response:
            lines = response.aiter_lines()
            assert '"choices"' in await anext(lines)
            await cli(tmp_path, "keys", "revoke", key.split("_")[1])
            data = [line.removeprefix("data: ") async for line in lines if line.startswith("data: ")]
    assert json.loads(data[-2])["error"]["code"] == 401
    assert data[-1] == "[DONE]"


async def test_keys_of_the_environment_and_of_files_are_in_no_list_of_processes_and_no_log(tmp_path: Path):
    (tmp_path / "admin").write_text(ADMIN)
    flags = ("--admin-key-file", str(tmp_path / "admin"), "--log-level", "debug")
    async with serving(tmp_path, *flags, MLX_SERVE_SERVER_API_KEY=SHARED) as (process, http):
        assert [await ask(http, key) for key in (None, SHARED, ADMIN, SHARED + "x")] == [401, 200, 200, 401]
        shown = " ".join(psutil.Process(process.pid).cmdline())
        assert (await http.get("/server_info", headers={"x-api-key": SHARED})).status_code == 200
        process.send_signal(signal.SIGTERM)
        out, log = await process.communicate()
    for key in (SHARED, ADMIN):
        assert key not in shown + out.decode() + log.decode()
    assert "serve" in shown
