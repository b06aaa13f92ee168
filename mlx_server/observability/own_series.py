"""Our own series: tiers, steps, memory, and what the prefix cache and admission do."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from mlx_server.errors import ContextLengthError, QueueTimeoutError, QuotaExceededError
from mlx_server.observability.families import (
    EngineReading,
    Readings,
    counter,
    counters,
    gauge,
    gauges,
    histograms,
)

_REASONS = (
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "displaced",
    QuotaExceededError.reason,
    QueueTimeoutError.reason,
    ContextLengthError.reason,
)
"""Why requests are refused before they run: the server's queue, a tier's limit, time, size."""


def own_families(readings: Readings) -> Iterator[Metric]:
    """Every family, each with its models in the order of `readings`."""
    yield from _tiers(readings)
    yield from _steps(readings)
    yield from _memory(readings)


def _tiers(readings: Readings) -> Iterator[Metric]:
    yield histograms(
        "mlx_serve:queue_time_seconds",
        "Wait for the first step, by tier.",
        "tier",
        readings,
        lambda r: r.metrics.queue_time_by_tier,
    )
    yield counters(
        "mlx_serve:preemptions",
        "Preemptions, by tier.",
        "tier",
        readings,
        lambda r: {**dict.fromkeys(r.metrics.tiers, 0), **r.stats.preemptions_by_tier},
    )
    yield counters(
        "mlx_serve:aging_promotions",
        "Requests that had waited long enough to rank with a better tier's when they first ran.",
        "tier",
        readings,
        lambda r: {tier: r.metrics.promoted_by_tier[tier] for tier in r.metrics.tiers},
    )
    rejections = CounterMetricFamily(
        "mlx_serve:admission_rejections",
        "Requests refused before they ran, by tier and reason.",
        labels=("model_name", "engine", "tier", "reason"),
    )
    for reading in readings:
        for tier in reading.metrics.tiers:
            for reason in _REASONS:
                rejections.add_metric((*reading.labels, tier, reason), reading.metrics.rejected[tier, reason])
    yield rejections


def _steps(readings: Readings) -> Iterator[Metric]:
    yield counter("mlx_serve:steps", "Steps scheduled.", readings, lambda r: r.stats.num_steps)
    yield counter(
        "mlx_serve:recomputed_tokens",
        "Tokens of prompts and outputs computed again after a preemption.",
        readings,
        lambda r: r.stats.num_tokens_recomputed,
    )
    yield counter("mlx_serve:model_calls", "Calls of the model.", readings, lambda r: r.stats.num_model_calls)
    yield histograms(
        "mlx_serve:step_time_seconds",
        "Time of a step, by what it computes: outputs (decode), prompts (prefill) or both (mixed).",
        "kind",
        readings,
        lambda r: {kind.value: times for kind, times in r.metrics.step_time_by_kind.items()},
    )
    yield counter(
        "mlx_serve:prefill_stall_seconds",
        "Time that prompts added to steps in which others decoded, over the usual step of those.",
        readings,
        lambda r: r.metrics.prefill_stall_s,
    )
    yield counter("mlx_serve:busy_seconds", "Time in steps.", readings, lambda r: r.stats.busy_time_s)
    yield counter(
        "mlx_serve:idle_seconds",
        "Time between steps while a running request waited: over busy and idle time, the device's idle share.",
        readings,
        lambda r: r.stats.idle_time_s,
    )


def _memory(readings: Readings) -> Iterator[Metric]:
    yield gauges(
        "mlx_serve:model_memory_bytes",
        "Memory of a model, by use.",
        "use",
        readings,
        lambda r: {"weights": r.stats.weight_bytes, "kv_pool": r.stats.kv_pool_bytes},
    )
    yield gauge("mlx_serve:kv_pool_blocks", "Blocks of the KV pool.", readings, lambda r: r.stats.num_blocks)
    yield gauge(
        "mlx_serve:kv_pool_max_blocks",
        "Blocks that the KV pool may grow to.",
        readings,
        lambda r: r.stats.max_num_blocks,
    )
    yield gauge(
        "mlx_serve:memory_pressure_level",
        "Percentage of full memory that is answered now: 85 gives idle blocks back, 92 holds admission, 97 preempts.",
        readings,
        lambda r: r.stats.pressure_level,
    )
    yield gauges(
        "mlx_serve:kv_blocks",
        "KV blocks, by state; unused cached ones are free.",
        "state",
        readings,
        _blocks_by_state,
    )
    yield gauge(
        "mlx_serve:state_checkpoints",
        "Recurrent states that are kept for prefixes; none for models that have no such state.",
        readings,
        lambda r: r.stats.num_state_checkpoints,
    )
    yield counter(
        "mlx_serve:prefix_cache_evictions",
        "Cached blocks taken for new content.",
        readings,
        lambda r: r.stats.num_block_evictions,
    )
    yield counter("mlx_serve:kv_pool_growths", "Times the KV pool grew.", readings, lambda r: r.stats.num_pool_growths)
    yield counter("mlx_serve:kv_pool_cuts", "Times the KV pool was cut.", readings, lambda r: r.stats.num_pool_cuts)
    yield counter(
        "mlx_serve:kv_blocks_moved", "Blocks moved to cut the pool.", readings, lambda r: r.stats.num_blocks_moved
    )
    yield counters(
        "mlx_serve:memory_pressure_actions",
        "What was done because memory ran short: pools cut, admission held, requests preempted.",
        "action",
        readings,
        lambda r: {
            "cut": r.stats.num_pressure_cuts,
            "hold": r.stats.num_pressure_holds,
            "preempt": r.stats.num_pressure_preemptions,
        },
    )


def _blocks_by_state(reading: EngineReading) -> dict[str, float]:
    stats = reading.stats
    return {
        "used": stats.num_blocks - stats.num_free_blocks,
        "free": stats.num_free_blocks,
        "cached": stats.num_cached_blocks,
    }
