"""Folders of tiny block drafters, in the form of their checkpoints, and drafts by mlx-vlm's code for them, or by it and
what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters.dflash2 import DFlash2DraftModel
from mlx_vlm.speculative.drafters.dflash2 import ModelConfig as SecondConfig
from mlx_vlm.speculative.drafters.qwen3_dflash import Model as FirstModel
from mlx_vlm.speculative.drafters.qwen3_dflash import ModelConfig as FirstConfig

from mlx_server.runtime.models.random_models import build_random
from tests.drafters import random_weights, save_drafter_folder
from tests.tiny_models import byte_tokenizer, save_model_folder, tiny_model

MASK_TOKEN_ID = 319
BLOCK_SIZE_OF_DRAFTERS = 8
LAYERS = (0, 2)
"""Of a target with three layers."""

_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SECOND = {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SCALED = {"input_embedding_scale": 1.7, "output_multiplier": 0.4, "final_logit_softcapping": 2.0}


def drafter_config(kind: str, target: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The config.json of a drafter for a model with the configuration `target`. The `kind` is "dflash", perhaps with
    ", causal and sliding" or ", own embeddings", or "dflash2", perhaps with ", scaled". "speculators" is the form of
    vLLM's speculators, with an output matrix for some tokens, biases, and windows, in which rows see no later ones."""
    text = target.get("text_config") or target
    layers = [layer for layer in LAYERS if layer < text["num_hidden_layers"]]
    own: dict[str, Any] = {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": layers}
    if "dflash2" in kind:
        own |= _SECOND
    if "scaled" in kind:
        own |= _SCALED
    if "causal" in kind:
        own["causal"] = True
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "num_target_layers": text["num_hidden_layers"],
        "block_size": BLOCK_SIZE_OF_DRAFTERS,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 4096,
        **(windows if "sliding" in kind or kind == "speculators" else {}),
        "dflash_config": own,
        **more,
    }
    return _as_speculator(config, layers) if kind == "speculators" else config


def _as_speculator(config: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": _ROPE}
    layer = {**config, "attention_bias": True, "rope_parameters": ropes}
    for name in ("architectures", "dflash_config", "num_target_layers", "rope_theta", "block_size"):
        del layer[name]
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [index + 1 for index in layers],
        "block_size": config["block_size"],
        "draft_vocab_size": 120,
        "mask_token_id": MASK_TOKEN_ID,
        "sliding_window_non_causal": False,
    }


class _Trimmed(FirstModel):
    """mlx-vlm's drafter with biases and an output matrix for some tokens. Rows see later ones of their block only in
    layers without a window, as in vLLM's qwen3_dflash.py."""

    def __init__(self, config: dict[str, Any]) -> None:
        own = {"target_layer_ids": [index - 1 for index in config["aux_hidden_state_layer_ids"]]}
        layer = {**config["transformer_layer_config"], "rope_parameters": _ROPE}
        super().__init__(FirstConfig.from_dict({**layer, **config, **own}))
        size = config["draft_vocab_size"]
        self.lm_head = nn.Linear(self.config.hidden_size, size, bias=False)
        for layer in self.layers:
            attention = layer.self_attn
            attention.is_causal = attention.is_sliding
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                rows, columns = attention[name].weight.shape
                attention[name] = nn.Linear(columns, rows)
        chosen = np.sort(np.random.default_rng(3).permutation(self.config.vocab_size)[:size])
        self.d2t = mx.array((chosen - np.arange(size)).astype(np.int64))

    def _project_context_kv(self, _: mx.array) -> None:
        """Without biases, theirs projects for all layers at once."""

    def bind(self, target: Any) -> Any:
        matrix = self.lm_head
        super().bind(target)
        self.lm_head = matrix
        return self

    def draft_block(self, *args: Any) -> mx.array:
        drafts = super().draft_block(*args)
        return drafts + self.d2t[drafts]


def their_drafter(config: dict[str, Any], seed: int = 3) -> Any:
    """mlx-vlm's drafter with random weights."""
    if "speculators_model_type" in config:
        trimmed = _Trimmed(config)
        trimmed.load_weights(list({**random_weights(trimmed, seed), "d2t": trimmed.d2t}.items()))
        return trimmed
    is_second = "selector_rank" in config["dflash_config"]
    model = (
        DFlash2DraftModel(SecondConfig.from_dict(config)) if is_second else FirstModel(FirstConfig.from_dict(config))
    )
    model.load_weights(list(random_weights(model, seed).items()))
    return model


def save_drafter(path: Path, config: dict[str, Any], model: Any) -> str:
    """The folder of a drafter, without a tokenizer, as they are published."""
    weights = {name.replace("codebook.weight", "codebook"): array for name, array in tree_flatten(model.parameters())}
    return save_drafter_folder(path, config, weights)


def folders(path: Path, kind: str, architecture: str = "qwen3") -> tuple[str, str, Any, Any]:
    """The folders of a model and a drafter, mlx-lm's model and mlx-vlm's drafter."""
    model, config = tiny_model(architecture)
    own = drafter_config(kind, dict(config))
    drafter = their_drafter(own)
    if "own embeddings" in kind:
        drafter.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
    path.mkdir(exist_ok=True)
    target = save_model_folder(model, dict(config), path / "model", byte_tokenizer())
    return str(target), save_drafter(path / "drafter", own, drafter), model, drafter


def their_drafts(drafter: Any, target: Any, token_ids: Sequence[int], count: int) -> list[int]:
    """What mlx-vlm's drafter drafts after `token_ids`, with features of all positions but the last."""
    drafter.validate_target_compatibility = lambda target: None  # it asks for mlx-vlm's own class of model
    drafter.bind(target)
    hidden, kept = target.model.embed_tokens(mx.array([token_ids[:-1]])), []
    for index, layer in enumerate(target.model.layers):
        hidden = layer(hidden, "causal")
        if index in LAYERS:
            kept.append(hidden)
    drafts = drafter.draft_block(
        mx.array([token_ids[-1]]),
        mx.concatenate(kept, axis=-1),
        drafter.make_cache(),
        count + 1,
        lambda logits: mx.argmax(logits, axis=-1),
    )
    found: list[int] = drafts[0].tolist()
    return found


def simple_folders(path: Path, kind: str, **sizes: Any) -> tuple[str, str]:
    """A model that always gives the same token, and a drafter that knows it: layers add nothing to embeddings, which
    are all equal, and the output matrix has one row. `sizes` are changes of the model's configuration; with any, the
    drafter's layers and blocks are as large as those of published ones."""
    config = {**tiny_model("llama").config, **sizes}
    model = build_random(config, 0)
    own = drafter_config(kind, config)
    if sizes:
        own |= {name: config.get(name, own[name]) for name in _SIZES} | {"block_size": 16}
    drafter = their_drafter(own)
    for one in (model, drafter):
        weights = {
            name: mx.zeros_like(array)
            for name, array in tree_flatten(one.parameters())
            if name.endswith(("o_proj.weight", "down_proj.weight", "codebook.weight"))
        }
        one.load_weights(list(weights.items()), strict=False)
    matrix = mx.zeros((config["vocab_size"], config["hidden_size"]))
    matrix[7] = 1.0
    ones = [(name, mx.ones_like(array)) for name, array in tree_flatten(model.parameters()) if "norm" in name]
    given = [("model.embed_tokens.weight", mx.ones_like(matrix)), ("lm_head.weight", matrix), *ones]
    model.load_weights(given, strict=False)
    target = save_model_folder(model, dict(config), path / "model", byte_tokenizer())
    return str(target), save_drafter(path / "drafter", own, drafter)
