"""Model types that mlx-lm lacks and mlx-vlm has: their text parts are served if they pass the probe, else refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.checks.choices import find_choices, with_few
from mlx_server.runtime.models import vlm
from mlx_server.runtime.models.blueprint import model_classes
from mlx_server.runtime.models.random_models import build_random
from mlx_server.runtime.models.vlm import vlm_module
from tests.conformance import Subject, check_crowd

TOLERANCE = 5e-5

_TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_MOE = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    **_MOE,
}
_AXES = {"rope_type": "default", "type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {**_AXES, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
}
_LONG_ROPE = {
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": list(range(1, 16, 2))},
}
"""Other factors beyond 32 tokens."""
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 56,
    "num_channels": 3,
}


def _text(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_TEXT, **more}


def _around(model_type: str, text: dict[str, Any], /, **vision: Any) -> dict[str, Any]:
    inner = {"text_config": text, "vision_config": {**_TOWER, **vision}}
    return {"model_type": model_type, "vocab_size": 320, "hidden_size": 64, "image_token_index": 300, **inner}


_VISION: dict[str, dict[str, Any]] = {
    name: {"model_type": name, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    for name in ("glm4v", "glm4v_moe", "glm5_next", "qwen4_exp")
}

SERVED = {
    "aya_vision": _around("aya_vision", _text("cohere2")),
    "cohere2_moe": _text("cohere2_moe", **_EXPERTS),
    "deepseek_v4": _text(
        "deepseek_v4",
        num_key_value_heads=1,
        head_dim=64,
        q_lora_rank=32,
        qk_rope_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=16,
        num_hash_layers=1,
        compress_ratios=[0, 0, 4, 128],
        sliding_window=32,
        num_nextn_predict_layers=0,
    ),
    "dots_ocr": _around("dots_ocr", _text("dots_ocr")),
    "flint": _text("flint"),
    "glm4v": _around(
        "glm4v",
        _text("glm4v_text", attention_bias=True, eos_token_id=[2], partial_rotary_factor=0.5, rope_parameters=_AXES),
        **_VISION["glm4v"],
    ),
    "glm4v_moe": _around(
        "glm4v_moe",
        _text(
            "glm4v_moe_text",
            **_MOE,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
            use_qk_norm=True,
            attention_bias=False,
            partial_rotary_factor=0.5,
            rope_parameters=_AXES,
        ),
        **_VISION["glm4v_moe"],
    ),
    "glm5_next": _around(
        "glm5_next",
        _text(
            "glm5_next_text",
            **{**_MLA, "qk_rope_head_dim": 0},
            linear_head_dim=16,
            linear_num_heads=4,
            index_head_dim=16,
            index_n_heads=4,
            index_topk=8,
            index_kpool=4,
            layer_types=["linear_attention", *["deepseek_sparse_attention"] * 3],
            indexer_types=["full", "full", "shared", "full"],
        ),
        **_VISION["glm5_next"],
    ),
    "granite_vision": _around("granite_vision", _text("granite")),
    "hy_v4": _text("hy_v4", **_MLA, index_head_dim=16, index_n_heads=2, index_topk=16),
    "idefics2": {
        **_around("idefics2", _text("mistral"), model_type="idefics2"),
        "perceiver_config": {
            "model_type": "idefics2Perceiver",
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 16,
            "num_key_value_heads": 1,
        },
    },
    "inkling": {
        **_around(
            "inkling",
            _text(
                "inkling",
                swa_num_attention_heads=4,
                swa_num_key_value_heads=2,
                swa_head_dim=16,
                sliding_window_size=24,
                rel_extent=64,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_shared_experts=1,
            ),
            n_layers=1,
            text_hidden_size=64,
        ),
        "audio_config": {"text_hidden_size": 64, "mel_vocab_size": 4, "n_mel_bins": 4},
    },
    "internvl_chat": _around("internvl_chat", _text("qwen2")),
    "jina_vlm": _around("jina_vlm", _text("jina_vlm")),
    "k2_horizon": _text("k2_horizon"),
    "kolibri1": _text(
        "kolibri1", **_EXPERTS, shared_expert_intermediate_size=32, sliding_window=24, layer_types=_ALTERNATING
    ),
    "llava_next": _around("llava_next", _text("llama"), model_type="clip_vision_model", projection_dim=64),
    "mimo_v2": _text(
        "mimo_v2",
        v_head_dim=16,
        swa_head_dim=16,
        swa_v_head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        partial_rotary_factor=0.5,
        sliding_window_size=24,
        hybrid_layer_pattern=[0, 1, 0, 1],
        moe_layer_freq=[0, 1, 1, 1],
        n_routed_experts=4,
        num_experts_per_tok=2,
        skip_vision=True,
        audio_config={"out_hidden_size": 64, "input_local_layers": 1, "input_local_dim": 64},
    ),
    "minicpmv4_6": _around("minicpmv4_6", _text("minicpmv4_6", **_LINEAR)),
    "minimax_m3": _text(
        "minimax_m3",
        dense_intermediate_size=64,
        shared_intermediate_size=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_layer_freq=[0, 1, 1, 1],
        sparse_attention_config={
            "use_sparse_attention": True,
            "sparse_attention_freq": [0, 1, 1, 1],
            "sparse_index_dim": 16,
            "sparse_num_index_heads": 2,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 4,
        },
    ),
    "mistral_large3": _around("mistral_large3", _text("mistral_large3", **_MLA), model_type="pixtral"),
    "molmo2": _around(
        "molmo2",
        _text("molmo2_text"),
        vit_config={**_SMALL, "head_dim": 16},
        adapter_config={**_SMALL, "head_dim": 16, "text_hidden_size": 64, "vit_layers": [-1, -1]},
    ),
    "phi3_v": _text("phi3_v", **_LONG_ROPE),
    "phi4mm": {
        **_text("phi4mm", **_LONG_ROPE),
        "vision_config": _SMALL,
        "audio_processor": {
            "config": {
                "attention_dim": 32,
                "attention_heads": 2,
                "num_blocks": 1,
                "linear_units": 32,
                "ext_pw_out_channel": 32,
                "depthwise_seperable_out_channel": 32,
                "conv_channels": 32,
            }
        },
    },
    "qwen3_5_moe_text": _text("qwen3_5_moe_text", **_LINEAR, **_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_5_text": _text("qwen3_5_text", **_LINEAR),
    "qwen4_exp": _around(
        "qwen4_exp",
        _text(
            "qwen4_exp",
            **_EXPERTS,
            **_LINEAR,
            hc_lowrank=16,
            shared_expert_intermediate_size=32,
            ple_layer_ids=[1],
            ple_embed_dim=64,
            ngram_vocab_size_base=50,
            split_ngram_parts=2,
            heads_per_ngram=2,
            indexer_head_dim=16,
            indexer_budget=8,
            indexer_compress_ratio=4,
            eos_token_id=2,
        ),
        **_VISION["qwen4_exp"],
    ),
    "step3p7": _around(
        "step3p7",
        _text(
            "step3p5",
            num_attention_groups=2,
            moe_num_experts=4,
            moe_top_k=2,
            share_expert_dim=32,
            moe_layers_enum="2,3",
            sliding_window=24,
            layer_types=_ALTERNATING,
            attention_other_setting={"num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 16},
        ),
        width=32,
        layers=1,
        heads=2,
    ),
    "xing4_0": _text("xing4_0", **_MLA),
}

LEVELS = dict.fromkeys(("inkling", "jina_vlm"), ("mixers, one request at a time",))
"""Of models whose decodes cannot be batched."""

REFUSED = {
    "deepseek_v4": (
        {**SERVED["deepseek_v4"], "head_dim": 16},
        "Rows of 16 numbers for 128 tokens each are not supported",
    ),
    "paligemma": (
        _around("paligemma", _text("gemma"), projection_dim=64),
        "Models of type paligemma cannot be served in a paged batch yet .*logits differ",
    ),
}
"""With the reason, which the error names."""


ALIKE = {
    *("aya_vision", "dots_ocr", "flint", "glm4v", "granite_vision", "idefics2", "internvl_chat", "k2_horizon"),
    *("llava_next", "mistral_large3", "molmo2", "phi4mm", "qwen3_5_text"),
}
"""Types whose text parts have the layers of another type here, or Llama's."""


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.full) if name in ALIKE else name for name in SERVED]
)
def test_answers_in_a_crowd_are_mlx_vlms_own(model_type: str) -> None:
    subject = Subject(model_type, SERVED[model_type])
    row = check_crowd(subject)
    assert row.worst_error <= TOLERANCE
    assert row.level in LEVELS.get(model_type, ("ragged", "recurrent mixers", "mixers"))
    assert row.calls_per_step == 1
    model: Any = subject.model
    module = vlm_module(f"models.{model_type}")
    plain = module.Model(model.config)
    plain.load_weights(tree_flatten(model.parameters()))
    ids = mx.array([list(range(7, 48))])
    caches = vlm_module("models.cache").make_prompt_cache(plain.language_model)
    wanted = plain.language_model(ids, cache=caches).logits
    assert mx.allclose(model(ids, cache=model.make_cache()), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "name", "limit"),
    [
        ("deepseek_v4", "index_topk", 64),
        ("glm5_next", "index_topk", 64),
        ("hy_v4", "index_topk", 64),
        ("minimax_m3", "sparse_topk_blocks", 16),
        ("qwen4_exp", "indexer_budget", 64),
    ],
)
def test_layers_that_choose_far_behind_the_check_at_load_are_checked_there(
    model_type: str, name: str, limit: int
) -> None:
    def changed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: limit if key == name else changed(inner) for key, inner in value.items()}

    subject = Subject(model_type, changed(SERVED[model_type]))
    model = subject.model
    choices = find_choices(model, 42)
    length = max(42, *(choice.num_tokens for choice in choices))
    ids = mx.array([[7 + place % 300 for place in range(length)]])
    whole = model(ids, cache=model.make_cache())
    with with_few(choices):
        assert not mx.allclose(model(ids, cache=model.make_cache()), whole, atol=1e-2)
    with subject.make_llm() as llm:
        assert llm.info.level in ("ragged", "recurrent mixers", "mixers")


