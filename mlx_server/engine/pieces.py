"""Long work on the MLX thread, in pieces between the steps of all models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.models.loader import Pieces

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
