"""A draft model of the same weights is always right, a random one changes nothing, and what it takes is freed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.batching.speculation.draft_model import DraftModel
from mlx_server.config import Config, ModelConfig, SchedulerConfig, load_config
from mlx_server.engine.library.llm import Completion
from mlx_server.engine.memory.need import estimate_need
from mlx_server.errors import ConfigError, ModelLoadError
from mlx_server.outputs import EngineStats, NewRequestData
from mlx_server.runtime.drafts.runner import DraftSampler
from mlx_server.runtime.memory import MemoryReading
from mlx_server.runtime.models.loader import LoadedModel
from mlx_server.runtime.models.random_models import build_random
from mlx_server.runtime.sampling.sampler import Sampler, SampleRow
from tests.architectures import config_of
from tests.conformance import Subject
from tests.device_memory import active_bytes
from tests.engine_worlds import make_llm, random_prompts
from tests.tiny_models import SLIDING_WINDOW, VOCAB_SIZE, byte_tokenizer, save_model_folder, tiny_model

_PROMPTS = random_prompts((33, 70, 2 * SLIDING_WINDOW + 5, 20, 64))
_SAMPLING = (
    SamplingParams(max_tokens=35, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=32, temperature=0.7, ignore_eos=True),
    SamplingParams(max_tokens=25, temperature=0.7, seed=3, top_p=0.9, logit_bias={5: 3.0}, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, seed=4, top_k=20, ignore_eos=True, speculate=False),
)
_UNSEEDED = 2


def draft_of(llm: LLM) -> DraftModel:
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    assert speculation.model is not None
    return speculation.model


def loaded(architecture: str, seed: int = 0) -> LoadedModel:
    model, config = tiny_model(architecture, seed)
    return LoadedModel(f"{architecture}-{seed}", model, dict(config), None)


def _answers(llm: LLM) -> list[Completion]:
    """Of all but the one without a seed, whose noise is the process's."""
    done = llm.generate(_PROMPTS, _SAMPLING, use_tqdm=False)
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    llm.engine.scheduler.check_integrity()
    return [one for index, one in enumerate(done) if index != _UNSEEDED]


@cache
def _plain(architecture: str) -> list[tuple[int, ...]]:
    with make_llm(architecture) as llm:
        return [one.token_ids for one in _answers(llm)]


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_draft_model_of_the_same_weights_is_always_right(architecture: str) -> None:
    """Greedy and at 0.7, with seeds and without, with bias, windows, and one beside them that does not draft."""
    plain = _plain(architecture)
    with make_llm(architecture, speculate="model", draft_model=loaded(architecture), max_draft_tokens=5) as llm:
        assert [one.token_ids for one in _answers(llm)] == plain
        stats, blocks = llm.stats(), draft_of(llm).blocks
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 80
        assert blocks.num_free_blocks == blocks.num_blocks
        assert blocks.num_cached_blocks > 0


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("num_blocks", [None, 11])
def test_a_random_draft_model_changes_no_answer(num_blocks: int | None) -> None:
    """Of another architecture; also beside lookups, with a pool so small that requests are preempted."""
    plain = _plain("llama")
    settings = {} if num_blocks is None else {"num_kv_blocks": num_blocks, "max_model_len": 320}
    with make_llm("llama", speculate="auto", draft_model=loaded("qwen3", 7), max_draft_tokens=4, **settings) as llm:
        assert [one.token_ids for one in _answers(llm)] == plain
        stats, blocks = llm.stats(), draft_of(llm).blocks
        assert stats.num_accepted_tokens < stats.num_draft_tokens
        assert (stats.num_preemptions > 0) == (num_blocks is not None)
        assert blocks.num_free_blocks == blocks.num_blocks


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("architecture", ["mistral4", "gpt_bigcode"])
def test_a_model_drafts_however_much_of_it_runs_by_group(architecture: str) -> None:
    """Of the same weights: it is always right."""
    subject = Subject(architecture)
    same = LoadedModel("same", subject.model, subject.config, None)
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)

    def answers(**settings: Any) -> tuple[list[tuple[int, ...]], LLM]:
        with subject.make_llm(**settings) as llm:
            assert llm.info.level.startswith("whole model")
            return [one.token_ids for one in llm.generate(_PROMPTS[:3], sampling, use_tqdm=False)], llm

    plain, _ = answers(speculate="off")
    drafted, llm = answers(speculate="model", draft_model=same)
    assert drafted == plain
    assert llm.stats().num_accepted_tokens == llm.stats().num_draft_tokens > 20


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    ("architecture", "speculate"),
    [
        ("mamba2", "model"),
        ("qwen3_next", "auto"),
        pytest.param("mamba2", "auto", marks=pytest.mark.full),
        pytest.param("qwen3_next", "model", marks=pytest.mark.full),
    ],
)
def test_it_drafts_for_a_model_with_recurrent_state(architecture: str, speculate: str) -> None:
    """Of two likely tokens the models disagree on some; in a pool so small that requests are preempted."""
    subject, bias = Subject(architecture), {5: 30.0, 6: 30.0}
    sampling = [
        SamplingParams(max_tokens=35, temperature=0.0, logit_bias=bias, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.9, seed=1, logit_bias=bias, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=0.9, seed=2, ignore_eos=True),
    ]

    def answers(**settings: Any) -> tuple[list[tuple[int, ...]], EngineStats]:
        with subject.make_llm(num_kv_blocks=8, **settings) as llm:
            done = llm.generate(_PROMPTS[:2] + _PROMPTS[3:4], sampling, use_tqdm=False)
            llm.engine.scheduler.check_integrity()
            return [one.token_ids for one in done], llm.stats()

    plain, _ = answers(speculate="off")
    drafted, stats = answers(speculate=speculate, draft_model=loaded("llama"), max_draft_tokens=4)
    assert drafted == plain
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks


