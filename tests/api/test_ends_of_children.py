"""What a server has started ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform == "darwin", reason="nothing is compiled for a GPU")
@pytest.mark.parametrize(("model", "code"), [("random:mini", 0), ("random:nosuch", 1)])
async def test_the_end_of_a_start_ends_the_compilers_too(tmp_path: Path, model: str, code: int):
    """A first start compiles for half a minute, and must not go on with that once it is told to stop or has failed."""
    compiler, compiling = tmp_path / "c++", tmp_path / "compiling"
    compiling.mkdir()
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo 1\ntouch {compiling}/$$\nexec sleep 600\n')
    compiler.chmod(0o700)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mlx_server", "serve", model, "--port", "0"),
        env={**os.environ, "MLX_SERVE_HOME": str(tmp_path / "home"), "CXX": str(compiler)},
        stdout=DEVNULL,
        stderr=PIPE,
    )
    try:
        async with asyncio.timeout(60):
            while not list(compiling.iterdir()) and process.returncode is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        if code == 0:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            await process.communicate()
        assert process.returncode == code
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    await asyncio.sleep(0.5)
    numbers = {int(path.name) for path in compiling.iterdir()}
    left = [p for p in psutil.process_iter() if p.pid in numbers and p.status() != psutil.STATUS_ZOMBIE]
    for child in left:
        child.kill()
    assert not left
