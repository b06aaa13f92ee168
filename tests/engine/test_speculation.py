"""Answers with drafts are the answers without them, token for token, whatever the drafts are."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.batching.speculation import drafting
from mlx_server.engine.library.llm import Completion
from mlx_server.runtime.checks import kv_loss
from tests.adapter_files import write_adapter, write_model
from tests.architectures import ARCHITECTURES as ALL_ARCHITECTURES
from tests.architectures import RECURRENT, REFUSED
from tests.conformance import Subject
from tests.drafters import Adversary, always
from tests.engine_worlds import greedy, make_folder, make_llm, random_prompts
from tests.tiny_models import ARCHITECTURES, SLIDING_WINDOW

_PROMPTS = random_prompts((33, 70, 2 * SLIDING_WINDOW + 5, 20, 64))
_SAMPLING = (
    SamplingParams(max_tokens=35, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=32, temperature=0.9, seed=2, top_p=0.9, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(max_tokens=25, temperature=0.8, seed=3, repetition_penalty=1.4, min_tokens=10),
    SamplingParams(max_tokens=40, temperature=1.2, seed=4, top_k=20, ignore_eos=True, speculate=False),
)


@pytest.fixture(autouse=True)
def wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are right but for some at random places, and all are tried."""
    monkeypatch.setattr("mlx_server.engine.draft_parts.NgramDrafter", Adversary)
    monkeypatch.setattr(drafting, "choose_depths", always)
    monkeypatch.setattr(Adversary, "rightness", 0.8)
    monkeypatch.setattr(Adversary, "rng", random.Random(0))


def check_equal(drafted: list[Completion], plain: list[Completion]) -> None:
    """All that a client sees, and of log-probabilities what rounding leaves."""
    for one, other in zip(drafted, plain, strict=True):
        for mine, wanted in zip(one.outputs, other.outputs, strict=True):
            assert replace(mine, logprobs=()) == replace(wanted, logprobs=())
            for with_drafts, without in zip(mine.logprobs, wanted.logprobs, strict=True):
                tops, wanted_tops = ((p.token, *p.top) for p in (with_drafts, without))
                for entry, known in zip(tops, wanted_tops, strict=True):
                    assert entry.token_id == known.token_id
                    assert entry.logprob == pytest.approx(known.logprob, abs=1e-4)


@cache
def _plain(architecture: str) -> list[Completion]:
    return _generate(architecture, speculate="off")


def _generate(architecture: str, **settings: object) -> list[Completion]:
    with make_llm(architecture, **settings) as llm:
        done = llm.generate(_PROMPTS, _SAMPLING, use_tqdm=False)
        assert llm.stats().num_free_blocks == llm.stats().num_blocks
        counters = llm.engine.scheduler.speculation
        assert (counters is None) == (settings["speculate"] == "off")
        if counters is not None:
            assert counters.counters.num_accepted_tokens > 0
            assert counters.counters.num_accepted_tokens < counters.counters.num_draft_tokens
    return done


@pytest.mark.parametrize("num_blocks", [None, 14])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafts_change_no_answer(architecture: str, num_blocks: int | None) -> None:
    """Greedy and sampled, with penalties and logprobs, beside one that does not draft; with a small pool, preempted."""
    plain = _plain(architecture)
    Adversary.learn(plain)
    settings = {} if num_blocks is None else {"num_kv_blocks": num_blocks, "max_model_len": 320}
    check_equal(_generate(architecture, speculate="ngram", **settings), plain)


@pytest.mark.full
@pytest.mark.parametrize("architecture", [name for name in ALL_ARCHITECTURES if name not in (*RECURRENT, *REFUSED)])
def test_no_architecture_s_answers_change(architecture: str) -> None:
    """Those with recurrent state are in `test_recurrent_speculation.py`."""
    subject = Subject(architecture)
    subject.wanted([[1, 2]], [2])  # makes constants that belong to this thread
    with subject.make_llm(num_kv_blocks=8, speculate="ngram") as llm:
        plain = llm.generate(_PROMPTS[:3], [replace(one, speculate=False) for one in _SAMPLING[:3]], use_tqdm=False)
        Adversary.learn(plain)
        assert llm.engine.reset_prefix_cache()
        check_equal(llm.generate(_PROMPTS[:3], _SAMPLING[:3], use_tqdm=False), plain)
        stats = llm.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["left", "right"]}}}
_LETTERS = dict.fromkeys(range(97, 123), 8.0)


