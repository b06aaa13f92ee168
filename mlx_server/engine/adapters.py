"""The adapters of a loaded model, changed while it serves."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from mlx_server.config import ModelConfig
from mlx_server.engine.fair_slots import in_daemon_thread
from mlx_server.engine.loading import check_unchanged
from mlx_server.engine.memory.need import MemoryNeed
from mlx_server.engine.parts import EngineParts
from mlx_server.engine.pieces import free_failed, in_pieces
from mlx_server.errors import InsufficientMemoryError, OverloadedError, ServeError
from mlx_server.model_entries import Adapter
from mlx_server.outputs import SchedulerOutput
from mlx_server.request import Request, RequestStatus
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.models.live_adapters import add_adapter, remove_adapter

logger = logging.getLogger(__name__)

_RETRY_S = 5.0


class LiveAdapters:
    """Loads and unloads adapters of one model. Their matrices are known by the digest of their content, so a request
    keeps the adapter with which it began, whatever its name means later. One change at a time. Event-loop thread
    only."""

    def __init__(
        self, parts: EngineParts, thread: MLXThread, settings: ModelConfig, requests: Callable[[], Iterable[Request]]
    ) -> None:
        """`requests` are those of the model that have not ended."""
        self._parts = parts
        self._thread = thread
        self._settings = settings
        self._requests = requests
        self._keys = parts.loaded.adapters.by_name
        self._turn, self._ended = asyncio.Lock(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: Counter[str] = Counter()

    def on_end(self) -> None:
        """Call when a request has ended."""
        self._ended.set()

    def hold(self, name: str) -> tuple[str, Callable[[], None]]:
        """The key of the adapter that has this name now, for requests to come, and what ends the hold: until then, the
        adapter is not freed. To be called once."""
        key, held, ended = self._keys[name], self._held, self._ended  # the holder keeps no part of the model
        held[key] += 1

        def end() -> None:
            held[key] -= 1
            ended.set()

        return key, end

    def used_by(self, status: RequestStatus) -> list[str]:
        """The names of the adapters of open requests with this status, also of adapters that were unloaded since."""
        return sorted({request.adapter for request in self._requests() if request.adapter and request.status is status})

    async def load(self, adapter: Adapter, num_bytes: int) -> None:
        """From the return on, requests may name the adapter, whose key is known and which takes `num_bytes`. Steps run
        meanwhile. Raises `ModelLoadError` for one that does not fit the model or whose files change,
        `InsufficientMemoryError`, what fetching raises, and `OverloadedError` if the model is unloaded."""
        task = self._start(self._load(adapter, num_bytes))
        await asyncio.wait((task,))
        if task.cancelled():
            raise OverloadedError(f"The model {self._settings.name} was unloaded; load the adapter again.", _RETRY_S)
        task.result()

    def has(self, name: str) -> bool:
        """Whether requests may name it."""
        return name in self._keys

    def has_content(self, key: str) -> bool:
        """Whether an adapter with this key takes memory, under any name."""
        return key in self._parts.loaded.adapters.keys

    def unload(self, name: str) -> None:
        """From now on, no request may name the adapter. Its memory is freed when those that use it have ended."""
        self._start(self._free(self._keys.pop(name)))

    async def close(self) -> None:
        """Ends all changes, before the model is unloaded."""
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _is_used(self, key: str) -> bool:
        return self._held[key] > 0 or any(request.adapter_key == key for request in self._requests())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, adapter: Adapter, num_bytes: int) -> None:
        async with self._turn:
            if not self.has_content(adapter.key):
                await self._add(adapter, num_bytes)
            try:
                await in_daemon_thread(lambda: check_unchanged((adapter,)))
            except ServeError:
                self._start(self._free(adapter.key))
                raise
            before = self._keys.get(adapter.name)
            self._keys[adapter.name] = adapter.key
        if before is not None:
            self._start(self._free(before))

    async def _add(self, adapter: Adapter, num_bytes: int) -> None:
        need, share = MemoryNeed(num_bytes, 0, 0), self._parts.share
        if not share.join(need):
            raise InsufficientMemoryError(
                f"The adapter {adapter.name} needs {num_bytes / 2**20:.0f} MiB, and no more than "
                f"{share.growable_bytes(1.0) / 2**20:.0f} MiB may be used: unload a model or an adapter, or raise "
                "--memory-limit."
            )
        try:
            await in_pieces(
                self._thread,
                lambda part: None,
                add_adapter(self._parts.loaded, self._parts.runner, adapter, self._settings.dtype),
            )
        except BaseException as error:
            await free_failed(self._thread, error)
            share.part(need)
            raise

    async def _free(self, key: str) -> None:
        """Frees an adapter once no request uses it, unless a name means it again."""
        while self._is_used(key):
            self._ended.clear()
            await self._ended.wait()
        async with self._turn:
            rows = self._parts.loaded.adapters
            if key in self._keys.values() or key not in rows.keys or self._is_used(key):
                return
            try:
                # Launched after all steps that still have a request with the adapter.
                await self._parts.executor.submit(SchedulerOutput(-1, ()))
                removal = remove_adapter(self._parts.loaded.model, rows, key)
                num_bytes = await in_pieces(self._thread, lambda part: None, removal)
                self._parts.share.part(MemoryNeed(num_bytes, 0, 0))
                logger.info("An adapter of %s was freed, %.0f MiB", self._settings.name, num_bytes / 2**20)
            except Exception as error:  # the engine or the thread has died, which is logged
                logger.warning("An adapter of %s was not freed: %s", self._settings.name, error)
