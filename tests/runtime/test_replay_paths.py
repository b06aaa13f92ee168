"""Steps over images and steps with drafts as Metal would encode them: every use of a pool is ordered, and none is
copied."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from replay.encoder import Limits
from replay.graph import Graph
from replay.images import record_images
from replay.metal import replay
from replay.models import config_of
from replay.order import Unordered, copied_updates, num_pool_uses, unordered
from replay.record import record_drafting
from replay.traffic import Drafting

from mlx_server.runtime.cache.row_pool import RowsInPlace, Slots
from mlx_server.runtime.drafts.assistant import AssistantBody, LentCache


def found_pairs(graph: Graph, num_splits: int = 6) -> list[Unordered]:
    """Those of as many ways to cut the steps into command buffers."""
    found = []
    for seed in range(num_splits):
        rng = random.Random(seed)
        share = rng.choice((0.0, 0.05, 0.3, 1.0))
        limits = Limits(rng.choice((5, 40, 1000)), 10**6, splits=lambda rng=rng, share=share: rng.random() < share)
        replayed = replay(graph, limits)
        assert num_pool_uses(replayed) > 50
        assert replayed.pool_copies == []
        found += unordered(replayed)
    return found


@pytest.mark.parametrize(
    ("model", "num_layers"),
    [("qwen3-vl-8b", 3), ("qwen3.5-35b-a3b", 4), ("gemma-3-4b", 6), ("gemma-4-26b-a4b", 6)],
)
def test_steps_over_images(model: str, num_layers: int) -> None:
    """Positions in three axes and added layers of an encoder's; an image whose rows see each other both ways."""
    graph = record_images(model, num_layers)
    assert copied_updates(graph) == []
    assert found_pairs(graph) == []


def head_steps() -> Graph:
    return record_drafting(config_of("qwen3.5-35b-a3b", 4), None, Drafting())


def test_bursts_of_a_draft_model() -> None:
    graph = record_drafting(config_of("llama-3-8b", 3), config_of("llama-3.2-1b", 2), Drafting())
    assert graph.num_steps == 1 + 2 * 5
    assert copied_updates(graph) == []
    assert found_pairs(graph) == []


def test_bursts_of_a_models_own_head() -> None:
    """The model writes hidden states where the head reads them, and the next step writes over them."""
    graph = head_steps()
    assert graph.num_steps == 1 + 2 * 5
    assert copied_updates(graph) == []
    assert found_pairs(graph) == []


def assistant_steps() -> Graph:
    return record_drafting(config_of("gemma-4-e2b", 12), None, Drafting())


def test_bursts_of_an_assistant() -> None:
    """It reads K/V that the step before it writes, and the step after it writes behind them."""
    graph = assistant_steps()
    assert graph.num_steps == 1 + 2 * 5
    assert copied_updates(graph) == []
    assert found_pairs(graph) == []


def test_bursts_of_an_eagle_drafter() -> None:
    """The outputs of some layers are kept as features."""
    graph = record_drafting(config_of("llama-3-8b", 12), "eagle", Drafting())
    assert graph.num_steps == 1 + 2 * 5
    assert copied_updates(graph) == []
    assert found_pairs(graph) == []


def test_rows_that_are_read_out_of_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = RowsInPlace.read

    def forgetful(rows: RowsInPlace, slots: Slots) -> object:
        token = rows._memory.token
        result = read(rows, slots)
        rows._memory.token = token
        return result

    monkeypatch.setattr(RowsInPlace, "read", forgetful)
    assert Unordered("kernel row_read", "kernel row_write") in found_pairs(head_steps())


def test_reads_of_an_assistant_that_are_out_of_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = AssistantBody._attend

    def forgetful(body: AssistantBody, x: mx.array, lent: LentCache) -> mx.array:
        memories = [pool.contents[0].memory for pool in lent.cache.pools]
        tokens = [memory.token for memory in memories]
        result = attend(body, x, lent)
        for memory, token in zip(memories, tokens):
            memory.token = token
        return result

    monkeypatch.setattr(AssistantBody, "_attend", forgetful)
    assert Unordered("kernel paged_decode", "kernel kv_write") in found_pairs(assistant_steps())
