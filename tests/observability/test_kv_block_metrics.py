"""Lifetimes of KV blocks: what is counted as taken, hit, idle and evicted, on a scripted clock."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from mlx_server.config import ObservabilityConfig
from mlx_server.observability.engine_metrics import KVBlockResidency
from mlx_server.observability.series import EngineReading, render
from tests.batching.worlds import make_request, make_world, prompt
from tests.engine.test_engine import ask, engine_of, read
from tests.engine_worlds import greedy, make_folder

NAMES = {f"vllm:kv_block_{name}_seconds" for name in ("lifetime", "idle_before_evict", "reuse_gap")}


def total_and_count(residency: KVBlockResidency, name: str) -> tuple[float, int]:
    histogram = residency.by_name[f"kv_block_{name}_seconds"]
    return round(histogram.total, 6), histogram.count


def test_lifetimes_idle_times_and_gaps_are_those_of_the_content() -> None:
    """Four blocks. The first request fills two, which another hits 10 s later; what comes then needs all four."""
    world = make_world(num_blocks=4)
    world.step_s = 0.0
    residency = KVBlockResidency(1.0, lambda: world.now)
    world.scheduler.blocks.observer = residency
    world.add(make_request("first", prompt(65), max_tokens=1))
    world.finish()
    world.now = 10.0
    world.add(make_request("again", prompt(65), max_tokens=1))
    world.finish()
    assert total_and_count(residency, "reuse_gap") == (20.0, 2)
    assert total_and_count(residency, "lifetime")[1] == 1  # the tail of the first, which could not be hit
    world.now = 40.0
    world.add(make_request("other", prompt(127, first=500), max_tokens=1))
    world.finish()
    lifetimes_s, num_lost = total_and_count(residency, "lifetime")
    idle_s, _ = total_and_count(residency, "idle_before_evict")
    assert num_lost == 4
    assert lifetimes_s == 2 * 40.0 + 10.0 + 30.0  # two shared ones, and a tail of each request
    assert idle_s == 2 * 30.0 + 10.0 + 30.0
    world.check_tokens()


def test_a_share_of_the_blocks_is_followed() -> None:
    for share, bounds in ((0.0, (0, 0)), (0.25, (150, 350))):
        residency = KVBlockResidency(share, lambda: 0.0, seed=1)
        for block in range(1000):
            residency.on_taken(block)
            residency.on_evicted(block)
        assert bounds[0] <= total_and_count(residency, "lifetime")[1] <= bounds[1]


async def test_they_are_shown_when_they_are_asked_for(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    for is_asked_for in (False, True):
        settings = ObservabilityConfig(kv_cache_metrics=is_asked_for, kv_cache_metrics_sample=1.0)
        async with engine_of(folder, observability=settings) as engine:
            for name in ("a", "b"):
                await read(engine.submit(ask(name, [1] * 40, greedy(5))))
            text = render([EngineReading("tiny", engine.stats(), engine.metrics, True)]).decode()
        found = {family.name: family for family in text_string_to_metric_families(text)}
        assert NAMES & set(found) == (NAMES if is_asked_for else set())
    counts = {sample.name: sample.value for name in NAMES for sample in found[name].samples}
    assert counts["vllm:kv_block_reuse_gap_seconds_count"] == 1
