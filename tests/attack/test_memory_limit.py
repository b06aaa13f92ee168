"""A server in a control group of Linux with little memory: it stays within, and what the kernel kills comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlx_server.runtime.machine import read_group_memory
from tests.soak.requests import seeded
from tests.soak.worlds import Server, ServerDied, serving

pytestmark = [pytest.mark.attack, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
MIB = 2**20
V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


class Group:
    """A control group that a test has made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def limit(self, num_bytes: int) -> None:
        name = "memory.max" if (self.folder / "memory.max").exists() else "memory.limit_in_bytes"
        (self.folder / name).write_text(str(num_bytes))

    def enter(self) -> None:
        """Moves the calling process there, and with it what it becomes."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


@pytest.fixture
def group() -> Iterator[Group]:
    folder = (V1 if V1.is_dir() else V2) / f"mlx-serve-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        group = Group(folder)
        with contextlib.suppress(OSError):
            group.limit(1024 * MIB)
        if not any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
            pytest.skip("control groups do not limit memory here")
        yield group
    finally:
        folder.rmdir()


async def answer(server: Server, http: httpx.AsyncClient) -> str:
    ask = seeded(1)
    response = await http.post(ask.path, json=ask.body, headers={"x-api-key": server.keys["default"]})
    assert response.status_code == 200, response.text
    return str(response.json()["choices"])


def test_a_model_that_the_group_has_no_room_for_is_refused(group: Group):
    """With the figures, rather than killed while it is loaded."""
    group.limit(700 * MIB)
    command = [sys.executable, "-m", "mlx_server", "serve", "random:qwen3-0.6b", "--port", "0"]
    ended = subprocess.run(
        command, cwd=ROOT, preexec_fn=group.enter, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1, ended.stderr[-2000:]
    assert "needs" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_what_the_kernel_kills_for_its_memory_comes_back_whole(tmp_path: Path, group: Group):
    async with serving(tmp_path) as server, httpx.AsyncClient(base_url=server.url, timeout=30) as http:
        keys, before = server.keys, await answer(server, http)
    group.limit(60 * MIB)
    with pytest.raises(ServerDied) as died:
        async with serving(tmp_path, keys=keys, before=group.enter):
            pass
    assert died.value.args[0] == -signal.SIGKILL
    group.limit(1024 * MIB)
    async with (
        serving(tmp_path, keys=keys, before=group.enter) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):
        assert await answer(server, http) == before
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await server.process.wait() == 0


def test_a_limit_is_read_as_the_kernel_has_it(group: Group):
    group.limit(64 * MIB)
    version = "0::" if group.folder.parent == V2 else "9:memory:"
    membership = group.folder.name
    reader, writer = os.pipe()
    os.write(writer, f"{version}/{membership}\n".encode())
    os.close(writer)
    found = read_group_memory(Path(f"/dev/fd/{reader}"))
    os.close(reader)
    assert found is not None
    assert found.limit_bytes == 64 * MIB
