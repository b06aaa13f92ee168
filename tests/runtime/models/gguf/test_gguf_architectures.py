"""Models of every architecture that is converted: written as GGUF by the names of the `gguf` package, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.gguf import WeightFormat, convert_gguf
from mlx_server.runtime.models.random_models import build_random
from tests.gguf_files import MERGES, SPECIALS, vocabulary

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": len(vocabulary()),
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50_000.0,
    "tie_word_embeddings": False,
}
_GEMMA = {"head_dim": 32, "tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 24}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LONG = {"type": "longrope", "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "short_factor": [1.0] * 6}
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"model_type": "llama"}),
    "llama with biases": ("llama", {"model_type": "llama", "attention_bias": True}),
    "llama 3": ("llama", {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": _LLAMA3}),
    "qwen2": ("qwen2", {"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen2 with yarn": (
        "qwen2",
        {
            "model_type": "qwen2",
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ),
    "qwen3": ("qwen3", {"model_type": "qwen3", "head_dim": 32}),
    "qwen3moe": (
        "qwen3moe",
        {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ),
    "gemma": ("gemma", {"model_type": "gemma", **_GEMMA}),
    "gemma2": ("gemma2", {"model_type": "gemma2", **_GEMMA, "attn_logit_softcapping": 40.0}),
    "gemma3": (
        "gemma3",
        {
            "model_type": "gemma3_text",
            **_GEMMA,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi2": ("phi2", {"model_type": "phi", "partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "phi3": ("phi3", {"model_type": "phi3"}),
    "phi3 long": (
        "phi3",
        {
            "model_type": "phi3",
            "partial_rotary_factor": 0.75,
            "rope_scaling": _LONG,
            "original_max_position_embeddings": 64,
        },
    ),
}


def _write_metadata(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)))
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "attn_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    length = scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if length is not None:
        writer.add_rope_scaling_orig_ctx_len(length)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3 if token in SPECIALS else 1 for token in vocabulary()])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)


def llama3_factors(config: dict[str, Any]) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    factors, scaling = [], config["rope_scaling"]
    for index in range(0, config["head_dim"], 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (index / config["head_dim"])
        if wavelength < 8192 / scaling["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > 8192 / scaling["low_freq_factor"]:
            factors.append(scaling["factor"])
        else:
            smooth = (8192 / wavelength - 1.0) / (scaling["high_freq_factor"] - 1.0)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def write_model(path: Path, architecture: str, config: dict[str, Any]) -> Any:
    """The mlx-lm model whose weights the file holds, in float32."""
    model = build_random(config, seed=3)
    if config["tie_word_embeddings"] and "lm_head" in model:
        model.sanitize({})  # Gemma 3 finds out by its weights
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_metadata(writer, architecture, config)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, parameter in tree_flatten(model.parameters()):
        module, _, part = name.rpartition(".")
        weight = np.array(parameter)
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        if architecture == "llama" and module.rpartition(".")[2] in heads:
            count = heads[module.rpartition(".")[2]]
            weight = weight.reshape(count, 2, weight.shape[0] // count // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        if architecture.startswith("gemma") and module.endswith("norm"):
            weight = weight + 1
        found = names.get_name(module.replace("switch_mlp", "experts"))
        assert found is not None, module
        writer.add_tensor(f"{found}.{part}", np.ascontiguousarray(weight, np.float32))
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    for length in ("long", "short"):
        if f"{length}_factor" in scaling:
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(scaling[f"{length}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("case", _CASES)
def test_logits_are_those_of_the_model_that_was_written(case: str, tmp_path: Path) -> None:
    architecture, own = _CASES[case]
    model = write_model(tmp_path / "tiny.gguf", architecture, {**_COMMON, **own})
    folder = tmp_path / "model"
    folder.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", folder, WeightFormat.FLOAT32)
    converted, _ = mlx_lm.load(str(folder))
    tokens = mx.array([np.random.default_rng(1).integers(3, len(vocabulary()), 40).tolist()])
    np.testing.assert_allclose(np.array(converted(tokens)), np.array(model(tokens)), rtol=0, atol=2e-4)


def test_frequencies_that_are_not_llama_3s_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "llama3_factors", lambda config: np.linspace(1, 2, 8, dtype=np.float32))
    write_model(tmp_path / "tiny.gguf", "llama", {**_COMMON, **_CASES["llama 3"][1]})
    with pytest.raises(ModelLoadError, match="rope_freqs are not those of Llama 3"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, WeightFormat.FLOAT32)


def test_gemma_is_kept_in_bfloat16(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", "gemma2", {**_COMMON, **_CASES["gemma2"][1]})
    convert_gguf(tmp_path / "tiny.gguf", tmp_path, WeightFormat.PACKED)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {w.dtype for w in mx.load(str(tmp_path / "model.safetensors")).values()} == {mx.bfloat16}
