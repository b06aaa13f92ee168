"""Folders of tiny EAGLE-3 drafters, in the forms of vLLM's speculators and of SGLang, and drafts by mlx-vlm's code for
them, or by it and what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import initialize_rope
from mlx_vlm.speculative.drafters.eagle3 import Model, ModelConfig
from mlx_vlm.speculative.drafters.eagle3.eagle3 import Attention

from mlx_server.runtime.models.random_models import build_random
from tests.drafters import random_weights, save_drafter_folder
from tests.tiny_models import byte_tokenizer, save_model_folder, tiny_model

LAYER_IDS = (1, 2, 3)
"""Of a target with three layers; the input of a fourth one is the output of the third."""
KINDS = ("speculators", "sglang", "whole vocabulary", "tied", "two layers", "qwen3")
WINDOW = 20
_ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


class _Normed(Model):
    """mlx-vlm's drafter if it goes on from its hidden state after the last norm, perhaps with a norm for the input of
    each layer of the model (`fc_norm`), as in vLLM's qwen3_eagle3.py."""

    def _prepare_target_hidden(self, hidden: mx.array) -> mx.array:
        if "fc_norm" in self and hidden.shape[-1] != self.hidden_size:
            parts = mx.split(hidden, len(self.fc_norm), axis=-1)
            return self.fc(mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts)], axis=-1))
        return super()._prepare_target_hidden(hidden)

    def _forward_tokens(self, *args: Any) -> mx.array:
        return self.norm(super()._forward_tokens(*args))

    def _logits(self, hidden: mx.array) -> mx.array:
        return self.lm_head(hidden)


class _Qwen3Attention(Attention):
    """With norms of queries and keys, and a window."""

    def __init__(self, *args: Any, window: int) -> None:
        super().__init__(*args)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=self.config.rms_norm_eps) for _ in range(2))
        self._window = window

    def __call__(self, x: mx.array, mask: Any, cache: Any, position_offset: Any) -> mx.array:
        def heads(rows: mx.array) -> mx.array:
            return rows.reshape(*x.shape[:2], -1, self.head_dim)

        queries = self.q_norm(heads(self.q_proj(x))).transpose(0, 2, 1, 3)
        keys = self.k_norm(heads(self.k_proj(x))).transpose(0, 2, 1, 3)
        queries, keys = (self.rope(part, offset=position_offset) for part in (queries, keys))
        keys, values = cache.update_and_fetch(keys, heads(self.v_proj(x)).transpose(0, 2, 1, 3))
        places = mx.arange(keys.shape[2])
        rows = places[-x.shape[1] :, None]
        seen = (places <= rows) & (places > rows - self._window)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=seen)
        return self.o_proj(out.transpose(0, 2, 1, 3).flatten(2))


def eagle_config(kind: str, target: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The config.json of a drafter for a model with the configuration `target`."""
    layer = {
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 2 if kind in ("two layers", "qwen3") else 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": 4096,
    }
    is_whole = kind in ("whole vocabulary", "tied")
    if is_whole:
        layer["rope_parameters"] = {"rope_theta": layer.pop("rope_theta"), **_ROPE}
    if kind == "qwen3":
        layer |= {"model_type": kind, "attention_bias": True, "sliding_window": WINDOW}
        layer["layer_types"] = ["full_attention", "sliding_attention"]
        more |= {"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [1, 3]}
    size = target["vocab_size"] if is_whole else 120
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
        "tie_word_embeddings": kind == "tied",
        "norm_before_fc": kind == "two layers",
        "norm_output": kind in ("two layers", "qwen3"),
        **more,
    }


def their_eagle(config: dict[str, Any], seed: int = 3) -> Any:
    """mlx-vlm's drafter with random weights."""
    layer = config.get("transformer_layer_config")
    flat = {"transformer_layer_config": config, "norm_before_residual": layer is not None, **config}
    model = (_Normed if config.get("norm_output") else Model)(ModelConfig.from_dict(flat))
    if config.get("fc_norm"):
        model.fc_norm = [nn.RMSNorm(model.target_hidden_size, eps=1e-6) for _ in model.config.target_layer_ids]
        model.fc = nn.Linear(len(model.fc_norm) * model.target_hidden_size, model.hidden_size, bias=True)
        for one, size, window in zip(model.layers, (2 * model.hidden_size, model.hidden_size), (10_000, WINDOW)):
            one.self_attn = _Qwen3Attention(one.self_attn.config, size, window=window)
    for one in model.layers:
        if rope := (layer or {}).get("rope_parameters"):
            one.self_attn.rope = initialize_rope(32, rope["rope_theta"], False, rope)
    weights = random_weights(model, seed)
    if "d2t" in weights:
        size = weights["d2t"].size
        others = 8 + np.random.default_rng(seed).permutation(model.target_vocab_size - 8)[: size - 8]
        chosen = np.sort(np.concatenate([np.arange(8), others]))  # 5 and 6 are what random models are made to like
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
    layer_ids = (1, 3) if "fc_norm" in drafter else LAYER_IDS
    features = mx.concatenate([outputs[index - 1] for index in layer_ids], axis=-1)

    def greedy(logits: mx.array) -> mx.array:
        return mx.argmax(logits, axis=-1)

    embeddings = drafter.embed_tokens
    drafter.reset(target)
    drafter.embed_tokens = embeddings  # its own, which `reset` replaces
    drafter.prefill_from_target_hidden(mx.array([token_ids[:-1]]), features, int(token_ids[-1]), greedy)
    drafts = drafter.draft_block(int(token_ids[-1]), features[:, -1:], None, count + 1, greedy)
    found: list[int] = drafts[0].tolist()
    return found


def simple_folders(path: Path) -> tuple[str, str]:
    """A model that always gives the same token, and a drafter that knows it: layers add nothing to embeddings, which
    are all equal, and the output matrices have one row."""
    model, config = build_random(tiny_model("llama").config, 0), dict(tiny_model("llama").config)
    own = eagle_config("qwen3", config)
    drafter = their_eagle(own)
    for one in (model, drafter):
        weights = {}
        for name, array in tree_flatten(one.parameters()):
            if "o_proj" in name or "down_proj" in name or name.endswith("bias"):
                weights[name] = mx.zeros_like(array)
            elif "norm" in name or name.endswith(("fc.weight", "embed_tokens.weight")):
                weights[name] = mx.ones_like(array)
            elif name.endswith("lm_head.weight"):
                place = 7 if one is model else (mx.arange(own["draft_vocab_size"]) + drafter.d2t).tolist().index(7)
                weights[name] = mx.where(mx.arange(array.shape[0])[:, None] == place, mx.ones_like(array), 0.0)
        one.load_weights(list(weights.items()), strict=False)
    path.mkdir(exist_ok=True)
    target = save_model_folder(model, config, path / "model", byte_tokenizer())
    return str(target), save_eagle(path / "drafter", own, drafter)
