"""A real server with a tiny model in a process of its own, and three streams beside whatever attacks it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    head: str
    body: bytes


class Target:
    """The server, and what watches it."""

    def __init__(self, server: subprocess.Popen[str], watch: subprocess.Popen[str], port: int) -> None:
        self._server = server
        self._watch = watch
        self.port = port

    @property
    def rss_bytes(self) -> int:
        return psutil.Process(self._server.pid).memory_info().rss

    def worst_gap_s(self) -> float:
        """Between two events of one of the streams, since it was last asked for."""
        assert self._watch.stdin is not None
        assert self._watch.stdout is not None
        self._watch.stdin.write("\n")
        self._watch.stdin.flush()
        line = self._watch.stdout.readline()
        assert line, "the streams have ended"
        return float(json.loads(line)["worst_gap_s"])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def post(self, path: str, body: bytes) -> Answer:
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
        with self.connect() as connection:
            with contextlib.suppress(ConnectionError):  # refused before it was read
                connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            return read_answer(connection)


def read_answer(connection: socket.socket) -> Answer:
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 20):
            received += piece
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    text = head.decode("latin-1")
    return Answer(int(text.split()[1]) if text else 0, text, body)


@contextlib.contextmanager
def target(folder: Path) -> Iterator[Target]:
    """The server with a random model, once all three streams run."""
    config = folder / "config.toml"
    make = [sys.executable, "-m", "mlx_server", "bench", "random-folder", "random:mini", str(folder / "mini")]
    subprocess.run(make, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    config.write_text(
        f'[server]\nport = 0\n[model]\nmodel = "{folder / "mini"}"\nmax_model_len = 4096\n'
        "[cache]\nnum_kv_blocks = 4096\n"
    )
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_process("tests.api.life_real", str(config)))
        assert server.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:(\d+)/v1", server.stdout.readline())
        assert match is not None
        watch = stack.enter_context(_process("tests.attack.watch", match.group(1)))
        attacked = Target(server, watch, int(match.group(1)))
        time.sleep(2.0)
        attacked.worst_gap_s()  # all streams run, or this fails
        yield attacked


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
