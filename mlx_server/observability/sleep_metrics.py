"""How long the server takes to go to sleep and to wake when it is told to, as vLLM reports it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_server.observability.histogram import Histogram

_OPERATION_S = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)


class SleepOperation(StrEnum):
    """What vLLM tells apart. It can give up the KV cache alone; here no route does, and its series stay at zero."""

    SLEEP = "sleep"
    RELEASE_KV_CACHE = "release_kv_cache_memory"
    WAKE = "wake"


class SleepMetrics(Collector):
    """Durations of the operations, of those too that failed, and how many are under way. They are of the whole
    server, so that no model is among the labels. Event-loop thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations = {operation: Histogram(_OPERATION_S) for operation in SleepOperation}
        self._in_flight = dict.fromkeys(SleepOperation, 0)

    @contextmanager
    def measured(self, operation: SleepOperation) -> Iterator[None]:
        """The operation is under way inside the block."""
        started_s = self._clock()
        self._in_flight[operation] += 1
        try:
            yield
        finally:
            self._in_flight[operation] -= 1
            self._durations[operation].observe(self._clock() - started_s)

    def collect(self) -> Iterator[Metric]:
        durations = HistogramMetricFamily(
            "vllm:sleep_mode_operation_duration_seconds",
            "Time that going to sleep or waking took, failed ones included.",
            labels=("operation",),
        )
        in_flight = GaugeMetricFamily(
            "vllm:sleep_mode_operations_in_flight",
            "Such operations that are under way.",
            labels=("operation",),
        )
        for operation, found in self._durations.items():
            durations.add_metric((operation,), found.cumulative(), found.total)
            in_flight.add_metric((operation,), self._in_flight[operation])
        yield from (durations, in_flight)
