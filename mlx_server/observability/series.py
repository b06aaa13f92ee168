"""What `/metrics` shows, as one table: vLLM's series, so that its dashboards and routers work, and our own.

Series of what this server does not have (external caches, media caches) are zero, so that expressions with them have
data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, core, generate_latest
from prometheus_client.registry import Collector

from mlx_server.config import BLOCK_SIZE
from mlx_server.errors import ContextLengthError, QueueTimeoutError, QuotaExceededError
from mlx_server.observability.engine_metrics import HISTOGRAMS, KV_BLOCK_HISTOGRAMS, EngineMetrics, Histogram
from mlx_server.outputs import EngineStats
from mlx_server.request import FinishReason

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_ENGINE = "0"
"""vLLM's label for the number of a data-parallel engine; here each model has one engine."""

_CACHES = ("device", "host", "p2p", "disk", "external_unspecified")
"""vLLM's places of cached blocks; ours are on the device or on disk."""

_QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")

_REASONS = (
    *_QUEUE_LIMITS,
    "displaced",
    QuotaExceededError.reason,
    QueueTimeoutError.reason,
    ContextLengthError.reason,
)
"""Why requests are refused before they run: limits of the server's queue or of a tier, a timeout, or their length."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One model at the time of a scrape. An unloaded model keeps its counters."""

    model_name: str
    stats: EngineStats
    metrics: EngineMetrics
    is_prefix_caching: bool
    is_loaded: bool = True


Readings = Sequence[EngineReading]
Labels = tuple[str, ...]
Value = float | Histogram
Found = Value | Mapping[str, float] | Mapping[str, Histogram] | Mapping[Labels, float]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, which may have several series.

    `name` may end with the metric's own labels in braces; a counter's is without the `_total` of its series. `read`
    reads a source: a path of attributes, or a function. It gives one value, or for a metric with labels a mapping from
    label values (a tuple if there are several labels) to values. A `Histogram` is shown as a histogram or as a summary.
    """

    kind: Callable[..., core.Metric]
    name: str
    help: str
    read: str | Callable[[Any], Found]

    def metric(self, sources: Mapping[Labels, Any], source_labels: Labels = ()) -> core.Metric:
        """All series of the metric; `sources` are keyed by their values of `source_labels`."""
        name, _, own_labels = self.name.rstrip("}").partition("{")
        labels = (*source_labels, *filter(None, own_labels.split(",")))
        read = attrgetter(self.read) if isinstance(self.read, str) else self.read
        metric = self.kind(name, self.help, labels=labels)
        for source_values, source in sources.items():
            for own_values, value in _by_labels(read(source)):
                self._add(metric, (*source_values, *own_values), value)
        return metric

    def _add(self, metric: Any, values: Labels, value: Value) -> None:
        if not isinstance(value, Histogram):
            metric.add_metric(values, value)
        elif self.kind is core.SummaryMetricFamily:
            metric.add_metric(values, value.count, value.total)
        else:
            metric.add_metric(values, value.cumulative(), value.total)


def _by_labels(found: Found) -> Iterator[tuple[Labels, Value]]:
    if not isinstance(found, Mapping):
        yield (), found
        return
    for labels, value in found.items():
        yield (labels if isinstance(labels, tuple) else (labels,)), value


def render(readings: Readings, others: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """The exposition of all models, loaded ones first (routers that read one number per server read the first), and
    then of `others`, which `SERVER_SERIES` reads by name; None is skipped."""
    return generate_latest(_Scrape(sorted(readings, key=lambda reading: not reading.is_loaded), others))


@dataclass(frozen=True, slots=True)
class _Scrape(Collector):
    readings: Readings
    others: Mapping[str, Any]

    def collect(self) -> Iterator[core.Metric]:
        if self.readings:
            by_model: dict[Labels, EngineReading] = {(one.model_name, _ENGINE): one for one in self.readings}
            has_kv_blocks = self.readings[0].metrics.kv_blocks is not None
            for series in (*VLLM_SERIES, *(VLLM_KV_BLOCK_SERIES if has_kv_blocks else ()), *OWN_SERIES):
                yield series.metric(by_model, ("model_name", "engine"))
            yield from (series.metric({(): self.readings}) for series in ALL_MODELS_SERIES)
        for name, other in self.others.items():
            yield from (series.metric({(): other}) for series in SERVER_SERIES[name] if other is not None)


def _refusals(reading: EngineReading) -> dict[Labels, float]:
    rejected, tiers = reading.metrics.rejected, reading.metrics.tiers
    return {(tier, reason): rejected[tier, reason] for tier in tiers for reason in _REASONS}


def _queue_refusals(readings: Readings) -> dict[Labels, float]:
    return {
        (r.model_name, limit): sum(number for (_, reason), number in r.metrics.rejected.items() if reason == limit)
        for r in readings
        for limit in _QUEUE_LIMITS
    }


def _adapters(readings: Readings) -> dict[Labels, float]:
    """All adapters of all models in one series, since routers look for one series only."""
    stats = [reading.stats for reading in readings]
    running = ",".join(name for stat in stats for name in stat.running_adapters)
    waiting = ",".join(name for stat in stats for name in stat.waiting_adapters)
    return {(str(sum(stat.num_adapters for stat in stats)), running, waiting): time.time()}


def _cache_config(reading: EngineReading) -> dict[Labels, float]:
    """vLLM's labels."""
    num_blocks = reading.stats.max_tokens // BLOCK_SIZE
    return {(str(BLOCK_SIZE), str(num_blocks), str(reading.is_prefix_caching)): 1.0}


