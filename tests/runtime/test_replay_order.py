"""Steps of real-size models as Metal would encode them: is every use of a pool ordered that MLX cannot see?"""

from __future__ import annotations

import random
from typing import Any

import pytest
from replay.encoder import Limits
from replay.graph import Graph
from replay.metal import replay
from replay.models import config_of
from replay.order import Unordered, copied_updates, num_pool_uses, unordered
from replay.record import record
from replay.traffic import KINDS, Traffic

from mlx_server.runtime.kernels.gpu.kernels import DecodeKernels, PoolKernels

LAYERS = {"llama-3-8b": 3, "qwen3-30b-a3b": 2, "qwen3.5-35b-a3b": 8, "gemma-3-12b": 6, "gemma-4-e2b": 10}
"""A few of each model, of all its kinds."""

NUM_STEPS = 3
NUM_SPLITS = 4
STEPS = {
    "decode": KINDS["decode"],
    "forced decode": Traffic(decodes=(100, 700), known=True),
    "prefill": Traffic(prompts=((512, 512),) * 2),
    "mixed": Traffic(decodes=(100, 700), prompts=((0, 200), (64, 300)), known=True),
}


def steps_of(model: str, kind: str, **options: Any) -> Graph:
    return record(config_of(model, LAYERS[model]), STEPS[kind], num_steps=NUM_STEPS, num_blocks=256, **options)


def pairs_over_splits(graph: Graph, num_splits: int) -> list[Unordered]:
    """Those of as many ways to cut the steps into command buffers."""
    found = []
    for seed in range(num_splits):
        rng = random.Random(seed)
        share = rng.choice((0.0, 0.02, 0.05, 0.3, 1.0))
        limits = Limits(rng.choice((5, 20, 40, 1000)), 10**6, splits=lambda rng=rng, share=share: rng.random() < share)
        replayed = replay(graph, limits)
        assert num_pool_uses(replayed) >= 2 * NUM_STEPS
        found += unordered(replayed)
    return found


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("model", LAYERS)
def test_every_use_of_a_pool_is_ordered_and_nothing_is_updated_that_the_step_also_reads(model: str, kind: str) -> None:
    """Of a hybrid, recurrent states neither."""
    graph = steps_of(model, kind)
    assert pairs_over_splits(graph, NUM_SPLITS) == []
    assert copied_updates(graph) == []


@pytest.mark.parametrize("kv_bits", [4, 8])
def test_every_use_of_a_quantised_pool_is_ordered(kv_bits: int) -> None:
    assert pairs_over_splits(steps_of("llama-3-8b", "mixed", kv_bits=kv_bits), NUM_SPLITS) == []


@pytest.mark.parametrize("kind", ["prefill", "mixed"])
@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-4-e2b"])
def test_every_use_of_a_pool_is_ordered_in_exact_steps(model: str, kind: str) -> None:
    """Products by own kernels, and each row of a prompt attended as a decode."""
    assert pairs_over_splits(steps_of(model, kind, is_exact=True), NUM_SPLITS) == []


@pytest.mark.full
@pytest.mark.parametrize("kind", ["decode", "mixed", "chunks"])
@pytest.mark.parametrize("model", LAYERS)
def test_every_use_of_a_pool_is_ordered_in_whole_models(model: str, kind: str) -> None:
    assert pairs_over_splits(record(config_of(model), KINDS[kind], num_steps=NUM_STEPS), 30) == []


def _leave_the_token_as_it_was(monkeypatch: pytest.MonkeyPatch, kernels: type, method: str) -> None:
    """As if the kernel gave no token that those behind it wait for."""
    launch = getattr(kernels, method)

    def forgetful(self: Any, pool: Any, *args: Any) -> Any:
        token = pool.memory.token
        result = launch(self, pool, *args)
        pool.memory.token = token
        return result

    monkeypatch.setattr(kernels, method, forgetful)


@pytest.mark.parametrize(
    ("kernels", "method", "kind", "pair"),
    [
        (DecodeKernels, "decode", "forced decode", Unordered("kernel paged_decode", "kernel kv_write")),
        (PoolKernels, "gather", "prefill", Unordered("kernel kv_gather", "kernel kv_write")),
        (PoolKernels, "gather", "mixed", Unordered("kernel kv_gather", "kernel kv_write")),
    ],
)
def test_a_token_that_is_missing_is_found(
    kernels: type, method: str, kind: str, pair: Unordered, monkeypatch: pytest.MonkeyPatch
) -> None:
    _leave_the_token_as_it_was(monkeypatch, kernels, method)
    assert pair in pairs_over_splits(steps_of("llama-3-8b", kind), NUM_SPLITS)


def test_a_write_that_nobody_waits_for_is_not_even_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _leave_the_token_as_it_was(monkeypatch, PoolKernels, "write")
    names = {dispatch.op for dispatch in replay(steps_of("llama-3-8b", "decode")).encoder.dispatches}
    assert "kernel paged_decode" in names
    assert "kernel kv_write" not in names
