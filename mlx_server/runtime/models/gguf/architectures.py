"""The GGUF architectures that can be converted: mlx-lm's names for their tensors, and its configuration for them.

Changes by llama.cpp's converter are undone: for models whose rotary embeddings rotate neighbours, it interleaves the
two halves of each head of q and k (`has_rotary_order`), and it adds 1 to Gemma's norms (`norm_offset`). The file does
not contain Gemma's scale of queries, its pattern of windows or Llama 3's scaling of frequencies; these come from
llama.cpp and from the published configurations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_server.errors import ModelLoadError

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """A file's metadata, and the shapes of its tensors in mlx-lm's order, `[rows, columns]`. `factors` has the factors
    for frequencies of rotary embeddings, by the tensor's name; only some files have them."""

    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    factors: Mapping[str, npt.NDArray[np.float32]]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        """A number or a text under the architecture's name."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        return _shortest(value) if isinstance(value, float) else value

    def number(self, name: str, default: float | None = None) -> Any:
        """As `get`. Raises `ModelLoadError` if this is not one positive number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            what = "no" if value is None else f"{value!r:.40} as"
            raise ModelLoadError(f"It has {what} {self.architecture}.{name}; one positive number is required.")
        return value

    @property
    def head_dim(self) -> int:
        return int(self.get("attention.key_length") or self.number("embedding_length") // self.num_heads)

    @property
    def num_heads(self) -> int:
        return int(self.number("attention.head_count"))

    @property
    def num_kv_heads(self) -> int:
        return int(self.number("attention.head_count_kv")) if self.get("attention.head_count_kv") else self.num_heads

    def has(self, tensor: str) -> bool:
        return tensor in self.shapes


def _shortest(value: float) -> float:
    """The shortest number with the same float32 value: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


@dataclass(frozen=True, slots=True)
class Architecture:
    """`layer_names` are mlx-lm's names of modules in a layer. Weights that are not packed get the type `dtype`."""

    model_type: str
    layer_names: Mapping[str, str]
    configure: Callable[[Facts], Config]
    top_names: Mapping[str, str]
    has_rotary_order: bool = False
    norm_offset: float = 0.0
    dtype: mx.Dtype = mx.float16

    def target(self, tensor: str) -> str:
        """mlx-lm's name of a tensor such as `blk.3.attn_q.weight`. Raises `ModelLoadError` if there is none."""
        module, _, kind = tensor.rpartition(".")
        parts = module.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in self.layer_names:
            return f"model.layers.{parts[1]}.{self.layer_names[parts[2]]}.{kind}"
        if module not in self.top_names:
            raise ModelLoadError(f"It contains {module}, which is unknown for its architecture.")
        return f"{self.top_names[module]}.{kind}"


ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""These tensors become part of the configuration."""

_TOP = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_HEAD_NORMS = MappingProxyType({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
_GEMMA2_NORMS = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)


def common_config(facts: Facts) -> Config:
    """The part of the configuration that all architectures have. Raises `ModelLoadError`."""
    shape = facts.shapes.get("token_embd.weight")
    if shape is None:
        raise ModelLoadError("It has no token_embd.weight, so it is not a language model.")
    return {
        "hidden_size": facts.number("embedding_length"),
        "head_dim": facts.head_dim,
        "num_hidden_layers": facts.number("block_count"),
        "intermediate_size": facts.number("feed_forward_length"),
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "max_position_embeddings": facts.number("context_length"),
        "vocab_size": shape[0],
        "tie_word_embeddings": not facts.has("output.weight"),
    }


def _rms_norm(facts: Facts) -> Config:
    return {"rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon")}


def _whole_rotary(facts: Facts) -> Config:
    """For models that rotate all dimensions of a head. Raises `ModelLoadError` for others, and for a scaling of
    frequencies that mlx-lm does not know."""
    rotated = facts.get("rope.dimension_count", facts.head_dim)
    if rotated != facts.head_dim:
        raise ModelLoadError(f"It rotates {rotated} of {facts.head_dim} dimensions of a head.")
    scaling = _scaling(facts)
    return {} if scaling is None else {"rope_scaling": scaling}


def _scaling(facts: Facts) -> Config | None:
    factors = facts.factors.get("rope_freqs.weight")
    if factors is not None:
        return _llama3_scaling(factors, facts)
    kind, factor = facts.get("rope.scaling.type", "none"), facts.get("rope.scaling.factor")
    if kind == "none" or factor is None:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    if kind == "yarn":
        length = facts.number("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    raise ModelLoadError(f"It scales rotary frequencies by {kind}, which is not supported.")


_LLAMA3 = MappingProxyType({"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})


def _llama3_scaling(factors: npt.NDArray[np.float32], facts: Facts) -> Config:
    """The rule for the factors in the file: 1 for short wavelengths, the largest for long ones, and a blend between
    them. Raises `ModelLoadError` if they are not those of Llama 3."""
    base, dim, factor = facts.number("rope.freq_base", 10000.0), facts.head_dim, float(factors.max())
    wavelengths = 2 * np.pi * base ** (np.arange(0, dim, 2) / dim)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    blend = np.clip((_LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0.0, 1.0)
    if factors.shape != blend.shape or not np.allclose(factors, 1 / ((1 - blend) / factor + blend), rtol=1e-3):
        raise ModelLoadError("Its rope_freqs are not those of Llama 3; others are not supported.")
    return {"rope_type": "llama3", "factor": _shortest(factor), **_LLAMA3}


def _llama(facts: Facts) -> Config:
    if facts.get("expert_count"):
        raise ModelLoadError("It is a mixture of experts of the llama architecture, which is not supported.")
    biases = {"attention_bias": facts.has("blk.0.attn_q.bias"), "mlp_bias": facts.has("blk.0.ffn_up.bias")}
    return {**_rms_norm(facts), **_whole_rotary(facts), **biases}


def _qwen(facts: Facts) -> Config:
    return {**_rms_norm(facts), **_whole_rotary(facts)}


def _qwen_moe(facts: Facts) -> Config:
    return {
        **_qwen(facts),
        "num_experts": facts.number("expert_count"),
        "num_experts_per_tok": facts.number("expert_used_count"),
        "moe_intermediate_size": facts.number("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def _query_scale(facts: Facts, layers_of_27b: int) -> int:
    """Gemma's largest models divide by hidden size over heads, the others by the real width of a head."""
    is_27b = facts.number("block_count") == layers_of_27b
    return int(facts.number("embedding_length") // facts.num_heads if is_27b else facts.head_dim)


def _gemma2(facts: Facts) -> Config:
    return {
        **_rms_norm(facts),
        "attn_logit_softcapping": facts.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(facts, 46),
        "sliding_window": facts.get("attention.sliding_window", 4096),
    }


def _gemma3(facts: Facts) -> Config:
    scaling = _scaling(facts)
    return {
        **_rms_norm(facts),
        **({} if scaling is None else {"rope_scaling": scaling}),
        "rope_theta": facts.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _query_scale(facts, 62),
        "sliding_window": facts.number("attention.sliding_window"),
        "sliding_window_pattern": 6,
    }


def _partial_rotary(facts: Facts) -> Config:
    return {"partial_rotary_factor": facts.get("rope.dimension_count", facts.head_dim) / facts.head_dim}


def _phi2(facts: Facts) -> Config:
    return {**_partial_rotary(facts), "layer_norm_eps": facts.number("attention.layer_norm_epsilon")}


def _phi3(facts: Facts) -> Config:
    original = facts.get("rope.scaling.original_context_length", facts.number("context_length"))
    config = {**_rms_norm(facts), **_partial_rotary(facts), "original_max_position_embeddings": original}
    names = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
    factors = {name: facts.factors[tensor].tolist() for name, tensor in names.items() if tensor in facts.factors}
    return {**config, "rope_scaling": {"type": "longrope", **factors}} if len(factors) == 2 else config


_EXPERTS = MappingProxyType(
    {f"ffn_{part}_exps": f"mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down")}
    | {"ffn_gate_inp": "mlp.gate"}
)
_PHI2_LAYER = MappingProxyType(
    {
        **{name: _LAYER[name] for name in ("attn_norm", "attn_q", "attn_k", "attn_v")},
        "attn_output": "self_attn.dense",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }
)
_PHI3_LAYER = MappingProxyType({**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
_BF16 = mx.bfloat16  # Gemma's activations are too large for float16

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("llama", _LAYER, _llama, _TOP, has_rotary_order=True),
        "qwen2": Architecture("qwen2", _LAYER, _qwen, _TOP),
        "qwen3": Architecture("qwen3", {**_LAYER, **_HEAD_NORMS}, _qwen, _TOP),
        "qwen3moe": Architecture("qwen3_moe", {**_LAYER, **_HEAD_NORMS, **_EXPERTS}, _qwen_moe, _TOP),
        "gemma": Architecture("gemma", _LAYER, _rms_norm, _TOP, norm_offset=1.0, dtype=_BF16),
        "gemma2": Architecture("gemma2", {**_LAYER, **_GEMMA2_NORMS}, _gemma2, _TOP, norm_offset=1.0, dtype=_BF16),
        "gemma3": Architecture(
            "gemma3_text", {**_LAYER, **_HEAD_NORMS, **_GEMMA2_NORMS}, _gemma3, _TOP, norm_offset=1.0, dtype=_BF16
        ),
        "phi2": Architecture("phi", _PHI2_LAYER, _phi2, {**_TOP, "output_norm": "model.final_layernorm"}),
        "phi3": Architecture("phi3", _PHI3_LAYER, _phi3, _TOP),
    }
)
"""By the architecture's name in a file. Mistral's and many other models are `llama` there."""

_OTHER_KINDS = MappingProxyType(
    {
        "clip": "the image part of a model (mmproj), not a model by itself",
        "bert": "an encoder, which generates no text",
        "nomic-bert": "an encoder, which generates no text",
        "t5": "a model with encoder and decoder",
        "whisper": "a speech model",
    }
)


def find_architecture(name: str) -> Architecture:
    """Raises `ModelLoadError` for an unknown one; the error says what it is, or names the supported ones."""
    found = ARCHITECTURES.get(name)
    if found is None:
        kind = _OTHER_KINDS.get(name)
        raise ModelLoadError(
            f"It has the architecture {name!r}"
            + (f": {kind}." if kind else f"; supported are {', '.join(ARCHITECTURES)}.")
        )
    return found
