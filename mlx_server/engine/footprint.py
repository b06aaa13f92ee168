"""How much memory a model will take, told from its files before anything of it is loaded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Set
from typing import Any

from mlx_server.config import FULL_KV, Config, ModelConfig
from mlx_server.engine.memory_budget import MemoryNeed
from mlx_server.engine.step_memory import step_bytes
from mlx_server.runtime import random_models
from mlx_server.runtime.adapters import adapter_tensors
from mlx_server.runtime.blueprint import foresee_cache
from mlx_server.runtime.command_buffers import max_elements
from mlx_server.runtime.loader import find_folder, is_gpu, is_metal
from mlx_server.runtime.pool_plan import plan_pools
from mlx_server.runtime.tensor_headers import TensorHeader, read_headers

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_STORED_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Types in which a model may compute, the smallest first: what is smaller is packed, what is larger a norm or scale."""

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FIRST_STATES = 4
"""Requests whose recurrent state is foreseen, with the states kept for their prefixes: as many run at a time where
there is no more room. The rest is taken as far as there is some when the model is loaded."""

_NO_BOUND = 2**62

_OTHER_TOWERS = re.compile(
    r"(^|\.)(vision_\w+|visual|audio_tower|embed_(vision|audio)|multi_modal_projector|mm_projector)\."
)
"""Weights of models that can see or hear, of which mlx-lm loads the text part."""


def estimate_need(config: Config) -> MemoryNeed:
    """What loading the model of `config` takes. Fetches its files if they are not there, and reads what they say of
    themselves: not for the event loop's thread. Raises `ModelLoadError` or `DownloadError`."""
    folder = find_folder(config.model.model)
    settings = config.model
    if folder is None:
        described: Mapping[str, Any] = random_models.config_of(settings.model)
        kind = next(kind for kind, name in _STORED_DTYPES.items() if name == described["torch_dtype"])
        item_bytes = _item_bytes(settings, _ITEM_BYTES[kind])
        weights = int(_num_parameters(described) * _parameter_bytes(described, item_bytes))
        stored = {kind}
    else:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        paths = sorted(folder.glob("model*.safetensors"))
        headers = [header for path in paths for header in read_headers(path).items()]
        tensors = [tensor for name, tensor in headers if _OTHER_TOWERS.search(name) is None]
        weights = sum(_tensor_bytes(tensor, settings) for tensor in tensors)
        stored = {tensor["dtype"] for tensor in tensors}
    for adapter in settings.adapters:
        weights += sum(_tensor_bytes(tensor, settings) for tensor in adapter_tensors(adapter))
    text = {**described, **(described.get("text_config") or {})}
    return MemoryNeed(weights, _activation_bytes(config, text, weights), _pool_bytes(config, described, stored))


def _pool_bytes(config: Config, described: Mapping[str, Any], stored: Set[str]) -> int:
    """Of the first KV blocks and of the first requests' recurrent state, with weights that are `stored` so. What code
    of the folder's own keeps is not known before it runs."""
    if "model_file" in described:
        return 0
    dtype = config.model.dtype
    if dtype == "auto":
        found = (name for kind, name in _STORED_DTYPES.items() if kind in stored and is_gpu())
        dtype = next(found, "float32")
    cache = foresee_cache(described, dtype)
    if config.cache.kv_bits != FULL_KV:
        cache.quantize(int(config.cache.kv_bits))
    plan = plan_pools(
        cache,
        config.cache,
        max_num_tokens=_NO_BOUND,
        max_num_seqs=min(config.scheduler.max_num_seqs, _FIRST_STATES),
        kv_limit_bytes=_NO_BOUND,
        state_limit_bytes=_NO_BOUND,
    )
    return plan.first_bytes


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


def _activation_bytes(config: Config, described: Mapping[str, Any], weights_bytes: int) -> int:
    """Of the steps that are launched. Off Metal, of one: hidden states in and out of the widest layer, and the logits
    of those that sample, in float32."""
    settings = config.scheduler
    if is_metal():
        return step_bytes(
            described,
            weights_bytes=weights_bytes,
            num_tokens=settings.max_num_batched_tokens,
            num_seqs=settings.max_num_seqs,
            context_tokens=config.model.max_model_len or described.get("max_position_embeddings") or _NO_BOUND,
            item_bytes=_item_bytes(config.model, 2),
            buffer_elements=max_elements(),
        )
    hidden = described.get("hidden_size", 1)
    widest = max(described.get("intermediate_size") or 0, 4 * hidden)
    tokens = settings.max_num_batched_tokens * 4 * (hidden + widest)
    logits = settings.max_num_seqs * described.get("vocab_size", 1) * 4
    return int(4 * (tokens + logits))


def _parameter_bytes(described: Mapping[str, Any], item_bytes: int) -> float:
    """Of one weight; a group of packed ones has a scale and a bias."""
    packed = described.get("quantization")
    return item_bytes if packed is None else packed["bits"] / 8 + 2 * item_bytes / packed["group_size"]


def _num_parameters(described: Mapping[str, Any]) -> int:
    """Of a plain transformer."""
    hidden, vocabulary = described["hidden_size"], described["vocab_size"]
    head_dim, num_heads = described["head_dim"], described["num_attention_heads"]
    attention = 2 * hidden * head_dim * (num_heads + described["num_key_value_heads"])
    layer = attention + 3 * hidden * described["intermediate_size"]
    embeddings = 1 if described["tie_word_embeddings"] else 2
    return int(described["num_hidden_layers"] * layer + embeddings * vocabulary * hidden)
