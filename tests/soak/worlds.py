"""A whole server in its own process, with a tiny model, few KV blocks and keys of three tiers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from mlx_server.api.auth.key_file import KeyFile
from tests.engine_worlds import make_folder

ADMIN_KEY = "master-of-all-1234"
MAX_MODEL_LEN = 1024
_TIERS = """
[tiers.interactive]
priority = "high"
[tiers.batch]
priority = "low"
max_num_waiting = 24
[tiers.tight]
requests_per_minute = 30
max_concurrent_requests = 3
"""


class ServerDied(Exception):
    """The server ended before it was ready: the exit code, and its log."""


@dataclass(frozen=True, slots=True)
class State:
    """The resources that the process holds."""

    resident_bytes: int
    num_descriptors: int
    num_threads: int


class Server:
    """A running server process, and its keys by tier."""

    def __init__(self, process: Process, url: str, keys: Mapping[str, str], log: Path) -> None:
        self.process = process
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.keys = keys
        self._log = log
        self._watched = psutil.Process(process.pid)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def state(self) -> State:
        with self._watched.oneshot():
            resident_bytes = self._watched.memory_info().rss
            return State(resident_bytes, self._watched.num_fds(), self._watched.num_threads())

    async def forget_prefixes(self, http: httpx.AsyncClient) -> None:
        response = await http.post("/flush_cache", headers={"x-api-key": ADMIN_KEY})
        assert response.status_code == 200, response.text

    async def settled(self, http: httpx.AsyncClient, timeout_s: float = 20.0) -> None:
        """Waits until no block is used and no request runs or waits."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while held := await self._held(http):
            assert asyncio.get_running_loop().time() < deadline_s, f"still held: {held}"
            await asyncio.sleep(0.1)

    async def _held(self, http: httpx.AsyncClient) -> dict[str, float]:
        text = (await http.get("/metrics")).text
        found = re.findall(
            r"^(mlx_serve:kv_blocks\{[^}]*state=\"used\"[^}]*\}"
            r"|vllm:num_requests_(?:running|waiting)\{[^}]*\}) ([\d.e+]+)$",
            text,
            re.MULTILINE,
        )
        assert len(found) == 3, found
        load = (await http.get("/load", headers={"x-api-key": ADMIN_KEY})).json()["server_load"]
        return {name: float(value) for name, value in [*found, ("load", load)] if float(value)}


def make_keys(path: Path) -> dict[str, str]:
    with KeyFile.create(path) as file:
        return {tier: file.add(tier, tier).text for tier in ("default", "interactive", "batch", "tight")}


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    module: str = "tests.api.life_real",
    *options: str,
    keys: Mapping[str, str] | None = None,
    before: Callable[[], object] | None = None,
) -> AsyncIterator[Server]:
    """Yields a server that is ready, with new keys unless the keys of an earlier one in `folder` are given. It is
    killed at the end if it has not ended. Its process calls `before` first. Raises `ServerDied`."""
    keys = keys or make_keys(folder / "keys.sqlite")
    config = folder / "config.toml"
    config.write_text(
        f'[server]\nport = 0\nclient_timeout_s = 5.0\ndrain_timeout_s = 10.0\nadmin_key = "{ADMIN_KEY}"\n'
        f'key_file = "{folder / "keys.sqlite"}"\n'
        f'[model]\nmodel = "{make_folder(folder / "tiny")}"\nmax_model_len = {MAX_MODEL_LEN}\n'
        "[cache]\nnum_kv_blocks = 100\n"
        # Prompts are cut by their lengths alone, so that a request alone is computed in the same way each time.
        "[scheduler]\nmax_num_seqs = 8\nmax_num_batched_tokens = 256\nmax_num_waiting = 64\n"
        f"target_step_ms = 3.6e6\nmax_step_ms = 3.6e6\n{_TIERS}"
    )
    log = folder / "log.txt"
    with log.open("wb") as errors:
        arguments = ["-m", module, str(config), *options]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=PIPE, stderr=errors, preexec_fn=before
        )
    try:
        assert process.stdout is not None
        match = re.search(rb"http://[^/]+", await process.stdout.readline())
        if match is None:
            raise ServerDied(await process.wait(), log.read_text())
        yield Server(process, match[0].decode(), keys, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
