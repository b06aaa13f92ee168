"""Simulated servers behind a simulated router: what is hit, by policy, and what the router knows by events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_server.bench.lab.simulator.fleet import POLICIES, Fleet, FleetMetrics, Talk
from mlx_server.cli.main import main

TALK = Talk(num_a_server=6, num_systems=8)


def run(policy: str, num_servers: int, talk: Talk = TALK, num_blocks: int = 2048) -> FleetMetrics:
    return Fleet(policy, num_servers, talk, "m2-max", num_blocks).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_one_conversation_hits_all_that_it_has_sent(policy: str):
    """Prompts of 22, 30, 38 and 46 blocks; each but the first begins as the one before, and the last token of none is
    taken from the cache."""
    found = run(policy, 1, Talk(num_a_server=1))
    assert found.num_requests == 4
    assert found.hit_rate == (22 + 30 + 38) / (22 + 30 + 38 + 46)


def test_placing_by_events_hits_most_and_splits_the_work():
    found = {policy: run(policy, 4) for policy in POLICIES}
    assert {one.num_requests for one in found.values()} == {4 * 6 * 4}
    assert found["events"].hit_rate >= 0.64
    assert found["events"].hit_rate >= found["sticky"].hit_rate > found["round-robin"].hit_rate + 0.1
    assert found["events"].largest_share < 2


def test_the_index_is_what_the_servers_have_evictions_included():
    fleet = Fleet("events", 3, TALK, "m2-max", 160)
    fleet.run()
    cached = [server.scheduler.blocks.num_cached_blocks for server in fleet._servers]
    assert sum(server.metrics.num_evictions for server in fleet._servers) > 50
    assert fleet._index.num_entries == sum(cached)
    for number, expected in enumerate(cached):
        assert sum(known >> number & 1 for known in fleet._index.servers.values()) == expected


def test_a_run_repeats():
    first, second = run("events", 2), run("events", 2)
    assert (first.hit_rate, first.ttft_p99_s, first.num_events) == (
        second.hit_rate,
        second.ttft_p99_s,
        second.num_events,
    )


@pytest.mark.parametrize("flag", ["--num-blocks", "--own-tokens"])
def test_what_no_server_could_take_is_refused(flag: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "fleet", flag, "8"]) != 0
    assert flag in capsys.readouterr().err


def test_the_command_has_a_row_for_each_policy_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "found.json"
    assert main(["bench", "fleet", "--servers", "1", "2", "--num-a-server", "2", "--json", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * len(POLICIES)
    results = json.loads(path.read_text())["results"]
    assert [(one["num_servers"], one["policy"]) for one in results] == [
        (n, policy) for n in (1, 2) for policy in POLICIES
    ]
    assert all(one["event_bytes"] > 0 for one in results if one["policy"] == "events")
