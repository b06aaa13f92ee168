"""Assistants of Gemma 4 models as drafters, over the whole engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.batching.blocks.layer_groups import first_seen
from mlx_server.batching.speculation.draft_heads import AssistantDrafts
from mlx_server.engine.parts import GivenModels
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.attention.interface import StepPlan
from mlx_server.runtime.drafts.assistant import read_assistant
from mlx_server.runtime.drafts.drafter import load_drafter
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.model_runner import ModelRunner
from tests.assistants import (
    TARGETS,
    assistant_config,
    folders,
    save_assistant,
    simple_folders,
    their_assistant,
    their_drafts,
)
from tests.device_memory import active_bytes
from tests.drafted_answers import check_behind_images, check_random_drafts, record_drafts
from tests.drafters import change_tensor, quantize
from tests.engine_worlds import random_prompts
from tests.vision_configs import CONFIGS
from tests.vision_worlds import evaluate_constants, tiny_vlm

_PROMPTS = random_prompts((30, 86, 25, 50))


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("is_clustered", [False, True])
@pytest.mark.parametrize("kind", TARGETS)
def test_drafts_are_those_of_mlx_vlm(
    kind: str, is_clustered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step of several requests at a time, whatever was right before, and also where some draft less, because
    they end soon; beyond the window, and prompts of several chunks."""
    drafts = record_drafts(monkeypatch, AssistantDrafts)
    target, assistant = folders(tmp_path / "a", kind, is_clustered=is_clustered)
    sampling = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (7, 20, 13, 20)]
    with LLM(
        target,
        speculate="model",
        draft_model=assistant,
        max_model_len=256,
        max_draft_tokens=5,
        max_num_batched_tokens=64,
    ) as llm:
        llm.generate(_PROMPTS, sampling, use_tqdm=False)
    assert len(drafts) > 20
    assert {len(ours) for _, ours in drafts} >= {2, 5}
    for token_ids, ours in drafts:
        theirs = their_drafts(kind, token_ids, len(ours), is_clustered=is_clustered)
        assert list(ours) == theirs, len(token_ids)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("kind", TARGETS)
def test_random_assistants_change_no_answer(kind: str, tmp_path: Path) -> None:
    """Greedy and at 0.7, with penalties, beside one that does not draft, with prefix hits and preemptions."""
    target, assistant = folders(tmp_path / "a", kind)
    before = active_bytes()
    stats = check_random_drafts(target, _PROMPTS, speculate="model", draft_model=assistant)
    assert active_bytes() <= before
    assert stats.num_accepted_tokens > 0
    assert stats.num_preemptions > 0


@pytest.mark.usefixtures("always_drafts")
def test_an_assistant_drafts_beside_lookups(tmp_path: Path) -> None:
    target, assistant = folders(tmp_path / "a", "gemma4")
    check_random_drafts(target, _PROMPTS, speculate="auto", draft_model=assistant)


@pytest.mark.usefixtures("always_drafts")
def test_an_assistant_that_is_right_saves_calls_of_the_model(tmp_path: Path) -> None:
    target, assistant = simple_folders(tmp_path / "a")
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    calls = []
    for settings in ({"speculate": "off"}, {"speculate": "model", "draft_model": assistant, "max_draft_tokens": 9}):
        with LLM(target, max_model_len=128, **settings) as llm:
            (one,) = llm.generate(_PROMPTS[:1], sampling, use_tqdm=False)
            assert one.token_ids == (0,) * 60
            calls.append(llm.stats().num_model_calls)
    assert calls[0] == 60
    assert calls[1] <= 2 + -(-58 // 10), "of ten tokens each, after the first two"


def _change(folder: str, **changes: Any) -> None:
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        (config if name in config else config["text_config"])[name] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backbone_hidden_size": 80}, "its backbone_hidden_size is 80, the model has 96; take the assistant made for"),
        ({"vocab_size": 400}, "its vocab_size is 400, the model has 320"),
        ({"head_dim": 32}, "its head_dim of sliding_attention is 32, the model has 16"),
        ({"num_attention_heads": 3}, "its 3 heads cannot share the model's 2"),
        ({"layer_types": ["linear"] * 3}, "it reads layers of the types"),
        ({"num_hidden_layers": 4}, "its layer_types has 3 entries for 4 layers"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "Cannot load .* to draft for"),
    ],
)
def test_an_assistant_of_another_model_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    target, assistant = folders(tmp_path / "a", "gemma4")
    _change(assistant, **changes)
    with pytest.raises(ModelLoadError, match=reason):
        LLM(target, speculate="model", draft_model=assistant, max_model_len=128)


