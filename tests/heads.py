"""Folders of tiny models with multi-token-prediction heads, in the form of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_server.runtime.models.random_models import build_random
from tests.architectures import config_of
from tests.tiny_models import VOCAB_SIZE, byte_tokenizer, save_model_folder

Weights = dict[str, mx.array]

_QWEN = ("mtp.", "mtp.layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
_DEEPSEEK = ("model.layers.{}.", "model.layers.{}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
_BAILING = ("model.layers.{}.", "model.layers.{}.", ("enorm", "hnorm", "eh_proj", "final_layernorm"))
_MIMO = (
    "model.mtp_layers.0.",
    "model.mtp_layers.0.",
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
)
_MIMO_V2 = ("model.mtp.layers.0.", "model.mtp.layers.0.", ("enorm", "hnorm", "eh_proj", "final_layernorm"))
_ERNIE = ("model.mtp_", "model.mtp_block.0.", ("emb_norm.0", "hidden_norm.0", "linear_proj.0", ""))
_NEMOTRON = ("mtp.layers.", "mtp.layers.{}.", ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm"))
_STEP = ("model.layers.{}.", "model.layers.{}.", ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm"))
_LONGCAT = ("model.mtp.", "model.mtp.layers.0.", ("layers.0.enorm.m", "layers.0.hnorm.m", "layers.0.eh_proj", "norm"))
NAMES: dict[str, tuple[str, str, tuple[str, str, str, str]]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "exaone_moe"), _QWEN),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), _DEEPSEEK),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_v3"), _BAILING),
    "mimo": _MIMO,
    "mimo_v2_flash": _MIMO_V2,
    "ernie4_5_moe": _ERNIE,
    "nemotron_h": _NEMOTRON,
    "step3p5": _STEP,
    "longcat_flash": _LONGCAT,
}
"""By architecture: the prefix of the head's names, that of its layers, and the names of its own parts (empty if it has
none). {} is the number of the model's layers, or the number of the layer if the head has two."""

_ONE_LAYER: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 1},
    "bailing_moe_v3": {"layer_group_size": 1},
    "ernie4_5_moe": {"moe_num_experts": 1, "moe_layer_start_index": 9},
    "exaone_moe": {"layer_types": ["full_attention", "sliding_attention"], "is_moe_layer": [False]},
    "longcat_flash": {"model_type": "deepseek_v3", "n_routed_experts": None},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0]},
    "nemotron_h": {"hybrid_override_pattern": ["*", "E"], "num_hidden_layers": 2},
    "step3p5": {"layer_types": ["sliding_attention"], "moe_layers_enum": ""},
}


def head_config(architecture: str, **more: Any) -> dict[str, Any]:
    """The configuration of a model with the head's kind of layers only."""
    config = {**config_of(architecture), **more}
    changes = {"num_hidden_layers": 1, "full_attention_interval": 1, "first_k_dense_replace": 0}
    changes |= _ONE_LAYER.get(architecture, {})
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **changes}
    return {**config, **changes}


def layer_name(architecture: str, name: str) -> str:
    """The name in a checkpoint of `layers.0.…` in a model with the head's layers only."""
    config = config_of(architecture)
    _, layer_prefix, _ = NAMES[architecture]
    number, _, rest = name.partition("layers.")[2].partition(".")
    if architecture != "nemotron_h":
        number = str((config.get("text_config") or config)["num_hidden_layers"])
    if architecture == "longcat_flash":
        rest = rest.replace("mlp.", "transformer_layer.mlp.")
    if architecture == "mimo_v2_flash":
        rest = rest.replace("post_attention_layernorm", "pre_mlp_layernorm")
    return f"{layer_prefix.format(number)}{rest}"


def head_weights(architecture: str, seed: int = 1, **more: Any) -> Weights:
    """Random weights of a head, as in a file in MLX's format; `more` changes the model's configuration."""
    config = config_of(architecture)
    prefix, _, (embedding_norm, hidden_norm, projection, norm) = NAMES[architecture]
    num_layers = (config.get("text_config") or config)["num_hidden_layers"]
    one = build_random(head_config(architecture, **more), seed)
    weights = {
        layer_name(architecture, name): array for name, array in tree_flatten(one.parameters()) if "layers." in name
    }
    size = config["hidden_size"]
    keys = mx.random.split(mx.random.key(seed), 4)
    prefix = prefix.format(num_layers)
    for name, key in zip(filter(None, (embedding_norm, hidden_norm, norm)), keys):
        weights[f"{prefix}{name}.weight"] = 1.0 + 0.1 * mx.random.normal((size,), key=key)
    weights[f"{prefix}{projection}.weight"] = 0.2 * mx.random.normal((size, 2 * size), key=keys[3])
    return weights