def _blocks_by_state(reading: EngineReading) -> dict[str, float]:
    stats = reading.stats
    used = stats.num_blocks - stats.num_free_blocks
    return {"used": used, "free": stats.num_free_blocks, "cached": stats.num_cached_blocks}


def _vllm_histogram(name: str, help: str) -> Family:
    return histogram(f"vllm:{name}", help, lambda reading: reading.metrics.by_name[name])


gauge = partial(Family, core.GaugeMetricFamily)
counter = partial(Family, core.CounterMetricFamily)
histogram = partial(Family, core.HistogramMetricFamily)
summary = partial(Family, core.SummaryMetricFamily)


def _zero(reading: EngineReading) -> float:
    return 0.0


def _states(models: Iterable[Any]) -> dict[Labels, float]:
    return {(model.name, state): state is model.state for model in models for state in type(model.state)}


def _loads(models: Iterable[Any]) -> dict[Labels, float]:
    return {(model.name, result): number for model in models for result, number in model.loads.items()}


def _failures(models: Iterable[Any]) -> dict[Labels, float]:
    return {(model.name,): model.num_deaths for model in models}


VLLM_SERIES: tuple[Family, ...] = (
    gauge("vllm:num_requests_running", "Requests in the running batch.", "stats.num_running"),
    gauge("vllm:num_requests_waiting", "Requests waiting to run.", "stats.num_waiting"),
    gauge(
        "vllm:num_requests_waiting_by_reason{reason}",
        "Waiting requests: for room (capacity), or for a prefix or an image that is being computed (deferred).",
        lambda r: {"capacity": r.stats.num_waiting - r.stats.num_deferred, "deferred": r.stats.num_deferred},
    ),
    gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that requests hold, 0 to 1; idle cached blocks count as free.",
        "stats.kv_usage",
    ),
    gauge(
        "vllm:engine_sleep_state{sleep_state}",
        "1 for the state of the model; an unloaded model is in discard_all.",
        lambda r: {"awake": r.is_loaded, "weights_offloaded": 0, "discard_all": not r.is_loaded},
    ),
    gauge(
        "vllm:cache_config_info{block_size,num_gpu_blocks,enable_prefix_caching}",
        "Shape of a model's KV pool.",
        _cache_config,
    ),
    counter("vllm:prompt_tokens", "Prompt tokens received.", "stats.num_prompt_tokens"),
    counter("vllm:generation_tokens", "Tokens generated.", "stats.num_generated_tokens"),
    counter(
        "vllm:prompt_tokens_by_source{source}",
        "Prompt tokens, by where their K/V came from.",
        lambda r: {
            "local_compute": r.stats.num_prompt_tokens_computed,
            "local_cache_hit": r.stats.num_prefix_hit_tokens,
            "external_kv_transfer": 0,
        },
    ),
    counter("vllm:prompt_tokens_cached", "Prompt tokens from the cache.", "stats.num_prefix_hit_tokens"),
    counter(
        "vllm:prompt_tokens_cached_by_source{source}",
        "Prompt tokens from the prefix cache, by where their blocks were.",
        lambda r: {
            **dict.fromkeys(_CACHES, 0),
            "device": r.stats.num_prefix_hit_tokens - r.stats.num_prompt_tokens_from_disk,
            "disk": r.stats.num_prompt_tokens_from_disk,
        },
    ),
    counter("vllm:prefix_cache_queries", "Tokens looked up in the cache.", "stats.num_prefix_query_tokens"),
    counter("vllm:prefix_cache_hits", "Tokens found in the cache.", "stats.num_prefix_hit_tokens"),
    counter("vllm:external_prefix_cache_queries", "Lookups in other servers' caches; none here.", _zero),
    counter("vllm:external_prefix_cache_hits", "Hits in other servers' caches; none here.", _zero),
    counter("vllm:mm_cache_queries", "Lookups in a cache of media; none here.", _zero),
    counter("vllm:mm_cache_hits", "Hits in a cache of media; none here.", _zero),
    counter("vllm:num_preemptions", "Preemptions.", "stats.num_preemptions"),
    counter(
        "vllm:request_success{finished_reason}",
        "Finished requests, by reason.",
        lambda r: {**{reason.value: r.metrics.finished[reason] for reason in FinishReason}, "repetition": 0},
    ),
    counter("vllm:spec_decode_num_drafts", "Steps of a request with drafts.", "stats.num_drafts"),
    counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.", "stats.num_draft_tokens"),
    counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.", "stats.num_accepted_tokens"),
    counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos{position}",
        "Drafted tokens accepted, by position in the draft.",
        lambda r: {"0": 0} | {str(place): count for place, count in r.stats.num_accepted_by_place.items()},
    ),
    *(_vllm_histogram(name, shown.help) for name, shown in HISTOGRAMS.items()),
)

