"""Whole transformer layers as one native operation each, in steps of few rows.

A layer is some 20 operations of MLX. In a small model with one row, their bookkeeping takes as long as the computing,
and holds back a second thread. Many mlx-lm models have the same code for a layer, its attention and its MLP: if all
three match and use the library's operations, the layer is one call, with the same bits. Steps with many rows, quantised
K/V and attention by group run the model's own code.
"""

from __future__ import annotations

from functools import lru_cache
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3

from mlx_server.runtime.cache.kv_cache import PagedLayerCache
from mlx_server.runtime.kernels.cpu.attention import CpuBackend

MAX_ROWS = 64
"""Of one call. With more rows the bookkeeping hardly counts, and a call's intermediate results would take memory."""

_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_UNKNOWN = object()


class _Block:
    """Mixed into a layer's class, before it in the order of bases."""

    _library: Any
    _rotation: Any
    _parts: Any = _UNKNOWN
    """The library's `Layer`, made at the first call, when weights are evaluated; None if it cannot compute this one."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = self._fused(x, mask, cache) if x.shape[0] <= MAX_ROWS and x.shape[1] == 1 else None
        return super().__call__(x, mask, cache) if y is None else y  # type: ignore[misc]

    def _fused(self, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        if type(cache) is not PagedLayerCache or not isinstance(cache.backend, CpuBackend) or "self_attn" in vars(self):
            return None
        if self._parts is _UNKNOWN:
            object.__setattr__(self, "_parts", _parts(self, self._library, self._rotation))
        return None if self._parts is None else cache.run_layer(self._parts, x, mask)


def install_fused_layers(model: Any, library: Any) -> int:
    """Computes layers of the known form by one call each, and returns how many. Call it after the library's products,
    norms and rotary embeddings are installed. MLX thread."""
    count = 0
    for module in model.modules():
        if _is_known(module):
            object.__setattr__(module, "_library", library)
            object.__setattr__(module, "_rotation", module.self_attn.rope._rotation)
            kind: Any = type(module)
            module.__class__ = _fused_class(kind)
            count += 1
    return count


@lru_cache(maxsize=64)
def _fused_class(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_Block, kind), {})


def _is_known(module: Any) -> bool:
    if not _has_code_of(module, llama.TransformerBlock) or isinstance(module, _Block):
        return False
    attention, mlp = module.get("self_attn"), module.get("mlp")
    if not any(_has_code_of(attention, kind) for kind in (llama.Attention, qwen3.Attention)):
        return False
    if not _has_code_of(mlp, llama.MLP) or not hasattr(attention.get("rope"), "_rotation"):
        return False
    norms = [module.get("input_layernorm"), module.get("post_attention_layernorm"), *_head_norms(attention)]
    products = [(attention if name in attention else mlp).get(name) for name in _PRODUCTS]
    return all(hasattr(product, "_product") for product in products) and all(
        norm is None or (isinstance(norm, nn.RMSNorm) and hasattr(norm, "_library")) for norm in norms
    )


def _has_code_of(module: Any, kind: type[Any]) -> bool:
    """Whether a module's call is the same as that of `kind`: equal bytecode that refers to the same functions."""
    ours, theirs = type(module).__call__, kind.__call__
    if not isinstance(ours, FunctionType) or not isinstance(theirs, FunctionType):
        return False
    mine, known = ours.__code__, theirs.__code__
    return (mine.co_code, mine.co_consts, mine.co_names, mine.co_varnames) == (
        known.co_code,
        known.co_consts,
        known.co_names,
        known.co_varnames,
    ) and all(ours.__globals__.get(name) is theirs.__globals__.get(name) for name in known.co_names)


def _head_norms(attention: Any) -> tuple[Any, Any]:
    has_norms = _has_code_of(attention, qwen3.Attention)
    return (attention.q_norm, attention.k_norm) if has_norms else (None, None)


def _parts(block: Any, library: Any, rotation: Any) -> Any | None:
    """The library's `Layer` with the present weights; None if it cannot compute with them."""
    attention, mlp = block["self_attn"], block["mlp"]
    parts = library.Layer(rotation, attention.n_heads, attention.n_kv_heads, attention.scale)
    for name in _PRODUCTS:
        layer = (attention if name in attention else mlp)[name]
        given = layer.get("scales"), layer.get("biases"), layer.bits if "scales" in layer else 0
        if not parts.add_product(layer.weight, *given, layer.get("bias")):
            return None
    for norm in (block.input_layernorm, block.post_attention_layernorm, *_head_norms(attention)):
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        if not parts.add_norm(weight, eps):
            return None
    return parts if parts.is_whole else None