def test_no_draft_model_is_kept_where_no_state_can_stand_behind_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mlx_server.runtime.cache.layers.kept_slots", lambda *_, **__: (0, 0))
    with Subject("mamba2").make_llm(speculate="auto", draft_model=loaded("llama")) as llm:
        assert llm.engine.scheduler.speculation is None
        assert llm.engine._loaded_parts().draft is None
    assert "llama-0 does not draft" in caplog.text


@pytest.mark.usefixtures("always_drafts")
def test_penalties_count_known_tokens_in_drafts() -> None:
    sampling = SamplingParams(
        max_tokens=40, temperature=0.7, seed=2, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True
    )
    with make_llm("llama", speculate="model", draft_model=loaded("llama"), max_draft_tokens=1) as llm:
        llm.generate(_PROMPTS, sampling, use_tqdm=False)
        stats = llm.stats()
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 80


@pytest.mark.parametrize("columns", [-5, 5])
def test_noise_is_the_model_s_whatever_the_width_of_the_draft_model_s_vocabulary(columns: int) -> None:
    """Models of one family pad theirs to different widths. The tokens that both have are drawn alike."""
    sampler = Sampler(300)
    draft = DraftSampler(300, sampler.entropy)
    logits = mx.random.normal((8, 300), key=mx.random.key(1))
    wide = mx.pad(logits, [(0, 0), (0, 5)], constant_values=50.0) if columns > 0 else logits[:, :-5]
    own = logits if columns > 0 else mx.pad(wide, [(0, 0), (0, 5)], constant_values=-mx.inf)
    params = SamplingParams(temperature=0.9)
    for one in (sampler, draft):
        one.add(NewRequestData("r", (1,), (), params, frozenset()))
    rows = [SampleRow("r", place) for place in range(8)]
    assert draft.sample(wide, rows).fetch() == sampler.sample(own, rows).fetch()


def test_it_drafts_as_measured_costs_say() -> None:
    """One that takes as long as the model itself gains nothing, and stops."""
    with make_llm("llama", speculate="auto", draft_model=loaded("llama"), max_draft_tokens=1) as llm:
        llm.generate(_PROMPTS[:1], SamplingParams(max_tokens=300, temperature=0.7, ignore_eos=True), use_tqdm=False)
        assert llm.stats().num_drafts < 150


def _folder(path: Path, seed: int = 0, **config: int) -> str:
    model, own = tiny_model("llama", seed)
    return str(save_model_folder(model, {**own, **config}, path, byte_tokenizer()))


