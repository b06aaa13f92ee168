"""Modules that run group by group: nothing of the model changes, and what is kept of a request is its own."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ChunkedKVCache

from mlx_server.errors import InsufficientMemoryError
from mlx_server.outputs import ScheduledChunk
from mlx_server.runtime import memory
from mlx_server.runtime.attention.cache_views import row_groups
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.cache.row_pool import PlainRows
from mlx_server.runtime.cache.sparse_caches import WindowLayerCache
from mlx_server.runtime.memory import state_slots
from tests.conformance import Subject, answer, worst_error
from tests.engine_worlds import random_prompts


def _parameters(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(array)) for name, array in tree_flatten(model.parameters())]


@pytest.mark.parametrize("architecture", ["qwen3_5", "nemotron_h", "deepseek_v3", "longcat_flash", "mistral4"])
def test_a_model_that_is_served_keeps_its_tree_and_loses_every_stand_in(architecture: str) -> None:
    subject = Subject(architecture)
    model = subject.model
    parameters, modules = _parameters(model), dict(model.named_modules())
    spaces = {name: dict(vars(module)) for name, module in modules.items()}
    with subject.make_llm() as llm:
        answer(llm, random_prompts((40, 3)), (3, 3))
        assert _parameters(model) == parameters
        assert dict(model.named_modules()) == modules
        assert {name: dict(vars(module)) for name, module in modules.items()} != spaces
    assert {name: dict(vars(module)) for name, module in modules.items()} == spaces


def test_a_quantised_hybrid_is_served() -> None:
    subject = Subject("qwen3_5")
    nn.quantize(subject.model, group_size=32, bits=4)
    mx.eval(subject.model.parameters())
    prompts = random_prompts((45, 3, 20))
    wanted = subject.wanted(prompts, (6, 6, 6))
    with subject.make_llm() as llm:
        assert worst_error(answer(llm, prompts, (6, 6, 6)), wanted) < 1e-4


def test_requests_take_over_slots_without_what_was_in_them() -> None:
    """Two slots, two for states behind drafts, eight for kept ones, and more requests: each starts from nothing."""
    subject = Subject("lfm2")
    prompts, max_tokens = random_prompts((33, 1, 2, 40, 1, 1)), (5, 9, 3, 4, 2, 6)
    with subject.make_llm(max_num_seqs=2) as llm:
        result = answer(llm, prompts, max_tokens)
        states = llm.engine._parts.runner.cache.recurrent
        assert {array.shape[0] for cache in states for array in cache.state() if array.size > 1} == {2 + 2 + 8}
    assert worst_error(result, subject.wanted(prompts, max_tokens)) < 1e-4


def test_rows_are_grouped_by_what_a_rectangle_can_hold() -> None:
    tables = BlockTables()
    for name in "abcde":
        tables.add(name)
    tables.plan([ScheduledChunk("a", 0, 33, (0,) * 33, ((5, 9),), True, 0)])
    tables.plan([ScheduledChunk("b", 0, 3, (0,) * 3, ((2,),), True, 0)])
    plans = tables.plan(
        [
            ScheduledChunk("a", 33, 1, None, (), True, 1),
            ScheduledChunk("b", 3, 1, None, (), True, 1),
            ScheduledChunk("c", 0, 1, (0,), ((7,),), True, 0),
            ScheduledChunk("d", 0, 2, (0, 0), ((8,),), True, 0),
            ScheduledChunk("e", 0, 2, (0, 0), ((1,),), True, 0),
        ]
    )
    groups = row_groups(plans, batches_decodes=True)
    assert [(g.first, g.last, g.length, g.is_fresh) for g in groups] == [
        (0, 2, 1, False),
        (2, 3, 1, True),
        (3, 5, 2, True),
        (5, 7, 2, True),
    ]
    alone = row_groups(plans, batches_decodes=False)
    assert [(g.first, g.last) for g in alone] == [(0, 1), (1, 2), (2, 3), (3, 5), (5, 7)]
    decodes = groups[0]
    assert decodes.starts.tolist() == [33, 3]
    places = decodes.places[0]
    assert places.slots.numbers.tolist() == [9 * 32 + 1, 2 * 32 + 3]
    assert places.context_slots.numbers.shape == (2, 34)
    assert places.context_slots.numbers[0].tolist() == [5 * 32 + i for i in range(32)] + [9 * 32, 9 * 32 + 1]
    assert places.context_slots.numbers[1].tolist()[:4] == [2 * 32 + i for i in range(4)]
    assert [g.state_slots.numbers.tolist() for g in groups] == [[0, 1], [2], [3], [4]]
    plans = tables.plan([ScheduledChunk(name, 34, 1, None, (), True, 1) for name in "ba"])
    assert row_groups(plans, batches_decodes=True)[0].state_slots.numbers.tolist() == [1, 0]
    rows = mx.arange(14).reshape(7, 1, 2)
    assert mx.array_equal(mx.concatenate([g.flat(g.cut(rows)) for g in groups]), rows)


def test_a_window_that_is_a_state_returns_what_is_seen_of_it() -> None:
    tables = BlockTables()
    tables.add("a")
    tables.add("b")
    layer = WindowLayerCache(4, mx.zeros((1, 1, 9, 2)), mx.zeros((1, 1, 9, 0)))
    layer.allocate(PlainRows.zeros, 2)

    def step(*chunks: ScheduledChunk) -> tuple[list[list[float]], list[list[bool]]]:
        """The keys that each request gets, which are the positions of their tokens, and the mask."""
        (group,) = row_groups(tables.plan(chunks), batches_decodes=True)
        view = layer.view(group)
        mask = view.make_mask(group.length)
        positions = mx.array(group.starts, dtype=mx.float32)[:, None, None, None] + mx.arange(group.length)[:, None]
        new = mx.broadcast_to(positions, (group.num_requests, 1, group.length, 2))
        keys, values = view.update_and_fetch(new, new[..., :0])
        assert values.shape == (*keys.shape[:3], 0)
        return keys[:, 0, :, 0].tolist(), mask.reshape(-1, keys.shape[2]).tolist()

    keys, mask = step(ScheduledChunk("a", 0, 40, (0,) * 40, ((5, 9),), True, 0))
    assert keys == [list(range(40))]
    assert mask == [[max(0, row - 3) <= key <= row for key in range(40)] for row in range(40)]
    step(ScheduledChunk("b", 0, 2, (0,) * 2, ((2,),), True, 0))
    keys, mask = step(ScheduledChunk("a", 40, 1, None, (), True, 1), ScheduledChunk("b", 2, 1, None, (), True, 1))
    assert keys == [[37, 38, 39, 40], [0, 0, 1, 2]]
    assert mask == [[True] * 4, [False, True, True, True]]
    assert step(ScheduledChunk("a", 41, 1, None, (), True, 2)) == ([[38, 39, 40, 41]], [[True] * 4])
    keys, mask = step(ScheduledChunk("a", 42, 3, (0,) * 3, (), True, 3))
    assert keys == [[39, 40, 41, 42, 43, 44]]
    assert mask == [[True] * 4 + [False] * 2, [False] + [True] * 4 + [False], [False] * 2 + [True] * 4]


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_5"])
def test_pools_of_regrouped_layers_grow(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read by group and what is attended in place moves together; states stay where they are."""
    monkeypatch.setattr(memory, "_FIRST_BLOCKS", 2)
    subject = Subject(architecture)
    prompts, max_tokens = random_prompts((50, 90, 30)), (9, 8, 40)
    wanted = subject.wanted(prompts, max_tokens)
    with subject.make_llm(num_kv_blocks=None, kv_cache_memory="1MB") as llm:
        result = answer(llm, prompts, max_tokens)
        assert llm.stats().num_pool_growths > 0
    assert worst_error(result, wanted) < 1e-4


