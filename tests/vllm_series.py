"""vLLM's series, which dashboards, routers and benchmarks read: type, labels, values of labels, and buckets."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

MODEL = frozenset({"model_name", "engine"})

MAX_MODEL_LEN = 256
"""The context of the model whose scrape is compared; buckets of lengths end there."""


@dataclass(frozen=True)
class Series:
    """A series. `closed` is a label with one of `values`, all of which exist from the start; `bounds` are a
    histogram's."""

    type: str
    labels: frozenset[str] = MODEL
    closed: str = ""
    values: frozenset[str] = frozenset()
    bounds: tuple[float, ...] = ()


def _split(type: str, closed: str, values: str, others: frozenset[str] = MODEL, bounds: str = "") -> Series:
    ends = tuple(map(float, bounds.split()))
    return Series(type, others | {closed}, closed, frozenset(values.split()), ends)


def _histogram(bounds: str) -> Series:
    return Series("histogram", bounds=tuple(map(float, bounds.split())))


_GAUGE = Series("gauge")
_COUNTER = Series("counter")


_LENGTHS = _histogram("1 2 5 10 20 50 100 200")
_TOKEN_S = _histogram(".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
_REQUEST_S = _histogram(".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_BLOCK_S = _histogram(".001 .002 .005 .01 .02 .05 .1 .2 .5 1 2 5 10 20 30 60 120 300 600 1200 1800")
_OPERATIONS = "sleep release_kv_cache_memory wake"

SERIES = {
    "num_requests_running": _GAUGE,
    "num_requests_waiting": _GAUGE,
    "num_requests_waiting_by_reason": _split("gauge", "reason", "capacity deferred"),
    "kv_cache_usage_perc": _GAUGE,
    "engine_sleep_state": _split("gauge", "sleep_state", "awake weights_offloaded discard_all"),
    # vLLM has a label for each setting of its cache, and none for the model: it serves one.
    "cache_config_info": Series("gauge", MODEL | {"block_size", "num_gpu_blocks", "enable_prefix_caching"}),
    "lora_requests_info": Series("gauge", frozenset({"max_lora", "running_lora_adapters", "waiting_lora_adapters"})),
    "prefix_cache_queries": _COUNTER,
    "prefix_cache_hits": _COUNTER,
    "external_prefix_cache_queries": _COUNTER,
    "external_prefix_cache_hits": _COUNTER,
    "mm_cache_queries": _COUNTER,
    "mm_cache_hits": _COUNTER,
    "num_preemptions": _COUNTER,
    "prompt_tokens": _COUNTER,
    "generation_tokens": _COUNTER,
    "prompt_tokens_by_source": _split("counter", "source", "local_compute local_cache_hit external_kv_transfer"),
    "prompt_tokens_cached": _COUNTER,
    "prompt_tokens_cached_by_source": _split("counter", "source", "device host p2p disk external_unspecified"),
    "request_success": _split("counter", "finished_reason", "stop length abort error repetition"),
    "admission_rejections": _split(
        "counter", "reason", "max_num_queued_reqs max_num_queued_tokens", frozenset({"model_name"})
    ),
    "request_prompt_tokens": _LENGTHS,
    "request_generation_tokens": _LENGTHS,
    "request_max_num_generation_tokens": _LENGTHS,
    "request_params_max_tokens": _LENGTHS,
    "request_prefill_kv_computed_tokens": _LENGTHS,
    "request_params_n": _histogram("1 2 5 10 20"),
    "request_num_preemptions": _histogram("1 2 3 4 5 10 20"),
    "iteration_tokens_total": _histogram("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"),
    "time_to_first_token_seconds": _histogram(
        ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
    ),
    "inter_token_latency_seconds": _TOKEN_S,
    "request_time_per_output_token_seconds": _TOKEN_S,
    "e2e_request_latency_seconds": _REQUEST_S,
    "request_queue_time_seconds": _REQUEST_S,
    "request_inference_time_seconds": _REQUEST_S,
    "request_prefill_time_seconds": _REQUEST_S,
    "request_decode_time_seconds": _REQUEST_S,
    "kv_block_lifetime_seconds": _BLOCK_S,
    "kv_block_idle_before_evict_seconds": _BLOCK_S,
    "kv_block_reuse_gap_seconds": _BLOCK_S,
    "spec_decode_num_drafts": _COUNTER,
    "spec_decode_num_draft_tokens": _COUNTER,
    "spec_decode_num_accepted_tokens": _COUNTER,
    "spec_decode_num_accepted_tokens_per_pos": _split("counter", "position", "0 1 2 3 4 5 6 7"),
    "sleep_mode_operation_duration_seconds": _split(
        "histogram", "operation", _OPERATIONS, frozenset(), ".01 .1 1 10 30 60 120 300 600"
    ),
    "sleep_mode_operations_in_flight": _split("gauge", "operation", _OPERATIONS, frozenset()),
}


def described(scrape: bytes) -> dict[str, Series]:
    """vLLM's series in a scrape, by name without the prefix."""
    found: dict[str, Series] = {}
    for family in text_string_to_metric_families(scrape.decode()):
        name = family.name.removeprefix("vllm:")
        if name == family.name:
            continue
        labels = frozenset(family.samples[0].labels) - {"le"}
        ends = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels} - {float("inf")}
        closed = SERIES[name].closed if name in SERIES else ""
        values = frozenset(sample.labels[closed] for sample in family.samples if closed)
        found[name] = Series(family.type, labels, closed, values, tuple(sorted(ends)))
    return found
