"""The multi-token-prediction heads of each architecture: which tensors of a checkpoint belong to the head, and how it
computes. The facts come from the reference implementation that each entry names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HeadFamily:
    """The head of some architectures.

    prefix           pattern with which the names of its tensors start; {layers} is the model's number of layers
    renames          replacements in the rest of the names
    layer            prefix of the names of its decoder layers, after `prefix` and `renames`
    layers           their prefix in `HeadBody`
    norm             name of its last norm; empty if it uses the model's last norm
    one_layer        changes to a model's configuration that make its layers like those of the head
    embedding_first  whether the embedding precedes the hidden state in the concatenation
    carries_normed   whether the head passes on its hidden state after the last norm, instead of before it
    reads_normed     whether it was trained on the model's hidden states after the last norm, instead of before it
    adds_one         whether checkpoints that are not in MLX's format store the weights of norms minus 1
    scales           factors of weights, by the ends of their names
    """

    prefix: str
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "final_layernorm"
    layer: str = ""
    layers: str = "layers.0."
    renames: Mapping[str, str] = field(default_factory=dict)
    one_layer: Callable[[Config], Config] = lambda _: {}
    embedding_first: bool = True
    carries_normed: bool = True
    reads_normed: bool = True
    adds_one: bool = False
    scales: Callable[[Config], Mapping[str, float]] = lambda _: {}

    def parts(self, name: str) -> str | None:
        """The name in `HeadBody` of a tensor, given its name without the prefix; None for copies of the model's own
        tensors."""
        for old, new in self.renames.items():
            name = name.replace(old, new)
        stem, _, kind = name.rpartition(".")
        own = {
            self.embedding_norm: "embedding_norm",
            self.hidden_norm: "hidden_norm",
            self.projection: "projection",
            self.norm: "norm",
        }
        if stem in own:
            return f"{own[stem]}.{kind}"
        if not name.startswith(self.layer) or stem in _COPIES:
            return None
        return f"{self.layers}{name.removeprefix(self.layer)}"


_COPIES = ("embed_tokens", "word_embeddings", "shared_head.head", "shared_head.output")

_QWEN = HeadFamily(
    prefix=r"(?:language_model\.|model\.)*mtp\.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
    layer="layers.0.",
    one_layer=lambda _: {"full_attention_interval": 1},
    adds_one=True,
)
"""vLLM's qwen3_next_mtp.py: `fc` of embedding and hidden state, one layer with full attention, `norm`."""

_DEEPSEEK = HeadFamily(
    prefix=r"model\.layers\.{layers}\.",
    norm="shared_head.norm",
    one_layer=lambda _: {"first_k_dense_replace": 0, "moe_layer_freq": 1},
    carries_normed=False,
)
"""vLLM's deepseek_mtp.py and glm4_moe_mtp.py, and DeepSeek-V3's README_WEIGHTS.md: the layer after the last one, with
the model's embedding and output matrix."""

_BAILING = HeadFamily(prefix=r"model\.layers\.{layers}\.", one_layer=lambda _: {"first_k_dense_replace": 0})
"""SGLang's bailing_moe_nextn.py: the layer after the last one, with latent attention and experts."""

_MIMO = HeadFamily(
    prefix=r"model\.mtp_layers\.0\.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    embedding_first=False,
)
"""vLLM's mimo_mtp.py: the hidden state comes first."""

