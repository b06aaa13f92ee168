"""Models with sliding windows: their blocks behind the window are given up, and the answers stay plain mlx-lm's."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.worlds import Chunk, make_backend, step_of, step_rows
from mlx_lm.models.cache import make_prompt_cache

from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockMove, ScheduledChunk, SchedulerOutput
from mlx_server.runtime import memory
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.cache.kv_cache import PagedKVCache, PagedLayerCache, leaves
from mlx_server.runtime.cache.layer_pools import LayerGroup, group_layers
from mlx_server.runtime.cache.layers import discover_layers
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from tests.architectures import ARCHITECTURES, REFUSED, WINDOW, config_of
from tests.batching.worlds import count_held
from tests.conformance import CROWDED, Subject, answer, worst_error
from tests.engine_worlds import BACKENDS, random_prompts
from tests.tiny_models import Reference

TOLERANCE = 1e-4

# --- groups ---------------------------------------------------------------------------------------------------------


def test_layers_are_grouped_by_their_windows() -> None:
    assert group_layers([None, None]) == [LayerGroup(None, ((0,), (1,)))]
    assert group_layers([64, 64]) == [LayerGroup(64, ((0,), (1,)))]
    assert group_layers([64, None]) == [LayerGroup(None, ((1,),)), LayerGroup(64, ((0,),))]
    assert group_layers([8, 64, None, 8, 64, None]) == [
        LayerGroup(None, ((2,), (5,))),
        LayerGroup(8, ((0,), (3,))),
        LayerGroup(64, ((1,), (4,))),
    ]


def test_there_are_few_groups_whatever_the_layers_are() -> None:
    assert len(group_layers([7, *[None] * 40])) <= 12
    assert len(group_layers([*range(1, 15)])) == 14


def make_cache(windows: list[int | None], dims: list[int]) -> PagedKVCache:
    layers = [PagedLayerCache(w, LayerSpec(2, dim, dim, mx.float32)) for w, dim in zip(windows, dims, strict=True)]
    return PagedKVCache(layers, ReferenceBackend())


def test_layers_share_blocks_if_a_few_of_each_fill_the_same_memory() -> None:
    cache = make_cache([24, None, 24], [16, 16, 16])
    assert cache.windows == (None, 24, 24)
    assert cache.block_bytes == cache.paged[0].spec.block_bytes
    assert len({id(layer.pool) for layer in cache.paged}) == 1
    wider = make_cache([24, None, 24], [16, 32, 16])
    assert wider.windows == (None, 24)
    assert wider.block_bytes == wider.paged[1].spec.block_bytes == 2 * wider.paged[0].spec.block_bytes
    assert len({id(layer.pool) for layer in wider.paged}) == 1
    odd = make_cache([24, None, 24], [16, 17, 16])
    assert odd.windows == (None,)
    assert odd.block_bytes == sum(layer.spec.block_bytes for layer in odd.paged)
    assert len({id(layer.pool) for layer in odd.paged}) == 3


@pytest.mark.slow
def test_the_documentation_names_who_shares_blocks() -> None:
    text = (Path(__file__).parents[3] / "docs" / "architectures.md").read_text(encoding="utf-8")
    named = re.search(r"This applies to (.+?)\. ", text)
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for architecture in ARCHITECTURES:
        if architecture not in REFUSED and (subject := Subject(architecture)).is_windowed:
            cache = PagedKVCache(discover_layers(subject.model), ReferenceBackend())
            found[cache.windows != (None,)].add(architecture)
    assert named is not None
    assert set(named[1].split(", ")) == found[True]
    assert not found[False]


# --- plans ----------------------------------------------------------------------------------------------------------


def test_a_plan_names_no_block_behind_the_window() -> None:
    tables = BlockTables((None, 40))
    for name in "ab":
        tables.add(name)
    tables.plan([ScheduledChunk("a", 0, 100, None, ((1, 2, 3, 4), (5, 6, 7, 8)), False, 0)])
    tables.plan([ScheduledChunk("b", 0, 2, None, ((9,), (10,)), False, 0)])
    tables.move((BlockMove(7, 0),))
    full, windowed = tables.plan(
        [
            ScheduledChunk("b", 2, 1, (0,), (), True, 0),
            ScheduledChunk("a", 100, 40, (0,) * 40, ((11,), (12,)), True, 0),
        ]
    )
    assert full.block_tables.tolist() == [[9, 0, 0, 0, 0], [1, 2, 3, 4, 11]]
    assert windowed.block_tables.tolist() == [[10, 0, 0, 0, 0], [0, 6, 0, 8, 12]]  # position 100 sees 61 to 100
    assert windowed.slot_mapping.tolist()[:2] == [10 * BLOCK_SIZE + 2, 8 * BLOCK_SIZE + 4]
    assert windowed.slot_mapping.tolist()[-1] == 12 * BLOCK_SIZE + 11
    assert full.positions is windowed.positions


ATTENTION: dict[str, Callable[[], Any]] = {
    "reference": ReferenceBackend,
    "cpu": lambda: CpuBackend(threads=2),
    "metal": make_backend,
}


@pytest.mark.parametrize("name", ATTENTION)
def test_what_stands_behind_the_window_does_not_count(name: str) -> None:
    """A decode and a chunk with a window of 40: the same with their first blocks in place and with block 0, where
    another request writes, in their stead."""
    spec = LayerSpec(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
    outs = []
    for is_null in (False, True):
        backend = ATTENTION[name]()
        pool = backend.make_pool(spec, 10, 10)
        first, second = ((0, 2, 3, 4), (0, 6, 7, 8)) if is_null else ((1, 2, 3, 4), (5, 6, 7, 8))
        steps = (
            (0, [Chunk((1, 2, 3, 4), 0, 127), Chunk((5, 6, 7, 8), 0, 100), Chunk((0,), 0, 31)]),
            (2, [Chunk(first, 127), Chunk((0,), 31), Chunk(second, 100, 20)]),
        )
        for seed, (num_decodes, chunks) in enumerate(steps):
            step = step_of(chunks, num_decodes)
            queries, keys, values = step_rows(seed, spec, 4, step.num_tokens)
            out = backend.attend(pool, queries, keys, values, backend.plan(step), scale=0.2, window=40)
            mx.eval(out, *backend.state(pool))
        outs.append(np.array(out))
    np.testing.assert_array_equal(*outs)


# --- whole engines --------------------------------------------------------------------------------------------------

WINDOWED = {
    "gemma3_text": (None, WINDOW),
    "gpt_oss": (None, WINDOW),
    "cohere2": (None, WINDOW),
    "olmo3": (None, WINDOW),
    "gemma3n": (None, WINDOW),
    "baichuan_m1": (None, WINDOW),
    "recurrent_gemma": (WINDOW,),
    "gemma4_text": (None, WINDOW),
    "mimo_v2_flash": (None, WINDOW),
}
"""Architectures whose layers share blocks, at several levels, and the windows that occur in them. In the last two,
layers with a window store K/V of other shapes than those without."""


def deep(architecture: str) -> Subject:
    """With more windowed layers than others, where the configuration tells."""
    config = config_of(architecture)
    if architecture == "gemma4_text":
        types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
        config |= {"num_hidden_layers": 8, "num_kv_shared_layers": 3, "layer_types": [*types, *types[:3]]}
    elif architecture == "mimo_v2_flash":
        config |= {"num_hidden_layers": 4, "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 0, 1]}
        config |= {"num_key_value_heads": 1, "v_head_dim": 12}
    elif "sliding_window_pattern" in config:
        config |= {"num_hidden_layers": 7, "sliding_window_pattern": 3}
    elif "layer_types" in config and architecture in ("gpt_oss", "olmo3"):
        types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
        config |= {"num_hidden_layers": 4, "layer_types": types}
    return Subject(architecture, config)


CROWD = random_prompts((150, 61, 33, 170, 5), seed=3), (20, 12, 35, 9, 40)


@lru_cache(maxsize=1)
def crowd_alone(architecture: str) -> tuple[Subject, list[Reference]]:
    """A model and plain mlx-lm's answers to `CROWD`, for successive tests of one architecture."""
    subject = deep(architecture)
    return subject, subject.wanted(*CROWD)


