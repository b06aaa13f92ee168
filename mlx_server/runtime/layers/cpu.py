"""Uses the native library for the layers of an unchanged model, where MLX computes on the CPU.

Linear layers and tied heads get its products (`products.py`); RMS norms, rotary embeddings and whole transformer layers
change their class in the same way. SwiGLU is a function in mlx-lm, which `seam.py` wraps. MLX computes what the library
cannot: half-precision activations, weights that are not contiguous, a depth that is not a multiple of 32.

Weights of a linear layer may stay bfloat16 while the model computes in float32: widening them is exact, so a product
has the same bits as with float32 weights, with half of the memory and of its traffic.

A transformer layer is some 20 operations of MLX. In a small model with one row, their bookkeeping takes as long as the
computing, and holds back a second thread. Many mlx-lm models have the same code for a layer, its attention and its MLP:
if all three match and use the library's operations, the layer is one native operation, with the same bits, in steps of
few rows. Steps with many rows, quantised K/V and attention by group run the model's own code.
"""

from __future__ import annotations

import inspect
import linecache
import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_server.runtime.cache.kv_cache import PagedLayerCache
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.layers.products import MakeProduct, RowProduct, install_products, keep_rows_in, mix_in

logger = logging.getLogger(__name__)

_BITS = (4, 8)
_TOLERANCE = 1e-4

SWIGLU = "_native_swiglu"
"""The attribute of a model that holds its SwiGLU function."""
_READ_WEIGHT = re.compile(r"\bself(?:\.\w+)*\.(\w+)\.weight\b")


def native_library() -> Any | None:
    """The library if MLX computes on the CPU, or None. May build it, see `native.library`."""
    return native.library() if mx.default_device() == mx.cpu else None


def bfloat16_weights(model: Any) -> list[tuple[Any, mx.array]]:
    """The layers whose weights may stay bfloat16 since only the layer itself reads them, with the weights. Call it
    before the model's type is changed."""
    read = _children_read_by_their_weights(model)
    return [
        (module, module.weight)
        for path, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Embedding)
        and path.rpartition(".")[2] not in read
        and _is_deep(module.weight)
        and module.weight.dtype == mx.bfloat16
    ]


def _children_read_by_their_weights(model: Any) -> set[str]:
    """Names of modules whose weights the model's code reads itself, as in `h @ self.model.embed_tokens.weight.T`: a
    bfloat16 operand there would be slow, or make all later activations bfloat16. Searches the source of its classes."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    functions = [value for kind in classes for value in vars(kind).values() if inspect.isfunction(value)]
    files = {function.__code__.co_filename for function in functions}
    return {name for file in files for name in _READ_WEIGHT.findall("".join(linecache.getlines(file)))}


def install_native(model: Any, kept: Sequence[tuple[Any, mx.array]] = ()) -> int:
    """Uses the library for the layers of a model whose type was changed to float32; the `kept` modules get their
    weights back. Returns the number of layers, 0 without the library. Call it after adapters are installed, and before
    weights are evaluated: some are made contiguous. MLX thread."""
    library = native_library()
    if library is None:
        return 0
    engine = native.engine(native.default_threads())
    if (fault := find_fault(library, engine)) is not None:
        logger.warning("The native library is not used: %s is not what MLX computes.", fault)
        return 0
    for module, weight in kept:
        module.weight = weight
    count = _install(model, library, engine)
    for module, _ in kept:
        if isinstance(module, nn.Embedding):
            keep_rows_in(module, mx.float32)
    object.__setattr__(model, SWIGLU, native.swiglu)
    return count


def _install(model: Any, library: Any, engine: Any) -> int:
    count = install_products(model, lambda layer: _product(library, engine, layer))
    for module in model.modules():
        count += _install_norm(module, library, engine) or _install_rope(module, library, engine)
    return count + _install_layers(model, library)


def native_product() -> MakeProduct | None:
    """Makes the library's product for a layer; None without the library."""
    library = native_library()
    if library is None:
        return None
    engine = native.engine(native.default_threads())
    return lambda layer: _product(library, engine, layer)


def describe_native() -> str:
    """Whether the library is used here, as text. May build it."""
    if mx.default_device() != mx.cpu:
        return "not needed: MLX computes on a GPU"
    library = native.library()
    if library is None:
        return f"none, so products and attention are MLX's own and steps take longer: {native.why_missing()}"
    fault = find_fault(library, native.engine(native.default_threads()))
    return "its results are MLX's" if fault is None else f"not used: {fault} is not what MLX computes"


