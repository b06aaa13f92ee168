"""Connections whose TLS handshake never ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.attack.tiers_world import served

pytestmark = pytest.mark.slow

MOST = 8


@pytest.fixture
def cert(tmp_path: Path) -> str:
    """A certificate and its key in one file."""
    path = str(tmp_path / "cert.pem")
    what = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", path, "-out", f"{path}.cert", *what]
    subprocess.run(command, check=True, capture_output=True)
    with open(path, "a") as file:
        file.write(Path(f"{path}.cert").read_text())
    return path


async def test_those_who_never_shake_hands_are_counted_and_make_room(tmp_path: Path, cert: str):
    """They would keep all descriptors for a minute, and a quarter of a MiB each."""
    settings = f'tls_cert = "{cert}"\ntls_key = "{cert}"\nmax_connections = {MOST}'
    async with served(tmp_path, settings) as server, contextlib.AsyncExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        context = ssl.create_default_context(cafile=cert)
        watched = psutil.Process(server.process.pid)
        num_files, num_bytes = watched.num_fds(), watched.memory_info().rss
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(3):
            async with httpx.AsyncClient(verify=context) as http:
                assert (await http.get(f"{server.url}/health")).status_code == 200
        assert watched.num_fds() - num_files <= MOST + 32
        assert watched.memory_info().rss - num_bytes < 32 * 2**20
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("has_key", [True, False])
async def test_a_body_that_never_arrives_is_not_waited_for_at_the_end(tmp_path: Path, cert: str, has_key: bool):
    """Closing TLS waits for the client's own close. Without a key, the answer is there before the body is read."""
    async with served(tmp_path, f'tls_cert = "{cert}"\ntls_key = "{cert}"') as server:
        key = next(iter(server.keys.values())) if has_key else "none"
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 99\r\n\r\n{{"
        )
        context = ssl.create_default_context(cafile=cert)
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as plain:
            client = context.wrap_socket(plain, server_hostname="127.0.0.1")
            client.sendall(head.encode())
            await asyncio.sleep(0.5)
            began_s = time.monotonic()
            server.process.terminate()
            assert await asyncio.wait_for(server.process.wait(), 20) == 0
            assert time.monotonic() - began_s < 4
            client.close()
        assert "Traceback" not in server.log.read_text()
