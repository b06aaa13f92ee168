"""Metrics under the names that vLLM's dashboards and routers query, with values counted by hand."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_server.kv_disk.disk import KvDisk
from mlx_server.kv_disk.files import Files
from mlx_server.observability.engine_metrics import EngineMetrics, Histogram
from mlx_server.observability.series import EngineReading, render
from mlx_server.outputs import EngineStats, ModelRunnerOutput, ScheduledChunk, SchedulerOutput
from mlx_server.request import FinishReason, Priority, Request
from mlx_server.sampling_params import SamplingParams
from tests.engine.test_engine import ask, engine_of, read
from tests.engine_worlds import greedy, make_folder

# What the panels of vLLM's Grafana dashboards query.
DASHBOARD_SERIES = (
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_sum",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_success_total",
    "vllm:iteration_tokens_total_count",
)

SUM = r"_sum(?=\{|$)"

# What routers decide by: an endpoint picker of the Gateway API inference extension, and SMG.
ROUTER_SERIES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info{block_size=32,enable_prefix_caching=True,num_gpu_blocks=32}",
    "vllm:lora_requests_info{max_lora=0,running_lora_adapters=,waiting_lora_adapters=}",
)


def samples(text: bytes) -> dict[str, float]:
    """Values by name, or by `name{label=value}` for labels other than model and engine."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine"))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def names(text: bytes) -> set[str]:
    return {key.partition("{")[0] for key in samples(text)}


def make_request(**more: object) -> Request:
    request = Request("r", [1] * 40, SamplingParams(max_tokens=10), arrival_s=100.0, max_total_tokens=50, tier="gold")
    for name, value in more.items():
        setattr(request, name, value)
    return request


def test_a_histogram_counts_as_prometheus_does():
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1.0, 1.1, 2.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.5", 4.0), ("+Inf", 5.0)]
    assert (histogram.count, histogram.total) == (5, 14.1)


def test_a_requests_stages_are_measured_on_one_clock():
    metrics = EngineMetrics(max_model_len=64)
    request = make_request(first_scheduled_s=101.0, first_token_s=103.0, num_cached_tokens=32, num_preemptions=2)
    for now in (103.0, 103.5, 104.5):
        request.output_token_ids.append(7)
        metrics.on_tokens([request], now)
    metrics.on_finished(request, FinishReason.STOP, 105.0)
    totals = {name: histogram.total for name, histogram in metrics.by_name.items()}
    assert totals == {
        "time_to_first_token_seconds": 3.0,
        "inter_token_latency_seconds": 1.5,
        "request_time_per_output_token_seconds": 1.0,
        "e2e_request_latency_seconds": 5.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 4.0,
        "request_prompt_tokens": 40,
        "request_generation_tokens": 3,
        "request_max_num_generation_tokens": 10,
        "request_params_max_tokens": 10,
        "request_params_n": 0.0,
        "request_prefill_kv_computed_tokens": 8,
        "request_num_preemptions": 2,
        "iteration_tokens_total": 0.0,
    }
    assert metrics.by_name["inter_token_latency_seconds"].count == 2
    assert metrics.by_name["request_prompt_tokens"].bounds == (1, 2, 5, 10, 20, 50)
    assert metrics.queue_time_by_tier["gold"].total == 1.0


def test_the_token_that_is_computed_to_score_a_prompt_does_not_count():
    metrics = EngineMetrics(64)
    request = make_request(sampling=SamplingParams(max_tokens=1, is_scoring=True), max_total_tokens=41)
    request.output_token_ids.append(7)
    assert metrics.on_finished(request, FinishReason.LENGTH, 105.0).num_output_tokens == 0
    for name in ("request_generation_tokens", "request_params_max_tokens", "request_max_num_generation_tokens"):
        assert (metrics.by_name[name].count, metrics.by_name[name].total) == (1, 0.0)


def test_a_request_that_never_ran_has_only_its_wait():
    metrics = EngineMetrics(64)
    metrics.on_finished(make_request(), FinishReason.ABORT, 104.0)
    assert metrics.finished == {FinishReason.ABORT: 1}
    assert metrics.by_name["e2e_request_latency_seconds"].total == 4.0
    assert metrics.by_name["request_queue_time_seconds"].count == 0


