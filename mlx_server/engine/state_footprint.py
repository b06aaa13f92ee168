"""How much recurrent state a request keeps, told from a model's configuration before it is loaded.

Known are gated delta nets (Qwen3-Next, Qwen3.5) and state spaces (Mamba and the hybrids with it). What others keep is
not foreseen, and booked when they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ITEM_BYTES = 4
"""mlx-lm keeps states in float32."""

_RECURRENT = frozenset({"linear_attention", "mamba", "M"})
"""How configurations call such layers."""

Described = Mapping[str, Any]


def state_bytes(described: Described) -> int:
    """Of one request in all layers; 0 for models without recurrent layers."""
    num_items = _delta_net_items(described) or _state_space_items(described)
    return num_items * _num_layers(described) * _ITEM_BYTES if num_items else 0


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


def _num_layers(described: Described) -> int:
    kinds = described.get("layer_types") or described.get("layers_block_type")
    kinds = kinds or described.get("hybrid_override_pattern")
    if kinds:
        return sum(kind in _RECURRENT for kind in kinds)
    num_layers = _first(described, "num_hidden_layers", "n_layer")
    period = _first(described, "full_attention_interval", "attn_layer_period")
    return num_layers - num_layers // period if period else num_layers


def _first(described: Described, *names: str, default: int = 0) -> int:
    return next((int(described[name]) for name in names if described.get(name)), default)
