"""What the HTTP side counts of each exchange, by route."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from mlx_server.observability.histogram import Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FINE_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5),
    *(7.5, 10, 30, 60),
)


@dataclass(slots=True)
class _Sizes:
    count: int = 0
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        self.count += 1
        self.num_bytes += num_bytes


class HttpMetrics(Collector):
    """Counts, durations and sizes under the names of the usual FastAPI instrumentation. Event-loop thread only.

    `handler` is the route's pattern, so that ids in paths make no series of their own; `none` for paths that no
    route has. `status` is the class of status codes, like `2xx`.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._durations: defaultdict[tuple[str, str], Histogram] = defaultdict(lambda: Histogram(_SECONDS))
        self._fine_durations = Histogram(_FINE_SECONDS)
        self._received: defaultdict[str, _Sizes] = defaultdict(_Sizes)
        self._sent: defaultdict[str, _Sizes] = defaultdict(_Sizes)

    def on_exchange(self, handler: str, method: str, status: int, duration_s: float) -> None:
        """An exchange has ended, its last byte sent."""
        self._counts[handler, method, f"{status // 100}xx"] += 1
        self._durations[handler, method].observe(duration_s)
        self._fine_durations.observe(duration_s)

    def on_bodies(self, handler: str, num_received: int, num_sent: int) -> None:
        """What of its bodies, in bytes, was read and written."""
        self._received[handler].add(num_received)
        self._sent[handler].add(num_sent)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests, by route and class of status.", labels=("handler", "method", "status")
        )
        for labels, number in self._counts.items():
            requests.add_metric(labels, number)
        durations = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From the request's head to the answer's last byte, by route.",
            labels=("handler", "method"),
        )
        for where, histogram in self._durations.items():
            durations.add_metric(where, histogram.cumulative(), histogram.total)
        fine = HistogramMetricFamily(
            "http_request_duration_highr_seconds", "From head to last byte, of all routes together, in finer steps."
        )
        fine.add_metric((), self._fine_durations.cumulative(), self._fine_durations.total)
        yield from (requests, durations, fine)
        yield _sizes("http_request_size_bytes", "Bytes read of requests' bodies, by route.", self._received)
        yield _sizes("http_response_size_bytes", "Bytes written of answers' bodies, by route.", self._sent)


def _sizes(name: str, help: str, by_handler: Mapping[str, _Sizes]) -> Metric:
    family = SummaryMetricFamily(name, help, labels=("handler",))
    for handler, sizes in by_handler.items():
        family.add_metric((handler,), sizes.count, sizes.num_bytes)
    return family


class QuotaMetrics(Collector):
    """What callers' quotas kept out before a model was asked."""

    def __init__(self, refused: Mapping[str, int]) -> None:
        """`refused` are requests by tier."""
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "mlx_serve:quota_refusals", "Requests beyond their key's rates or seats, by tier.", labels=("tier",)
        )
        for tier, number in self._refused.items():
            family.add_metric((tier,), number)
        yield family
