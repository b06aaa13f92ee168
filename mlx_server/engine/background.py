"""Work on threads that nobody waits for at the end of the process, like a download."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T], *, stack_bytes: int = 0) -> T:
    """Like `asyncio.to_thread`, but a cancelled caller leaves nothing that keeps the process from ending. The thread's
    stack may grow to `stack_bytes`; 0 is as large as usual."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    _start(threading.Thread(target=work, name="background", daemon=True), stack_bytes)
    return await future


def _start(thread: threading.Thread, stack_bytes: int) -> None:
    """Python has one size for all threads: others that start just now get it, too, which costs address space only."""
    usual_bytes = threading.stack_size(stack_bytes)
    try:
        thread.start()
    finally:
        threading.stack_size(usual_bytes)
