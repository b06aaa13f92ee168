"""Drafts in the simulator: what a draft costs there, and that drafting never takes longer than not to, in virtual
time, where rows cost what they cost on GPUs."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mlx_server.batching.limits import QueueLimits, SchedulerLimits
from mlx_server.bench.lab.simulator.engine import PROFILES, TARGET_STEP_S, Simulation, SimulationMetrics
from mlx_server.bench.lab.simulator.traces import ClosedLoop, DraftMix, Mix, Traffic
from mlx_server.cli.main import main
from mlx_server.request import Priority

GPUS = ("m2-max", "m5-max", "gpu")


@cache
def simulate(profile: str, num_streams: int, num_prompt_tokens: int, mix: DraftMix | None) -> SimulationMetrics:
    """Streams that ask without a pause, on a device that runs by itself; answers of 400 tokens."""
    machine = PROFILES[profile]
    limits = SchedulerLimits(
        max_num_seqs=32,
        target_step_s=TARGET_STEP_S,
        context_doubling_tokens=machine.cost.context_doubling_tokens,
        queue=QueueLimits(max_num_waiting=10**9, max_queued_tokens=10**12),
    )
    cost = replace(machine.cost, is_self_running=True)
    traffic = Traffic(Mix(own_tokens=num_prompt_tokens, output_tokens=400, spread=0.0, shared_share=0.0), seed=0)
    loop = ClosedLoop(traffic, {Priority.NORMAL: num_streams}, 5 * num_streams)
    simulation = Simulation(limits, 8000, cost, drafts=mix, check_every=200)
    return simulation.run(loop.first(), loop.next_of)


def speedup(profile: str, num_streams: int, num_prompt_tokens: int, mix: DraftMix) -> float:
    drafted = simulate(profile, num_streams, num_prompt_tokens, mix)
    plain = simulate(profile, num_streams, num_prompt_tokens, None)
    assert drafted.counters.num_generated_tokens == plain.counters.num_generated_tokens
    assert drafted.counters.num_draft_tokens > 0, "drafts were tried"
    return plain.elapsed_s / drafted.elapsed_s


LOADS = list(itertools.product(GPUS, (1, 4, 16), (64, 1500)))
SOME_LOADS = [("m2-max", 16, 64), ("m5-max", 4, 64), ("m5-max", 1, 1500), ("gpu", 4, 1500)]
"""Each GPU, each number of streams and each length: these run by default, all with `-m full`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "num_streams", "num_prompt_tokens"),
    [pytest.param(*load, marks=() if load in SOME_LOADS else pytest.mark.full) for load in LOADS],
)
def test_drafts_never_lose(profile: str, num_streams: int, num_prompt_tokens: int) -> None:
    """Whether they are always wrong, mostly, half, or hardly ever, or rarely found, or right for every other request
    only; including the tries that show it."""
    for acceptances, found_share in (
        ((0.0,), 1.0),
        ((0.3,), 1.0),
        ((0.6,), 1.0),
        ((0.95,), 1.0),
        ((0.2,), 0.05),
        ((0.95, 0.0), 1.0),
    ):
        mix = DraftMix(acceptances=acceptances, found_share=found_share)
        assert speedup(profile, num_streams, num_prompt_tokens, mix) >= 0.97, mix


@pytest.mark.parametrize(("num_streams", "least"), [(1, 4.0), (4, 2.5), (16, 1.2)])
def test_right_drafts_pay_where_rows_cost_little(num_streams: int, least: float) -> None:
    assert speedup("gpu", num_streams, 64, DraftMix(acceptances=(0.95,))) >= least


def test_few_wrong_drafts_are_tried() -> None:
    """A request whose drafts are always wrong has less than one draft in eight tokens."""
    metrics = simulate("gpu", 1, 64, DraftMix(acceptances=(0.0,)))
    assert metrics.counters.num_accepted_tokens == 0
    assert 0 < metrics.counters.num_draft_tokens < metrics.counters.num_generated_tokens / 8


def test_a_draft_costs_a_row_and_gives_a_token() -> None:
    """All are right: eight drafts and a token a step once that many rows are known, and the books agree."""
    metrics = simulate("gpu", 1, 64, DraftMix(acceptances=(1.0,)))
    assert metrics.num_finished == 5
    assert metrics.counters.num_generated_tokens == 5 * 400
    assert metrics.counters.num_accepted_tokens == metrics.counters.num_draft_tokens
    assert metrics.counters.num_steps < 5 * 400 / 8


def test_the_command_shows_drafts_beside_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    command = ["bench", "simulate", "--clients", "0", "2", "0", "--num-requests", "4", "--profile", "gpu"]
    assert main([*command, "--draft-acceptance", "0.9", "0.5", "--draft-share", "0.8", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert " tokens drafted in " in printed
    assert "| no drafts " in printed
    drafted, plain = json.loads(path.read_text())["results"]
    assert 0 < drafted["counters"]["num_accepted_tokens"] < drafted["counters"]["num_draft_tokens"]
    assert plain["counters"]["num_drafts"] == 0
    assert main([*command, "--draft-acceptance", "0.9", "--ablate", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    undrafted = [result["scheduler"] for result in results if not result["counters"]["num_drafts"]]
    assert len(results) == 7
    assert undrafted == ["no drafts"], "each row is without one mechanism"
    assert main([*command, "--draft-acceptance", "1.5"]) == 2
    assert "1.5 is not a share from 0 to 1" in capsys.readouterr().err