def _any_sampling(rng: random.Random) -> SamplingParams:
    """One of all kinds of answers, greedy or at 0.7."""
    kind = rng.choice(
        (
            {"ignore_eos": True, "logprobs": 2},
            {"structured_outputs": {"json": _SCHEMA}},
            {"structured_outputs": {"regex": "[a-f]{5,40}(one|two|three)"}, "logprobs": 1},
            {"stop": ("a", "zz"), "logit_bias": _LETTERS},
            {"stop": ("ab",), "logit_bias": _LETTERS, "include_stop_str_in_output": True, "n": 2},
            {"n": 3, "min_tokens": 9},
            {"presence_penalty": 1.0, "frequency_penalty": 0.4, "ignore_eos": True},
            {"repetition_penalty": 1.3, "min_p": 0.02, "stop_token_ids": (97, 3)},
            {"top_k": 12, "logit_bias": {5: 3.0, 97: -4.0}, "ignore_eos": True},
        )
    )
    temperature = rng.choice((0.0, 0.7))
    return SamplingParams(max_tokens=rng.randrange(9, 60), temperature=temperature, seed=rng.randrange(99), **kind)


def _round(llm: LLM, adapters: Iterable[str], rng: random.Random, known: list[tuple[int, ...]]) -> None:
    """Requests of all kinds at once, some of which go on from what was said before; plain, then with drafts."""
    Adversary.rightness, Adversary.rng = rng.choice((0.2, 0.6, 0.9, 1.0)), rng
    prompts = [rng.choice(known)[: rng.randrange(20, 110)] for _ in range(3)]
    prompts += [tuple(rng.randrange(97, 123) for _ in range(rng.randrange(3, 50))) for _ in range(3)]
    sampling = [_any_sampling(rng) for _ in prompts]
    names = [rng.choice((None, *adapters)) for _ in prompts]
    plain = llm.generate(prompts, [replace(one, speculate=False) for one in sampling], adapters=names, use_tqdm=False)
    Adversary.learn(plain)
    if rng.random() < 0.5:  # else all of it is cached
        assert llm.engine.reset_prefix_cache()
    check_equal(llm.generate(prompts, sampling, adapters=names, use_tqdm=False), plain)
    known += [(*done.prompt_token_ids, *done.token_ids) for done in plain]
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"num_kv_blocks": 8}),
        pytest.param("qwen3_next", {"num_kv_blocks": 8}, marks=pytest.mark.slow),
        ("gemma3_text", {}),
        # batch invariant, or what is rounded otherwise may fall into other bits; there are no adapters then
        ("qwen3", {"kv_bits": "8", "num_kv_blocks": 8, "batch_invariant": True}),
        pytest.param("qwen3", {"kv_bits": "4", "batch_invariant": True}, marks=pytest.mark.full),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.full),
        pytest.param("gpt_oss", {}, marks=pytest.mark.full),
        pytest.param("falcon_h1", {"num_kv_blocks": 8}, marks=pytest.mark.full),
    ],
)
def test_answers_of_all_kinds_at_once_stay_what_they_are(
    architecture: str, settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars, stop strings, several answers, penalties, biases, log-probabilities, beside an adapter, with prefix
    hits; where blocks are few, with preemptions; with windows, recurrent state, and K/V in fewer bits."""
    monkeypatch.setattr(kv_loss, "_MAX_DIVERGENCE", np.inf)  # weights at random lose more than a trained model's
    wide = {"head_dim": 64} if "kv_bits" in settings else {}
    folder = write_model(architecture, tmp_path / "model", **wide)
    adapters = {} if "kv_bits" in settings else {"own": str(write_adapter(folder, tmp_path / "own"))}
    rng = random.Random(architecture)
    known = [tuple(prompt) for prompt in random_prompts((70, 110), seed=1)]
    with LLM(str(folder), adapters=adapters, speculate="ngram", max_model_len=256, **settings) as llm:
        for _ in range(3):
            _round(llm, adapters, rng, known)
        stats = llm.stats()
    assert 60 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_preemptions > 0) == ("num_kv_blocks" in settings)


def test_tokens_behind_a_stop_string_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were accepted in one step with the token that completes it."""
    printable = tuple(range(97, 123))
    prompt = _PROMPTS[0]
    with LLM(str(make_folder(tmp_path / "m")), num_kv_blocks=32, max_model_len=512, speculate="ngram") as llm:
        sampling = greedy(40, allowed_token_ids=printable, logit_bias=dict(zip(printable, range(26))))
        (plain,) = llm.generate([prompt], replace(sampling, speculate=False), use_tqdm=False)
        Adversary.learn([plain])
        monkeypatch.setattr(Adversary, "rightness", 1.0)
        before = llm.stats()
        (drafted,) = llm.generate([prompt], replace(sampling, stop=(plain.text[11:14],)), use_tqdm=False)
        after = llm.stats()
    num_tokens = len(drafted.token_ids)
    assert drafted.finish_reason == "stop"
    assert after.num_accepted_tokens - before.num_accepted_tokens > num_tokens
    assert after.num_generated_tokens - before.num_generated_tokens == num_tokens
