"""More connections than the process may have files, and nobody asks for a key before they are made."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from tests.attack.tiers_world import served

pytestmark = [pytest.mark.attack, pytest.mark.timeout(600)]

NUM_IDLE = 2300


@pytest.mark.parametrize("num_files", [512, 1024, 4096])
async def test_idle_connections_do_not_stop_the_server(tmp_path: Path, num_files: int):
    limited = ["bash", "-c", f'ulimit -n {num_files}; exec "$@"', "bash"]
    longest_s = 0.0
    async with served(tmp_path, command=limited) as server:
        async with server.attacked("connect", NUM_IDLE):
            for _ in range(50):
                start_s = time.perf_counter()
                async with httpx.AsyncClient(timeout=10) as http:
                    assert (await http.get(f"{server.url}/health")).status_code == 200
                longest_s = max(longest_s, time.perf_counter() - start_s)
                (answer,) = await server.ask("high")
                assert answer.status == 200
                await asyncio.sleep(0.05)
        log = server.log.read_text()
    print(
        f"{num_files} files, {NUM_IDLE} idle connections: /health took {longest_s:.3f} s at most, {len(log)} B of log"
    )
    assert "Traceback" not in log
    assert log.count("connections closed or refused") <= 2
