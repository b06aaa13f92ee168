"""EAGLE-3 drafters, over the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_server import LLM, SamplingParams
from mlx_server.batching.speculation.draft_heads import HeadDrafts
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.random_models import build_random
from tests.architectures import config_of
from tests.device_memory import active_bytes
from tests.drafted_answers import check_random_drafts, record_drafts
from tests.drafters import change_tensor, quantize, save_drafter_folder
from tests.eagles import KINDS, eagle_config, folders, save_eagle, simple_folders, their_drafts, their_eagle
from tests.engine_worlds import random_prompts
from tests.heads import stored_config
from tests.tiny_models import byte_tokenizer, save_model_folder

_PROMPTS = random_prompts((30, 66, 25, 20))


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_mlx_vlm(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step of several requests at a time, whatever was right before, and also where some draft less, because
    they end soon; prompts of several chunks."""
    drafts = record_drafts(monkeypatch, HeadDrafts)
    target, drafter, model, theirs = folders(tmp_path / "a", kind)
    sampling = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (7, 20, 13, 20)]
    with LLM(
        target, speculate="model", draft_model=drafter, max_model_len=256, max_draft_tokens=5, max_num_batched_tokens=64
    ) as llm:
        llm.generate(_PROMPTS, sampling, use_tqdm=False)
    assert len(drafts) > 20
    assert {len(ours) for _, ours in drafts} >= {2, 5}
    for token_ids, ours in drafts:
        assert list(ours) == their_drafts(theirs, model, token_ids, len(ours)), len(token_ids)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        *[("sglang", "gemma3_text"), ("qwen3", "qwen3")],
        *[pytest.param(kind, "llama", marks=pytest.mark.full) for kind in KINDS],
    ],
)
def test_random_drafters_change_no_answer(kind: str, architecture: str, tmp_path: Path) -> None:
    """Greedy and at 0.7, with penalties, beside one that does not draft, with prefix hits and preemptions."""
    target, drafter, _, _ = folders(tmp_path / "a", kind, architecture)
    before = active_bytes()
    stats = check_random_drafts(target, _PROMPTS, speculate="model", draft_model=drafter)
    assert active_bytes() <= before
    assert stats.num_preemptions > 0


@pytest.mark.usefixtures("always_drafts")
def test_a_drafter_that_knows_the_model_is_always_right(tmp_path: Path) -> None:
    """At any temperature: it draws with the model's noise, also among fewer tokens."""
    target, drafter = simple_folders(tmp_path / "a")
    sampling = [SamplingParams(max_tokens=40, temperature=0.7 * (n % 2), seed=n, ignore_eos=True) for n in range(4)]
    with LLM(target, speculate="model", draft_model=drafter, max_model_len=128, max_draft_tokens=5) as llm:
        for done in llm.generate(_PROMPTS, sampling, use_tqdm=False):
            assert set(done.token_ids) == {7}
        stats = llm.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 100
    assert stats.num_generated_tokens > 2.5 * stats.num_model_calls


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("architecture", ["qwen3_next", pytest.param("kimi_k25", marks=pytest.mark.full)])
def test_a_drafter_reads_layers_of_any_kind(architecture: str, tmp_path: Path) -> None:
    config = stored_config(config_of(architecture))
    target = str(save_model_folder(build_random(config, 0), config, tmp_path / "model", byte_tokenizer()))
    text = config.get("text_config") or config
    own = eagle_config("speculators", text)
    assert text["num_hidden_layers"] >= 3
    drafter = save_eagle(tmp_path / "drafter", own, their_eagle(own))
    check_random_drafts(target, _PROMPTS, speculate="model", draft_model=drafter)


