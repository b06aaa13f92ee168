"""Drafts of models with recurrent state, which cannot be cut back: answers stay what they are without, token for
token, and so do the states that are kept for prefixes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.batching.speculation import drafting
from mlx_server.config import BLOCK_SIZE
from mlx_server.engine.library.llm import Completion
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.cache.kv_cache import StateLayerCache
from mlx_server.runtime.cache.row_pool import Slots
from tests.architectures import RECURRENT
from tests.conformance import Subject
from tests.drafters import Adversary, always
from tests.engine_worlds import greedy, random_prompts
from tests.runtime.models.test_vlm_text_parts import SERVED

_PROMPTS = random_prompts((33, 70, 53))
_SAMPLING = (
    greedy(40),
    SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=30, temperature=0.9, seed=2, top_p=0.9, presence_penalty=1.5, frequency_penalty=0.5),
)


_SOME = ("qwen3_next", "mamba2", "lfm2", "rwkv7", "falcon_h1", "kimi_linear", "jamba", "recurrent_gemma")
"""One of each kind of recurrent state."""


@pytest.fixture(autouse=True)
def wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are right but for some at random places, and all are tried."""
    monkeypatch.setattr("mlx_server.engine.draft_parts.NgramDrafter", Adversary)
    monkeypatch.setattr(drafting, "choose_depths", always)


def _plain(llm: LLM, prompts: list[list[int]], sampling: tuple[SamplingParams, ...]) -> list[Completion]:
    """Answers without drafts, which are what is drafted from then on. Nothing of it stays cached."""
    plain = llm.generate(prompts, [replace(params, speculate=False) for params in sampling], use_tqdm=False)
    Adversary.learn(plain)
    assert llm.engine.reset_prefix_cache()
    assert llm.stats().num_draft_tokens == 0
    return plain


@pytest.mark.parametrize(
    "architecture",
    [
        *[name if name in _SOME else pytest.param(name, marks=pytest.mark.full) for name in RECURRENT],
        "deepseek_v4",
        pytest.param("glm5_next", marks=pytest.mark.full),
    ],
)
def test_drafts_change_no_answer(architecture: str) -> None:
    """Greedy and sampled, with penalties and log-probabilities, in a pool so small that requests are preempted."""
    subject = Subject(architecture, SERVED.get(architecture))
    subject.wanted(_PROMPTS[1:2], [2])  # makes constants that belong to this thread
    with subject.make_llm(num_kv_blocks=8, speculate="ngram") as llm:
        plain = _plain(llm, _PROMPTS, _SAMPLING)
        drafted = llm.generate(_PROMPTS, _SAMPLING, use_tqdm=False)
        stats = llm.stats()

    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    for with_drafts, without in zip(drafted[1].logprobs, plain[1].logprobs, strict=True):
        assert with_drafts.token.logprob == pytest.approx(without.token.logprob, abs=5e-4)
        assert [t.token_id for t in with_drafts.top] == [t.token_id for t in without.top]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("architecture", ["qwen3_next", "lfm2", "mamba2", "deepseek_v4"])
def test_states_kept_of_drafted_outputs_are_right(architecture: str) -> None:
    """A prompt that goes on from most of an answer resumes at the last block boundary of that, which a step with drafts
    has reached, and answers what the first request did."""
    prompt = random_prompts((20,))[0]
    with Subject(architecture, SERVED.get(architecture)).make_llm(speculate="ngram") as llm:
        for length in (58, 61, 65):
            (plain,) = _plain(llm, [prompt], (greedy(length),))
            (drafted,) = llm.generate([prompt], greedy(length), use_tqdm=False)
            assert drafted.token_ids == plain.token_ids
            longer = [*prompt, *plain.token_ids[:-5]]
            (again,) = llm.generate([longer], greedy(5, speculate=False), use_tqdm=False)
            assert again.token_ids == plain.token_ids[-5:]
            assert again.num_cached_tokens == (len(longer) - 1) // BLOCK_SIZE * BLOCK_SIZE
            llm.engine.scheduler.speculation.counters.num_draft_tokens = 0


def test_a_state_before_drafts_is_left_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No state is copied, neither for drafts nor when they were wrong."""
    copies: list[int] = []
    copy = StateLayerCache.copy

    def counted(self: StateLayerCache, sources: Slots, destinations: Slots) -> None:
        copies.append(sources.numbers.size)
        copy(self, sources, destinations)

    monkeypatch.setattr(StateLayerCache, "copy", counted)
    prompt = random_prompts((20,))[0]
    with Subject("mamba2").make_llm(speculate="ngram", prefix_caching=False) as llm:
        _plain(llm, [prompt], (greedy(60),))
        llm.generate([prompt], greedy(60), use_tqdm=False)
        stats = llm.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert copies == []


def test_a_layer_that_leaves_part_of_its_state_unwritten_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts would go on from a slot that holds another request's part."""
    write = StateLayerCache.write

    def forgetful(self: StateLayerCache, index: int, slots: Slots, values: object) -> None:
        if index == 0 or slots.numbers[0] != 3:  # the slot behind the probe's drafts
            write(self, index, slots, values)  # type: ignore[arg-type]

    monkeypatch.setattr(StateLayerCache, "write", forgetful)
    with pytest.raises(ModelLoadError, match="its logits differ"):
        Subject("mamba2").make_llm()
