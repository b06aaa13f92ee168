"""The simulator's tier on disk: what it holds, how long it takes, and what it is worth where memory is too small."""

from __future__ import annotations

import dataclasses
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from mlx_server.batching.limits import SchedulerLimits
from mlx_server.bench.lab.simulator.disk import DiskCost, SimulatedDisk
from mlx_server.bench.lab.simulator.engine import CostModel, Simulation, SimulationMetrics
from mlx_server.bench.lab.simulator.traces import Mix, TracedRequest, Traffic, read_trace, write_trace
from mlx_server.cli.main import main
from mlx_server.config import BLOCK_SIZE
from mlx_server.kv_disk.disk import BUSY_BYTES_PER_S, MAX_WAITING_BYTES

MIB = 2**20
COST = CostModel(base_s=0.010, decode_s=0.001, prompt_s=0.001, context_doubling_tokens=1e12, host_s=0.002)
DISK = DiskCost(num_records=10_000, block_bytes=MIB, read_bytes_per_s=1e9, write_bytes_per_s=5e8, bytes_per_day=10**12)
CHATS = Traffic(Mix(own_tokens=64, output_tokens=8, spread=0.0, prefix_tokens=1024, tiers=(0, 1, 0)), seed=0).chats(
    2.0, turns=4, pause_s=30.0, num_requests=120
)


def simulate(disk: DiskCost | None, arrivals: list[TracedRequest] = CHATS, num_blocks: int = 120) -> SimulationMetrics:
    limits = SchedulerLimits(context_doubling_tokens=COST.context_doubling_tokens)
    return Simulation(limits, num_blocks, COST, check_every=1, disk=disk).run(arrivals)


def test_contexts_that_memory_cannot_hold_come_back_from_disk() -> None:
    """Thirty conversations of some 36 blocks on 120: in memory alone most have to be computed again."""
    with_disk, without = simulate(DISK), simulate(None)
    assert with_disk.num_finished == without.num_finished == 120
    assert with_disk.counters.num_prompt_tokens_from_disk > 50_000
    assert without.counters.num_prompt_tokens_from_disk == 0
    tokens = [metrics.counters.num_prompt_tokens_computed for metrics in (with_disk, without)]
    assert tokens[0] * 2 < tokens[1]
    assert with_disk.mean_ttft_s * 2 < without.mean_ttft_s


def test_what_may_be_written_a_day_and_what_has_room_bounds_it() -> None:
    most = simulate(DISK).counters.num_prompt_tokens_from_disk
    for less in ({"bytes_per_day": 200 * MIB}, {"num_records": 200}, {"bytes_per_day": 0}):
        found = simulate(dataclasses.replace(DISK, **less)).counters.num_prompt_tokens_from_disk
        assert found < most / 2
    assert found == 0


def test_a_load_takes_what_the_disk_needs() -> None:
    """Twenty blocks of a MiB, at 10 MB and at 1 GB a second."""
    first = TracedRequest(0.0, CHATS[0].tier, 650, 1, tuple(range(21)))
    filler = TracedRequest(1000.0, first.tier, 1040, 1, tuple(range(100, 133)))
    arrivals = [first, filler, dataclasses.replace(first, arrival_s=2000.0)]
    slow = dataclasses.replace(COST, prompt_s=0.1)
    times = []
    for rate in (1e7, 1e9):
        disk = dataclasses.replace(DISK, read_bytes_per_s=rate)
        limits = SchedulerLimits(context_doubling_tokens=1e12)
        metrics = Simulation(limits, 33, slow, check_every=1, disk=disk).run(arrivals)
        assert metrics.counters.num_prompt_tokens_from_disk == 640
        times.append(metrics.tiers[first.tier].ttft_s[-1])
    assert times[0] - times[1] == pytest.approx(20 * MIB / 1e7 - 20 * MIB / 1e9, abs=0.05)


