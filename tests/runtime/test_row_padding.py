"""Rows of padding: a step is computed in tiles where that takes less time, and nobody's answer or blocks show it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_server.runtime.forward import padded
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from tests.attention_worlds import Layer, Span, World
from tests.conformance import Subject, answer, worst_error
from tests.engine_worlds import on_the_cpu, random_prompts


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often a linear layer was called on so many rows."""
    counts: Counter[int] = Counter()
    compute = nn.Linear.__call__

    def counting(self: nn.Linear, x: mx.array) -> mx.array:
        counts[x.size // x.shape[-1]] += 1
        return compute(self, x)

    monkeypatch.setattr(nn.Linear, "__call__", counting)
    return counts


pytestmark = on_the_cpu


def test_whole_tiles_are_the_nearest_that_take_less_time() -> None:
    assert [padded(n) for n in range(1, 17)] == [1, 2, 3, 4, 5, 6, 7] + [16] * 9
    assert [padded(n) for n in (17, 23, 24, 32, 39, 40, 1000)] == [17, 23, 32, 32, 39, 48, 1008]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "phi3"])
@pytest.mark.parametrize("num_requests", [3, 8, 13, 17])
def test_decodes_are_computed_in_tiles(architecture: str, num_requests: int, widths: Counter[int]) -> None:
    subject = Subject(architecture)
    prompts, max_tokens = random_prompts((2,) * num_requests), (6,) * num_requests
    wanted = subject.wanted(prompts, max_tokens)
    with subject.make_llm(num_kv_blocks=64, attention_backend="cpu") as llm:
        widths.clear()
        result = answer(llm, prompts, max_tokens)
        llm.engine.scheduler.check_integrity()
    assert worst_error(result, wanted) < 1e-4
    assert set(widths) == {padded(num_requests), padded(2 * num_requests)}


def test_the_head_computes_its_rows_in_tiles(widths: Counter[int]) -> None:
    """All prompts in one step: 9 rows of logits of 9 * 16 tokens."""
    subject = Subject("phi3")
    with subject.make_llm(num_kv_blocks=64, attention_backend="cpu") as llm:
        widths.clear()
        answer(llm, random_prompts((16,) * 9), (1,) * 9)
    assert set(widths) == {144, 16}


@pytest.mark.parametrize("how", ["reference", "quantised", "experts", "regrouped"])
def test_whom_padding_would_cost_is_not_padded(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject({"experts": "mixtral", "regrouped": "qwen3_5"}.get(how, "llama"))
    if how == "quantised":
        nn.quantize(subject.model, group_size=32, bits=4)
        mx.eval(subject.model.parameters())
    rows: Counter[int] = Counter()
    embed = nn.Embedding.__call__, nn.QuantizedEmbedding.__call__

    def spy(compute: Any) -> Any:
        def counting(self: nn.Module, ids: mx.array) -> mx.array:
            rows[ids.size] += 1
            return compute(self, ids)

        return counting

    monkeypatch.setattr(nn.Embedding, "__call__", spy(embed[0]))
    monkeypatch.setattr(nn.QuantizedEmbedding, "__call__", spy(embed[1]))
    backend = "reference" if how == "reference" else "cpu"
    with subject.make_llm(num_kv_blocks=64, attention_backend=backend) as llm:
        rows.clear()
        answer(llm, random_prompts((2,) * 9), (6,) * 9)
    assert set(rows) == {9, 18}


@pytest.mark.parametrize("seed", range(8))
def test_attention_of_padding_is_zero_and_stores_nothing(seed: int) -> None:
    cpu, rng = CpuBackend(threads=2), np.random.default_rng(seed)
    world = World(Layer(6, 2, 64, 40), [Span(99, 100), Span(4, 5), Span(30, 30 + int(rng.integers(1, 40)))], seed)
    pool = cpu.make_pool(world.layer.spec, world.num_blocks)
    past = world.past()
    assert past is not None
    world.attend_step(cpu, pool, past, [slice(0, span.start) for span in world.spans])
    inputs = world.inputs([slice(span.start, span.end) for span in world.spans])
    num_tokens, num_more = inputs[0].shape[0], int(rng.integers(1, 16))
    filled = [mx.concatenate([rows, mx.full((num_more, *rows.shape[1:]), float("nan"))]) for rows in inputs]
    plan = cpu.plan(world.step())
    cpu.attend(pool, *(mx.ones_like(rows) for rows in filled), plan, scale=1.0)  # what the output held before
    out = np.array(cpu.attend(pool, *filled, plan, scale=world.layer.scale))
    assert float(np.abs(out[:num_tokens] - world.expected()).max()) < 3e-6
    assert (out[num_tokens:] == 0).all()
    assert np.isfinite(pool.keys).all()
    assert np.isfinite(pool.values).all()