def save_head(path: Path, weights: Weights, file_name: str = "mtp.safetensors", kind: str = "mlx") -> None:
    """Writes a head. `kind` "pt" is a head as published, without conversion."""
    mx.save_safetensors(str(path / file_name), weights, metadata={"format": kind})


def head_folder(path: Path, architecture: str, *, inside: bool = False) -> str:
    """A tiny random model with a random head, in a separate file or among its weights."""
    config = stored_config(config_of(architecture))
    model = build_random(config, 0)
    save_model_folder(model, config, path, byte_tokenizer())
    if inside:
        both = {**dict(tree_flatten(model.parameters())), **head_weights(architecture)}
        save_head(path, both, "model.safetensors")
    else:
        save_head(path, head_weights(architecture))
    return str(path)


CYCLE = np.roll(np.arange(VOCAB_SIZE), -7)
"""The most likely token after each token, in a model of `cycle_folder`."""


def cycle_folder(path: Path, architecture: str, *, reads_hidden: bool) -> str:
    """A model whose next token depends only on the last one, with a head that always predicts the token after it: from
    the model's hidden state, or from the previous token. Layers add nothing; embeddings are unit vectors."""
    config = stored_config(config_of(architecture))
    sizes = {"hidden_size": VOCAB_SIZE, "num_attention_heads": 5, "num_key_value_heads": 5}
    sizes["num_attention_groups"] = 5
    config |= sizes
    model = build_random(config, 0)
    table = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.float32)
    table[CYCLE, np.arange(VOCAB_SIZE)] = 1.0
    step = mx.array(table)  # maps a token's unit vector to the next token's
    eye, nothing = mx.eye(VOCAB_SIZE), mx.zeros((VOCAB_SIZE, VOCAB_SIZE))
    weights = _without_layers(dict(tree_flatten(model.parameters())))
    weights = {n: eye if n.endswith("embed_tokens.weight") else a for n, a in weights.items()}
    weights = {n: 0.3 * step if n.endswith("lm_head.weight") else a for n, a in weights.items()}
    path.mkdir()
    save_model_folder(model, config, path, byte_tokenizer())
    save_head(path, weights, "model.safetensors")
    prefix, _, (embedding_norm, hidden_norm, projection, norm) = NAMES[architecture]
    one = build_random(head_config(architecture, **sizes), 1)
    prefix = prefix.format(config["num_hidden_layers"])
    head = {
        layer_name(architecture, name): array
        for name, array in _without_layers(dict(tree_flatten(one.parameters()))).items()
        if "layers." in name
    }
    norms = filter(None, (embedding_norm, hidden_norm, norm))
    head |= {f"{prefix}{name}.weight": mx.ones(VOCAB_SIZE) for name in norms}
    parts = [nothing, step] if reads_hidden else [eye, nothing]
    if architecture == "mimo":
        parts.reverse()
    save_head(path, {**head, f"{prefix}{projection}.weight": mx.concatenate(parts, axis=1)})
    return str(path)


def stored_config(config: dict[str, Any]) -> dict[str, Any]:
    """The form of a `config.json`: for most models, transformers warns if `rope_scaling` is null."""
    if config["model_type"] == "glm4_moe":
        return config
    nested = config.get("text_config")
    own = {"text_config": stored_config(nested)} if isinstance(nested, dict) else {}
    return {name: value for name, value in {**config, **own}.items() if name != "rope_scaling"}


def _without_layers(weights: Weights) -> Weights:
    """The weights of a model whose layers add nothing, and whose norms only scale."""

    def change(name: str, array: mx.array) -> mx.array:
        if "o_proj" in name or "down_proj" in name:
            return mx.zeros_like(array)
        return mx.ones_like(array) if name.endswith("norm.weight") else array

    return {name: change(name, array) for name, array in weights.items()}


def as_published(weights: Weights, *, less_one: Callable[[str], bool]) -> Weights:
    """The published form: a tensor for each expert, and 1 subtracted from the norms that `less_one` selects."""
    published: Weights = {}
    for name, array in weights.items():
        if ".switch_mlp." in name:
            for number, expert in enumerate(array):
                one = name.replace(".switch_mlp.", f".experts.{number}.")
                published[one.replace(".fc1.", ".up_proj.").replace(".fc2.", ".down_proj.")] = expert
        else:
            published[name] = array - 1.0 if less_one(name) else array
    return published