@pytest.mark.parametrize(
    ("architecture", "backend"),
    [
        pytest.param(
            architecture,
            backend,
            marks=[pytest.mark.full] if architecture != "gemma4_text" and is_more else [],
        )
        for architecture in WINDOWED
        for backend in BACKENDS
        for is_more in [backend == "reference" or architecture in ("cohere2", "olmo3")]
    ],
)
def test_answers_beyond_the_window_are_those_given_alone(architecture: str, backend: str) -> None:
    """Chunks, joins, preemptions, and prompts again, in a pool that is too small for all of them."""
    (subject, wanted), (prompts, max_tokens) = crowd_alone(architecture), CROWD
    with subject.make_llm(attention_backend=backend, **{**CROWDED, "num_kv_blocks": 10}) as llm:
        assert set(llm.info.windows) == set(WINDOWED[architecture])
        first = answer(llm, prompts, max_tokens)
        again = answer(llm, prompts[:2], max_tokens[:2])
        stats, num_groups = llm.stats(), len(llm.info.windows)
    assert stats.num_block_evictions > 0
    assert stats.num_free_blocks == stats.num_blocks == 10 * num_groups
    assert max(worst_error(first, wanted), worst_error(again, wanted[:2])) < TOLERANCE


@pytest.mark.parametrize(
    "architecture", [pytest.param("gemma3_text", marks=pytest.mark.full), "recurrent_gemma", "gemma4_text"]
)
def test_pools_that_grow_and_are_cut_keep_what_windows_see(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth step begins with a cut by all that is idle, which moves blocks."""
    monkeypatch.setattr(memory, "_FIRST_BLOCKS", 2)
    schedule, num_steps = ContinuousBatchingScheduler.schedule, count()

    def cut_often(self: ContinuousBatchingScheduler, now: float) -> SchedulerOutput | None:
        if next(num_steps) % 5 == 4:
            self.blocks.shrink(self.blocks.num_free_blocks)
        self.check_integrity()
        return schedule(self, now)

    monkeypatch.setattr(ContinuousBatchingScheduler, "schedule", cut_often)
    subject = deep(architecture)
    prompts, max_tokens = random_prompts((150, 90, 70), seed=5), (20, 40, 60)
    wanted = subject.wanted(prompts, max_tokens)
    with subject.make_llm(num_kv_blocks=None, kv_cache_memory="2MB", max_num_batched_tokens=64) as llm:
        first = answer(llm, prompts, max_tokens)
        again = answer(llm, prompts, max_tokens)
        stats = llm.stats()
    assert min(stats.num_pool_growths, stats.num_pool_cuts, stats.num_blocks_moved) > 4
    assert max(worst_error(first, wanted), worst_error(again, wanted)) < TOLERANCE


@pytest.mark.parametrize("architecture", ["gemma3_text", "gemma4_text"])
def test_the_next_turn_hits_what_the_last_one_left(architecture: str) -> None:
    subject = deep(architecture)
    (prompt,) = random_prompts((200,), seed=6)
    with subject.make_llm() as llm:
        first = answer(llm, [prompt], [30]).completions[0]
        turn = [*prompt, *first.token_ids, *random_prompts((20,), seed=7)[0]]
        second = answer(llm, [turn], [5])
    assert second.completions[0].num_cached_tokens == (200 + 29) // BLOCK_SIZE * BLOCK_SIZE
    assert worst_error(second, subject.wanted([turn], [5])) < TOLERANCE


# --- long contexts --------------------------------------------------------------------------------------------------

CONTEXT = 2**15
LONG_WINDOW, LONG_CHUNK = 1000, 512
MAX_HELD = 49
"""Blocks of a window and a chunk, wherever the window begins in its first."""

_SLIDING = ["sliding_attention"] * 3
LONG: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 4, "sliding_window_pattern": 4},
    "gpt_oss": {"num_hidden_layers": 4, "layer_types": [*_SLIDING, "full_attention"]},
    "gemma4_text": {
        "num_hidden_layers": 7,
        "layer_types": [*_SLIDING, "full_attention", *_SLIDING],
        "num_kv_shared_layers": 0,
    },
}
"""Architectures whose layers store the same, and one whose windowed layers store half as much as the others."""


def long(architecture: str) -> Subject:
    config = {**config_of(architecture), **LONG[architecture], "hidden_size": 32, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Subject(architecture, {**config, **heads, "max_position_embeddings": CONTEXT, "sliding_window": LONG_WINDOW})


def greedy_in_chunks(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Plain mlx-lm's answer, the prompt in parts: attention over all of it at once would take 32 GiB."""
    cache, ids = make_prompt_cache(model), prompt
    answered: list[int] = []
    while len(answered) < max_tokens:
        for first in range(0, len(ids), LONG_CHUNK):
            logits = model(mx.array([ids[first : first + LONG_CHUNK]]), cache=cache)
            mx.eval(logits)
        ids = [int(mx.argmax(logits[0, -1]))]
        answered += ids
    return answered


def answer_long(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """A prompt of nearly 32,768 tokens and its greedy answer from a real engine, whose pool has the blocks for one
    such request and few more: what its groups hold is counted whenever blocks are taken."""
    held = count_held(monkeypatch)
    layers = discover_layers(subject.model)
    windows = PagedKVCache(layers, ReferenceBackend()).windows
    assert sorted(windows, key=str) == [*[LONG_WINDOW] * (len(windows) - 1), None]
    num_blocks = CONTEXT // BLOCK_SIZE + MAX_HELD * (len(windows) - 1)
    (prompt,) = random_prompts((CONTEXT - 8,), seed=8)
    with subject.make_llm(
        max_model_len=CONTEXT,
        num_kv_blocks=-(-num_blocks // len(windows)),
        max_num_batched_tokens=LONG_CHUNK,
    ) as llm:
        (completion,) = answer(llm, [prompt], [8]).completions
        assert llm.info.windows == windows
        stats = llm.stats()
    for window, column in zip(windows, zip(*held, strict=True), strict=True):
        if window is None:
            assert max(column) == CONTEXT // BLOCK_SIZE
        else:
            assert LONG_WINDOW // BLOCK_SIZE < max(column) <= MAX_HELD
    all_bytes = sum(layer.spec.block_bytes for layer in leaves(layers) if isinstance(layer, PagedLayerCache))
    assert stats.kv_pool_bytes < 0.4 * all_bytes * CONTEXT // BLOCK_SIZE
    return prompt, list(completion.token_ids)


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[pytest.mark.full] if name != "gpt_oss" else []) for name in LONG]
)
def test_windows_of_a_long_prompt_hold_a_window_and_a_chunk(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_long(long(architecture), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("architecture", LONG)
def test_answers_to_long_prompts_are_those_given_alone(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = long(architecture)
    prompt, token_ids = answer_long(subject, monkeypatch)
    assert token_ids == greedy_in_chunks(subject.model, prompt, len(token_ids))
