"""Long work on the MLX thread, in pieces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from mlx_server.engine.pieces import in_pieces
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.models.loader import Pieces


@pytest.fixture
def thread() -> Iterator[MLXThread]:
    thread = MLXThread()
    yield thread
    thread.stop()


async def test_work_that_is_cancelled_is_closed_on_the_thread_that_did_it(thread: MLXThread) -> None:
    begun, closed = asyncio.Event(), list[threading.Thread]()

    def work() -> Pieces[None]:
        try:
            while True:
                yield 0.5
        finally:
            closed.append(threading.current_thread())

    pieces = work()  # held here, or the garbage collector would close it
    doing = asyncio.create_task(in_pieces(thread, lambda progress: begun.set(), pieces))
    await begun.wait()
    doing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doing
    assert thread.call(lambda: [threading.current_thread()]).result() == closed