VLLM_KV_BLOCK_SERIES = tuple(_vllm_histogram(name, help) for name, help in KV_BLOCK_HISTOGRAMS.items())

OWN_SERIES: tuple[Family, ...] = (
    histogram(
        "mlx_serve:queue_time_seconds{tier}",
        "Time until the first step, by tier.",
        "metrics.queue_time_by_tier",
    ),
    counter(
        "mlx_serve:preemptions{tier}",
        "Preemptions, by tier.",
        lambda r: {**dict.fromkeys(r.metrics.tiers, 0), **r.stats.preemptions_by_tier},
    ),
    counter(
        "mlx_serve:aging_promotions{tier}",
        "Requests that had aged by at least one priority level when they first ran.",
        lambda r: {tier: r.metrics.promoted_by_tier[tier] for tier in r.metrics.tiers},
    ),
    counter("mlx_serve:admission_rejections{tier,reason}", "Requests refused before they ran.", _refusals),
    counter("mlx_serve:recomputed_tokens", "Tokens computed again after a preemption.", "stats.num_tokens_recomputed"),
    counter("mlx_serve:model_calls", "Calls of the model.", "stats.num_model_calls"),
    counter("mlx_serve:images_encoded", "Calls of the vision encoder.", "stats.num_images_encoded"),
    histogram(
        "mlx_serve:step_time_seconds{kind}",
        "Step time, by what the step computes: decode, prefill or both (mixed).",
        lambda r: {kind.value: times for kind, times in r.metrics.step_time_by_kind.items()},
    ),
    counter(
        "mlx_serve:prefill_stall_seconds",
        "Time of mixed steps beyond that of an average decode-only step.",
        "metrics.prefill_stall_s",
    ),
    counter("mlx_serve:busy_seconds", "Time in steps, those of a draft model included.", "stats.busy_time_s"),
    counter("mlx_serve:idle_seconds", "Time between steps while requests were running.", "stats.idle_time_s"),
    gauge(
        "mlx_serve:model_memory_bytes{use}",
        "Memory of a model, by use.",
        lambda r: {"weights": r.stats.weight_bytes, "kv_pool": r.stats.kv_pool_bytes},
    ),
    gauge("mlx_serve:kv_pool_max_blocks", "Blocks that the KV pool may grow to.", "stats.max_num_blocks"),
    gauge(
        "mlx_serve:memory_pressure_level",
        "Threshold of memory use that is exceeded: 85 frees idle blocks, 92 holds admission, 97 preempts.",
        "stats.pressure_level",
    ),
    gauge("mlx_serve:kv_blocks{state}", "KV blocks, by state; cached ones are free, too.", _blocks_by_state),
    gauge("mlx_serve:state_checkpoints", "Recurrent states kept for prefixes.", "stats.num_state_checkpoints"),
    counter("mlx_serve:prefix_cache_evictions", "Cached blocks reused.", "stats.num_block_evictions"),
    counter("mlx_serve:draft_errors", "Failures of draft models.", "stats.num_draft_errors"),
    counter("mlx_serve:kv_disk_loads", "Loads of prefixes from disk.", "stats.num_disk_loads"),
    counter("mlx_serve:kv_disk_load_seconds", "Time of loads from disk.", "stats.disk_load_time_s"),
    counter(
        "mlx_serve:kv_disk_blocks{result}",
        "KV blocks between pool and disk: loaded, not loaded (computed), saved, or not saved (the queue was full).",
        lambda r: {
            "loaded": r.stats.num_blocks_loaded,
            "not_loaded": r.stats.num_blocks_not_loaded,
            "saved": r.stats.num_blocks_saved,
            "not_saved": r.stats.num_blocks_not_saved,
        },
    ),
    counter("mlx_serve:kv_pool_growths", "Times the KV pool grew.", "stats.num_pool_growths"),
    counter("mlx_serve:kv_pool_cuts", "Times the KV pool was cut.", "stats.num_pool_cuts"),
    counter("mlx_serve:kv_blocks_moved", "Blocks moved to cut the pool.", "stats.num_blocks_moved"),
    counter(
        "mlx_serve:memory_pressure_actions{action}",
        "Actions under memory pressure: pools cut, admission held, requests preempted.",
        lambda r: {
            "cut": r.stats.num_pressure_cuts,
            "hold": r.stats.num_pressure_holds,
            "preempt": r.stats.num_pressure_preemptions,
        },
    ),
)