@pytest.mark.parametrize("name", ["masked_embedding.token_ordering", "model.norm.weight"])
def test_an_assistant_that_lacks_a_tensor_is_refused(name: str, tmp_path: Path) -> None:
    target, assistant = folders(tmp_path / "a", "gemma4", is_clustered=True)
    change_tensor(assistant, name, lambda _: None)
    with pytest.raises(ModelLoadError, match=rf"(?s)Missing 1 parameters.*{name.removeprefix('model.')}"):
        LLM(target, speculate="model", draft_model=assistant, max_model_len=128)


@pytest.mark.parametrize(
    "change", [lambda tokens: 50_000 * tokens, lambda tokens: tokens - 1, lambda tokens: tokens[1:]]
)
def test_an_assistant_whose_clusters_are_not_all_tokens_is_refused(
    change: Callable[[mx.array], mx.array], tmp_path: Path
) -> None:
    """MLX does not check indices, and would write beside the logits."""
    target, assistant = folders(tmp_path / "a", "gemma4", is_clustered=True)
    change_tensor(assistant, "masked_embedding.token_ordering", change)
    with pytest.raises(
        ModelLoadError, match="its token_ordering does not have each of 320 tokens once; fetch it again"
    ):
        LLM(target, speculate="model", draft_model=assistant, max_model_len=128)


@pytest.mark.usefixtures("always_drafts")
def test_its_own_number_of_kv_heads_does_not_count(tmp_path: Path) -> None:
    """It computes no K/V, so a config.json may leave them to a default that does not divide its heads."""
    target, assistant = folders(tmp_path / "a", "gemma4")
    _change(assistant, num_key_value_heads=3)
    assert check_random_drafts(target, _PROMPTS, speculate="model", draft_model=assistant).num_accepted_tokens > 0


@pytest.mark.usefixtures("always_drafts")
def test_a_burst_names_no_block_that_was_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks before the window of the next token may be another request's by then, or not in the pool any more."""
    plans_at, num_left_out = ModelRunner.plans_at, 0

    def watched(runner: ModelRunner, positions: Mapping[str, int]) -> tuple[StepPlan, ...]:
        nonlocal num_left_out
        plans = plans_at(runner, positions)
        for plan, window in zip(plans, runner.cache.windows):
            for table, position in zip(plan.block_tables, positions.values()):
                behind = table[: first_seen(position + 1, window)]
                assert not behind.any()
                num_left_out += len(behind)
        return plans

    monkeypatch.setattr(ModelRunner, "plans_at", watched)
    target, assistant = folders(tmp_path / "a", "gemma4")
    stats = check_random_drafts(target, _PROMPTS, speculate="model", draft_model=assistant)
    assert stats.num_draft_errors == 0
    assert num_left_out > 0


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("kind", TARGETS)
async def test_an_assistant_drafts_behind_images(kind: str, tmp_path: Path) -> None:
    vlm = tiny_vlm(kind)
    own = assistant_config({"text_config": CONFIGS[kind]["text_config"]}) | {"model_type": "gemma4_unified_assistant"}
    folder = Path(save_assistant(tmp_path / "assistant", own, their_assistant(own)))
    loaded = exhaust(load_drafter(read_assistant, "assistant", folder, vlm.loaded, "auto"))
    evaluate_constants(loaded.model)
    await check_behind_images(kind, GivenModels(vlm.loaded, loaded), seed=1)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("is_clustered", [False, True])
def test_a_quantized_assistant_drafts(is_clustered: bool, tmp_path: Path) -> None:
    target, assistant = folders(tmp_path / "a", "gemma4", is_clustered=is_clustered)
    config = json.loads((Path(assistant) / "config.json").read_text())
    model = their_assistant(config)
    save_assistant(Path(assistant), {**config, "quantization": quantize(model)}, model)
    assert check_random_drafts(target, _PROMPTS, speculate="model", draft_model=assistant).num_accepted_tokens > 0