@pytest.mark.usefixtures("always_drafts")
def test_a_quantized_drafter_with_the_models_embeddings_drafts(tmp_path: Path) -> None:
    target, drafter, _, theirs = folders(tmp_path / "a", "speculators")
    config = json.loads((Path(drafter) / "config.json").read_text())
    save_eagle(Path(drafter), {**config, "quantization": quantize(theirs, nn.Linear)}, theirs)
    change_tensor(drafter, "embed_tokens.weight", lambda _: None)
    check_random_drafts(target, _PROMPTS, speculate="model", draft_model=drafter)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target_hidden_size": 96}, "its target_hidden_size is 96, the model has 64; take the drafter made for"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
            r"it reads the inputs of layers \[1, 2, 4\], the model has 3",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2]},
            "its fc reads 192 numbers, 2 of the model's layers have 128",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, r"it reads the inputs of layers \[1, 1, 2\]"),
        ({"norm_before_fc": True}, "Cannot load .* to draft for"),
        ({"hidden_act": "gelu"}, "its hidden_act is gelu; only drafters with silu are supported"),
        ({"parallel_drafting": True}, r"it drafts all tokens in parallel \(P-EAGLE\), which is not supported"),
        ({"use_aux_hidden_state": False}, "it reads only the model's last hidden state, as EAGLE 1 and 2 do"),
        ({"layer_types": ["full_attention"] * 2}, "its layer_types has 2 entries for 1 layers"),
        ({"speculators_model_type": "peagle"}, "^--draft-model: Drafters of the kind peagle are not supported: take"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5 are not",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.25},
            "partial_rotary_factor is 0.25 are not",
        ),
    ],
)
def test_a_drafter_of_another_model_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    target, drafter, _, _ = folders(tmp_path / "a", "speculators")
    path = Path(drafter) / "config.json"
    config = json.loads(path.read_text())
    layer = config["transformer_layer_config"] | {"hidden_act": "silu", "layer_types": ["full_attention"]}
    layer |= dict.fromkeys(("rope_parameters", "rope_scaling", "partial_rotary_factor"))
    changed = {"transformer_layer_config": {name: changes.get(name, value) for name, value in layer.items()}}
    path.write_text(json.dumps({**config, **changed, **changes}))
    with pytest.raises(ModelLoadError, match=reason):
        LLM(target, speculate="model", draft_model=drafter, max_model_len=128)


@pytest.mark.parametrize(
    ("name", "what"),
    [("self_attn.kv_b_proj.weight", r"latent attention \(MLA\)"), ("mlp.experts.0.up_proj.weight", "experts")],
)
def test_a_drafter_with_other_layers_is_refused_for_them(name: str, what: str, tmp_path: Path) -> None:
    target, drafter, _, theirs = folders(tmp_path / "a", "speculators")
    config = json.loads((Path(drafter) / "config.json").read_text())
    weights = dict(tree_flatten(theirs.parameters()))
    save_drafter_folder(Path(drafter), config, {**weights, f"layers.0.{name}": mx.zeros((2, 2))})
    with pytest.raises(ModelLoadError, match=f"its layers have {what}, which is not supported"):
        LLM(target, speculate="model", draft_model=drafter, max_model_len=128)


@pytest.mark.parametrize("change", [10_000_000, 100, -1000])
def test_a_drafter_that_names_tokens_which_the_model_lacks_is_refused(change: int, tmp_path: Path) -> None:
    """MLX does not check indices, and would write beside the logits."""
    target, drafter, _, _ = folders(tmp_path / "a", "speculators")
    change_tensor(drafter, "d2t", lambda d2t: d2t + change)
    with pytest.raises(ModelLoadError, match=r"its d2t names tokens -?\d+ to -?\d+, the model has 320; fetch it again"):
        LLM(target, speculate="model", draft_model=drafter, max_model_len=128)


def test_a_drafter_for_some_tokens_needs_an_output_matrix(tmp_path: Path) -> None:
    target, drafter, _, _ = folders(tmp_path / "a", "speculators")
    change_tensor(drafter, "lm_head.weight", lambda _: None)
    with pytest.raises(ModelLoadError, match="it has no lm_head for its 120 of the model's 320 tokens"):
        LLM(target, speculate="model", draft_model=drafter, max_model_len=128)


def test_a_drafter_of_another_width_needs_embeddings_of_its_own(tmp_path: Path) -> None:
    target, drafter, _, _ = folders(tmp_path / "a", "speculators")
    config = json.loads((Path(drafter) / "config.json").read_text())
    config["transformer_layer_config"]["hidden_size"] = 96
    model = their_eagle({**config, "target_hidden_size": 64})
    save_eagle(Path(drafter), config, model)
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM(target, speculate="model", draft_model=drafter, max_model_len=128) as llm:
        llm.generate(_PROMPTS[:1], sampling, use_tqdm=False)
    change_tensor(drafter, "embed_tokens.weight", lambda _: None)
    with pytest.raises(ModelLoadError, match="its hidden_size without embeddings is 96, the model has 64"):
        LLM(target, speculate="model", draft_model=drafter, max_model_len=128)