_MIMO_V2 = HeadFamily(
    prefix=r"model\.mtp\.layers\.0\.",
    renames={"pre_mlp_layernorm": "post_attention_layernorm"},
    # The second layer does not belong to the head: mlx-lm's code looks for the first layer with full attention.
    one_layer=lambda _: {"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0]},
)
"""SGLang's mimo_v2_flash_nextn.py: a layer with a window, without experts."""

_ERNIE = HeadFamily(
    prefix=r"model\.mtp_",
    embedding_norm="emb_norm.0",
    hidden_norm="hidden_norm.0",
    projection="linear_proj.0",
    norm="",
    layer="block.0.",
    one_layer=lambda _: {"moe_layer_start_index": 1},
)
"""FastDeploy's ernie4_5_mtp.py: a layer without experts, and the model's own last norm, as in training. (vLLM's
ernie_mtp.py has no last norm.)"""


def _exaone_layer(config: Config) -> Config:
    """Keeps the model's other layers in the list, because full attention has no rope if any of them has a window."""
    own = config.get("mtp_layer_types") or ["full_attention"]
    return {"layer_types": [own[0], *config["layer_types"]], "is_moe_layer": [False]}


_EXAONE = replace(_QWEN, prefix=r"mtp\.", one_layer=_exaone_layer, adds_one=False)
"""vLLM's exaone_moe_mtp.py: as Qwen, with a layer without experts."""


def _nemotron_layers(config: Config) -> Config:
    types = config.get("mtp_layers_block_type")
    pattern = None if types else list(config.get("mtp_hybrid_override_pattern") or "*E")
    return {
        "num_hidden_layers": len(types or pattern or ()),
        "hybrid_override_pattern": pattern,
        "layers_block_type": types,
        "layer_types": None,
    }


_NEMOTRON = HeadFamily(
    prefix=r"(?:language_model\.)?mtp\.layers\.",
    embedding_norm="0.enorm",
    hidden_norm="0.hnorm",
    projection="0.eh_proj",
    norm="1.final_layernorm",
    layers="layers.",
    one_layer=_nemotron_layers,
)
"""vLLM's nemotron_h_mtp.py: two layers, attention and experts."""

_STEP_LISTS = ("layer_types", "partial_rotary_factors", "rope_theta", "swiglu_limits", "swiglu_limits_shared")


def _step_layer(config: Config) -> Config:
    """The lists with an entry for each layer continue with the heads after the model's last layer. Heads have a window
    and no experts."""
    lists = {name: config[name] for name in _STEP_LISTS if isinstance(config.get(name), list)}
    own = {name: values[config["num_hidden_layers"] :] for name, values in lists.items()}
    return {**own, "moe_layers_enum": ""}


_STEP = replace(_DEEPSEEK, renames={"transformer.": ""}, one_layer=_step_layer, reads_normed=False, adds_one=True)
"""SGLang's step3p5_mtp.py: reads hidden states before the last norm."""


def _longcat_layer(config: Config) -> Config:
    return {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "intermediate_size": config["ffn_hidden_size"],
    }


def _longcat_scales(config: Config) -> dict[str, float]:
    """Scales of latents, which DeepSeek V3's layers do not have."""
    ranks = {"q": config["q_lora_rank"], "kv": config["kv_lora_rank"]}
    return {
        f"{part}_a_layernorm.weight": (config["hidden_size"] / rank) ** 0.5
        for part, rank in ranks.items()
        if config.get(f"mla_scale_{part}_lora")
    }


_LONGCAT = HeadFamily(
    prefix=r"model\.mtp\.",
    embedding_norm="layers.0.enorm",
    hidden_norm="layers.0.hnorm",
    projection="layers.0.eh_proj",
    norm="norm",
    layer="layers.0.",
    renames={"norm.m.": "norm.", "transformer_layer.": ""},
    one_layer=_longcat_layer,
    scales=_longcat_scales,
)
"""vLLM's longcat_flash_mtp.py: a layer of DeepSeek V3 without experts."""

FAMILIES: Mapping[str, HeadFamily] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _DEEPSEEK),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_v3"), _BAILING),
    "mimo": _MIMO,
    "mimo_v2_flash": _MIMO_V2,
    "ernie4_5_moe": _ERNIE,
    "exaone_moe": _EXAONE,
    "nemotron_h": _NEMOTRON,
    "step3p5": _STEP,
    "longcat_flash": _LONGCAT,
}
"""By `model_type`."""
