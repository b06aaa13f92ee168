"""A server process with Ollama's port beside its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest

from tests.engine_worlds import make_folder
from tests.homes import with_kernels

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    options = ["--port", "0", "--ollama-port", str(port), "--served-model-name", "tiny", "--kv-cache-memory", "8MB"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_server", "serve", str(make_folder(tmp_path / "model")), *options],
        env={**os.environ, "MLX_SERVE_HOME": str(with_kernels(tmp_path / "home"))},
        stdout=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(120, process.kill)
    timer.start()
    try:
        yield process, port
    finally:
        timer.cancel()
        process.terminate()
        process.communicate()


def test_both_ports_serve_and_one_of_them_is_ollamas(server: tuple[subprocess.Popen[str], int]):
    process, port = server
    assert process.stdout is not None
    line = process.stdout.readline()
    assert f"Ollama's API: http://127.0.0.1:{port}  " in line
    own, other = line.split()[3].removesuffix("/v1"), f"http://127.0.0.1:{port}"
    assert httpx.get(other).text == "Ollama is running"
    assert httpx.head(other).status_code == 200
    assert "<html" in httpx.get(own).text
    assert httpx.head(own).status_code == 200
    for url in (own, other):
        with httpx.Client() as http:
            body = {"prompt": "Hi", "raw": True, "stream": False, "options": {"num_predict": 4}}
            answer = http.post(f"{url}/api/generate", json=body)
            assert answer.status_code == 200, answer.text
            assert json.loads(http.get(f"{url}/v1/models").text)["data"][0]["id"] == "tiny"
    client = ollama.Client(host=other)
    assert [model.model for model in client.list().models] == ["tiny:latest"]
    client._client.close()
    process.terminate()
    assert process.wait(30) == 0
