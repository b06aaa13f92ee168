"""A server process with a key of each tier, its worst enemies, and whoever suffers from them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from mlx_server.api.auth.key_file import KeyFile
from tests.engine_worlds import make_folder
from tests.homes import with_kernels

TIERS = ("high", "normal", "low")


@dataclass(frozen=True)
class Answer:
    """What one request got: its status, and the time to its first event."""

    status: int
    ttft_s: float


class Served:
    """A running server."""

    def __init__(self, process: Process, url: str, keys: dict[str, str], log: Path) -> None:
        self.process = process
        self.url = url
        self.keys = keys
        self.log = log

    @contextlib.asynccontextmanager
    async def attacked(self, attack: str, num: int, tier: str = "low") -> AsyncIterator[None]:
        """While a process of its own attacks with the key of `tier`."""
        address = httpx.URL(self.url)
        arguments = [attack, str(address.host), str(address.port), self.keys[tier], str(num)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.attack.intruder", *arguments, stdout=PIPE
        )
        try:
            assert process.stdout is not None
            assert (await process.stdout.readline()).strip() == b"on"
            yield
        finally:
            process.kill()
            await process.wait()

    async def ask(self, tier: str, num: int = 1) -> list[Answer]:
        """Streamed completions, one after the other, each on a connection of its own."""
        return [await self._ask(self.keys[tier], index) for index in range(num)]

    async def _ask(self, key: str, index: int) -> Answer:
        body = {"prompt": f"{index} words are spoken " * 8, "max_tokens": 2, "stream": True, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=60) as http:
            start_s = time.perf_counter()
            request = http.stream("POST", f"{self.url}/v1/completions", json=body, headers={"x-api-key": key})
            async with request as response:
                async for _ in response.aiter_bytes():
                    return Answer(response.status_code, time.perf_counter() - start_s)
        raise AssertionError("an answer without a byte")


@contextlib.asynccontextmanager
async def served(folder: Path, settings: str = "", command: Sequence[str] = ()) -> AsyncIterator[Served]:
    """A server of a tiny model with `settings`, more TOML; `command` is put in front of the interpreter."""
    with KeyFile.create(folder / "keys.sqlite") as file:
        keys = {tier: file.add(tier, "").text for tier in TIERS}
    tiers = "".join(f'[tiers.{tier}]\npriority = "{tier}"\n' for tier in TIERS)
    config = folder / "config.toml"
    config.write_text(
        f'[model]\nmodel = "{make_folder(folder / "tiny")}"\nserved_model_name = "tiny"\n'
        f'[cache]\nkv_cache_memory = "128MB"\n[server]\nport = 0\nkey_file = "{folder / "keys.sqlite"}"\n'
        f"{settings}\n{tiers}"
    )
    log = folder / "log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            *[sys.executable, "-m", "mlx_server", "serve", "--config", str(config)],
            stdout=PIPE,
            stderr=errors,
            env={**os.environ, "MLX_SERVE_HOME": str(with_kernels(folder / "home"))},
        )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        match = re.match(r"mlx-serve is ready: (https?://127\.0\.0\.1:\d+)/v1", line)
        assert match is not None, (line, log.read_text())
        yield Served(process, match.group(1), keys, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def percentile(answers: Sequence[Answer], share: float) -> float:
    times = sorted(answer.ttft_s for answer in answers)
    return times[min(len(times) - 1, round(share * (len(times) - 1)))]