ALL_MODELS_SERIES: tuple[Family, ...] = (
    gauge(
        "vllm:lora_requests_info{max_lora,running_lora_adapters,waiting_lora_adapters}",
        "Adapters of running and waiting requests, as clients name them. The value is the time.",
        _adapters,
    ),
    counter(
        "vllm:admission_rejections{model_name,reason}",
        "Requests refused at a limit of the server's queue.",
        _queue_refusals,
    ),
)

SERVER_SERIES: Mapping[str, tuple[Family, ...]] = {
    "models": (
        gauge("mlx_serve:model_state{model_name,state}", "1 for the model's state.", _states),
        counter("mlx_serve:model_loads{model_name,result}", "Finished loads, by result.", _loads),
        counter("mlx_serve:model_failures{model_name}", "Engines that have died.", _failures),
    ),
    "kv_disk": (
        gauge("mlx_serve:kv_disk_on", "1 while prefixes are kept on disk, 0 after an error.", "is_on"),
        gauge("mlx_serve:kv_disk_bytes", "Bytes of the files of prefixes.", "store.num_bytes"),
        gauge("mlx_serve:kv_disk_limit_bytes", "Limit of these bytes.", "store.limit_bytes"),
        gauge("mlx_serve:kv_disk_records", "KV blocks on disk.", lambda disk: len(disk.store)),
        counter(
            "mlx_serve:kv_disk_transferred_bytes{direction}",
            "Bytes of KV blocks read and written.",
            lambda disk: {"read": disk.counters.num_bytes_read, "write": disk.counters.num_bytes_written},
        ),
        counter(
            "mlx_serve:kv_disk_lost_records{reason}",
            "KV blocks on disk that were evicted, or found damaged.",
            lambda disk: {"evicted": disk.store.num_evicted, "damaged": disk.store.num_bad},
        ),
        counter("mlx_serve:kv_disk_errors", "Errors of the disk.", "counters.num_errors"),
    ),
    "sleep": (
        histogram(
            "vllm:sleep_mode_operation_duration_seconds{operation}",
            "Duration of sleeps and wakes, failed ones included.",
            "durations",
        ),
        gauge("vllm:sleep_mode_operations_in_flight{operation}", "Sleeps and wakes in progress.", "in_flight"),
    ),
    "http": (
        counter("http_requests{handler,method,status}", "HTTP requests, by route and status.", "counts"),
        histogram(
            "http_request_duration_seconds{handler,method}",
            "Time from the request's head to the answer's last byte, by route.",
            "durations",
        ),
        histogram("http_request_duration_highr_seconds", "All routes together, in finer buckets.", "fine_durations"),
        summary("http_request_size_bytes{handler}", "Size of request bodies, by route.", "received"),
        summary("http_response_size_bytes{handler}", "Size of answer bodies, by route.", "sent"),
    ),
    "quota_refusals": (counter("mlx_serve:quota_refusals{tier}", "Requests answered 429, by tier.", dict),),
    "shared_store": (
        gauge("mlx_serve:shared_store_up", "1 while the fleet's shared store answers.", "is_here"),
        counter("mlx_serve:shared_store_failures", "Failed calls of the shared store.", "num_failures"),
    ),
    "kv_events": (
        counter("mlx_serve:kv_event_batches{topic}", "Batches of KV events published.", "num_sent"),
        counter("mlx_serve:kv_events_lost{topic}", "Changes replaced by an event that clears the cache.", "num_lost"),
    ),
    "process": (
        gauge("process_resident_memory_bytes", "Physical memory of the process.", lambda p: p.memory_info().rss),
        gauge("process_virtual_memory_bytes", "Address space of the process.", lambda p: p.memory_info().vms),
        gauge("process_start_time_seconds", "Start of the process, since the epoch.", lambda p: p.create_time()),
        gauge("process_open_fds", "Open file descriptors.", lambda p: p.num_fds()),
        gauge("process_threads", "Threads of the process.", lambda p: p.num_threads()),
        counter("process_cpu_seconds", "CPU time, user and system.", lambda p: sum(p.cpu_times()[:2])),
    ),
}
