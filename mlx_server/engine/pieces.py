"""Long work on the MLX thread, in pieces between the steps of all models."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TypeVar

from mlx_server.errors import EngineDeadError
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.models.loader import Pieces, release

T = TypeVar("T")


async def in_pieces(thread: MLXThread, on_progress: Callable[[float], None], work: Pieces[T]) -> T:
    """Does `work` on the MLX thread, one call for each piece, so that other steps run in between. Closes it if it fails
    or is cancelled."""

    def advance() -> float | StopIteration:
        try:
            return next(work)
        except StopIteration as end:  # futures cannot hold this exception
            return end

    try:
        while not isinstance(progress := await asyncio.wrap_future(thread.call(advance)), StopIteration):
            on_progress(progress)
    except BaseException:
        thread.call(work.close)
        raise
    result: T = progress.value
    return result


async def free_failed(thread: MLXThread, error: BaseException) -> None:
    """Frees what work that has failed with `error` has made so far. Call it where the error was caught."""
    trace = error.__traceback__
    inner = None if trace is None else trace.tb_next  # without the caller's frame and those that await it
    await undo(thread, partial(_free, error, inner))


async def undo(thread: MLXThread, work: Callable[[], object]) -> None:
    """Does `work` after a failure on the MLX thread, if that has not ended."""
    with contextlib.suppress(EngineDeadError):
        await asyncio.wrap_future(thread.call(work))


def _free(error: BaseException, inner: TracebackType | None) -> None:
    """Frees what the frames of the tracebacks still hold. MLX thread."""
    traceback.clear_frames(inner)
    chain = error.__cause__ or error.__context__
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    release([])
