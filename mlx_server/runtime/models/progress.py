"""The progress of models that are being fetched, converted or quantised, for the terminal and the server's routes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqdm import tqdm


@dataclass(slots=True)
class Progress:
    """`stage` is `fetching`, `converting` or `quantizing`. `done_bytes` of `total_bytes` are done, `kept_bytes` of them
    by an earlier, interrupted run."""

    stage: str
    total_bytes: int = 0
    done_bytes: int = 0
    kept_bytes: int = 0
    started_s: float = field(default_factory=time.monotonic)

    def reading(self) -> dict[str, Any]:
        """For people and programs; `bytes_per_s` and `remaining_s` are None until they can be estimated."""
        passed_s = time.monotonic() - self.started_s
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
    """Takes a number of bytes that are done; `was_kept` if an earlier run did them."""

    def __call__(self, num_bytes: int, *, was_kept: bool = False) -> None: ...


_running: dict[str, Progress] = {}


def progress_of(model: str) -> Progress | None:
    """The progress of a model, by its configured name; None if it is not being prepared. Any thread."""
    return _running.get(model)


@contextlib.contextmanager
def shown(model: str, stage: str, total_bytes: int) -> Iterator[Report]:
    """While it is open, `progress_of` returns what the caller reports, and a bar shows it if standard error is a
    terminal. Any thread; one at a time for each model."""
    progress = _running[model] = Progress(stage, total_bytes)

    def report(num_bytes: int, *, was_kept: bool = False) -> None:
        progress.done_bytes += num_bytes
        progress.kept_bytes += num_bytes * was_kept
        if was_kept and not bar.disable:  # does not count for the rate
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
