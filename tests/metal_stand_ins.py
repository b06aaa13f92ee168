"""mlx-lm's Metal kernels in plain MLX, so that models that consist of them run anywhere.

muse_spark computes in bfloat16; here it is float32, so that products of whole batches and of single rows are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import bitlinear_layers, muse_spark


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces all kernels of bitnet and muse_spark until the test ends."""
    monkeypatch.setattr(bitlinear_layers, "_bitlinear_kernel", _bitlinear)
    monkeypatch.setattr(muse_spark, "mx", _WholePrecision())
    for stand_in in (
        *(expert_routing, norm_add_norm, post_expert_norm_combine, qk_norm, qk_norm_rope),
        rms_norm_sigmoid_gate,
    ):
        monkeypatch.setattr(muse_spark, stand_in.__name__, stand_in)


class _WholePrecision:
    bfloat16 = mx.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


def _bitlinear(*, inputs: Sequence[mx.array], template: Sequence[tuple[str, Any]], **launch: Any) -> list[mx.array]:
    rows, packed, scale = inputs
    weights = mx.concatenate([(packed >> shift) & 3 for shift in (0, 2, 4, 6)]).astype(rows.dtype) - 1
    product = rows @ weights.T
    return [product / scale if dict(template)["invert_weight_scales"] else product * scale]


def expert_routing(
    logits: mx.array, expert_bias: mx.array, *, top_k: int, multiplier: float, score_eps: float, route_scale: float
) -> tuple[mx.array, mx.array]:
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return chosen, weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: nn.RMSNorm | None,
) -> tuple[mx.array, mx.array | None]:
    scaled = branch if post_weight is None else post_weight * branch
    stream = alpha * stream + beta * mx.fast.rms_norm(scaled, None, post_eps)
    return stream, None if next_norm is None else next_norm(stream)


def post_expert_norm_combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    return (mx.fast.rms_norm(experts * norm_weight, None, eps) * weights[..., None]).sum(axis=-2)


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> tuple[mx.array, mx.array]:
    num_heads = n_heads + n_kv_heads
    heads = qkvg[..., : num_heads * head_dim].reshape(*qkvg.shape[:-1], num_heads, head_dim)
    normed = mx.fast.rms_norm(heads, None, eps)
    return normed[..., :n_heads, :] * query_scale, normed[..., n_heads:, :]


def qk_norm_rope(
    qkvg: mx.array, *, head_dim: int, rope_base: float, offset: int | mx.array, **norm: Any
) -> tuple[mx.array, mx.array]:
    def rotated(heads: mx.array) -> mx.array:
        turned = mx.fast.rope(
            heads.swapaxes(1, 2), head_dim, traditional=True, base=rope_base, scale=1.0, offset=offset
        )
        return turned.swapaxes(1, 2)

    queries, keys = qk_norm(qkvg, head_dim=head_dim, **norm)
    return rotated(queries), rotated(keys)


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, None, eps).swapaxes(1, 2).reshape(gate.shape) * mx.sigmoid(gate)
