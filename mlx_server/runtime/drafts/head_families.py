"""Which tensors of a checkpoint are its multi-token-prediction head, and how they are joined, by architecture. Facts
are from the reference implementations that each family names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HeadFamily:
    """The head of some architectures. Names of its tensors begin with `prefix`, a pattern in which {layers} stands for
    the number of the model's layers, and `renames` are made behind it; `layer` goes before those of its decoder layers,
    which are `layers` of a model. Without a `norm` the head has the model's last one.

    `one_layer` is what makes the layers of a model's configuration those of the head. `embedding_first`: the order in
    which embedding and hidden state are joined. `carries_normed`: the head gives itself its hidden state behind the
    last norm, not before. `reads_normed`: it was trained on the model's hidden states behind the last norm, not before.
    `adds_one`: checkpoints that are not in MLX's format keep norms' weights less 1. `scales`: factors of weights, by
    the ends of their names.
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
        """The name in a `HeadBody` of what follows the prefix; None for copies of what is the model's own."""
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
"""vLLM's qwen3_next_mtp.py: `fc` over embedding and hidden state, a layer with full attention, `norm`."""

_DEEPSEEK = HeadFamily(
    prefix=r"model\.layers\.{layers}\.",
    norm="shared_head.norm",
    one_layer=lambda _: {"first_k_dense_replace": 0, "moe_layer_freq": 1},
    carries_normed=False,
)
"""vLLM's deepseek_mtp.py and glm4_moe_mtp.py, and DeepSeek-V3's README_WEIGHTS.md: the layer behind the last one, whose
embedding and output matrix are the model's."""

_BAILING = HeadFamily(
    prefix=r"model\.layers\.{layers}\.",
    one_layer=lambda _: {"first_k_dense_replace": 0},
)
"""SGLang's bailing_moe_nextn.py: the layer behind the last one, with latent attention and experts."""

_MIMO = HeadFamily(
    prefix=r"model\.mtp_layers\.0\.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    norm="final_layernorm",
    embedding_first=False,
)
"""vLLM's mimo_mtp.py: the hidden state goes first."""

_MIMO_V2 = HeadFamily(
    prefix=r"model\.mtp\.layers\.0\.",
    renames={"pre_mlp_layernorm": "post_attention_layernorm"},
    # the second layer, with full attention, is none of the head's: mlx-lm's code wants to know where the first such is
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
ernie_mtp.py has none.)"""


def _exaone_layer(config: Config) -> Config:
    """The model's other layers stay in the list: if any has a window, full attention has no rope."""
    own = config.get("mtp_layer_types") or ["full_attention"]
    return {"layer_types": [own[0], *config["layer_types"]], "is_moe_layer": [False]}


_EXAONE = HeadFamily(
    prefix=r"mtp\.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
    layer="layers.0.",
    one_layer=_exaone_layer,
)
"""vLLM's exaone_moe_mtp.py: Qwen's names, a layer without experts."""


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
    """Lists by layer go on behind the model's last one for its heads; those have a window, and no experts."""
    lists = {name: config[name] for name in _STEP_LISTS if isinstance(config.get(name), list)}
    own = {name: values[config["num_hidden_layers"] :] for name, values in lists.items()}
    return {**own, "moe_layers_enum": ""}


_STEP = HeadFamily(
    prefix=r"model\.layers\.{layers}\.",
    norm="shared_head.norm",
    renames={"transformer.": ""},
    one_layer=_step_layer,
    carries_normed=False,
    reads_normed=False,
    adds_one=True,
)
"""SGLang's step3p5_mtp.py: hidden states from before the last norm."""


def _longcat_layer(config: Config) -> Config:
    return {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "intermediate_size": config["ffn_hidden_size"],
    }


def _longcat_scales(config: Config) -> dict[str, float]:
    """Of latents, which DeepSeek V3's layers do not scale."""
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
