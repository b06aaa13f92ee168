"""K/V in 8 or 4 bits, or K in 8 and V in 4: less memory, bounded errors, and answers that still depend on nothing but
the prompt."""

from __future__ import annotations

import logging
import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.config import FEWER_KV
from mlx_server.errors import ConfigError, ModelLoadError
from mlx_server.runtime import memory
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.cache import kv_cache
from mlx_server.runtime.cache.block_contents import BlockContents
from mlx_server.runtime.cache.kv_cache import PagedKVCache, PagedLayerCache
from mlx_server.runtime.cache.row_pool import KvBits, QuantizedRows, Slots, rotate, row_bytes
from mlx_server.runtime.checks import kv_loss
from mlx_server.runtime.checks.kv_loss import KvLoss
from mlx_server.runtime.kernels.trials import exact_rows
from tests.architectures import config_of
from tests.conformance import CROWDED, LENGTHS, MAX_TOKENS, Subject, answer, preempt_every
from tests.engine_worlds import random_prompts

WIDER = {"head_dim": 64, "global_head_dim": 128, "kv_lora_rank": 64, "qk_rope_head_dim": 32}
"""Dimensions that can be quantised."""

KINDS = [
    *("qwen3", "deepseek_v3"),
    *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_next", "gpt_oss", "gemma3_text", "gemma4_text")),
]


@pytest.fixture(autouse=True)
def unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights at random lose more than a model's that has learnt something."""
    monkeypatch.setattr(kv_loss, "_MAX_DIVERGENCE", np.inf)


def wide(architecture: str) -> Subject:
    return Subject(architecture, {**config_of(architecture), **WIDER})


def first_errors(subject: Subject, bits: str) -> float:
    """Worst difference of a likely first token's log-probability, relative to the largest logit."""
    prompts = random_prompts((70, 33, 5, 50), seed=4)  # of which no token is a tie between two experts
    wanted = subject.wanted(prompts, [1] * 4)
    with subject.make_llm(kv_bits=bits) as llm:
        # The second round reads prefixes that the first has written.
        rounds = [answer(llm, prompts, [1] * 4).completions for _ in range(2)]
    worst = 0.0
    for completions in rounds:
        for completion, reference in zip(completions, wanted, strict=True):
            row = (reference.logits - mx.logsumexp(reference.logits, axis=-1, keepdims=True)).tolist()[0]
            largest = float(mx.abs(reference.logits).max())
            top = completion.logprobs[0].top
            worst = max(worst, *(abs(entry.logprob - row[entry.token_id]) / largest for entry in top))
    return worst


@pytest.mark.parametrize("architecture", KINDS)
def test_errors_are_bounded_and_grow_with_fewer_bits(architecture: str) -> None:
    subject = wide(architecture)
    full, eight, mixed, four = (first_errors(subject, bits) for bits in ("full", "8", "k8v4", "4"))
    assert full < 1e-5 < eight < 0.05
    assert eight < mixed
    assert eight < four < 0.8


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("bits", ["8", "k8v4", "4"])
def test_answers_do_not_depend_on_who_else_runs(architecture: str, bits: str) -> None:
    """Chunks apart: a chunk sees its own K/V as the pool has them, so where it is cut changes nothing."""
    subject = wide(architecture)
    prompts = random_prompts(LENGTHS)
    with subject.make_llm(kv_bits=bits, max_num_seqs=1, prefix_caching=False) as llm:
        alone = [list(c.token_ids) for c in answer(llm, prompts, MAX_TOKENS).completions]
    with subject.make_llm(kv_bits=bits, **CROWDED) as llm:
        preempt_every(7, llm.engine.scheduler)
        crowded = answer(llm, prompts, MAX_TOKENS)
        answer(llm, prompts[2:3], MAX_TOKENS[2:3])
        again = answer(llm, prompts[2:3], MAX_TOKENS[2:3])
    assert crowded.num_preemptions > 0
    assert [list(c.token_ids) for c in crowded.completions] == alone
    assert list(again.completions[0].token_ids) == alone[2]
    assert again.completions[0].num_cached_tokens == 64


def test_a_block_takes_what_its_bits_take() -> None:
    sizes = {}
    for bits in ("full", "8", "k8v4", "4"):
        with wide("qwen3").make_llm(kv_bits=bits) as llm:
            sizes[bits] = llm.info.block_bytes
            pools = [layer.pool.contents[0] for layer in llm.engine._parts.runner.cache.paged]
            held = sum(pool.keys.nbytes + pool.values.nbytes for pool in pools)
            assert held == llm.info.num_blocks * llm.info.block_bytes
    # A scale and a bias of float32 for 32 numbers.
    assert sizes["8"] / sizes["full"] == (64 + 16) / 256
    assert sizes["k8v4"] / sizes["full"] == (48 + 16) / 256
    assert sizes["4"] / sizes["full"] == (32 + 16) / 256
    assert row_bytes(128, mx.float16, 8) / row_bytes(128, mx.float16, None) == (128 + 16) / 256
    assert row_bytes(128, mx.float16, 4) / row_bytes(128, mx.float16, None) == (64 + 16) / 256


