"""Uses the native library for the layers of an unchanged model, where MLX computes on the CPU.

Linear layers and tied heads get its products (`products.py`); RMS norms and rotary embeddings change their class in the
same way, and so do whole transformer layers (`fused_layers.py`). SwiGLU is a function in mlx-lm, which `seam.py` wraps.
MLX computes what the library cannot: half-precision activations, weights that are not contiguous, a depth that is not a
multiple of 32.

Weights of a linear layer may stay bfloat16 while the model computes in float32: widening them is exact, so a product
has the same bits as with float32 weights, with half of the memory and of its traffic.
"""

from __future__ import annotations

import inspect
import linecache
import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.layers.fused_layers import install_fused_layers
from mlx_server.runtime.layers.products import MakeProduct, RowProduct, install_products, keep_rows_in

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
    return count + install_fused_layers(model, library)


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


def _convert(module: Any, kind: type[Any], library: Any, engine: Any) -> None:
    module.__class__ = kind
    object.__setattr__(module, "_library", library)
    object.__setattr__(module, "_engine", engine)


class _RMSNorm(_Native, nn.RMSNorm):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array | None = self._library.rms_norm(self._engine, x, self.weight, self.eps)
        return super().__call__(x) if y is None else y


def _install_norm(module: Any, library: Any, engine: Any) -> bool:
    if type(module) is not nn.RMSNorm:
        return False
    _convert(module, _RMSNorm, library, engine)
    return True


class _Turning(_Native):
    _rotation: Any

    def _turned(self, x: mx.array, offset: int | mx.array) -> mx.array | None:
        if isinstance(offset, int):
            offset = mx.array(offset)
        turned: mx.array | None = self._library.rope(self._engine, x, offset, self._rotation)
        return turned


class _RoPE(_Turning, nn.RoPE):  # type: ignore[misc]
    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        y = self._turned(x, offset)
        return super().__call__(x, offset) if y is None else y


class _Llama3RoPE(_Turning, Llama3RoPE):  # type: ignore[misc]
    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        y = self._turned(x, offset)
        return super().__call__(x, offset) if y is None else y


def _install_rope(module: Any, library: Any, engine: Any) -> bool:
    if type(module) is nn.RoPE:
        frequencies = [module.scale * module.base ** (-i / module.dims) for i in range(0, module.dims, 2)]
        kind: type[Any] = _RoPE
    elif type(module) is Llama3RoPE:
        frequencies = [1 / wavelength for wavelength in module._freqs.tolist()]
        kind = _Llama3RoPE
    else:
        return False
    _convert(module, kind, library, engine)
    object.__setattr__(module, "_rotation", _rotation(library, tuple(frequencies), bool(module.traditional)))
    return True


@lru_cache(maxsize=32)
def _rotation(library: Any, frequencies: tuple[float, ...], is_traditional: bool) -> Any:
    """Shared by all layers with the same frequencies: it keeps the sines of recent positions."""
    return library.Rotation(frequencies, is_traditional)