def test_gaps_of_requests_that_advance_together_are_counted_for_each():
    metrics = EngineMetrics(64)
    requests = [make_request(last_token_s=last_s) for last_s in (7.0, 7.0, 7.5, 7.0, None)]
    metrics.on_tokens(requests, 8.0)
    gaps, first = metrics.by_name["inter_token_latency_seconds"], metrics.by_name["time_to_first_token_seconds"]
    assert (gaps.count, gaps.total) == (4, 3.5)
    assert (first.count, first.total) == (1, -92.0)
    metrics.on_tokens(requests, 8.25)
    assert (gaps.count, gaps.total) == (9, 3.5 + 5 * 0.25)


def test_who_ages_into_a_better_tier_before_the_first_step_is_promoted():
    metrics = EngineMetrics(64, aging_rate=0.1)
    for waited_s, priority in ((9.0, Priority.LOW), (11.0, Priority.LOW), (11.0, Priority.HIGH)):
        request = make_request(first_scheduled_s=100.0 + waited_s, priority=priority, tier=priority.name)
        metrics.on_finished(request, FinishReason.ABORT, 120.0)
    assert metrics.promoted_by_tier == {"LOW": 1}


def step(step_id: int, sizes: tuple[int, ...], num_prompt_tokens: int) -> SchedulerOutput:
    chunks = tuple(ScheduledChunk(f"r{i}", 0, size, None, (), True, 0) for i, size in enumerate(sizes))
    return SchedulerOutput(step_id, chunks, num_prompt_tokens=num_prompt_tokens)


def test_steps_are_told_apart_by_what_they_compute():
    metrics = EngineMetrics(64)
    steps = [
        (step(0, (40,), 40), 0.4),
        (step(1, (1, 32), 32), 0.3),  # stalls nobody for as long as it is unknown how long decodes take
        (step(2, (1, 1), 0), 0.1),
        (step(3, (1, 1, 32), 32), 0.35),
        (step(4, (1, 1, 9), 9), 0.05),
    ]
    for output, step_time_s in steps:
        metrics.on_step(output)
        metrics.on_step_done(output, ModelRunnerOutput(output.step_id, {}, step_time_s=step_time_s))
    counts = {kind.value: (h.count, round(h.total, 9)) for kind, h in metrics.step_time_by_kind.items()}
    assert counts == {"decode": (1, 0.1), "prefill": (1, 0.4), "mixed": (3, 0.7)}
    assert metrics.prefill_stall_s == pytest.approx(0.25)
    assert metrics.by_name["iteration_tokens_total"].total == 40 + 33 + 2 + 34 + 11


