"""The simulator: traffic, its clock to the millisecond, what it reports; and what it shows of the scheduler."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import json
import operator
import re
from collections.abc import Iterable
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any

import pytest

from mlx_server.batching.limits import QueueLimits, SchedulerLimits
from mlx_server.bench.lab.simulator.command import as_document
from mlx_server.bench.lab.simulator.engine import (
    PROFILES,
    TARGET_STEP_S,
    CostModel,
    Simulation,
    SimulationMetrics,
    percentile,
)
from mlx_server.bench.lab.simulator.traces import ClosedLoop, Flood, Mix, TracedRequest, Traffic, read_trace
from mlx_server.cli.main import main
from mlx_server.errors import ConfigError
from mlx_server.request import Priority, Request

COST = CostModel(base_s=0.010, decode_s=0.001, prompt_s=0.001, context_doubling_tokens=1e12, host_s=0.002)
PLAIN = Mix(own_tokens=100, output_tokens=30, shared_share=0.0, tiers=(0, 1, 0))
ARRIVAL = operator.attrgetter("arrival_s")


def arrival(arrival_s: float, num_prompt: int, num_output: int, first_id: int = 0, **extra: Any) -> TracedRequest:
    ids = tuple(range(first_id, first_id + -(-num_prompt // 32)))
    return TracedRequest(arrival_s, extra.pop("tier", Priority.NORMAL), num_prompt, num_output, ids, **extra)


def simulate(
    arrivals: Iterable[TracedRequest],
    *,
    num_blocks: int = 512,
    cost: CostModel = COST,
    check_every: int = 1,
    **settings: Any,
) -> SimulationMetrics:
    options = {name: settings.pop(name) for name in ("is_async", "enable_prefix_caching") if name in settings}
    limits = SchedulerLimits(context_doubling_tokens=cost.context_doubling_tokens, **settings)
    return Simulation(limits, num_blocks, cost, check_every=check_every, **options).run(arrivals)


# --- its clock --------------------------------------------------------------------------------------------


def test_a_request_alone_takes_what_the_model_says() -> None:
    assert COST.seconds_alone(100, 4) == pytest.approx(0.010 + 0.1 + 3 * 0.011)
    metrics = simulate([arrival(5.0, 100, 4)])
    tier = metrics.tiers[Priority.NORMAL]
    host_s = 0.002
    assert tier.queue_s == [0.0]
    assert tier.ttft_s == pytest.approx([0.010 + 0.1 + host_s])
    assert tier.e2e_s == pytest.approx([0.010 + 0.1 + 3 * 0.011 + host_s])
    assert max(tier.gaps_s) == pytest.approx(0.011)
    assert metrics.counters.num_steps == 4
    assert metrics.elapsed_s == pytest.approx(5.0 + tier.e2e_s[0])


@pytest.mark.parametrize("is_self_running", [False, True])
def test_a_late_step_leaves_a_self_running_device_the_time_of_its_launch(is_self_running: bool) -> None:
    """20 ms of the host behind 0.9 of 50 ms less 10 would be too late by 5 ms in each step."""
    cost = dataclasses.replace(COST, base_s=0.049, host_s=0.02, is_self_running=is_self_running)
    metrics = simulate([arrival(0.0, 100, 40)], cost=cost)
    idle_s = metrics.elapsed_s - metrics.busy_s - 0.02  # but for the first launch
    assert idle_s <= 0.016 if is_self_running else idle_s >= 35 * 0.005


def test_without_a_step_ahead_the_host_is_waited_for() -> None:
    metrics = simulate([arrival(0.0, 100, 4)], is_async=False)
    tier = metrics.tiers[Priority.NORMAL]
    assert tier.e2e_s == pytest.approx([0.010 + 0.1 + 3 * 0.011 + 4 * 0.002])
    assert max(tier.gaps_s) == pytest.approx(0.013)


def test_decodes_share_a_step() -> None:
    metrics = simulate([arrival(0.0, 1, 5, first_id=index) for index in range(8)])
    assert metrics.counters.num_steps == 5
    assert metrics.elapsed_s == pytest.approx(0.002 + 5 * (0.010 + 8 * 0.001))
    assert metrics.output_rate == pytest.approx(40 / metrics.elapsed_s)


def test_context_makes_a_prompt_dearer() -> None:
    cost = CostModel(base_s=0.0, decode_s=0.0, prompt_s=0.001, context_doubling_tokens=1000.0, host_s=0.0)
    metrics = simulate([arrival(0.0, 500, 1)], cost=cost)
    assert metrics.elapsed_s == pytest.approx(0.5 * (1 + 250 / 1000))


def test_equal_hash_ids_are_an_equal_prefix() -> None:
    first, second = arrival(0.0, 128, 4), arrival(50.0, 128, 4)
    metrics = simulate([first, second])
    assert metrics.counters.num_prompt_tokens_computed == 128 + 32
    assert metrics.counters.num_prefix_hit_tokens == 96
    assert metrics.hit_rate == pytest.approx(96 / 256)
    wide = [
        TracedRequest(0.0, Priority.NORMAL, 600, 2, (1, 2), 512),
        TracedRequest(9.0, Priority.NORMAL, 600, 2, (1, 3), 512),
    ]
    assert simulate(wide).counters.num_prefix_hit_tokens == 512


def test_nobody_is_nothing() -> None:
    metrics = simulate([])
    assert (metrics.num_finished, metrics.elapsed_s, metrics.hit_rate) == (0, 0.0, None)


def test_books_are_checked_at_every_step_and_at_the_end() -> None:
    metrics = simulate([arrival(0.0, 10, 5)])
    assert metrics.num_checks == 5 + 1


def test_a_replay_repeats() -> None:
    arrivals = list(islice(Traffic(Mix(), 3).bursts(20.0, 10), 60))
    (first,), (second,) = (as_document({"": simulate(arrivals)}) for _ in range(2))
    del first["host_s"], second["host_s"]
    assert first == second


def test_who_is_refused_is_counted() -> None:
    limits = {"normal": QueueLimits(max_num_waiting=2)}
    metrics = simulate([arrival(0.0, 10, 5, first_id=index) for index in range(6)], tiers=limits)
    assert (metrics.num_finished, metrics.num_refused) == (2, 4)
    assert metrics.num_most_waiting == 2
    metrics = simulate([arrival(0.0, 100, 100), arrival(0.0, 100, 5, 9)], max_num_seqs=1, queue_timeout_s=0.5)
    assert (metrics.num_finished, metrics.num_refused) == (1, 1)
    metrics = simulate([arrival(0.0, 100, 100)], num_blocks=6)
    assert (metrics.num_finished, metrics.num_refused) == (0, 1)
    assert metrics.output_rate == 0.0


# --- what it reports --------------------------------------------------------------------------------------


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 50) == 0.0
    assert [percentile([3.0, 1.0, 2.0, 4.0], percent) for percent in (1, 25, 50, 51, 99, 100)] == [1, 1, 2, 3, 4, 4]


# --- traffic ----------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_the_rate_and_the_mix() -> None:
    mix = Mix(shared_share=0.25, num_prefixes=8, prefix_tokens=100, tiers=(0.1, 0.6, 0.3))
    requests = list(islice(Traffic(mix, 1).poisson(50.0), 20_000))
    assert requests == list(islice(Traffic(mix, 1).poisson(50.0), 20_000))
    assert requests != list(islice(Traffic(mix, 2).poisson(50.0), 20_000))
    assert requests[-1].arrival_s == pytest.approx(400, rel=0.05)
    assert [sum(r.tier is tier for r in requests) / 20_000 for tier in Priority] == pytest.approx(mix.tiers, abs=0.02)
    shared = [request for request in requests if request.hash_ids[0] < 8 * 4]
    assert len(shared) == pytest.approx(5000, rel=0.05)
    assert {request.hash_ids[:4] for request in shared} == {tuple(range(4 * n, 4 * n + 4)) for n in range(8)}
    assert all(len(r.hash_ids) == -(-r.num_prompt_tokens // 32) for r in requests)
    mean_output = sum(request.num_output_tokens for request in requests) / 20_000
    assert mean_output == pytest.approx(mix.output_tokens, rel=0.05)
    own = [hash_id for r in requests for hash_id in (r.hash_ids[4:] if r in shared[:50] else ())]
    assert len(own) == len(set(own))


def test_bursts_come_together() -> None:
    requests = list(islice(Traffic(PLAIN, 0).bursts(40.0, 16), 1600))
    moments = {request.arrival_s for request in requests}
    assert len(moments) == 100
    assert max(moments) == pytest.approx(40, rel=0.3)
    mix = dataclasses.replace(PLAIN, shared_share=0.5, prefix_tokens=96)
    for _, burst in groupby(islice(Traffic(mix, 0).bursts(40.0, 16), 160), lambda request: request.arrival_s):
        prefixes = {request.hash_ids[:3] for request in burst if request.hash_ids[0] < 3 * mix.num_prefixes}
        assert len(prefixes) == 1


def test_clients_of_a_closed_loop_ask_when_they_are_answered() -> None:
    """Two of HIGH and one of LOW, 100 in and 4 out, in turns on one seat: nobody waits for more than the others' two,
    and whoever has been answered asks at that moment."""
    mix = Mix(own_tokens=100, output_tokens=4, spread=0.0, shared_share=0.0)
    loop = ClosedLoop(Traffic(mix, 0), {Priority.HIGH: 2, Priority.NORMAL: 0, Priority.LOW: 1}, 20)
    sent: list[TracedRequest] = []
    ended: list[float] = []

    def next_of(request: Request, now: float) -> TracedRequest | None:
        ended.append(now)
        following = loop.next_of(request, now)
        if following is not None:
            assert (following.arrival_s, following.tier) == (now, request.priority)
            sent.append(following)
        return following

    first = loop.first()
    assert [(request.arrival_s, request.tier) for request in first] == [(0.0, 0), (0.0, 0), (0.0, 2)]
    limits = SchedulerLimits(max_num_seqs=1, context_doubling_tokens=COST.context_doubling_tokens)
    metrics = Simulation(limits, 64, COST).run(first, next_of)
    assert {(r.num_prompt_tokens, r.num_output_tokens) for r in (*first, *sent)} == {(100, 4)}
    assert (len(sent), len(ended), metrics.num_finished) == (17, 20, 20)
    assert metrics.num_most_waiting == 3, "no client has two requests at a time"


def test_a_flood_keeps_its_requests_open_and_delays_its_own() -> None:
    mix = Mix(own_tokens=100, output_tokens=20, spread=0.0, shared_share=0.0)
    arrivals = list(islice(Traffic(mix, 0).poisson(0.5, Priority.NORMAL, start_s=5.0), 20))
    found = {}
    for is_fair in (True, False):
        flood = Flood(Traffic(mix, 1), Priority.NORMAL, 30, arrivals[-1].arrival_s)
        limits = SchedulerLimits(max_num_seqs=4, context_doubling_tokens=COST.context_doubling_tokens)
        simulation = Simulation(limits, 400, COST, is_fair=is_fair)
        metrics = found[is_fair] = simulation.run([*flood.first(), *arrivals], flood.next_of)
        assert len(metrics.tiers[Priority.NORMAL].e2e_s) == 20
        assert metrics.num_most_waiting >= 30 - 4
        assert len(metrics.flood.e2e_s) > 100, "it goes on until the last arrival"
    fair, one = (found[is_fair].tiers[Priority.NORMAL].queue_s for is_fair in (True, False))
    assert percentile(fair, 50) < 0.2 * percentile(one, 50)
    assert percentile(fair, 90) < 0.2 * percentile(one, 90)
    assert found[True].output_rate == pytest.approx(found[False].output_rate, rel=0.02)


def write_trace(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


MOONCAKE = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": list(range(46, 60))}


def test_a_recorded_trace_is_read(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", {**MOONCAKE, "timestamp": 27483}, MOONCAKE)
    first, second = read_trace(path)
    assert first == TracedRequest(0.0, Priority.NORMAL, 6955, 52, tuple(range(46, 60)), 512)
    assert second.arrival_s == pytest.approx(0.001)
    shrunk = read_trace(path, shrink=16, tiers=(1, 0, 0))[0]
    assert shrunk == TracedRequest(0.0, Priority.HIGH, 434, 3, tuple(range(46, 60)), 32)


def test_prompts_of_a_trace_without_hashes_have_nothing_in_common(tmp_path: Path) -> None:
    lines = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-10 00:00:00,600,2\n2024-05-10 00:01:00,600,2\n"
    arrivals = read_trace(write_trace(tmp_path / "azure.csv", lines))
    assert [request.arrival_s for request in arrivals] == [0.0, 60.0]
    metrics = simulate(arrivals)
    assert (metrics.num_finished, metrics.counters.num_prefix_hit_tokens) == (2, 0)


def test_a_recorded_trace_is_replayed_with_its_hits(tmp_path: Path) -> None:
    later = {**MOONCAKE, "timestamp": 99000, "hash_ids": [*range(46, 56), *range(90, 94)]}
    arrivals = read_trace(write_trace(tmp_path / "trace.jsonl", MOONCAKE, later))
    metrics = simulate(arrivals)
    assert metrics.counters.num_prefix_hit_tokens == 10 * 512
    assert metrics.num_finished == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "request 2 is not understood"),
        ("[]", "request 2 is not understood"),
        ({"timestamp": 1}, "'input_length'"),
        ({**MOONCAKE, "hash_ids": [1]}, "request 2: 1 hash_ids do not cover input_length 6955"),
        ({"prompt": "x"}, "mixes prompts with lines of a trace"),
        ({**MOONCAKE, "output_length": "many"}, "many"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write_trace(tmp_path / "trace.jsonl", MOONCAKE, line))


def test_other_bad_traces_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read the dataset"):
        read_trace(tmp_path / "missing")
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(write_trace(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="holds prompts"):
        read_trace(write_trace(tmp_path / "prompts.jsonl", {"prompt": "x"}))
    with pytest.raises(ConfigError, match="--shrink is 3"):
        read_trace(write_trace(tmp_path / "trace.jsonl", MOONCAKE), shrink=3)


# --- what it shows of the scheduler -----------------------------------------------------------------------


def queue_p99(metrics: SimulationMetrics, tier: Priority) -> float:
    return percentile(metrics.tiers[tier].queue_s, 99.0)


FLOOD_S = (20.0, 80.0)
SEATS = 16


@functools.cache
def capacity() -> float:
    """Requests of `PLAIN` a second that a full server finishes."""
    metrics = simulate(islice(Traffic(PLAIN, 9).poisson(1000.0), 600), max_num_seqs=SEATS, check_every=100)
    return metrics.num_finished / metrics.elapsed_s


def under_flood(
    tiers: tuple[float, float, float], tier: Priority, num_most_waiting: int, load: float = 0.3
) -> SimulationMetrics:
    """Two minutes of traffic that takes `load` of the capacity; for one of them, one tier sends ten times the
    capacity on top. Of that tier `num_most_waiting` may wait; with 0 there is no flood."""
    base = Traffic(dataclasses.replace(PLAIN, tiers=tiers), 0).poisson(load * capacity())
    arrivals: Iterable[TracedRequest] = takewhile(lambda request: request.arrival_s < 120.0, base)
    limits = {}
    if num_most_waiting:
        extra = Traffic(PLAIN, 1).poisson(10 * capacity(), tier, start_s=FLOOD_S[0])
        flood = takewhile(lambda request: request.arrival_s < FLOOD_S[1], extra)
        arrivals = heapq.merge(arrivals, flood, key=ARRIVAL)
        limits = {tier.name.lower(): QueueLimits(max_num_waiting=num_most_waiting)}
    return simulate(arrivals, max_num_seqs=SEATS, target_step_s=0.1, tiers=limits, check_every=100)


def test_a_flood_of_low_does_not_delay_better_tiers() -> None:
    """While so few LOW requests may wait that nearly each starts within `1 / aging_rate` seconds, few of them age past
    a NORMAL one (LOW sits out steps of better tiers), and none past HIGH; better tiers take the seats of LOW. So their
    99 % queue time grows by two steps at most."""
    tiers = (0.3, 0.7, 0.0)
    limit = int(0.25 * capacity() / 0.1)
    calm, flooded = (under_flood(tiers, Priority.LOW, num_most_waiting) for num_most_waiting in (0, limit))
    assert flooded.tiers[Priority.LOW].num_refused > 1000
    assert flooded.counters.num_preemptions > 0
    low_s = flooded.tiers[Priority.LOW].queue_s
    assert percentile(low_s, 95.0) < 1 / 0.1
    assert max(low_s) < 1.5 / 0.1
    for tier in (Priority.HIGH, Priority.NORMAL):
        assert len(flooded.tiers[tier].e2e_s) == len(calm.tiers[tier].e2e_s) > 30
        assert queue_p99(flooded, tier) <= queue_p99(calm, tier) + 2 * 0.12


def test_a_flood_of_high_delays_low_by_a_bounded_time() -> None:
    """LOW waits until it has aged past the HIGH requests that wait, of which a bounded number may, and for the credit
    of 256 tokens, of which each takes seven of HIGH's; by then others of LOW have come, and all of them share an eighth
    of the server."""
    limit, load = 100, 0.08
    flooded = under_flood((0.0, 0.0, 1.0), Priority.HIGH, limit, load)
    assert flooded.tiers[Priority.HIGH].num_refused > 1000
    aged_s = 2 / 0.1 + limit / capacity() + 7 * 256 / (PLAIN.own_tokens * capacity())
    assert 2 / 0.1 * 0.5 < queue_p99(flooded, Priority.LOW) <= aged_s * (1 + load / (1 / 8))
    assert flooded.tiers[Priority.LOW].num_refused == 0


@pytest.mark.parametrize("num_tokens", [256, 512])
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_at_saturation_the_best_tier_keeps_its_latency_and_the_worst_gets_on(profile: str, num_tokens: int) -> None:
    """NORMAL and LOW send twice what the server can do. HIGH comes now and then, at any moment of a step."""
    cost, target_s = PROFILES[profile].cost, TARGET_STEP_S
    cost = dataclasses.replace(cost, is_self_running=profile == "gpu")
    times = [25.0 + 1.237 * n for n in range(25)]
    high = [arrival(s, num_tokens, 8, 10**9 + 100 * n, tier=Priority.HIGH) for n, s in enumerate(times)]
    every_s = 0.5 * cost.seconds_alone(num_tokens, 1)
    crowd = [
        arrival(n * every_s, num_tokens, 8, 100 * n, tier=(Priority.NORMAL, Priority.LOW)[n % 2])
        for n in range(int(56.0 / every_s))
    ]
    options = {"num_blocks": 4096, "cost": cost, "max_num_seqs": 8, "target_step_s": target_s, "check_every": 100}
    calm = simulate(high, **options)
    full = simulate(heapq.merge(high, crowd, key=ARRIVAL), **options)
    alone_s, loaded_s = (percentile(metrics.tiers[Priority.HIGH].ttft_s, 95.0) for metrics in (calm, full))
    assert loaded_s <= 1.5 * alone_s
    assert sum(queue_s < 40.0 for queue_s in full.tiers[Priority.LOW].queue_s) >= 3


def test_aging_is_what_bounds_the_wait_of_low() -> None:
    """HIGH alone overfills the server for two minutes and more."""
    requests = islice(Traffic(PLAIN, 0).poisson(1.2 * capacity(), Priority.HIGH), int(180 * capacity()))
    low = arrival(20.0, 10, 5, first_id=10**9, tier=Priority.LOW)
    arrivals = sorted([*requests, low], key=ARRIVAL)
    waits = {
        rate: simulate(arrivals, max_num_seqs=SEATS, aging_rate=rate, check_every=100).tiers[Priority.LOW].queue_s[0]
        for rate in (0.0, 0.1)
    }
    assert 20.0 < waits[0.1] < 40.0 < 100.0 < waits[0.0]


def test_every_mechanism_earns_its_place() -> None:
    """Bursts of requests with common prefixes, some prompts long, on a pool that is too small."""
    mix = Mix(own_tokens=150, output_tokens=40, shared_share=0.7, num_prefixes=40, prefix_tokens=1024)
    arrivals = list(islice(Traffic(mix, 4).bursts(4.0, 24), 480))

    def replay(**settings: Any) -> SimulationMetrics:
        return simulate(arrivals, num_blocks=700, max_num_seqs=32, target_step_s=0.15, check_every=100, **settings)

    full = replay()
    assert full.num_finished == 480
    assert full.gap_percentile(100) < replay(bound_stalls=False).gap_percentile(100)
    computed = full.counters.num_prompt_tokens_computed
    assert computed < replay(deduplicate_prefixes=False).counters.num_prompt_tokens_computed
    assert computed < 0.8 * replay(enable_prefix_caching=False).counters.num_prompt_tokens_computed
    assert full.elapsed_s < replay(is_async=False).elapsed_s


# --- the command ------------------------------------------------------------------------------------------


def command(*arguments: str) -> int:
    return main(["bench", "simulate", "--num-requests", "60", *arguments])


def test_the_command_prints_a_summary_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("60 requests finished and 0 were refused in ")
    assert [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")][2:] == [
        "high",
        "normal",
        "low",
    ]


def test_the_command_ablates_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    assert command("--ablate", "--pattern", "bursts", "--json", str(path)) == 0
    names = [
        "all mechanisms",
        "no stall bound",
        "no prefix deduplication",
        "no step ahead",
        "no aging",
        "no prefix cache",
    ]
    printed = capsys.readouterr().out
    assert [name for name in names if f"| {name} " in printed] == names
    document = json.loads(path.read_text())
    assert document["settings"]["pattern"] == "bursts"
    assert [result["scheduler"] for result in document["results"]] == names
    assert all(result["num_finished"] == 60 for result in document["results"])
    assert document["results"][0]["tiers"]["normal"]["ttft_s_p99"] > 0


def test_the_command_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{**MOONCAKE, "timestamp": 1000 * index} for index in range(5)]
    path = write_trace(tmp_path / "trace.jsonl", *lines)
    assert command("--trace", str(path), "--shrink", "16", "--speed-up", "10", "--tiers", "0", "0", "1") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("5 requests finished")
    assert "| low " in printed
    assert "normal" not in printed


def test_the_command_runs_a_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    assert command("--clients", "1", "0", "2", "--spread", "0", "--own-tokens", "64", "--json", str(path)) == 0
    assert "normal" not in capsys.readouterr().out
    (result,) = json.loads(path.read_text())["results"]
    assert result["num_finished"] == 60
    assert result["num_most_waiting"] <= 3
    assert 0 < result["tiers"]["high"]["ttft_s_p50"] <= result["tiers"]["high"]["ttft_s_p95"]


def test_the_command_bounds_the_queue(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--max-num-waiting", "3", "--queue-timeout-s", "9")
    assert command("--rate", "1000", "--tiers", "0", "1", "0", "--max-num-seqs", "2", *limits) == 0
    assert " 0 were refused" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "missing.jsonl"), "Cannot read the dataset missing.jsonl"),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "32"), "it must be at least --max-num-seqs, 64"),
        (("--rate", "0"), "0 is not a finite number above 0"),
        (("--num-requests", "0"), "0 is not a whole number of at least 1"),
        (("--tiers", "0", "0", "0"), "--tiers is 0.0 0.0 0.0"),
        (("--clients", "0", "0", "0"), "--clients is 0 0 0; name at least one client"),
        (
            ("--clients", "1", "0", "0", "--turns", "2", "--trace", "a", "--write-trace", "b", "--pause-s", "1"),
            "Without effect on traffic of --clients: --pause-s, --trace, --turns, --write-trace. Leave out",
        ),
        (
            ("--trace", "a", "--rate", "2", "--pattern", "bursts", "--own-tokens", "9", "--turns", "2"),
            "Without effect on a trace: --own-tokens, --pattern, --rate, --turns. Leave out",
        ),
        (("--shrink", "2"), "Without effect on traffic of --pattern poisson: --shrink."),
        (("--burst-size", "2", "--pause-s", "1"), "effect on traffic of --pattern poisson: --burst-size, --pause-s."),
        (("--turns", "2", "--shared-share", "1"), "Without effect on traffic of --turns: --shared-share."),
        (("--disk-gb-per-s", "1", "1"), "Without effect on a replay without --kv-disk: --disk-gb-per-s."),
        (("--draft-share", "0.5"), "Without effect on a replay without --draft-acceptance: --draft-share."),
        (("--spread", "-1"), "--spread: -1 is not a finite number of at least 0"),
        (("--aging-rate", "-3"), "--aging-rate: -3 is not a finite number of at least 0"),
        (("--tiers", "nan", "1", "0"), "--tiers: nan is not a finite number of at least 0"),
        (("--explain", "60"), "--explain is 60, but the requests are only 0 to 59"),
        (("--clients", "1", "0", "0", "--num-requests", "5", "--explain", "5"), "but the requests are only 0 to 4"),
        (("--shared-share", "7"), "--shared-share: 7 is not a share from 0 to 1"),
        (("--draft-acceptance", "x"), "--draft-acceptance: x is not a finite number of at least 0"),
    ],
)
def test_the_command_explains_what_is_wrong(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments) == 2
    assert message in capsys.readouterr().err


def test_it_explains_step_by_step_why_a_request_waited(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The second of two begins as the first, and is shorter. On one seat, and on two."""
    first = {"timestamp": 0, "input_length": 4096, "output_length": 3, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8]}
    second = {"timestamp": 1, "input_length": 3900, "output_length": 3, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 9]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in (first, second)))
    printed = []
    for num_seats in ("1", "2"):
        more = ("--max-num-seqs", num_seats, "--max-num-batched-tokens", "512", "--tiers", "0", "1", "0")
        assert command("--trace", str(trace), "--explain", "1", *more) == 0
        printed.append([line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines() if "  step " in line])
    on_one, on_two = printed
    assert any(line.startswith("no seat: all are taken") for line in on_one)
    assert on_two[0] == "is parked: 0 computes the prefix that it begins with"
    assert on_one[-1].startswith("gets ")
    assert on_one[-1].split(";")[0].endswith("has 0 left")


def test_it_explains_that_a_request_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--clients", "0", "3", "0", "--max-num-seqs", "1", "--max-num-waiting", "1", "--explain", "2") == 0
    assert re.search(r"^ +0\.000 s  is refused: .+", capsys.readouterr().out)


@pytest.mark.parametrize("profile", ["cpu", "m2-max", "m5-max", "gpu"])
def test_a_profile_says_what_steps_cost_and_their_target(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    assert command("--profile", profile, "--json", str(path)) == 0
    capsys.readouterr()
    document, known = json.loads(path.read_text()), PROFILES[profile]
    assert document["profile"] == dataclasses.asdict(known)
    min_s = document["results"][0]["counters"]["num_steps"] * known.cost.base_s
    assert document["results"][0]["busy_s"] > min_s
