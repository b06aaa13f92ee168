"""Folders of tiny EAGLE-3 drafters, in the forms of vLLM's speculators and of SGLang, and drafts by mlx-vlm's code for
them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import initialize_rope
from mlx_vlm.speculative.drafters.eagle3 import Model, ModelConfig

from tests.drafters import random_weights, save_drafter_folder
from tests.tiny_models import byte_tokenizer, save_model_folder, tiny_model

LAYER_IDS = (1, 2, 3)
"""Of a target with three layers; the input of a fourth one is the output of the third."""
KINDS = ("speculators", "sglang", "whole vocabulary", "two layers")
_ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


class _Normed(Model):
    """mlx-vlm's drafter if it goes on from its hidden state after the last norm."""

    def _forward_tokens(self, *args: Any) -> mx.array:
        return self.norm(super()._forward_tokens(*args))

    def _logits(self, hidden: mx.array) -> mx.array:
        return self.lm_head(hidden)


def eagle_config(kind: str, target: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The config.json of a drafter for a model with the configuration `target`."""
    layer = {
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 2 if kind == "two layers" else 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": 4096,
    }
    if kind == "whole vocabulary":
        layer["rope_parameters"] = {"rope_theta": layer.pop("rope_theta"), **_ROPE}
    size = target["vocab_size"] if kind == "whole vocabulary" else 120
    if kind == "sglang":
        own = {"eagle_aux_hidden_state_layer_ids": [one - 1 for one in LAYER_IDS], "use_aux_hidden_state": True}
        kinds = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": own}
        return {**layer, "draft_vocab_size": size, **kinds, **more}
    normed = {} if kind == "speculators" else {"norm_before_residual": False}  # true is their default
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": size,
        "eagle_aux_hidden_state_layer_ids": [*LAYER_IDS],
        **normed,
        "norm_before_fc": kind == "two layers",
        "norm_output": kind == "two layers",
        **more,
    }


def their_eagle(config: dict[str, Any], seed: int = 3) -> Any:
    """mlx-vlm's drafter with random weights."""
    layer = config.get("transformer_layer_config")
    flat = {"transformer_layer_config": config, "norm_before_residual": layer is not None, **config}
    model = (_Normed if config.get("norm_output") else Model)(ModelConfig.from_dict(flat))
    for one in model.layers:
        if rope := (layer or {}).get("rope_parameters"):
            one.self_attn.rope = initialize_rope(32, rope["rope_theta"], False, rope)
    weights = random_weights(model, seed)
    if "d2t" in weights:
        size = weights["d2t"].size
        chosen = np.sort(np.random.default_rng(seed).permutation(model.target_vocab_size)[:size])
        weights["d2t"] = mx.array((chosen - np.arange(size)).astype(np.int32))
    model.load_weights(list(weights.items()))
    return model


def save_eagle(path: Path, config: dict[str, Any], model: Any) -> str:
    """The folder of a drafter, without a tokenizer and, if it is SGLang's form, with its names."""
    weights = dict(tree_flatten(model.parameters()))
    if "d2t" in weights:
        weights |= {"d2t": weights["d2t"].astype(mx.int64), "t2d": mx.zeros((model.target_vocab_size,), mx.bool_)}
    if "eagle_config" in config:
        weights = {name.replace("layers.0.", "midlayer."): array for name, array in weights.items()}
    return save_drafter_folder(path, config, weights)


def folders(path: Path, kind: str, architecture: str = "llama") -> tuple[str, str, Any, Any]:
    """The folders of a model and a drafter, mlx-lm's model and mlx-vlm's drafter."""
    model, config = tiny_model(architecture)
    own = eagle_config(kind, dict(config))
    drafter = their_eagle(own)
    path.mkdir(exist_ok=True)
    target = save_model_folder(model, dict(config), path / "model", byte_tokenizer())
    return str(target), save_eagle(path / "drafter", own, drafter), model, drafter


def their_drafts(drafter: Any, target: Any, token_ids: Sequence[int], count: int) -> list[int]:
    """What mlx-vlm's drafter drafts after `token_ids`, with features of all positions but the last."""
    hidden, outputs = target.model.embed_tokens(mx.array([token_ids[:-1]])), []
    for layer in target.model.layers:
        hidden = layer(hidden, "causal")
        outputs.append(hidden)
    features = mx.concatenate([outputs[index - 1] for index in LAYER_IDS], axis=-1)

    def greedy(logits: mx.array) -> mx.array:
        return mx.argmax(logits, axis=-1)

    embeddings = drafter.embed_tokens
    drafter.reset(target)
    drafter.embed_tokens = embeddings  # its own, which `reset` replaces
    drafter.prefill_from_target_hidden(mx.array([token_ids[:-1]]), features, int(token_ids[-1]), greedy)
    drafts = drafter.draft_block(int(token_ids[-1]), features[:, -1:], None, count + 1, greedy)
    found: list[int] = drafts[0].tolist()
    return found
