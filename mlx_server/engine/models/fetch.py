"""Fetching a model while others are served: one fetch a model at a time, and how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlx_server.engine.fair_slots import in_daemon_thread
from mlx_server.model_entries import hub_id
from mlx_server.runtime.models.bundled import SMOLLM2
from mlx_server.runtime.models.progress import Progress, progress_of
from mlx_server.runtime.models.resolve import resolve_model


@dataclass(frozen=True, slots=True)
class Fetch:
    """A model on its way here, by its name or its id on the hub. `done` ends with what keeps it from coming, a
    `ServeError` where that is known."""

    name: str
    done: asyncio.Task[None]

    def reading(self) -> dict[str, Any]:
        """The same as `progress` and more, for people and programs to read: its stage, its rate, the time left."""
        return {"model": self.name, **(progress_of(self.name) or Progress("fetching")).reading()}

    def progress(self) -> tuple[int, int]:
        """Bytes that are here, and how many there are in all; zeros while that is being found out."""
        found = progress_of(self.name)
        return (0, 0) if found is None else (found.done_bytes, found.total_bytes)


class Fetches:
    """Those in progress. On the event loop's thread. A fetch goes on when nobody waits for it any more: what is here
    already would be lost otherwise."""

    def __init__(self) -> None:
        self._running: dict[str, Fetch] = {}

    def join(self, name: str) -> Fetch:
        """The fetch of a model that `can_be_fetched`, begun if it is not in progress."""
        name = hub_id(name) or name
        running = self._running.get(name)
        if running is None:
            task = asyncio.create_task(self._fetch(name), name=f"fetch {name}")
            task.add_done_callback(_take_error)
            running = self._running[name] = Fetch(name, task)
        return running

    def running(self) -> Iterator[Fetch]:
        yield from self._running.values()

    async def _fetch(self, name: str) -> None:
        try:
            await in_daemon_thread(lambda: resolve_model(name))
        finally:
            del self._running[name]


def can_be_fetched(name: str) -> bool:
    """Whether models are fetched by such a name: the bundled model's, or a hub id or its page. It may be
    nobody's."""
    return name == SMOLLM2.name or hub_id(name) is not None


def _take_error(task: asyncio.Task[None]) -> None:
    """Whoever waits gets it; if nobody does, it is no fault of the program."""
    if not task.cancelled():
        task.exception()