@pytest.mark.usefixtures("always_drafts")
def test_its_memory_is_booked_and_freed(tmp_path: Path) -> None:
    target, draft = _folder(tmp_path / "target"), _folder(tmp_path / "draft", 3)

    def use(**settings: str) -> tuple[int, int, int]:
        before = active_bytes()
        with LLM(target, kv_cache_memory="8MB", max_model_len=512, **settings) as llm:
            llm.generate(["ab", "cd"], SamplingParams(max_tokens=20, temperature=0.0), use_tqdm=False)
            stats, share = llm.stats(), llm.engine._loaded_parts().share
            assert share is not None
            booked = share.need.weights_bytes, share.need.kv_bytes
            assert booked == (stats.weight_bytes, stats.kv_pool_bytes)
        assert active_bytes() <= before
        return stats.weight_bytes, stats.kv_pool_bytes, stats.num_draft_tokens

    weights, pool, _ = use()
    both, pools, num_drafts = use(draft_model=draft, speculate="model")
    assert both == 2 * weights
    assert pools > pool
    assert num_drafts > 0
    alone = estimate_need(Config(model=ModelConfig(model=target)))
    together = estimate_need(Config(model=ModelConfig(model=target, draft_model=draft)))
    assert together.weights_bytes == 2 * alone.weights_bytes
    assert together.kv_bytes == 2 * alone.kv_bytes
    off = Config(model=ModelConfig(model=target, draft_model=draft), scheduler=SchedulerConfig(speculate="off"))
    assert estimate_need(off) == alone


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("method", ["launch", "fetch_rows"])
def test_a_draft_model_that_fails_ends_drafting_and_no_more(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of the log, one in the metrics, and its pool is free."""
    plain = _plain("llama")
    with make_llm("llama", speculate="model", draft_model=loaded("qwen3", 7)) as llm:
        parts = llm.engine._loaded_parts()
        assert parts.draft is not None
        runner, num_left = parts.draft.runner._draft, [9]
        work = getattr(runner, method)

        def failing(step: Any, *more: Any) -> Any:
            num_left[0] -= 1
            if num_left[0] == 0:
                raise RuntimeError("it is broken")
            return work(step, *more)

        monkeypatch.setattr(runner, method, failing)
        assert [one.token_ids for one in _answers(llm)] == plain
        assert num_left == [0]
        stats = llm.stats()
        assert (stats.num_draft_errors, stats.num_drafts > 0) == (1, True)
        assert not any(pool.contents for pool in runner.cache.pools)
        assert parts.draft.model.blocks.num_blocks == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "it is broken" in caplog.text


def test_no_states_behind_drafts_are_booked_where_nothing_drafts(tmp_path: Path) -> None:
    """`--speculate model` is for the models that have a draft model; one beside them without does not draft."""
    config = config_of("mamba2")
    folder = save_model_folder(build_random(config, 0), dict(config), tmp_path / "mamba2", byte_tokenizer())

    def needed(speculate: Any) -> int:
        scheduler = SchedulerConfig(speculate=speculate)
        return estimate_need(Config(model=ModelConfig(model=str(folder)), scheduler=scheduler)).kv_bytes

    assert needed("model") == needed("off") < needed("auto")


def test_another_vocabulary_is_refused_with_both_names(tmp_path: Path) -> None:
    target, draft = _folder(tmp_path / "target"), Path(_folder(tmp_path / "other"))
    tokenizer = draft / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8").replace('"a": ', '"@@": ')
    tokenizer.write_text(text, encoding="utf-8")
    before = active_bytes()
    with pytest.raises(ModelLoadError, match=r"other cannot draft for .*target: .*'a' in the model's and '@@' in the"):
        LLM(target, draft_model=str(draft))
    assert active_bytes() <= before


def test_a_model_that_cannot_draft_is_refused(tmp_path: Path) -> None:
    model, config = tiny_model("llama")
    mamba = config_of("mamba2")
    recurrent = LoadedModel("mamba2", build_random({**mamba, "vocab_size": VOCAB_SIZE}, 0), mamba, None)
    narrow = LoadedModel("narrow", model, {**config, "vocab_size": 7}, None)
    with pytest.raises(ModelLoadError, match="narrow cannot draft for llama: it has 7 token ids, but the model has"):
        make_llm("llama", speculate="model", draft_model=narrow)
    with pytest.raises(ModelLoadError, match="mamba2 cannot draft for llama: it has recurrent state"):
        make_llm("llama", speculate="model", draft_model=recurrent)
    with pytest.raises(ModelLoadError, match=r"random:mini cannot draft for .*: random:mini has no tokenizer"):
        LLM(_folder(tmp_path / "target"), draft_model="random:mini")
    with pytest.raises(ConfigError, match="both by name, or both loaded"):
        make_llm("llama", draft_model="random:mini")
    with pytest.raises(ConfigError, match="--draft-model"):
        load_config(environ={}, flags={"speculate": "model"})


def test_the_setting_is_named_when_the_draft_model_cannot_be_loaded(tmp_path: Path) -> None:
    target, draft = _folder(tmp_path / "target"), Path(_folder(tmp_path / "draft"))
    with pytest.raises(ModelLoadError, match=rf"^--draft-model: There is no model {tmp_path}/none: "):
        LLM(target, draft_model=str(tmp_path / "none"))
    (draft / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"^--draft-model: "):
        LLM(target, draft_model=str(draft))


def test_its_pool_grows_only_while_there_is_plenty_of_memory() -> None:
    """The model's own pool comes first."""
    with make_llm("llama", speculate="model", draft_model=loaded("qwen3", 7)) as llm:
        parts = llm.engine._loaded_parts()
        assert parts.draft is not None
        assert parts.share is not None
        total = 2**40
        for free_share, is_plenty in ((0.15, False), (0.5, True)):
            parts.share._budget._read = lambda left=free_share: MemoryReading(total, int(left * total), total, 0)
            parts.share._budget.limit_bytes = total
            own, draft = (guard._kv_memory for guard in (parts.guard, parts.draft.guard))
            assert own.take(1, 1, is_needed=True) == 1
            assert draft.take(1, 1, is_needed=True) == is_plenty
            own.give_back(1)
            if is_plenty:
                draft.give_back(1)
