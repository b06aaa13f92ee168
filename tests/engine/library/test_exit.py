"""What becomes of an `AsyncLLM` that is not stopped: its script ends as it would without one, and other event loops are
refused."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_server import AsyncLLM
from mlx_server.engine.request_stream import RequestStream
from mlx_server.errors import EngineDeadError, InvalidRequestError
from tests.engine_worlds import greedy, make_folder

SCRIPT = """
import asyncio, sys
from mlx_server import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM(sys.argv[1], num_kv_blocks=600, max_model_len=1024, target_step_ms=3.6e6, max_step_ms=3.6e6)
    await llm.start()
    if "is kept" in sys.argv:
        globals()["kept"] = llm
    long = [[number] * 1000 for number in range(8)]
    work = asyncio.create_task(llm.complete(long, SamplingParams(max_tokens=9, ignore_eos=True)))
    while not llm.engine.stats().num_running:
        await asyncio.sleep(0)
    if "raises" in sys.argv:
        raise ValueError("the script's own")

asyncio.run(main())
print("the end")
sys.exit(3)
"""


@pytest.mark.parametrize(("how", "status"), [("is dropped", 3), ("is kept", 3), ("raises", 1)])
def test_a_script_that_stops_nothing_ends_in_the_middle_of_a_step(how: str, status: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    command = [sys.executable, "-c", SCRIPT, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    assert ("the end" in done.stdout) is (status == 3)


FETCHES = """
import threading
from mlx_server import LLM
from mlx_server.engine import parts

def fetch(config):
    print("fetching", flush=True)
    threading.Event().wait()

parts.estimate_need = fetch
LLM("smollm2")
"""


def test_ctrl_c_ends_a_script_whose_model_is_being_fetched() -> None:
    with subprocess.Popen([sys.executable, "-c", FETCHES], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as script:
        try:
            assert script.stdout is not None
            assert script.stdout.readline() == b"fetching\n"
            script.send_signal(signal.SIGINT)
            _, errors = script.communicate(timeout=60)
        finally:
            script.kill()
    assert b"KeyboardInterrupt" in errors
    assert script.returncode == -signal.SIGINT


@pytest.fixture
def llm(tmp_path: Path) -> AsyncLLM:
    return AsyncLLM(str(make_folder(tmp_path / "m")), num_kv_blocks=64, max_model_len=1024)


def test_the_end_of_its_loop_ends_its_streams_and_it_can_still_be_stopped(llm: AsyncLLM) -> None:
    async def begin() -> RequestStream:
        await llm.start()
        stream = llm.engine.submit(llm.builder.prompt("a", greedy(900), None).requests[0])
        await anext(stream)
        return stream

    async def go_on(stream: RequestStream) -> None:
        with pytest.raises(EngineDeadError, match=r"its event loop has ended.* in one loop"):
            [_ async for _ in stream]
        with pytest.raises(EngineDeadError, match="its event loop has ended"):
            await llm.complete("b", greedy(2))
        await llm.stop()
        assert not llm.engine.num_streams

    asyncio.run(go_on(asyncio.run(begin())))


def test_another_loop_is_refused(llm: AsyncLLM) -> None:
    with asyncio.Runner() as first:
        first.run(llm.start())
        with pytest.raises(InvalidRequestError, match="m was started in another event loop; use it in that one"):
            asyncio.run(llm.complete("b", greedy(2)))
        assert len(first.run(llm.complete("b", greedy(2)))[0].token_ids) == 2
        first.run(llm.stop())
