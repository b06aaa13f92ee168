"""What a model keeps of each token and of each request, told from its configuration before it is loaded.

Close for the architectures that are used most, so that there is room when a model is loaded; what it really keeps is
booked then. Recurrent states are known of gated delta nets (Qwen3-Next, Qwen3.5) and of state spaces (Mamba and the
hybrids with it); those of others are not foreseen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_STATE_ITEM_BYTES = 4
"""mlx-lm keeps states in float32."""

_RECURRENT = frozenset({"linear_attention", "mamba", "M", "conv"})
"""How configurations call such layers, in lists with a name a layer."""

_WHOLE_KV = frozenset({"deepseek_v2", "minicpm3"})
"""Architectures whose attention goes through a latent that mlx-lm widens before it is kept."""

Described = Mapping[str, Any]


def kv_items(described: Described) -> int:
    """Numbers that are kept of one token in all layers."""
    num_heads = _first(described, "num_attention_heads", "n_head", "n_heads")
    if not num_heads:
        return 0
    if "kv_lora_rank" in described and described.get("model_type") not in _WHOLE_KV:
        width = described["kv_lora_rank"] + _first(described, "qk_rope_head_dim")
    elif "kv_lora_rank" in described:
        parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        width = num_heads * sum(_first(described, part) for part in parts)
    else:
        head_dim = _first(described, "head_dim", default=_first(described, "hidden_size", "n_embd", "dim") // num_heads)
        width = 2 * head_dim * _first(described, "num_key_value_heads", default=num_heads)
    return int(width * _layers(described).attention)


def state_bytes(described: Described) -> int:
    """Recurrent state of one request in all layers; 0 for models without such layers."""
    num_items = _delta_net_items(described) or _state_space_items(described)
    return num_items * _layers(described).recurrent * _STATE_ITEM_BYTES


def _delta_net_items(described: Described) -> int:
    num_heads = _first(described, "linear_num_value_heads")
    key_dim = _first(described, "linear_key_head_dim")
    value_items = num_heads * _first(described, "linear_value_head_dim")
    width = 2 * key_dim * _first(described, "linear_num_key_heads") + value_items
    return value_items * key_dim + (_first(described, "linear_conv_kernel_dim", default=4) - 1) * width


def _state_space_items(described: Described) -> int:
    size = _first(described, "mamba_d_state", "ssm_state_size", "state_size")
    if not size:
        return 0
    inner = _first(described, "mamba_n_heads", "mamba_num_heads", "num_heads") * _first(
        described, "mamba_d_head", "mamba_head_dim", "head_dim"
    )
    inner = inner or _first(described, "mamba_expand") * _first(described, "hidden_size")
    inner = inner or _first(described, "intermediate_size")
    groups = _first(described, "mamba_n_groups", "n_groups")
    kernel = _first(described, "mamba_d_conv", "conv_kernel", default=4)
    return inner * size + (kernel - 1) * (inner + 2 * groups * size)


class _Layers(NamedTuple):
    attention: int
    recurrent: int


def _layers(described: Described) -> _Layers:
    """How many there are of each kind; where nothing tells them apart, each layer may be both."""
    num_layers = _first(described, "num_hidden_layers", "n_layer", "n_layers", default=1)
    kinds = described.get("layer_types") or described.get("layers_block_type")
    kinds = kinds or described.get("hybrid_override_pattern")
    period = _first(described, "full_attention_interval", "attn_layer_period")
    if kinds:
        recurrent = [kind for kind in kinds if kind in _RECURRENT]
        attention = [kind for kind in kinds if kind == "*" or ("attention" in kind and kind not in _RECURRENT)]
        return _Layers(len(attention), len(recurrent))
    if "full_attn_idxs" in described:
        num_attention = len(described["full_attn_idxs"] or ())
        return _Layers(num_attention, num_layers - num_attention)
    if period:
        return _Layers(num_layers // period, num_layers - num_layers // period)
    return _Layers(num_layers, num_layers)


def _first(described: Described, *names: str, default: int = 0) -> int:
    return next((int(described[name]) for name in names if described.get(name)), default)
