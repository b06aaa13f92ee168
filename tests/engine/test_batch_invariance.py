"""With `batch_invariant`, answers have the same bits alone and in any batch, after prefix hits and preemptions."""

from __future__ import annotations

import random

import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.batching.speculation import drafting
from mlx_server.bench.lab.invariance import WAYS
from mlx_server.engine.library.llm import Completion
from mlx_server.errors import ModelLoadError
from tests.drafters import Adversary, always
from tests.engine_worlds import NATIVE_BACKEND, make_llm, on_the_cpu, random_prompts
from tests.tiny_models import ARCHITECTURES

pytestmark = on_the_cpu

_ALSO = {name: [] if name in ("gemma3_text", "qwen3_moe") else [pytest.mark.full] for name in ARCHITECTURES}
"""Windows and experts by default; more only in long sweeps."""


def _params(rng: random.Random, seed: int) -> SamplingParams:
    """One of the ways to sample, with log-probabilities."""
    max_tokens = rng.randrange(1, 60)
    return SamplingParams(max_tokens=max_tokens, seed=seed, logprobs=3, ignore_eos=True, **rng.choice(WAYS))  # type: ignore[arg-type]


def _requests(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 300 tokens, half of which begin with those of one of three heads."""
    rng = random.Random(seed)
    heads = random_prompts((40, 100, 270), seed)
    tails = random_prompts([rng.choice((1, 2, 31, 32, 33, rng.randrange(3, 120))) for _ in range(count)], seed + 1)
    prompts = [rng.choice(heads) + tail if rng.random() < 0.5 else tail for tail in tails]
    return prompts, [_params(rng, index) for index in range(count)]


def _bits(completion: Completion) -> object:
    return completion.token_ids, completion.logprobs


def _alone(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[object]:
    """Each without anyone beside it or before it."""
    wanted = []
    for prompt, sampling in zip(prompts, params, strict=True):
        assert llm.engine.reset_prefix_cache()
        wanted += [_bits(answer) for answer in llm.generate([prompt], sampling, use_tqdm=False)]
    assert llm.stats().num_preemptions == 0
    return wanted


@pytest.mark.parametrize(
    ("architecture", "count", "settings"),
    [
        ("qwen3", 12, {}),
        ("qwen3", 9, {"kv_bits": "8"}),
        *(pytest.param(name, 9, {}, marks=_ALSO[name]) for name in ARCHITECTURES if name != "qwen3"),
    ],
)
def test_every_request_has_the_bits_that_it_has_alone(architecture: str, count: int, settings: dict[str, str]) -> None:
    prompts, params = _requests(count, seed=1)
    native = {"attention_backend": NATIVE_BACKEND, "batch_invariant": True, **settings}
    with make_llm(architecture, **native) as llm:
        wanted = _alone(llm, prompts, params)
    rng = random.Random(2)
    with make_llm(architecture, num_kv_blocks=20, max_num_seqs=24, max_num_batched_tokens=100, **native) as llm:
        answers, num_cached = dict[int, object](), 0
        order = rng.sample(range(count), count)
        while order:
            batch, order = order[: (size := rng.randrange(6, 33))], order[size:]
            got = llm.generate([prompts[i] for i in batch], [params[i] for i in batch], use_tqdm=False)
            num_cached += sum(one.num_cached_tokens for one in got)
            answers |= {i: _bits(one) for i, one in zip(batch, got, strict=True)}
        stats = llm.stats()
    assert [i for i in range(count) if answers[i] != wanted[i]] == []
    assert stats.num_preemptions > 0 or count < 40
    assert num_cached > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steps_of_more_rows_than_products_are_tried_with_change_no_bit(architecture: str) -> None:
    prompts = random_prompts([300, 250, 3, 280, 190, 190], seed=5)
    params = [SamplingParams(max_tokens=2, temperature=0.0, logprobs=3, ignore_eos=True)] * len(prompts)
    settings = {"attention_backend": NATIVE_BACKEND, "batch_invariant": True, "max_num_batched_tokens": 2048}
    with make_llm(architecture, **settings) as llm:
        wanted = _alone(llm, prompts, params)
        assert llm.engine.reset_prefix_cache()
        assert [_bits(done) for done in llm.generate(prompts, params, use_tqdm=False)] == wanted


def test_a_model_that_cannot_keep_it_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"reference attention backend, .* use --attention-backend auto"):
        make_llm("llama", attention_backend="reference", batch_invariant=True)


@pytest.mark.parametrize("architecture", [pytest.param(name, marks=_ALSO[name]) for name in ARCHITECTURES])
def test_drafts_change_no_bit(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of tokens nor of log-probabilities, whether the drafts are right or wrong, alone or beside others."""
    prompts, params = _requests(6, seed=3)
    native = {"attention_backend": NATIVE_BACKEND, "batch_invariant": True, "max_num_batched_tokens": 100}
    with make_llm(architecture, **native) as llm:
        wanted = _alone(llm, prompts, params)
        answers = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr("mlx_server.engine.draft_parts.NgramDrafter", Adversary)
    monkeypatch.setattr(drafting, "choose_depths", always)
    Adversary.learn(answers)
    with make_llm(architecture, speculate="ngram", **native) as llm:
        assert _alone(llm, prompts, params) == wanted
        assert [_bits(done) for done in llm.generate(prompts, params, use_tqdm=False)] == wanted
        stats = llm.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
