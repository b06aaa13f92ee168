"""`mlx-serve serve` as a process, before it serves anything and after whoever read its output has left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.homes import with_kernels

pytestmark = pytest.mark.slow

MODEL = ("random:mini", "--num-kv-blocks", "16", "--attention-backend", "reference")

SLOW_IMPORTS = """
    import sys

    class Gate:
        # Stands for libraries that take long to import.
        def find_spec(self, name, path=None, target=None):
            if name in ("mlx", "transformers"):
                print("importing", flush=True)
                sys.stdin.readline()

    sys.meta_path.insert(0, Gate())
    from mlx_server.cli.main import main
    sys.exit(main(sys.argv[1:]))
"""


@contextlib.asynccontextmanager
async def python(home: Path, *arguments: str, stdin: int = DEVNULL) -> AsyncIterator[Process]:
    environment = {**os.environ, "MLX_SERVE_HOME": str(with_kernels(home))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stdin=stdin, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line_of(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def test_probes_are_answered_before_what_takes_long_is_imported(tmp_path: Path):
    """Other requests wait until they can be served; a second server fails at once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    program = textwrap.dedent(SLOW_IMPORTS)
    arguments = ("-c", program, "serve", *MODEL, "--port", port)
    async with python(tmp_path, *arguments, stdin=PIPE) as process:
        assert await line_of(process) == "importing"
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as http:
            for path in ("/health", "/ping"):
                health = await http.get(path)
                assert (health.status_code, health.json()) == (503, {"status": "loading"})
                assert health.headers["retry-after"] == "1"
            asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2}))
            async with python(tmp_path, *arguments) as second:
                out, errors = await second.communicate()
            assert (second.returncode, out) == (1, b"")
            assert f"Cannot listen on 127.0.0.1:{port}: Address already in use. Stop what listens there" in (
                errors.decode()
            )
            assert b"Traceback" not in errors
            assert not asking.done()
            assert process.stdin is not None
            process.stdin.write(b"\n\n")
            assert (await asking).status_code == 200
            assert (await http.get("/health")).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()
        assert process.returncode == 0
        if "openblas" in os.environ.get("LD_PRELOAD", ""):
            assert b"libopenblas0-pthread" not in errors


async def test_a_signal_ends_a_server_that_is_still_importing(tmp_path: Path):
    arguments = ("-c", textwrap.dedent(SLOW_IMPORTS), "serve", *MODEL, "--port", "0")
    async with python(tmp_path, *arguments, stdin=PIPE) as process:
        assert await line_of(process) == "importing"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0


@pytest.mark.parametrize("is_listed", [False, True], ids=["the model", "one of several"])
@pytest.mark.parametrize(("name", "words"), [("nowhere", "There is no model"), (".", "it lacks config.json")])
async def test_a_model_that_is_nowhere_is_told_before_what_takes_long_is_imported(
    name: str, words: str, is_listed: bool, tmp_path: Path
):
    folder, settings = str(tmp_path / name), tmp_path / "settings.toml"
    settings.write_text(f'[[models]]\nmodel = "random:mini"\n[[models]]\nmodel = "{folder}"\npinned = true\n')
    program = textwrap.dedent(SLOW_IMPORTS).replace('"mlx"', '"mlx_lm"')
    flags = ("--config", str(settings)) if is_listed else (folder,)
    async with python(tmp_path, "-c", program, "serve", "--port", "0", *flags) as process:
        out, errors = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert f"{folder}" in errors.decode()
    assert words in errors.decode()


async def test_a_wrong_certificate_is_one_of_the_settings_though_the_port_is_taken_before(tmp_path: Path):
    missing = str(tmp_path / "missing")
    flags = ("--tls-cert", missing, "--tls-key", missing)
    async with python(tmp_path, "-m", "mlx_server", "serve", *MODEL, "--port", "0", *flags) as process:
        out, errors = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert f"{missing} cannot be read" in errors.decode()


async def test_settings_that_change_nothing_or_are_wrong_are_named_in_the_log(tmp_path: Path):
    (tmp_path / "settings.toml").write_text('[tiers.a]\nmodels = ["random:mini", "nope"]\n[pool]\nidle_ttl_s = 60\n')
    # A wrong file of keys ends the server before it loads a model.
    flags = ("--config", str(tmp_path / "settings.toml"), "--api-key-file", str(tmp_path / "missing"))
    async with python(tmp_path, "-m", "mlx_server", "serve", *MODEL, "--port", "0", *flags) as process:
        out, said = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    errors = said.decode()
    assert f"{tmp_path / 'missing'} cannot be read" in errors
    faults = re.findall(r"WARNING +\S+: (.*)", errors)
    assert len(faults) == 2, errors
    assert faults[0].startswith("idle_ttl_s is 60.0, which has no effect without")
    assert "The model `nope` does not exist." in faults[1]


async def test_a_server_whose_output_nobody_reads_any_more_goes_on(tmp_path: Path):
    """As after `mlx-serve serve 2>&1 | head -1`, or in a terminal that was closed."""
    async with python(tmp_path, "-m", "mlx_server", "serve", *MODEL, "--port", "0") as process:
        url = re.search(r"http://[^/]+", await line_of(process))
        assert url is not None
        for number in (1, 2):
            transport = process._transport.get_pipe_transport(number)  # type: ignore[attr-defined]
            transport.close()
        async with httpx.AsyncClient(base_url=url[0], timeout=20) as http:
            for _ in range(3):
                response = await http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2})
                assert response.status_code == 200  # each has left a line in the log, which leads nowhere
            process.send_signal(signal.SIGQUIT)
            assert (await http.get("/health")).status_code == 200
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0


@pytest.mark.parametrize("lost", ["closed", "unread", "full"])
def test_what_cannot_be_written_is_dropped(lost: str):
    """And no socket gets the number of a standard stream."""
    program = """
        import logging, os, socket, sys
        from mlx_server.environment import open_streams
        from mlx_server.observability.logs import survive_lost_streams

        open_streams()
        survive_lost_streams()
        assert socket.socket().fileno() > 2
        for stream in (sys.stdout, sys.stderr):
            for _ in range(3):
                print("a line " * 2000, file=stream, flush=True)
        logging.warning("a record")
        sys.exit(7)
    """
    reader, writer = os.pipe()
    os.close(reader)
    if lost == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY) if os.path.exists("/dev/full") else writer, writer)

    def close() -> None:
        for number in (0, 1, 2) if lost == "closed" else ():
            os.close(number)

    command = [sys.executable, "-c", textwrap.dedent(program)]
    try:
        status = subprocess.run(command, stdout=writer, stderr=writer, preexec_fn=close, check=False, timeout=60)
    finally:
        os.close(writer)
    assert status.returncode == 7


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has no other BLAS")
async def test_the_log_says_once_what_a_slow_blas_costs_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    async with python(tmp_path, "-m", "mlx_server", "serve", *MODEL, "--port", "0") as process:
        assert "mlx-serve is ready" in await line_of(process)
        process.terminate()
        _, errors = await process.communicate()
    assert errors.count(b"libopenblas0-pthread") == 1, errors.decode()