def test_every_count_is_under_its_own_name():
    """Every field of the stats and every count of the metrics has a number that no other has."""
    stats = EngineStats(
        num_running=2,
        num_waiting=7,
        num_deferred=3,
        num_adapters=5,
        running_adapters=("m:a",),
        waiting_adapters=("m:b", "m:c"),
        num_blocks=40,
        num_free_blocks=30,
        num_cached_blocks=9,
        num_state_checkpoints=4,
        max_num_blocks=50,
        weight_bytes=1001,
        kv_pool_bytes=1002,
        pressure_level=85,
        num_steps=11,
        num_model_calls=12,
        num_prompt_tokens=13,
        num_prompt_tokens_computed=14,
        num_prompt_tokens_from_disk=6,
        num_generated_tokens=16,
        num_tokens_recomputed=29,
        preemptions_by_tier={"gold": 18},
        num_prefix_query_tokens=19,
        num_prefix_hit_tokens=20,
        num_drafts=51,
        num_draft_tokens=52,
        num_accepted_tokens=53,
        num_accepted_by_place={0: 54, 1: 55},
        num_block_evictions=21,
        num_pool_growths=22,
        num_pool_cuts=23,
        num_blocks_moved=24,
        num_pressure_cuts=25,
        num_pressure_holds=26,
        num_pressure_preemptions=27,
        num_disk_loads=61,
        num_blocks_loaded=62,
        num_blocks_not_loaded=63,
        num_blocks_saved=64,
        num_blocks_not_saved=65,
        disk_load_time_s=66.5,
        busy_time_s=28.5,
        idle_time_s=29.5,
    )
    metrics = EngineMetrics(64)
    metrics.finished = Counter({reason: 31 + index for index, reason in enumerate(FinishReason)})
    metrics.promoted_by_tier["gold"] = 35
    metrics.prefill_stall_s = 36.5
    metrics.queue_time_by_tier["gold"] = Histogram((1.0,))
    refusals = ("max_num_queued_reqs", "max_num_queued_tokens", "tier_limit", "queue_timeout", "context_length")
    metrics.rejected.update({("gold", reason): 41 + index for index, reason in enumerate(refusals)})
    found = samples(render([EngineReading("m", stats, metrics, True)]))
    histograms = {name for name in found if name.partition("{")[0].endswith(("_bucket", "_count", "_sum"))}
    assert found.pop("vllm:lora_requests_info{max_lora=5,running_lora_adapters=m:a,waiting_lora_adapters=m:b,m:c}") > 0
    assert {name: value for name, value in found.items() if value and name not in histograms} == {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 7,
        "vllm:num_requests_waiting_by_reason{reason=capacity}": 4,
        "vllm:num_requests_waiting_by_reason{reason=deferred}": 3,
        "vllm:kv_cache_usage_perc": 0.2,
        "vllm:engine_sleep_state{sleep_state=awake}": 1,
        "vllm:cache_config_info{block_size=32,enable_prefix_caching=True,num_gpu_blocks=50}": 1,
        "vllm:prompt_tokens_total": 13,
        "vllm:generation_tokens_total": 16,
        "vllm:prompt_tokens_by_source_total{source=local_compute}": 14,
        "vllm:prompt_tokens_by_source_total{source=local_cache_hit}": 20,
        "vllm:prompt_tokens_cached_total": 20,
        "vllm:prompt_tokens_cached_by_source_total{source=device}": 14,
        "vllm:prompt_tokens_cached_by_source_total{source=disk}": 6,
        "mlx_serve:kv_disk_loads_total": 61,
        "mlx_serve:kv_disk_blocks_total{result=loaded}": 62,
        "mlx_serve:kv_disk_blocks_total{result=not_loaded}": 63,
        "mlx_serve:kv_disk_blocks_total{result=saved}": 64,
        "mlx_serve:kv_disk_blocks_total{result=not_saved}": 65,
        "mlx_serve:kv_disk_load_seconds_total": 66.5,
        "vllm:prefix_cache_queries_total": 19,
        "vllm:prefix_cache_hits_total": 20,
        "vllm:num_preemptions_total": 18,
        "vllm:request_success_total{finished_reason=stop}": 31,
        "vllm:request_success_total{finished_reason=length}": 32,
        "vllm:request_success_total{finished_reason=abort}": 33,
        "vllm:request_success_total{finished_reason=error}": 34,
        "vllm:spec_decode_num_drafts_total": 51,
        "vllm:spec_decode_num_draft_tokens_total": 52,
        "vllm:spec_decode_num_accepted_tokens_total": 53,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=0}": 54,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=1}": 55,
        "vllm:admission_rejections_total{reason=max_num_queued_reqs}": 41,
        "vllm:admission_rejections_total{reason=max_num_queued_tokens}": 42,
        "mlx_serve:preemptions_total{tier=gold}": 18,
        "mlx_serve:recomputed_tokens_total": 29,
        "mlx_serve:aging_promotions_total{tier=gold}": 35,
        **{
            f"mlx_serve:admission_rejections_total{{reason={reason},tier=gold}}": 41 + index
            for index, reason in enumerate(refusals)
        },
        "mlx_serve:model_calls_total": 12,
        "mlx_serve:prefill_stall_seconds_total": 36.5,
        "mlx_serve:busy_seconds_total": 28.5,
        "mlx_serve:idle_seconds_total": 29.5,
        "mlx_serve:model_memory_bytes{use=weights}": 1001,
        "mlx_serve:model_memory_bytes{use=kv_pool}": 1002,
        "mlx_serve:kv_pool_max_blocks": 50,
        "mlx_serve:memory_pressure_level": 85,
        "mlx_serve:kv_blocks{state=used}": 10,
        "mlx_serve:kv_blocks{state=free}": 30,
        "mlx_serve:kv_blocks{state=cached}": 9,
        "mlx_serve:state_checkpoints": 4,
        "mlx_serve:prefix_cache_evictions_total": 21,
        "mlx_serve:kv_pool_growths_total": 22,
        "mlx_serve:kv_pool_cuts_total": 23,
        "mlx_serve:kv_blocks_moved_total": 24,
        "mlx_serve:memory_pressure_actions_total{action=cut}": 25,
        "mlx_serve:memory_pressure_actions_total{action=hold}": 26,
        "mlx_serve:memory_pressure_actions_total{action=preempt}": 27,
    }


