"""Folders of tiny assistants of Gemma 4 models, in the form of their checkpoints, and drafts by mlx-vlm's code for
them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.gemma4.language import LanguageModel
from mlx_vlm.speculative.drafters.gemma4_assistant import Model, ModelConfig

from mlx_server.runtime.models.random_models import build_random
from tests.drafters import random_weights, save_drafter_folder
from tests.tiny_models import byte_tokenizer, save_model_folder
from tests.vision_configs import CONFIGS

TARGETS: dict[str, dict[str, Any]] = {
    name: {key: value for key, value in CONFIGS[name].items() if key != "vision_config"} | {"model_type": "gemma4"}
    for name in ("gemma4", "gemma4_moe")
}
"""One whose last layers share K/V and that has inputs per layer, and one with experts and equal K and V."""


def assistant_config(target: dict[str, Any], *, is_clustered: bool = False) -> dict[str, Any]:
    text = target["text_config"]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": text["hidden_size"],
        "use_ordered_embeddings": is_clustered,
        "num_centroids": 20,
        "centroid_intermediate_top_k": 4,
        "tie_word_embeddings": True,
        "text_config": {
            **text,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": len(kinds),
            "num_attention_heads": 4,
            "num_kv_shared_layers": len(kinds),
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "layer_types": kinds,
        },
    }


def their_assistant(config: dict[str, Any], seed: int = 3) -> Any:
    """mlx-vlm's assistant with random weights."""
    model = Model(ModelConfig.from_dict(config))
    weights = random_weights(model, seed)
    if config["use_ordered_embeddings"]:
        order = np.random.default_rng(seed).permutation(config["text_config"]["vocab_size"])
        weights["masked_embedding.token_ordering"] = mx.array(order.astype(np.int32))
    model.load_weights(list(weights.items()))
    return model


def save_assistant(path: Path, config: dict[str, Any], model: Any) -> str:
    """The folder of an assistant, without a tokenizer."""
    weights = dict(tree_flatten(model.parameters()))
    if "masked_embedding.token_ordering" in weights:
        weights["masked_embedding.token_ordering"] = weights["masked_embedding.token_ordering"].astype(mx.int64)
    return save_drafter_folder(path, config, weights)


def folders(path: Path, kind: str, *, is_clustered: bool = False) -> tuple[str, str]:
    """A random model and a random assistant for it."""
    config = TARGETS[kind]
    path.mkdir(exist_ok=True)
    model = save_model_folder(build_random(config, 7), config, path / "model", byte_tokenizer())
    own = assistant_config(config, is_clustered=is_clustered)
    return str(model), save_assistant(path / "assistant", own, their_assistant(own))


@lru_cache(maxsize=1)
def _theirs(kind: str, *, is_clustered: bool) -> tuple[Any, Any]:
    """mlx-vlm's model and assistant."""
    config = TARGETS[kind]
    target = LanguageModel(vlm_text_config(config))
    target.load_weights(tree_flatten(build_random(config, 7).language_model.parameters()))
    return target, their_assistant(assistant_config(config, is_clustered=is_clustered))


def their_drafts(kind: str, token_ids: Sequence[int], count: int, *, is_clustered: bool = False) -> list[int]:
    """What mlx-vlm's assistant drafts after `token_ids`, of which its model has computed all but the last."""
    target, drafter = _theirs(kind, is_clustered=is_clustered)
    made = target(mx.array([token_ids[:-1]]), return_hidden=True, return_shared_kv=True)
    drafter.reset(target)
    drafter.set_shared_kv(made.shared_kv_states, len(token_ids) - 1)
    hidden = target.speculative_draft_hidden(made.hidden_states[-1][:, -1:])
    drafts = drafter.draft_block(token_ids[-1], hidden, [], count + 1, lambda logits: mx.argmax(logits, axis=-1))
    found: list[int] = drafts[0].tolist()
    return found


def simple_folders(path: Path, **sizes: Any) -> tuple[str, str]:
    """A model that always gives the same token, and an assistant that knows it: layers add nothing to embeddings, of
    which all but that of token 0 are equal, and smaller. `sizes` are changes of the text part's configuration."""
    config = {**TARGETS["gemma4_moe"], **{name: sizes[name] for name in ("vocab_size",) if name in sizes}}
    config["text_config"] = {**config["text_config"], "enable_moe_block": False, **sizes}
    own = assistant_config(config)
    model, assistant = build_random(config, 7), their_assistant(own)
    for one in (model, assistant):
        weights = {}
        for name, array in tree_flatten(one.parameters()):
            if name.endswith("embed_tokens.weight"):
                weights[name] = mx.where(mx.arange(array.shape[0])[:, None] == 0, 0.02, mx.full(array.shape, 0.01))
            elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                weights[name] = mx.zeros_like(array)
            elif name.endswith(("norm.weight", "projection.weight", "layer_scalar")):
                weights[name] = mx.ones_like(array)
        one.load_weights(list(weights.items()), strict=False)
    path.mkdir(exist_ok=True)
    target = save_model_folder(model, config, path / "model", byte_tokenizer())
    return str(target), save_assistant(path / "assistant", own, assistant)


def vlm_text_config(config: dict[str, Any]) -> Any:
    from mlx_vlm.models.gemma4.config import TextConfig

    return TextConfig.from_dict(config["text_config"])
