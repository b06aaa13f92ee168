"""What the server counts beside its engines: HTTP exchanges, refusals, states of models, sleep, and its process."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import psutil

from mlx_server.observability.engine_metrics import Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FINE_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5),
    *(7.5, 10, 30, 60),
)
_OPERATION_S = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)


class HttpMetrics:
    """Counts, durations and sizes under the names of the usual FastAPI instrumentation. Event-loop thread only.

    `handler` is the route's pattern, so that ids in paths make no series of their own; `none` for paths that no
    route has. `status` is the class of status codes, like `2xx`. Sizes need no buckets.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.durations: defaultdict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(_SECONDS))
        self.fine_durations = Histogram(_FINE_SECONDS)
        self.received: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(()))
        self.sent: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(()))

    def on_exchange(self, handler: str, method: str, status: int, duration_s: float) -> None:
        """An exchange has ended, its last byte sent."""
        self.counts[handler, method, f"{status // 100}xx"] += 1
        self.durations[handler, method].observe(duration_s)
        self.fine_durations.observe(duration_s)

    def on_bodies(self, handler: str, num_received: int, num_sent: int) -> None:
        """What of its bodies, in bytes, was read and written."""
        self.received[handler].observe(num_received)
        self.sent[handler].observe(num_sent)


@dataclass(frozen=True, slots=True)
class QuotaMetrics:
    """What callers' quotas refused before a model was asked."""

    refused: Mapping[str, int]
    """Requests by tier."""


@dataclass(frozen=True, slots=True)
class SharedStoreMetrics:
    """The store in which a fleet counts together."""

    is_here: bool
    num_failures: int


@dataclass(frozen=True, slots=True)
class KvEventMetrics:
    """What routers were told of prefix caches, by topic."""

    sent: Mapping[str, int]
    """Batches."""
    lost: Mapping[str, int]
    """Changes that were never told, since too many waited; subscribers forgot all instead."""


@dataclass(frozen=True, slots=True)
class ModelReading:
    """One model of the pool at the moment of a scrape."""

    model_name: str
    state: str
    loads: Mapping[str, int]
    """By how they ended."""


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """States and loads of models, those that were never loaded included. `states` are all that a model can be in."""

    models: Sequence[ModelReading]
    states: Sequence[str]

    @property
    def by_state(self) -> dict[tuple[str, str], bool]:
        return {(model.model_name, state): state == model.state for model in self.models for state in self.states}

    @property
    def loads(self) -> dict[tuple[str, str], int]:
        return {(model.model_name, result): n for model in self.models for result, n in model.loads.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskMetrics:
    """The tier of all models on disk, at the moment of a scrape."""

    is_on: bool
    num_bytes: int
    limit_bytes: int
    num_records: int
    num_bytes_read: int
    num_bytes_written: int
    num_evicted: int
    num_damaged: int
    num_errors: int


class SleepOperation(StrEnum):
    """What vLLM tells apart. It can give up the KV cache alone; here no route does, and its series stay at zero."""

    SLEEP = "sleep"
    RELEASE_KV_CACHE = "release_kv_cache_memory"
    WAKE = "wake"


class SleepMetrics:
    """Durations of putting the server to sleep and waking it, of attempts that failed too, and how many are under way.
    They are of the whole server, so that no model is among the labels. Event-loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.durations = {operation: Histogram(_OPERATION_S) for operation in SleepOperation}
        self.in_flight = dict.fromkeys(SleepOperation, 0)

    @contextmanager
    def measured(self, operation: SleepOperation) -> Iterator[None]:
        """The operation is under way inside the block."""
        started_s = self._clock()
        self.in_flight[operation] += 1
        try:
            yield
        finally:
            self.in_flight[operation] -= 1
            self.durations[operation].observe(self._clock() - started_s)


class ProcessMetrics(psutil.Process):
    """The server process, read at each scrape under the names that every Prometheus client uses. The client library's
    own collector knows Linux only."""
