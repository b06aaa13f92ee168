"""Writes folders of tiny models and of adapters with random weights, made by mlx-lm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model

from tests.architectures import config_of
from tests.conformance import Subject
from tests.tiny_models import byte_tokenizer, save_model_folder


def write_model(architecture: str, path: Path, *, bits: int | None = None, **changes: Any) -> Path:
    """A folder that mlx-lm can load, with a tokenizer; quantized to `bits`."""
    config = {**config_of(architecture), **changes}
    for section in (config, config.get("text_config", {})):
        section.pop("rope_scaling", None)  # transformers warns about it
        if "query_pre_attn_scalar" in section:
            section["query_pre_attn_scalar"] = int(section["query_pre_attn_scalar"])  # or transformers refuses it
    subject = Subject(architecture, config)
    if bits is not None:
        config["quantization"] = {"group_size": 32, "bits": bits}
        nn.quantize(subject.model, **config["quantization"])
    return save_model_folder(subject.model, config, path, byte_tokenizer())


def write_adapter(
    model_folder: Path,
    path: Path,
    kind: str = "lora",
    *,
    rank: int = 4,
    scale: float = 4.0,
    num_layers: int = 100,
    keys: list[str] | None = None,
    seed: int = 0,
) -> Path:
    """A random adapter for the last `num_layers` layers of a saved model: all their linear layers, or `keys`."""
    return save_adapter(plain_model(model_folder), path, kind, rank, scale, num_layers, keys, seed)


def save_adapter(
    model: nn.Module,
    path: Path,
    kind: str = "lora",
    rank: int = 4,
    scale: float = 4.0,
    num_layers: int = 100,
    keys: list[str] | None = None,
    seed: int = 0,
) -> Path:
    """The same for a model in memory, which then contains the adapter."""
    parameters = {"rank": rank, "scale": scale, "dropout": 0.1, **({} if keys is None else {"keys": keys})}
    num_layers = min(num_layers, len(model.layers))
    model.freeze()
    if kind == "full":
        model.unfreeze()
    else:
        linear_to_lora_layers(model, num_layers, parameters, use_dora=kind == "dora")
    weights = {
        name: mx.random.normal(array.shape, key=mx.random.key(1000 * seed + index)) * 0.2
        if name.endswith("lora_b")
        else array
        for index, (name, array) in enumerate(tree_flatten(model.trainable_parameters()))
    }
    path.mkdir()
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    settings = {"fine_tune_type": kind, "num_layers": num_layers, "lora_parameters": parameters}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def plain_model(folder: Path, adapter: Path | None = None) -> nn.Module:
    """The model as mlx-lm loads it, with an adapter or without."""
    model, _ = load_model(folder)
    return model if adapter is None else load_adapters(model, str(adapter)).eval()


def save_as_peft(adapter: Path, path: Path, to_name: Callable[[str], str] = str, **settings: Any) -> Path:
    """An adapter of `write_adapter` as PEFT would have saved it. `to_name` gives transformers' name of a layer."""
    parameters = json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]
    tensors = {}
    for name, array in mx.load(str(adapter / "adapters.safetensors")).items():
        layer, _, matrix = name.rpartition(".lora_")
        kind = "lora_embedding_{}" if layer.endswith("embed_tokens") else "lora_{}.weight"
        if layer.endswith("embed_tokens"):  # as PEFT does for embeddings
            tensors[f"base_model.model.{to_name(layer)}.base_layer.weight"] = mx.zeros((len(array), 8))
        tensors[f"base_model.model.{to_name(layer)}.{kind.format(matrix.upper())}"] = mx.contiguous(array.T)
    path.mkdir()
    mx.save_safetensors(str(path / "adapter_model.safetensors"), tensors)
    alpha = parameters["scale"] * parameters["rank"]
    settings = {"peft_type": "LORA", "r": parameters["rank"], "lora_alpha": alpha, **settings}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path
