"""How much memory a model will take, told from its files before anything of it is loaded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from mlx_server.config import BLOCK_SIZE, FULL_KV, Config, ModelConfig
from mlx_server.engine.cache_footprint import kv_items, state_bytes
from mlx_server.engine.memory_budget import MemoryNeed
from mlx_server.runtime import random_models
from mlx_server.runtime.adapters import adapter_tensors
from mlx_server.runtime.loader import find_folder, is_gpu
from mlx_server.runtime.memory import first_kv_blocks
from mlx_server.runtime.tensor_headers import TensorHeader, read_headers
from mlx_server.setting_forms import parse_size

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_FIRST_STATES = 8
"""Requests whose recurrent state is foreseen; more get slots as far as there is room when the model is loaded."""

_OTHER_TOWERS = re.compile(
    r"(^|\.)(vision_\w+|visual|audio_tower|embed_(vision|audio)|multi_modal_projector|mm_projector)\."
)
"""Weights of models that can see or hear, of which mlx-lm loads the text part."""

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def estimate_need(config: Config) -> MemoryNeed:
    """What loading the model of `config` takes. Fetches its files if they are not there, and reads what they say of
    themselves: not for the event loop's thread. Raises `ModelLoadError` or `DownloadError`."""
    folder = find_folder(config.model.model)
    if folder is None:
        described: Mapping[str, Any] = random_models.config_of(config.model.model)
        weights = _num_parameters(described) * _item_bytes(config.model, 4)
        kv_item_bytes = _item_bytes(config.model, 4)
    else:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        described = {**described, **(described.get("text_config") or {})}
        paths = sorted(folder.glob("model*.safetensors"))
        headers = [header for path in paths for header in read_headers(path).items()]
        tensors = [tensor for name, tensor in headers if _OTHER_TOWERS.search(name) is None]
        weights = sum(_tensor_bytes(tensor, config.model) for tensor in tensors)
        floats = [_ITEM_BYTES[tensor["dtype"]] for tensor in tensors if tensor["dtype"] in _ITEM_BYTES]
        kv_item_bytes = _item_bytes(config.model, min(floats, default=2))
    for adapter in config.model.adapters:
        weights += sum(_tensor_bytes(tensor, config.model) for tensor in adapter_tensors(adapter))
    kv_bytes = _kv_bytes(config, described, kv_item_bytes)
    kv_bytes += min(config.scheduler.max_num_seqs, _FIRST_STATES) * state_bytes(described)
    return MemoryNeed(weights, _activation_bytes(config, described), kv_bytes)


def _item_bytes(settings: ModelConfig, stored: int) -> int:
    """Bytes of a number that is stored in so many, once it is loaded."""
    if settings.dtype == "auto":
        return stored if is_gpu() else 4
    return _DTYPE_BYTES[settings.dtype]


def _tensor_bytes(tensor: TensorHeader, settings: ModelConfig) -> int:
    stored = _ITEM_BYTES.get(tensor["dtype"])
    if stored is None:  # packed or whole numbers stay as they are
        begin, end = tensor["data_offsets"]
        return int(end - begin)
    return int(math.prod(tensor["shape"]) * _item_bytes(settings, stored))


def _kv_bytes(config: Config, described: Mapping[str, Any], item_bytes: int) -> int:
    """Of the first blocks, or of as many as were asked for."""
    cache = config.cache
    share = 1.0 if cache.kv_bits == FULL_KV else (int(cache.kv_bits) + 1) / (8 * item_bytes)
    block_bytes = BLOCK_SIZE * kv_items(described) * item_bytes * share
    if cache.num_kv_blocks is not None:
        return int(cache.num_kv_blocks * block_bytes)
    first = int(first_kv_blocks(2**31) * block_bytes)
    if cache.kv_cache_memory == "auto":
        return first
    return min(first, parse_size(cache.kv_cache_memory, "--kv-cache-memory"))


def _activation_bytes(config: Config, described: Mapping[str, Any]) -> int:
    """Of one step: hidden states in and out of the widest layer, and the logits of those that sample, in float32."""
    hidden = described.get("hidden_size", 1)
    widest = max(described.get("intermediate_size") or 0, 4 * hidden)
    tokens = config.scheduler.max_num_batched_tokens * 4 * (hidden + widest)
    logits = config.scheduler.max_num_seqs * described.get("vocab_size", 1) * 4
    return int(4 * (tokens + logits))


def _num_parameters(described: Mapping[str, Any]) -> int:
    """Of a plain transformer."""
    hidden, vocabulary = described["hidden_size"], described["vocab_size"]
    head_dim, num_heads = described["head_dim"], described["num_attention_heads"]
    attention = 2 * hidden * head_dim * (num_heads + described["num_key_value_heads"])
    layer = attention + 3 * hidden * described["intermediate_size"]
    embeddings = 1 if described["tie_word_embeddings"] else 2
    return int(described["num_hidden_layers"] * layer + embeddings * vocabulary * hidden)