@pytest.mark.parametrize("is_self_running", [False, True], ids=["cpu", "gpu"])
def test_conversations_that_come_back_together_are_all_loaded(is_self_running: bool) -> None:
    """Eight of 20 blocks that others have displaced: nothing but their last tokens is computed again. Loading all of
    them takes 0.17 s, and computing one 0.65 s."""
    tier = CHATS[0].tier
    first = [TracedRequest(9.0 * n, tier, 650, 1, tuple(range(100 * n, 100 * n + 21))) for n in range(8)]
    fillers = [
        TracedRequest(200.0 + 20 * n, tier, 1040, 1, tuple(range(-100 * n - 34, -100 * n - 1))) for n in range(8)
    ]
    again = [dataclasses.replace(request, arrival_s=1000.0) for request in first]
    cost = dataclasses.replace(COST, is_self_running=is_self_running)
    limits = SchedulerLimits(context_doubling_tokens=1e12)
    metrics = Simulation(limits, 250, cost, check_every=1, disk=DISK).run([*first, *fillers, *again])
    assert metrics.counters.num_prompt_tokens_from_disk == 8 * 640
    assert max(metrics.tiers[tier].ttft_s[-8:]) < 0.65


def test_writes_are_slower_beside_who_runs() -> None:
    disk = SimulatedDisk(DISK)
    for number in range(2):
        disk.set_busy(number == 1)
        disk.write(bytes([number]), b"", memoryview(b""), is_state=False)
    assert disk.room() == MAX_WAITING_BYTES - 2 * MIB
    assert disk.has(b"\0")
    disk.now = disk.next_s
    disk.finish_due()
    assert disk.now == pytest.approx(MIB / 5e8)
    assert disk.has(b"\0")
    assert disk.room() == MAX_WAITING_BYTES - MIB
    assert disk.next_s - disk.now == pytest.approx(MIB / BUSY_BYTES_PER_S)
    assert not disk.is_quiet


def test_a_turn_begins_with_all_of_the_turns_before() -> None:
    chats = {}
    for first, turns in groupby(sorted(CHATS, key=lambda turn: turn.hash_ids), key=lambda turn: turn.hash_ids[0]):
        chats[first] = sorted(turns, key=lambda turn: turn.arrival_s)
    assert [len(turns) for turns in chats.values()] == [4] * 30
    for turns in chats.values():
        assert [turn.num_prompt_tokens for turn in turns] == [1024 + 64 * number for number in (1, 2, 3, 4)]
        for before, after in pairwise(turns):
            assert after.hash_ids[: len(before.hash_ids)] == before.hash_ids
            assert len(after.hash_ids) * BLOCK_SIZE == after.num_prompt_tokens


def test_what_is_written_as_a_trace_is_read_as_it_was(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", CHATS)
    found = read_trace(tmp_path / "trace.jsonl", shrink=16)
    assert [dataclasses.replace(request, arrival_s=0.0) for request in found] == [
        dataclasses.replace(request, arrival_s=0.0) for request in CHATS
    ]
    assert found[-1].arrival_s == pytest.approx(CHATS[-1].arrival_s - CHATS[0].arrival_s, abs=0.002)


def test_the_command_replays_with_the_disk_and_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = ["--turns", "3", "--pause-s", "9", "--num-requests", "60", "--num-blocks", "200", "--tiers", "0", "1", "0"]
    trace = tmp_path / "trace.jsonl"
    assert main(["bench", "simulate", *chats, "--kv-disk", "1GB", "--write-trace", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if " ms " in line][1:] == ["all mechanisms", "no disk"]
    assert len(read_trace(trace, shrink=16)) == 60


@pytest.mark.parametrize(("size", "words"), [("0", "--kv-disk is 0 bytes"), ("many", "many: write bytes, or a size")])
def test_a_disk_without_room_for_a_block_is_refused(size: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulate", "--kv-disk", size]) == 2
    assert words in capsys.readouterr().err