def test_room_for_states_is_bounded_by_memory(caplog: pytest.LogCaptureFixture) -> None:
    assert state_slots(0, 64, 0) == 64
    assert state_slots(2**20, 64, 2**30) == 64
    assert state_slots(2**20, 64, 40 * 2**20) == 8
    assert "at most 8 run at a time instead of 64" in caplog.text
    with pytest.raises(InsufficientMemoryError, match="one request takes 8 MiB, and 16 MiB are free"):
        state_slots(8 * 2**20, 64, 16 * 2**20)


def test_a_model_that_runs_as_a_whole_answers_in_the_order_of_the_rows() -> None:
    """It runs once for all decodes and once for each prompt."""
    subject = Subject("mistral4")
    prompts, max_tokens = random_prompts((3, 40, 5, 33, 1)), (12, 4, 9, 5, 8)
    wanted = subject.wanted(prompts, max_tokens)
    with subject.make_llm(max_num_batched_tokens=48, max_num_seqs=5) as llm:
        result = answer(llm, prompts, max_tokens)
    assert result.num_model_calls > result.num_steps
    assert worst_error(result, wanted) < 1e-4


@pytest.mark.parametrize("architecture", ["gemma4", "gemma3n", "iquestloopcoder"])
def test_layers_that_share_kv_attend_where_it_lies(architecture: str) -> None:
    """In one forward pass, each layer's K/V written once."""
    subject = Subject(architecture)
    prompts, max_tokens = random_prompts((40, 3, 33)), (6, 9, 4)
    wanted = subject.wanted(prompts, max_tokens)
    with subject.make_llm() as llm:
        assert llm.info.level == "ragged"
        result = answer(llm, prompts, max_tokens)
    assert result.num_model_calls == result.num_steps
    assert worst_error(result, wanted) < 1e-4


def test_who_attends_within_chunks_is_read_by_group_however_short_the_prompts_of_the_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until a context is longer than a chunk, plain attention in place would give the same logits."""
    subject = Subject("qwen3")
    monkeypatch.setattr(
        type(subject.model), "make_cache", lambda self: [ChunkedKVCache(8192) for _ in self.layers], raising=False
    )
    with subject.make_llm() as llm:
        assert llm.info.level == "mixers"