def test_a_prompt_of_two_tokens_writes_nothing_beside_its_arrays() -> None:
    """It overwrote the size of an array, which MLX then counts as free."""
    model = build_random(SERVED["qwen4_exp"], 0)
    mx.eval(model(mx.array([[1, 2]]), cache=model.make_cache()))
    assert mx.get_active_memory() < 2**32


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_cannot_be_paged_is_refused_by_name(model_type: str) -> None:
    config, reason = REFUSED[model_type]
    with pytest.raises(ModelLoadError, match=reason):
        Subject(model_type, config).make_llm()


def test_mlx_lms_code_comes_first_unless_the_model_is_to_see() -> None:
    config = {**SERVED["k2_horizon"], "model_type": "qwen3_vl"}
    assert model_classes(config)[0].__module__ == "mlx_lm.models.qwen3_vl"
    assert issubclass(model_classes(config, sees=True)[0], vlm.VlmModel)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm, "is_installed", lambda: False)
    with pytest.raises(ModelLoadError, match=r"k2_horizon not supported.*pip install '\.\[vision\]'"):
        model_classes({"model_type": "k2_horizon"})
    assert model_classes({"model_type": "qwen3"})[0].__module__ == "mlx_lm.models.qwen3"


def test_what_nobody_knows_is_said_so() -> None:
    with pytest.raises(ModelLoadError, match="Neither mlx-lm nor mlx-vlm knows it"):
        model_classes({"model_type": "from_tomorrow"})


def test_models_are_imported_without_what_mlx_vlm_serves_with() -> None:
    """In a process of its own: other tests import the rest."""
    program = (
        "import sys; from mlx_server.runtime.models.vlm import vlm_module; vlm_module('models.qwen3_vl');"
        "print(*sorted(name for name in sys.modules if name.count('.') == 1 and name.startswith('mlx_vlm.')))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "mlx_vlm.models" in ended.stdout
    assert not {"mlx_vlm.generate", "mlx_vlm.server", "mlx_vlm.convert"} & set(ended.stdout.split())
