"""Replacements for MLX's fused operations: on Metal each is recorded as one operation, but on a CPU MLX splits them
before it records them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import gated_delta

PREFIX = "mlx_"
"""Prefix of the names of kernels that stand for an operation of MLX."""

_COMPILED = type(mx.compile(lambda x: x))
_FUSED_PROMPT_DIMS = (64, 72, 80, 96, 128)
_FUSED_DECODE_DIMS = (64, 96, 128, 256)
_MAX_DECODED = 8


@contextmanager
def installed() -> Iterator[None]:
    """Within the block, MLX and mlx-lm act as on Metal, and nothing may be computed."""
    with ExitStack() as stack:
        mx.disable_compile()  # compiled functions keep graphs, in which stand-ins have fixed shapes
        stack.callback(mx.enable_compile)
        for target, name, value in (
            (mx.metal, "is_available", lambda: True),
            (mx, "default_device", lambda: mx.Device(mx.gpu)),
            (mx, "contiguous", _contiguous),
            (mx.fast, "rms_norm", _rms_norm),
            (mx.fast, "layer_norm", _layer_norm),
            (mx.fast, "rope", _rope),
            (mx.fast, "scaled_dot_product_attention", _attention(mx.fast.scaled_dot_product_attention)),
            *_compiled_functions(),
        ):
            stack.enter_context(patch.object(target, name, value))
        for name, kernel in _recurrent_kernels():
            stack.enter_context(patch.object(gated_delta, name, kernel))
        yield


def one_op(
    name: str, inputs: Sequence[mx.array], outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]]
) -> list[mx.array]:
    """Arrays of these shapes and types, made of `inputs` by a single operation."""
    result: list[mx.array] = _kernel(name, len(inputs), len(outputs))(
        inputs=list(inputs),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    return result


@functools.cache
def _kernel(name: str, num_inputs: int, num_outputs: int) -> Callable[..., list[mx.array]]:
    kernel: Callable[..., list[mx.array]] = mx.fast.metal_kernel(
        name=f"{PREFIX}{name}_",
        input_names=[f"in{i}" for i in range(num_inputs)],
        output_names=[f"out{i}" for i in range(num_outputs)],
        source="",
        ensure_row_contiguous=False,
    )
    return kernel


def _like(name: str, x: mx.array, *others: Any) -> mx.array:
    inputs = [x, *(other for other in others if isinstance(other, mx.array))]
    return one_op(name, inputs, [(x.shape, x.dtype)])[0]


def _contiguous(a: mx.array, allow_col_major: bool = False, *, stream: Any = None) -> mx.array:
    return _like("Contiguous", a)


def _rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: Any = None) -> mx.array:
    return _like("RMSNorm", x, weight)


def _layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, *, stream: Any = None
) -> mx.array:
    return _like("LayerNorm", x, weight, bias)


def _rope(
    a: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    stream: Any = None,
) -> mx.array:
    places = offset if isinstance(offset, mx.array) else mx.array(offset)
    return _like("RoPE" if dims == a.shape[-1] else "PartialRoPE", a, places, freqs)


def _attention(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """One operation if MLX would use its fused kernel, else the operations that it uses instead."""

    def attention(
        q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: mx.array | None = None
    ) -> mx.array:
        if not _is_fused(q, k, v):
            return original(q, k, v, scale=scale, mask=mask, sinks=sinks)
        inputs = [q, k, v, *(x for x in (mask, sinks) if isinstance(x, mx.array))]
        return one_op("Attention", inputs, [((*q.shape[:-1], v.shape[-1]), q.dtype)])[0]

    return attention


def _is_fused(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """scaled_dot_product_attention.cpp: use_fallback, for a GPU without NAX."""
    key_dim, value_dim, length = q.shape[-1], v.shape[-1], q.shape[2]
    if length > _MAX_DECODED:
        return key_dim == value_dim and key_dim in _FUSED_PROMPT_DIMS
    fits = length <= k.shape[2] and length * (q.shape[1] // k.shape[1]) <= 32
    return fits and ((key_dim == value_dim and key_dim in _FUSED_DECODE_DIMS) or (key_dim, value_dim) == (192, 128))


def _compiled_functions() -> Iterator[tuple[Any, str, Any]]:
    """Functions of `mx.compile` in loaded modules. They are assumed to be elementwise, and so one operation each."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(("mlx_lm.models", "mlx_vlm.models", "mlx.nn", "mlx_server.runtime")):
            for name, value in list(vars(module).items()):
                inner = getattr(value, "_mlx_server_original", value)  # ours may choose another way first
                if isinstance(inner, _COMPILED):
                    yield module, name, _fused(name, inner)


def _fused(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def fused(*args: Any, **options: Any) -> Any:
        outputs = tree_flatten(function(*args, **options))  # only for its shapes
        inputs = [value for _, value in tree_flatten([args, options]) if isinstance(value, mx.array)]
        stand_ins = one_op(f"Compiled_{name}", inputs, [(value.shape, value.dtype) for _, value in outputs])
        return tree_unflatten([(key, value) for (key, _), value in zip(outputs, stand_ins, strict=True)])

    return fused


def _recurrent_kernels() -> list[tuple[str, Any]]:
    """mlx-lm's Metal kernels of gated delta layers, which it makes when it is imported on a Mac."""
    return [
        ("_gated_delta_kernel", gated_delta._make_gated_delta_kernel()),
        ("_gated_delta_kernel_masked", gated_delta._make_gated_delta_kernel(has_mask=True)),
        ("_gated_delta_kernel_packed", gated_delta._make_gated_delta_packed_kernel()),
    ]