def test_every_histogram_is_under_its_own_name():
    """Each has been observed once, with another number."""
    metrics = EngineMetrics(64)
    metrics.follow_kv_blocks(1.0, lambda: 0.0)
    own = {
        "queue_time_seconds{tier=gold}": metrics.queue_time_by_tier.setdefault("gold", Histogram((1.0,))),
        **{f"step_time_seconds{{kind={kind.value}}}": times for kind, times in metrics.step_time_by_kind.items()},
    }
    histograms = {f"vllm:{name}": one for name, one in metrics.by_name.items()}
    histograms |= {f"mlx_serve:{name}": one for name, one in own.items()}
    for number, one in enumerate(histograms.values(), start=1):
        one.observe(number)
    found = samples(render([EngineReading("m", EngineStats(), metrics, True)]))
    sums = {re.sub(SUM, "", name): value for name, value in found.items() if re.search(SUM, name)}
    assert sums == {name: number for number, name in enumerate(histograms, start=1)}


def test_a_model_that_was_unloaded_keeps_its_counters_and_comes_last():
    metrics, now = EngineMetrics(64), EngineStats(num_running=2, num_model_calls=5, preemptions_by_tier={"low": 1})
    metrics.past = EngineStats(num_running=3, num_model_calls=10, preemptions_by_tier={"low": 2, "high": 1})
    now = replace(now, num_accepted_by_place={0: 1, 1: 0, 2: 0})
    metrics.past = replace(metrics.past, num_accepted_by_place={0: 7, 1: 5})
    gone = EngineReading("gone", EngineStats().plus(metrics.past), metrics, True, is_loaded=False)
    again = EngineReading("again", now.plus(metrics.past), EngineMetrics(64), True)
    text = render([gone, again]).decode()
    calls = [line for line in text.splitlines() if line.startswith(("mlx_serve:model_calls", "vllm:num_requests_run"))]
    assert calls == [
        'vllm:num_requests_running{engine="0",model_name="again"} 2.0',
        'vllm:num_requests_running{engine="0",model_name="gone"} 0.0',
        'mlx_serve:model_calls_total{engine="0",model_name="again"} 15.0',
        'mlx_serve:model_calls_total{engine="0",model_name="gone"} 10.0',
    ]
    assert 'mlx_serve:preemptions_total{engine="0",model_name="again",tier="low"} 3.0' in text
    assert 'vllm:engine_sleep_state{engine="0",model_name="gone",sleep_state="discard_all"} 1.0' in text
    by_place = [line.split()[-1] for line in text.splitlines() if "_per_pos_total{" in line and '"again"' in line]
    assert by_place == ["8.0", "5.0", "0.0"]


def test_cached_blocks_that_nobody_uses_count_as_free():
    stats = EngineStats(num_blocks=5, max_num_blocks=10, num_free_blocks=3, num_cached_blocks=3)
    text = render([EngineReading("m", stats, EngineMetrics(64), True)])
    assert samples(text)["vllm:kv_cache_usage_perc"] == pytest.approx(0.2)
    assert samples(text)["mlx_serve:kv_blocks{state=cached}"] == 3


def test_the_first_engine_comes_first():
    readings = [EngineReading(name, EngineStats(), EngineMetrics(64), True) for name in ("b", "a")]
    lines = render(readings).decode().splitlines()
    running = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    assert ['model_name="b"' in line for line in running] == [True, False]
    assert render([]) == b""


async def test_counters_go_on_when_the_model_is_loaded_again(tmp_path):
    folder = make_folder(tmp_path / "tiny")
    async with engine_of(folder) as engine:
        await read(engine.submit(ask("a", [1] * 40, greedy(5))))
        await engine.stop()
        first = samples(render([EngineReading("tiny", engine.stats(), engine.metrics, True, is_loaded=False)]))
    assert first["vllm:generation_tokens_total"] == 5
    assert first["mlx_serve:model_memory_bytes{use=weights}"] == 0
    async with engine_of(folder, metrics=engine.metrics) as again:
        await read(again.submit(ask("b", [1] * 40, greedy(3))))
        second = samples(render([EngineReading("tiny", again.stats(), again.metrics, True)]))
    assert second["vllm:generation_tokens_total"] == 8
    assert second["vllm:time_to_first_token_seconds_count"] == 2
    assert second["vllm:inter_token_latency_seconds_count"] == 4 + 2
    assert second["mlx_serve:model_memory_bytes{use=weights}"] > 0
    assert [name for name, value in first.items() if name.endswith("_total") and second[name] < value] == []


