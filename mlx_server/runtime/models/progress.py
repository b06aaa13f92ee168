"""How far a model is on its way: fetched, converted or quantised. On the terminal, and for whoever asks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqdm import tqdm


@dataclass(slots=True)
class Progress:
    """`stage` is `fetching`, `converting` or `quantizing`. Of `total_bytes`, which grows while files are found,
    `done_bytes` are done, `kept_bytes` of these by an earlier, interrupted run."""

    stage: str
    total_bytes: int = 0
    done_bytes: int = 0
    kept_bytes: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def reading(self, now: float | None = None) -> dict[str, Any]:
        """For people and programs to read; `bytes_per_s` and `remaining_s` are None until there is something to
        reckon them by."""
        passed_s = (time.monotonic() if now is None else now) - self.started_s
        new_bytes = self.done_bytes - self.kept_bytes
        rate = new_bytes / passed_s if passed_s > 0 and new_bytes > 0 else None
        return {
            "stage": self.stage,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes or None,
            "bytes_per_s": None if rate is None else round(rate),
            "remaining_s": None if rate is None else round(max(0, self.total_bytes - self.done_bytes) / rate, 1),
        }


class Report(Protocol):
    """Takes bytes that are done, `was_kept` by an earlier run."""

    def __call__(self, num_bytes: int, *, was_kept: bool = False) -> None: ...


_running: dict[str, Progress] = {}


def progress_of(model: str) -> Progress | None:
    """Of a model by the name that it is configured by; None if nothing is under way. Any thread."""
    return _running.get(model)


@contextlib.contextmanager
def shown(model: str, stage: str, total_bytes: int) -> Iterator[Report]:
    """While it is open, `progress_of` tells what its user reports; so does a bar, where standard error is a terminal.
    Any thread; one at a time for a model."""
    progress = _running[model] = Progress(stage, total_bytes)

    def report(num_bytes: int, *, was_kept: bool = False) -> None:
        progress.done_bytes += num_bytes
        progress.kept_bytes += num_bytes * was_kept
        if was_kept and not bar.disable:  # no part of the rate
            bar.initial += num_bytes
            bar.last_print_n += num_bytes
        bar.update(num_bytes)

    title = f"{stage.capitalize()} {model}"
    try:
        with tqdm(total=total_bytes, unit="B", unit_scale=True, desc=title, disable=None) as bar:
            yield report
    finally:
        if _running.get(model) is progress:
            del _running[model]