def find_fault(library: Any, engine: Any) -> str | None:
    """The first operation of the library that gives another result than MLX's own, None if there is none. Takes some
    milliseconds. MLX thread."""
    x = mx.random.normal((5, 1, 1, 2 * native.DEPTH_STEP), key=mx.random.key(0))
    whole, half = (nn.Linear(x.shape[-1], 48) for _ in range(2))
    half.weight = half.weight.astype(mx.bfloat16).astype(mx.float32)
    rope, positions = nn.RoPE(x.shape[-1]), mx.arange(5)
    sample = nn.Module()
    sample.layers = {
        "a product": whole,
        "a product of bfloat16": half,
        **{f"a product of {bits} bits": nn.QuantizedLinear.from_linear(whole, 32, bits) for bits in _BITS},
        "a norm": nn.RMSNorm(x.shape[-1]),
    }

    def results() -> dict[str, mx.array]:
        return {**{name: layer(x) for name, layer in sample.layers.items()}, "a rotary embedding": rope(x, positions)}

    own = {**results(), "SwiGLU": nn.silu(x) * x}
    half.weight = half.weight.astype(mx.bfloat16)
    _install(sample, library, engine)
    _install_rope(rope, library, engine)
    mx.eval(sample.parameters())  # the library cannot read lazy weights
    ours = {**results(), "SwiGLU": library.swiglu(engine, x, x)}
    return next((name for name in own if not mx.allclose(ours[name], own[name], atol=_TOLERANCE).item()), None)


def _is_deep(weight: mx.array) -> bool:
    return weight.ndim == 2 and weight.shape[1] % native.DEPTH_STEP == 0


def _product(library: Any, engine: Any, layer: Any) -> RowProduct | None:
    """The product reads the layer's weights at each call: they may be replaced."""
    if "scales" not in layer:
        if not _is_deep(layer.weight):
            return None
        layer.weight = mx.contiguous(layer.weight)  # copies transposed ones only, as GPT-2 has
        return lambda x: library.linear(engine, x, layer.weight)
    if layer.bits not in _BITS or getattr(layer, "mode", "affine") != "affine":
        return None
    bits = layer.bits
    return lambda x: library.linear(engine, x, layer.weight, layer.scales, layer.biases, bits)


class _Native:
    """Arguments of the library's calls that are neither parameters nor children of a module."""

    _library: Any
    _engine: Any


def _convert(module: Any, mixin: type[_Native], library: Any, engine: Any) -> None:
    mix_in(module, mixin)
    object.__setattr__(module, "_library", library)
    object.__setattr__(module, "_engine", engine)


class _Norm(_Native):
    weight: mx.array
    eps: float

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array | None = self._library.rms_norm(self._engine, x, self.weight, self.eps)
        return super().__call__(x) if y is None else y  # type: ignore[misc]


def _install_norm(module: Any, library: Any, engine: Any) -> bool:
    if type(module) is not nn.RMSNorm:
        return False
    _convert(module, _Norm, library, engine)
    return True


class _Turning(_Native):
    _rotation: Any

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        position = mx.array(offset) if isinstance(offset, int) else offset
        y: mx.array | None = self._library.rope(self._engine, x, position, self._rotation)
        return super().__call__(x, offset) if y is None else y  # type: ignore[misc]


def _install_rope(module: Any, library: Any, engine: Any) -> bool:
    if type(module) is nn.RoPE and module.base > 0:
        frequencies = [module.scale * module.base ** (-i / module.dims) for i in range(0, module.dims, 2)]
    elif type(module) is Llama3RoPE:
        frequencies = [1 / wavelength for wavelength in module._freqs.tolist()]
    else:
        return False
    _convert(module, _Turning, library, engine)
    object.__setattr__(module, "_rotation", _rotation(library, tuple(frequencies), bool(module.traditional)))
    return True


@lru_cache(maxsize=32)
def _rotation(library: Any, frequencies: tuple[float, ...], is_traditional: bool) -> Any:
    """Shared by all layers with the same frequencies: it keeps the sines of recent positions."""
    return library.Rotation(frequencies, is_traditional)


MAX_ROWS = 64
"""Of one call. With more rows the bookkeeping hardly counts, and a call's intermediate results would take memory."""

_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_UNKNOWN = object()


class _Block:
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


def _install_layers(model: Any, library: Any) -> int:
    """Computes layers of the known form by one call each, and returns how many. Call it after the library's products,
    norms and rotary embeddings are installed. MLX thread."""
    count = 0
    for module in model.modules():
        if _is_known(module):
            object.__setattr__(module, "_library", library)
            object.__setattr__(module, "_rotation", module.self_attn.rope._rotation)
            mix_in(module, _Block)
            count += 1
    return count


def forget_layer(module: Any) -> None:
    """Call when a part of a layer was replaced: whether the library can compute it is found out again."""
    if isinstance(module, _Block):
        vars(module).pop("_parts", None)


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
        if not hasattr(layer, "_product"):  # it got an adapter
            return None
        given = layer.get("scales"), layer.get("biases"), layer.bits if "scales" in layer else 0
        if not parts.add_product(layer.weight, *given, layer.get("bias")):
            return None
    for norm in (block.input_layernorm, block.post_attention_layernorm, *_head_norms(attention)):
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        if not parts.add_norm(weight, eps):
            return None
    return parts if parts.is_whole else None
