"""Counts of the whole server, for /metrics: HTTP requests, and sleep."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from mlx_server.observability.engine_metrics import Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FINE_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5),
    *(7.5, 10, 30, 60),
)
_OPERATION_S = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)


class HttpMetrics:
    """Counts, durations and sizes of HTTP requests, with the names of the usual FastAPI instrumentation. Event-loop
    thread only.

    `handler` is the route's pattern, since paths contain ids; `none` for unknown paths. `status` is a class like `2xx`.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.durations: defaultdict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(_SECONDS))
        self.fine_durations = Histogram(_FINE_SECONDS)
        self.received: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(()))
        self.sent: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(()))

    def on_exchange(
        self, handler: str, method: str, status: int, duration_s: float, num_received: int, num_sent: int
    ) -> None:
        """A request has ended: its answer is sent. The last two are the bytes of its bodies."""
        self.counts[handler, method, f"{status // 100}xx"] += 1
        self.durations[handler, method].observe(duration_s)
        self.fine_durations.observe(duration_s)
        self.received[handler].observe(num_received)
        self.sent[handler].observe(num_sent)


class SleepOperation(StrEnum):
    """vLLM's operations. No route releases the KV cache alone, so its series stay at zero."""

    SLEEP = "sleep"
    RELEASE_KV_CACHE = "release_kv_cache_memory"
    WAKE = "wake"


class SleepMetrics:
    """Durations of sleeps and wakes, including those that failed, and how many are in progress. They concern the whole
    server, so the model is not a label. Event-loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.durations = {operation: Histogram(_OPERATION_S) for operation in SleepOperation}
        self.in_flight = dict.fromkeys(SleepOperation, 0)

    @contextmanager
    def measured(self, operation: SleepOperation) -> Iterator[None]:
        started_s = self._clock()
        self.in_flight[operation] += 1
        try:
            yield
        finally:
            self.in_flight[operation] -= 1
            self.durations[operation].observe(self._clock() - started_s)