@pytest.mark.parametrize("architecture", ["qwen3", "gemma4_text"])
def test_quantised_pools_grow(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second, layers of two shapes share blocks."""
    monkeypatch.setattr(memory, "_FIRST_BLOCKS", 2)
    subject = wide(architecture)
    prompts = random_prompts((50, 90))
    answers = []
    for settings in ({"num_kv_blocks": None, "kv_cache_memory": "1MB"}, {}):
        with subject.make_llm(kv_bits="k8v4", **settings) as llm:
            answers.append([c.token_ids for c in answer(llm, prompts, (40, 8)).completions])
            assert (llm.stats().num_pool_growths > 0) == bool(settings)
    assert answers[0] == answers[1]


def test_rows_come_back_close_to_what_was_written() -> None:
    rows = QuantizedRows.zeros((64, 2, 32), mx.float32, 8)
    written = mx.random.normal((3, 2, 32), key=mx.random.key(0))
    slots = Slots(np.array([5, 63, 0]))
    rows.write(slots, written)
    assert float(mx.abs(rows.read(slots) - written).max()) < 0.02
    assert not rows.read(Slots(np.array([[1, 2]]))).any()
    kept = rows.take(Slots(np.array([63, 63, 1])))
    assert mx.array_equal(kept.read(Slots(np.array([0]))), rows.read(Slots(np.array([63]))))


def test_what_cannot_be_quantised_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="--kv-bits needs head dimensions that are multiples of 32; one is 16"):
        Subject("llama").make_llm(kv_bits="8")


@pytest.mark.parametrize(("bits", "words"), [("8", "8 bits"), ("k8v4", "8 and 4 bits"), ("4", "4 bits")])
def test_they_are_read_by_the_backend_that_reads_whole_ones(
    bits: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    subject = wide("qwen3")
    with subject.make_llm() as llm:
        name = llm.info.backend
    assert name != "reference"
    with caplog.at_level(logging.INFO), subject.make_llm(kv_bits=bits) as llm:
        assert llm.info.backend == name
    share = {"8": 31, "k8v4": 25, "4": 19}[bits]
    assert f"K/V in {words} take {share} % of the memory and are read by the {name} backend" in caplog.text
    with subject.make_llm(kv_bits=bits, attention_backend="reference") as llm:
        assert llm.info.backend == "reference"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_for_self_tests_lose_nothing(bits: int, dtype: mx.Dtype) -> None:
    for dim, group_size in ((64, 32), (96, 32)):
        rows = exact_rows(np.random.default_rng(1), (50, 3, dim), dtype, bits)
        quantised = mx.quantize(rows, group_size=group_size, bits=bits)
        assert mx.array_equal(mx.dequantize(*quantised, group_size=group_size, bits=bits), rows)
        assert len(np.unique(np.array(rows.astype(mx.float32)))) > 2**bits


def outlying(factor: float) -> Subject:
    """A model some of whose key channels are so many times as large, and the queries' as much smaller."""
    subject = Subject("qwen3", {**config_of("qwen3"), **WIDER})
    for layer in subject.model.layers:
        for norm, by in ((layer.self_attn.k_norm, factor), (layer.self_attn.q_norm, 1 / factor)):
            places = mx.arange(norm.weight.size) % 32 == 5  # both numbers of a rotary pair
            norm.weight = mx.where(places, by * norm.weight, norm.weight)
    mx.eval(subject.model.parameters())
    return subject


def test_rotating_keeps_products_and_spreads_what_is_large() -> None:
    for dim in (64, 96, 576):
        one, other = mx.random.normal((7, 3, dim)), mx.random.normal((7, 3, dim))
        products = (rotate(one) * rotate(other)).sum(axis=-1)
        assert mx.allclose(products, (one * other).sum(axis=-1), atol=1e-4)
    assert mx.allclose(rotate(mx.array([[8.0] + [0.0] * 63])), mx.ones((1, 64)))


def test_outlying_keys_lose_less_rotated(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def divergence() -> float:
        with caplog.at_level(logging.INFO), outlying(20.0).make_llm(kv_bits="4"):
            found = re.findall(r"distributions are (\S+) nats", caplog.text)
        return float(found[-1])

    rotated = divergence()
    monkeypatch.setattr(kv_cache, "rotate", lambda rows: rows)
    assert rotated < 0.6 * divergence()


def test_what_loses_too_much_is_refused_and_what_loses_much_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subject = wide("qwen3")
    with caplog.at_level(logging.INFO), subject.make_llm(kv_bits="8"):
        pass
    assert re.search(r"On fixed tokens, with K/V in 8 bits the distributions are \S+ nats from those", caplog.text)
    monkeypatch.setattr(kv_loss, "_WARNED_DIVERGENCE", 0.0)
    with caplog.at_level(logging.WARNING), subject.make_llm(kv_bits="8"):
        pass
    assert "This model's answers get worse: with K/V in 8 bits" in caplog.text
    assert "Better: --kv-bits full." in caplog.text
    monkeypatch.setattr(kv_loss, "_MAX_DIVERGENCE", 1e-9)
    with pytest.raises(
        ModelLoadError, match=r"lose too much with this model: with K/V in 4 bits .* with --kv-bits k8v4, 8 or full"
    ):
        subject.make_llm(kv_bits="4")


def test_the_loss_of_the_same_logits_is_none() -> None:
    logits = mx.random.normal((5, 11))
    assert KvLoss.of(logits, logits) == KvLoss(1.0, 0.0)
    worse = KvLoss.of(logits, -logits)
    assert worse.agreement == 0.0
    assert worse.divergence > 0.1


@pytest.mark.parametrize(
    ("most", "chosen", "tried"),
    [(10.0, "4 bits", ["4 bits"]), (0.003, "8 bits", ["4 bits", "8 and 4 bits", "8 bits"]), (0.0, None, None)],
)
def test_auto_takes_the_fewest_bits_that_lose_little(
    most: float,
    chosen: str | None,
    tried: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kv_loss, "_WARNED_DIVERGENCE", most)
    prompts = random_prompts((70, 33), seed=4)
    subject = wide("qwen3")
    with caplog.at_level(logging.INFO), subject.make_llm(kv_bits="auto") as llm:
        got, backend = [c.token_ids for c in answer(llm, prompts, [8, 8]).completions], llm.info.backend
    measured = re.findall(r"On fixed tokens, with K/V in (.*?) the", caplog.text)
    assert measured == (tried or ["4 bits", "8 and 4 bits", "8 bits"])
    assert re.findall(r"K/V in (.*?) take", caplog.text) == ([chosen] if chosen else [])
    assert ("K/V stay unquantised" in caplog.text) == (chosen is None)
    with subject.make_llm(kv_bits=chosen.removesuffix(" bits") if chosen else "full") as llm:
        assert llm.info.backend == backend
        assert [c.token_ids for c in answer(llm, prompts, [8, 8]).completions] == got


def test_auto_leaves_whole_what_cannot_be_quantised(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Subject("llama").make_llm(kv_bits="auto") as llm:
        assert len(answer(llm, random_prompts((40,)), [4]).completions[0].token_ids) == 4
    assert "K/V stay unquantised: --kv-bits needs head dimensions that are multiples of 32; one is 16." in caplog.text


@pytest.mark.parametrize(("architecture", "has_index"), [("deepseek_v32", True), ("longcat_flash", False)])
def test_keys_by_which_layers_choose_tokens_stay_whole(
    architecture: str, has_index: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss of a choice among many tokens shows only in texts longer than those measured."""
    subject = Subject(architecture, {**config_of(architecture), **WIDER, "index_head_dim": 64})
    with caplog.at_level(logging.WARNING), subject.make_llm(kv_bits="8") as llm:
        bits = [cache.spec.bits for cache in llm.engine._parts.runner.cache.paged]
    assert bits == [KvBits(8, 8), None if has_index else KvBits(8, 8)] * (len(bits) // 2)
    assert ("not measured: its layers choose the tokens that they attend to" in caplog.text) == has_index
    with caplog.at_level(logging.INFO), subject.make_llm(kv_bits="auto"):
        assert ("K/V stay unquantised: its layers choose the tokens" in caplog.text) == has_index


def test_blocks_of_other_bits_are_other_blocks_on_disk() -> None:
    layouts = []
    for bits in (None, *map(KvBits.of, FEWER_KV), KvBits(4, 8)):
        cache = PagedKVCache([PagedLayerCache(None, LayerSpec(2, 64, 64, mx.float32, bits))], ReferenceBackend())
        cache.allocate(2, num_slots=1)
        layouts.append(tuple(BlockContents(cache).layout()))
    assert len(set(layouts)) == len(layouts)
