"""Makes the engines of a process: all of them on one MLX thread."""

from __future__ import annotations

from collections.abc import Callable

from mlx_server.config import Config
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.memory_budget import MemoryShare
from mlx_server.engine.memory_watch import MemoryWatch
from mlx_server.engine.parts import Surroundings
from mlx_server.runtime.executor import MLXThread


class EngineFactory:
    """Owns the MLX thread that its engines share."""

    def __init__(self, *, wire_memory: bool = False) -> None:
        """`wire_memory` as in `[memory]`."""
        self._thread = MLXThread(wire_memory=wire_memory)

    @property
    def is_alive(self) -> bool:
        """Whether engines can work at all."""
        return self._thread.is_alive

    def make(
        self,
        config: Config,
        share: MemoryShare,
        *,
        watch: MemoryWatch,
        past: AsyncEngine | None,
        is_shared: Callable[[], bool],
        on_progress: Callable[[float], None],
    ) -> AsyncEngine:
        """An engine that is not started. `share` is what is booked for it, `watch` watches all models' memory. It
        continues the counts of `past`, the model's engine before. `is_shared` says whether others have work,
        `on_progress` gets the part of the weights that is loaded."""
        around = Surroundings(self._thread, is_shared, on_progress, share, watch)
        return AsyncEngine(config, around, metrics=None if past is None else past.metrics)

    def stop(self) -> None:
        """Ends the thread; the engines have been stopped. Blocks for as long as a piece of work lasts."""
        self._thread.stop()
