"""LoRA adapters as Hugging Face's PEFT saves them, made into mlx-lm's layers.

PEFT names a layer as transformers does, behind `base_model.model.`, and stores both matrices as linear layers:
`lora_A` `[rank, inputs]` and `lora_B` `[outputs, rank]`. mlx-lm's `lora_a` and `lora_b` are their transposes. An
adapter adds `alpha / rank` of their product, or `alpha / sqrt(rank)` with rank stabilisation:

    r 8, lora_alpha 16                          scale 2
    r 16, lora_alpha 16, use_rslora             scale 4
    alpha_pattern {"o_proj": 24}, rank 8        scale 3 in layers whose path ends with o_proj
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import sqrt
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear

from mlx_server.model_entries import Adapter

SETTINGS_FILE = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"

_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?")
BASE_LAYER = ".base_layer.weight"
"""Ends the names of weights of the model itself, which PEFT saves with an adapter for its embeddings."""
_IN_STACK = re.compile(r"(?:^|\.)(layers\.\d+\..+)")
_KINDS = nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding
_REFUSED = ("use_dora", "alora_invocation_tokens")
"""Settings of adapters that are more than a product of two matrices at each token."""


def apply_peft(model: nn.Module, adapter: Adapter) -> None:
    """Replaces layers of `model` by mlx-lm's with the adapter's lazy weights. Raises `ValueError` for an adapter of
    another kind or for another model, and what reading the files raises."""
    settings = json.loads((adapter.path / SETTINGS_FILE).read_text(encoding="utf-8"))
    if (kind := settings.get("peft_type")) != "LORA":
        raise ValueError(f"its peft_type is {kind!r}; only LORA is supported")
    for name in _REFUSED:
        if settings.get(name):
            raise ValueError(f"{name} is not supported; merge it into the model with PEFT, and convert the result")
    pairs: dict[str, dict[str, mx.array]] = {}
    for name, array in cast("dict[str, mx.array]", mx.load(str(adapter.path / PEFT_WEIGHTS))).items():
        if name.endswith(BASE_LAYER):
            continue
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise ValueError(f"its tensor {name} is not one of LoRA's matrices")
        pairs.setdefault(found[1], {})[found[2]] = array
    layers = {path: module for path, module in model.named_modules() if isinstance(module, _KINDS)}
    tuned = {}
    for path, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise ValueError(f"it has only one of the two matrices of {path}")
        own = _own_path(path, layers)
        tuned[own] = _tuned(path, layers[own], pair["A"], pair["B"], settings)
    model.update_modules(tree_unflatten(list(tuned.items())))


def _own_path(path: str, layers: Mapping[str, nn.Module]) -> str:
    """mlx-lm's path of the layer that transformers calls `path`: the same, or the one with the same end from
    `layers.N.` on, as with a model of text and images (`model.language_model.layers.0.mlp.up_proj` is
    `language_model.model.layers.0.mlp.up_proj`). Raises `ValueError` if none of `layers` fits, or several."""
    if path in layers:
        return path
    in_stack = _IN_STACK.search(path)
    end = path.rpartition(".")[2] if in_stack is None else in_stack[1]
    fitting = [own for own in layers if own.endswith(f".{end}") and _is_seen(own) == _is_seen(path)]
    if len(fitting) != 1:
        raise ValueError(f"the model has no layer {path}" if not fitting else f"{path} may be any of {fitting}")
    return fitting[0]


def _is_seen(path: str) -> bool:
    """Whether the layer belongs to a vision tower, whose layers have the names of those for text."""
    return re.search("vision|visual", path) is not None


def _tuned(path: str, layer: nn.Module, a: mx.array, b: mx.array, settings: Mapping[str, Any]) -> nn.Module:
    kind = LoRAEmbedding if isinstance(layer, nn.Embedding | nn.QuantizedEmbedding) else LoRALinear
    rank = a.shape[0]
    divisor = sqrt(rank) if settings.get("use_rslora") else rank
    tuned = kind.from_base(layer, r=rank, scale=_alpha(path, settings) / divisor)
    if (a.T.shape, b.T.shape) != (tuned.lora_a.shape, tuned.lora_b.shape):
        raise ValueError(f"matrices of shapes {a.shape} and {b.shape} do not fit the model's layer for {path}")
    tuned.lora_a, tuned.lora_b = a.T, b.T
    return tuned


def _alpha(path: str, settings: Mapping[str, Any]) -> float:
    """A pattern of `alpha_pattern` is a regular expression for a whole path, or for its end behind a dot."""
    for pattern, alpha in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", path):
            return float(alpha)
    return float(settings["lora_alpha"])
