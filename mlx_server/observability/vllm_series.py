"""vLLM's series: what its dashboards, autoscalers and the routers in front of it read.

What this server cannot do stands at zero (external caches, media caches, speculative decoding), so that expressions
about it have data. The series of sleep mode are of the whole server: `sleep_metrics.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlx_server.config import BLOCK_SIZE
from mlx_server.observability.families import (
    EngineReading,
    Readings,
    counter,
    counters,
    gauge,
    gauges,
    histogram,
)
from mlx_server.observability.histogram import Histogram
from mlx_server.request import FinishReason

_NO_DRAFTS = "there is no speculative decoding here."

_CACHES = ("device", "host", "p2p", "disk", "external_unspecified")
"""Where vLLM finds cached blocks; ours are on the device."""

_QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")

_HISTOGRAM_HELP = {
    "time_to_first_token_seconds": "Arrival to first token.",
    "inter_token_latency_seconds": "Gaps between a request's token events.",
    "request_time_per_output_token_seconds": "Mean time per output token after the first, by request.",
    "e2e_request_latency_seconds": "Arrival to end.",
    "request_queue_time_seconds": "Arrival to first step.",
    "request_prefill_time_seconds": "First step to first token.",
    "request_decode_time_seconds": "First token to end.",
    "request_inference_time_seconds": "First step to end.",
    "request_prompt_tokens": "Prompt tokens, by request.",
    "request_generation_tokens": "Output tokens, by request.",
    "request_max_num_generation_tokens": "Output tokens that a request could have had.",
    "request_params_max_tokens": "max_tokens, where a request has it.",
    "request_params_n": "Answers asked for, by prompt.",
    "request_prefill_kv_computed_tokens": "Prompt tokens that the prefix cache did not serve, by request.",
    "request_num_preemptions": "Preemptions, by request.",
    "iteration_tokens_total": "Tokens computed, by step.",
    "kv_block_lifetime_seconds": "From a KV block's first token to its eviction; of a sample of the blocks.",
    "kv_block_idle_before_evict_seconds": "From its last use to its eviction.",
    "kv_block_reuse_gap_seconds": "Between two uses of what is in it.",
}


def vllm_families(readings: Readings) -> Iterator[Metric]:
    """Every family, each with its models in the order of `readings`, of which there is at least one."""
    yield from _state(readings)
    yield from _tokens(readings)
    yield from _requests(readings)
    yield from _drafts(readings)
    for name in readings[0].metrics.by_name:
        yield histogram(f"vllm:{name}", _HISTOGRAM_HELP[name], readings, _named(name))


def _state(readings: Readings) -> Iterator[Metric]:
    yield gauge("vllm:num_requests_running", "Requests in the running batch.", readings, lambda r: r.stats.num_running)
    yield gauge(
        "vllm:num_requests_waiting",
        "Requests that wait for a place in it.",
        readings,
        lambda r: r.stats.num_waiting,
    )
    yield gauges(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests: for room, or for a prefix that another request is computing.",
        "reason",
        readings,
        _waiting_by_reason,
    )
    yield gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks that requests use, 0 to 1; cached ones that nobody uses count as free.",
        readings,
        _kv_cache_usage,
    )
    yield gauges(
        "vllm:engine_sleep_state",
        "1 for the state that the model is in; one that was unloaded has discarded all.",
        "sleep_state",
        readings,
        lambda r: {"awake": r.is_loaded, "weights_offloaded": 0, "discard_all": not r.is_loaded},
    )
    yield _cache_config(readings)
    yield _lora(readings)


def _tokens(readings: Readings) -> Iterator[Metric]:
    yield counter("vllm:prompt_tokens", "Prompt tokens received.", readings, lambda r: r.stats.num_prompt_tokens)
    yield counter("vllm:generation_tokens", "Tokens generated.", readings, lambda r: r.stats.num_generated_tokens)
    yield counters(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens, by where their K/V came from.",
        "source",
        readings,
        lambda r: {
            "local_compute": r.stats.num_prompt_tokens_computed,
            "local_cache_hit": r.stats.num_prompt_tokens_cached,
            "external_kv_transfer": 0,
        },
    )
    yield counter(
        "vllm:prompt_tokens_cached",
        "Prompt tokens that the prefix cache served.",
        readings,
        lambda r: r.stats.num_prompt_tokens_cached,
    )
    yield counters(
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens that the prefix cache served, by where their blocks were.",
        "source",
        readings,
        lambda r: {**dict.fromkeys(_CACHES, 0), "device": r.stats.num_prompt_tokens_cached},
    )
    yield counter(
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        readings,
        lambda r: r.stats.num_prefix_query_tokens,
    )
    yield counter("vllm:prefix_cache_hits", "Tokens found there.", readings, lambda r: r.stats.num_prefix_hit_tokens)
    for cache, what in (("external_prefix_cache", "other servers' caches"), ("mm_cache", "a cache of media")):
        yield counter(f"vllm:{cache}_queries", f"Lookups in {what}; there is none here.", readings, lambda r: 0)
        yield counter(f"vllm:{cache}_hits", "Found there.", readings, lambda r: 0)


def _requests(readings: Readings) -> Iterator[Metric]:
    yield counter("vllm:num_preemptions", "Preemptions.", readings, lambda r: r.stats.num_preemptions)
    yield counters(
        "vllm:request_success",
        "Requests that have ended, by reason.",
        "finished_reason",
        readings,
        lambda r: {**{reason.value: r.metrics.finished[reason] for reason in FinishReason}, "repetition": 0},
    )
    rejections = CounterMetricFamily(
        "vllm:admission_rejections",
        "Requests refused at a limit of the server's queue.",
        labels=("model_name", "reason"),
    )
    for reading in readings:
        for limit in _QUEUE_LIMITS:
            number = sum(n for (_, reason), n in reading.metrics.rejected.items() if reason == limit)
            rejections.add_metric((reading.model_name, limit), number)
    yield rejections


def _drafts(readings: Readings) -> Iterator[Metric]:
    for name, what in (("drafts", "Drafts"), ("draft_tokens", "Tokens drafted"), ("accepted_tokens", "Those accepted")):
        yield counter(f"vllm:spec_decode_num_{name}", f"{what}; {_NO_DRAFTS}", readings, lambda r: 0)
    yield counters(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        f"Drafted tokens accepted, by their place in the draft; {_NO_DRAFTS}",
        "position",
        readings,
        lambda r: {"0": 0},
    )


def _named(name: str) -> Callable[[EngineReading], Histogram]:
    return lambda reading: reading.metrics.by_name[name]


def _waiting_by_reason(reading: EngineReading) -> dict[str, float]:
    stats = reading.stats
    return {"capacity": stats.num_waiting - stats.num_deferred, "deferred": stats.num_deferred}


def _kv_cache_usage(reading: EngineReading) -> float:
    return reading.stats.kv_usage


def _cache_config(readings: Readings) -> Metric:
    """vLLM's labels name no model; who looks for one model's here finds it by ours."""
    labels = ("model_name", "engine", "block_size", "num_gpu_blocks", "enable_prefix_caching")
    family = GaugeMetricFamily("vllm:cache_config_info", "Shape of a model's KV pool.", labels=labels)
    for reading in readings:
        values = (str(BLOCK_SIZE), str(reading.stats.max_tokens // BLOCK_SIZE), str(reading.is_prefix_caching))
        family.add_metric((*reading.labels, *values), 1.0)
    return family


def _lora(readings: Readings) -> Metric:
    """All adapters of all models have their places, so that routers which look for one find it anywhere."""
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters by what clients call them: those in use, and those waited for. The time.",
        labels=labels,
    )
    stats = [reading.stats for reading in readings]
    running = (name for stat in stats for name in stat.running_adapters)
    waiting = (name for stat in stats for name in stat.waiting_adapters)
    values = str(sum(stat.num_adapters for stat in stats)), ",".join(running), ",".join(waiting)
    family.add_metric(values, time.time())
    return family
