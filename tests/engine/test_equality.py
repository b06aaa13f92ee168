"""Greedy outputs equal plain mlx-lm's, token for token, however the engine batches, cuts, shares or preempts.

Float32 throughout. The tiny models' logits are far enough apart that float order decides no token.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
from _pytest.mark.structures import ParameterSet

from tests.engine_worlds import BACKENDS, answers, make_llm, plain_greedy, random_prompts
from tests.tiny_models import ARCHITECTURES, SLIDING_WINDOW

LENGTHS = (3, 31, 32, 33, 70, 150, 1, 64, 45)
MAX_TOKENS = (40, 3, 17, 1, 25, 9, 33, 12, 5)


def worlds(*kinds: tuple[object, ...]) -> list[ParameterSet]:
    """All architectures and backends with each of `kinds`. By default the reference backend has one architecture, with
    windows, and the first kind: the scheduler does not know the backend."""

    def is_default(architecture: str, backend: str, kind: tuple[object, ...]) -> bool:
        return backend != "reference" or (architecture, kind) == ("gemma3_text", kinds[0])

    return [
        pytest.param(*world, *kind, marks=[] if is_default(*world, kind) else [pytest.mark.full])
        for world in product(ARCHITECTURES, BACKENDS)
        for kind in kinds
    ]


IN_ALL = pytest.mark.parametrize(("architecture", "backend"), worlds(()))
IN_BOTH_MODES = pytest.mark.parametrize(("architecture", "backend", "async_scheduling"), worlds((True,), (False,)))


@IN_ALL
def test_alone(architecture: str, backend: str) -> None:
    prompts = random_prompts((50, 2 * SLIDING_WINDOW + 5))
    wanted = plain_greedy(architecture, prompts, (30, 30))
    with make_llm(architecture, attention_backend=backend) as llm:
        assert [answers(llm, [p], [30])[0] for p in prompts] == wanted


@IN_BOTH_MODES
def test_members_join_and_leave_at_different_steps(architecture: str, backend: str, async_scheduling: bool) -> None:
    prompts = random_prompts(LENGTHS)
    wanted = plain_greedy(architecture, prompts, MAX_TOKENS)
    with make_llm(
        architecture,
        attention_backend=backend,
        async_scheduling=async_scheduling,
        max_num_seqs=3,
        max_num_batched_tokens=48,
    ) as llm:
        assert answers(llm, prompts, MAX_TOKENS) == wanted
        stats = llm.stats()
    assert stats.num_model_calls == stats.num_steps
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("chunk", [1, 7, pytest.param(512, marks=pytest.mark.full)])
@IN_ALL
def test_prompts_cut_into_chunks(architecture: str, backend: str, chunk: int) -> None:
    prompts = random_prompts((70, 33, 20))
    wanted = plain_greedy(architecture, prompts, (8, 8, 8))
    with make_llm(architecture, attention_backend=backend, max_chunk_tokens=chunk) as llm:
        assert answers(llm, prompts, (8, 8, 8)) == wanted
        assert llm.stats().num_prompt_tokens_computed == 70 + 33 + 20


@IN_ALL
def test_prefix_hits(architecture: str, backend: str) -> None:
    head = random_prompts((100,))[0]
    prompts = [head + tail for tail in random_prompts((1, 20, 40), seed=1)]
    prompts.append(prompts[0])
    wanted = plain_greedy(architecture, prompts, (20, 20, 20, 20))
    with make_llm(architecture, attention_backend=backend) as llm:
        assert [answers(llm, [p], [20])[0] for p in prompts] == wanted
        # 3 full blocks of 100 shared tokens; the last prompt is a repeat: 101 tokens of which 96 hit.
        assert llm.stats().num_prompt_tokens_computed == 101 + (120 - 96) + (140 - 96) + (101 - 96)


@IN_BOTH_MODES
def test_forced_preemption(architecture: str, backend: str, async_scheduling: bool) -> None:
    """Eight requests want 2 to 4 blocks each, and there are 8."""
    rng = random.Random(7)
    prompts = random_prompts([rng.randrange(20, 60) for _ in range(8)])
    max_tokens = [rng.randrange(25, 45) for _ in prompts]
    wanted = plain_greedy(architecture, prompts, max_tokens)
    with make_llm(
        architecture,
        attention_backend=backend,
        async_scheduling=async_scheduling,
        num_kv_blocks=8,
        max_model_len=256,
    ) as llm:
        assert answers(llm, prompts, max_tokens) == wanted
        stats = llm.stats()
    assert stats.num_preemptions > 0
    assert stats.num_blocks == stats.num_free_blocks == 8 * stats.num_layer_groups
