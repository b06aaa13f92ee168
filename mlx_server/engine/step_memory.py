"""What the temporaries of steps take on Metal, told from a model's configuration.

MLX keeps what a command buffer uses until it has ended, and has up to 12 in flight. Each ends at a number of elements
of all buffers that it uses, weights included. So temporaries take as much of these as they are of all that a layer
uses, but no more than two steps, the most that are launched, make in all.

Llama-3-8B in 4 bits, 2,048 tokens, 96 x 2^20 elements (a Mac with 16 GiB): a layer has about 0.19 G elements of
temporaries and 0.035 G of weights, so 12 x 96 x 2^20 x 2 bytes x 0.85 = 1.9 GiB, and 0.4 GiB for what is wide and long.
MLX's rules replayed over such steps (`tests/replay`) have a peak of 1.6 GiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlx_server.runtime.command_buffers import MAX_IN_FLIGHT

_STEPS_LAUNCHED = 2
_WORD_BYTES = 4
"""Of packed weights, which are most; of others, this counts fewer elements than there are, and so more temporaries."""

_SAMPLER_ARRAYS = 6
_FUSED_DIMS = range(129)
"""Head dimensions for which MLX keeps the logits of prompts' attention to itself."""

_LOGITS_SHARE = 1.3
"""What command buffers with such logits hold beside others: they end late by half of these."""

_LONG_CONTEXT = 32768
_LAYERS_GATHERED = 2
"""A prompt's chunk attends over rows gathered from the pool: those of so many layers are there at a time. At longer
contexts than that there may be more than is booked, and MLX waits where there is no room."""


def step_bytes(
    described: Mapping[str, Any],
    *,
    weights_bytes: int,
    num_tokens: int,
    num_seqs: int,
    context_tokens: int,
    item_bytes: int,
    buffer_elements: int,
) -> int:
    """The most that steps of up to `num_tokens` tokens, of which `num_seqs` rows sample, have in memory beside weights
    and pools, with contexts of up to `context_tokens`. Activations take `item_bytes` each; a command buffer ends at
    `buffer_elements`."""
    num_layers = max(1, _number(described, "num_hidden_layers", "n_layers", "num_layers"))
    per_token = _row_elements(described)
    layer = num_tokens * per_token
    share = layer / (layer + weights_bytes / _WORD_BYTES / num_layers)
    logits = 1.0 if _head_dim(described) in _FUSED_DIMS else _LOGITS_SHARE
    gathered = _LAYERS_GATHERED * min(context_tokens, _LONG_CONTEXT) * _key_value_width(described)
    in_flight = MAX_IN_FLIGHT * share * buffer_elements * logits + gathered + num_tokens * _widest(described)
    sampled = _SAMPLER_ARRAYS * num_seqs * _number(described, "vocab_size") * 4
    launched = _STEPS_LAUNCHED * ((num_layers * layer + gathered) * item_bytes + sampled)
    return math.ceil(min(in_flight * item_bytes, launched))


def _row_elements(described: Mapping[str, Any]) -> int:
    """Elements that a layer makes for each token; of layers of several kinds, those of each."""
    hidden = _number(described, "hidden_size", "dim", "d_model")
    mixer = 3 * max(_attention_width(described), 2 * _recurrent_width(described))
    experts = _number(described, "num_experts_per_tok", "moe_k", "top_k_experts")
    width = _number(described, "moe_intermediate_size") or _number(described, "intermediate_size") or 4 * hidden
    if not experts:
        return 8 * hidden + mixer + 3 * width
    shared = _number(described, "shared_expert_intermediate_size")
    return 8 * hidden + mixer + experts * (4 * hidden + 3 * width) + 3 * shared


def _widest(described: Mapping[str, Any]) -> int:
    """Elements for each token of the two largest arrays that one operation uses."""
    hidden = _number(described, "hidden_size", "dim", "d_model")
    experts = max(1, _number(described, "num_experts_per_tok", "moe_k", "top_k_experts"))
    width = _number(described, "moe_intermediate_size") if experts > 1 else _number(described, "intermediate_size")
    return 2 * experts * max(hidden, width)


def _attention_width(described: Mapping[str, Any]) -> int:
    """Of queries, keys and values together."""
    return _num_heads(described) * _head_dim(described) + _key_value_width(described)


def _key_value_width(described: Mapping[str, Any]) -> int:
    num_kv_heads = _number(described, "num_key_value_heads", "n_kv_heads", "num_kv_heads") or _num_heads(described)
    return 2 * num_kv_heads * _head_dim(described)


def _head_dim(described: Mapping[str, Any]) -> int:
    own = _number(described, "head_dim")
    return own or _number(described, "hidden_size", "dim", "d_model") // _num_heads(described)


def _num_heads(described: Mapping[str, Any]) -> int:
    return max(1, _number(described, "num_attention_heads", "n_heads", "num_heads"))


def _recurrent_width(described: Mapping[str, Any]) -> int:
    keys = _number(described, "linear_num_key_heads") * _number(described, "linear_key_head_dim")
    return 2 * keys + _number(described, "linear_num_value_heads") * _number(described, "linear_value_head_dim")


def _number(described: Mapping[str, Any], *names: str) -> int:
    return next((int(value) for name in names if isinstance(value := described.get(name), int)), 0)