async def test_drafts_are_counted_by_their_place(tmp_path):
    """A second request gets the first one's answer again: drafts of it are right."""
    async with engine_of(make_folder(tmp_path / "tiny")) as engine:
        speculation = engine._loaded_parts().scheduler.speculation
        # Rows are free, whatever this machine measures.
        speculation.costs.curve = lambda first, last: [1.0] * (last - first + 1)
        first, second = [await read(engine.submit(ask(name, [1] * 40, greedy(60)))) for name in "ab"]
        found = samples(render([EngineReading("tiny", engine.stats(), engine.metrics, True)]))
    drafts = {name.removeprefix("vllm:spec_decode_num_"): n for name, n in found.items() if "spec_decode" in name}
    by_place = [drafts.pop(f"accepted_tokens_per_pos_total{{position={place}}}") for place in range(8)]
    assert drafts.keys() == {"drafts_total", "draft_tokens_total", "accepted_tokens_total"}
    assert 0 < drafts["drafts_total"] <= drafts["draft_tokens_total"]
    assert sum(by_place) == drafts["accepted_tokens_total"] > 40
    assert drafts["drafts_total"] >= by_place[0] == max(by_place)
    # Each step gives a token beside the drafts that were right.
    assert found["vllm:generation_tokens_total"] == 120
    assert len(first) + len(second) + drafts["accepted_tokens_total"] == 120
    num_accepted = [deltas[-1].num_accepted_drafts for deltas in (first, second)]
    num_rejected = [deltas[-1].num_rejected_drafts for deltas in (first, second)]
    assert sum(num_accepted) == drafts["accepted_tokens_total"]
    assert sum(num_rejected) == drafts["draft_tokens_total"] - drafts["accepted_tokens_total"]


async def test_every_series_of_the_dashboards_is_there_after_one_request(tmp_path):
    async with engine_of(make_folder(tmp_path / "tiny")) as engine:
        await read(engine.submit(ask("a", [1] * 40, greedy(5))))
        aborted = engine.submit(ask("b", [2] * 40, greedy(50)))
        await anext(aborted)
        aborted.abort()
        stats = engine.stats()
        text = render([EngineReading("tiny", stats, engine.metrics, True)])
    assert not set(DASHBOARD_SERIES) - names(text)
    found = samples(text)
    assert not set(ROUTER_SERIES) - set(found)
    assert found["vllm:request_success_total{finished_reason=length}"] == 1
    assert found["vllm:request_success_total{finished_reason=abort}"] == 1
    assert found["vllm:prompt_tokens_total"] == 80
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:request_generation_tokens_sum"] >= 6
    assert found["vllm:iteration_tokens_total_count"] == stats.num_steps
    assert found["vllm:cache_config_info{block_size=32,enable_prefix_caching=True,num_gpu_blocks=32}"] == 1


def test_the_disk_is_read_where_it_counts(tmp_path: Path):
    disk = KvDisk(Files(tmp_path), 2**20, 2**30)
    try:
        disk.drain(5.0)
        disk.counters.num_bytes_read, disk.counters.num_bytes_written, disk.counters.num_errors = 11, 12, 13
        disk.store.num_evicted, disk.store.num_bad = 14, 15
        found = samples(render([], {"kv_disk": disk, "kv_events": None}))
    finally:
        disk.close()
    assert found == {
        "mlx_serve:kv_disk_on": 1,
        "mlx_serve:kv_disk_bytes": disk.store.num_bytes,
        "mlx_serve:kv_disk_limit_bytes": disk.store.limit_bytes,
        "mlx_serve:kv_disk_records": 0,
        "mlx_serve:kv_disk_transferred_bytes_total{direction=read}": 11,
        "mlx_serve:kv_disk_transferred_bytes_total{direction=write}": 12,
        "mlx_serve:kv_disk_lost_records_total{reason=evicted}": 14,
        "mlx_serve:kv_disk_lost_records_total{reason=damaged}": 15,
        "mlx_serve:kv_disk_errors_total": 13,
    }
