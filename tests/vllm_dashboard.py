"""The expressions of dashboards for vLLM by panel, written from the documented names of its series."""

from __future__ import annotations


def _quantile(quantile: float, series: str) -> str:
    return (
        f'histogram_quantile({quantile}, sum by (le) (rate(vllm:{series}_bucket{{model_name="$model_name"}}[$window])))'
    )


def _mean(series: str) -> str:
    return f"{_rate(series + '_sum')} / {_rate(series + '_count')}"


def _rate(series: str) -> str:
    return f'sum(rate(vllm:{series}{{model_name="$model_name"}}[$window]))'


def _latency(series: str) -> tuple[str, ...]:
    return (*(_quantile(q, series) for q in (0.5, 0.9, 0.95, 0.99)), _mean(series))


def _heatmap(series: str) -> tuple[str, ...]:
    return (f'sum by (le) (increase(vllm:{series}_bucket{{model_name="$model_name"}}[$window]))',)


PANELS: dict[str, tuple[str, ...]] = {
    "end-to-end latency": _latency("e2e_request_latency_seconds"),
    "token throughput": (_rate("prompt_tokens_total"), _rate("generation_tokens_total")),
    "inter-token latency": _latency("inter_token_latency_seconds"),
    "time per output token": _latency("request_time_per_output_token_seconds"),
    "time to first token": _latency("time_to_first_token_seconds"),
    "scheduler state": (
        'vllm:num_requests_running{model_name="$model_name"}',
        'vllm:num_requests_waiting{model_name="$model_name"}',
    ),
    "cache utilization": ('vllm:kv_cache_usage_perc{model_name="$model_name"}',),
    "prompt length": _heatmap("request_prompt_tokens"),
    "generation length": _heatmap("request_generation_tokens"),
    "finish reason": (
        'sum by (finished_reason) (increase(vllm:request_success_total{model_name="$model_name"}[$window]))',
    ),
    "queue time": (_rate("request_queue_time_seconds_sum"),),
    "prefill and decode time": (_rate("request_prefill_time_seconds_sum"), _rate("request_decode_time_seconds_sum")),
    "max generation tokens": (_rate("request_max_num_generation_tokens_sum"),),
    "iterations": (_rate("iteration_tokens_total_count"),),
}


def expressions(model_name: str, window: str) -> dict[str, list[str]]:
    """All expressions by panel, for one model and a window like `1m`."""
    return {
        title: [each.replace("$model_name", model_name).replace("$window", window) for each in panel]
        for title, panel in PANELS.items()
    }
