"""The only change to mlx-lm: its attention function lets paged caches compute their own attention, and its SwiGLU can
be computed in another way.

mlx-lm's attention layers call `cache.update_and_fetch(k, v)`, use `cache.offset` for rope, and then call
`scaled_dot_product_attention(q, k, v, cache=cache, ...)`. They get our cache, and this module wraps that function; no
model code is copied or changed. SwiGLU is a function that the MLPs of most models call.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
from mlx_lm.models import activations, base

from mlx_server.errors import ModelLoadError

_NAME = "scaled_dot_product_attention"
_PARAMETERS = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")
_MARK = "_mlx_server_original"
_MODELS = ("mlx_lm.models", "mlx_vlm.models")


class AttendsItself(ABC):
    """A layer cache that computes its own attention. `keys` are the keys that it returned to the model in the current
    forward pass; None before."""

    keys: mx.array | None = None

    @abstractmethod
    def attend(self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
        """Attention of this step's queries over the content of the cache."""


caches_in_use: ContextVar[Sequence[AttendsItself]] = ContextVar("caches_in_use", default=())
"""The caches of the model that is being called. Attention over keys that one of them returned goes to that cache."""


def check_seam() -> None:
    """Raises `ModelLoadError` if mlx-lm's attention function does not have the expected parameters."""
    original = getattr(base, _NAME, None)
    found = tuple(inspect.signature(getattr(original, _MARK, original)).parameters) if callable(original) else ()
    if found != _PARAMETERS:
        raise ModelLoadError(
            f"mlx_lm.models.base.{_NAME} has the parameters {found}, expected {_PARAMETERS}: this version of "
            "mlx-lm is not supported. Install mlx-lm 0.32."
        )


def install_seam() -> None:
    """Wraps mlx-lm's attention function in `base` and in every model module that has imported it. Further calls only
    wrap it in modules imported since. MLX thread, before a model is built."""
    check_seam()
    _replace(base, _NAME, _wrap)
    _replace(activations, "swiglu", _wrap_swiglu)
    for name, home, wrap in (
        (_NAME, sys.modules.get("mlx_vlm.models.base"), _wrap),
        ("swiglu", sys.modules.get("mlx_vlm.models.activations"), _wrap_swiglu),
    ):
        if home is not None:
            _replace(home, name, wrap)


SwiGLU = Callable[[mx.array, mx.array], mx.array | None]

swiglu_in_use: ContextVar[SwiGLU | None] = ContextVar("swiglu_in_use", default=None)
"""Computes SwiGLU for the model that is being called; mlx-lm's own does if there is none or it returns None."""


def _wrap_swiglu(original: Any) -> Any:
    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        compute = swiglu_in_use.get()
        y = None if compute is None else compute(gate, x)
        result: mx.array = original(gate, x) if y is None else y
        return result

    setattr(swiglu, _MARK, original)
    return swiglu


def _replace(home: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces a function by a wrapper, in `home` and in all modules that have imported it, unless it is one
    already."""
    original = getattr(home, name)
    wrapper = original if hasattr(original, _MARK) else wrap(original)
    setattr(home, name, wrapper)
    unwrapped = getattr(wrapper, _MARK)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(_MODELS) and getattr(module, name, None) is unwrapped:
            setattr(module, name, wrapper)


def _wrap(original: Any) -> Any:
    def scaled_dot_product_attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        owner = cache if isinstance(cache, AttendsItself) else None
        if owner is None or owner.keys is not keys:  # a layer may attend over another layer's keys
            owner = next((other for other in caches_in_use.get() if other.keys is keys), owner)
        if owner is not None:
            return owner.attend(queries, scale, mask, sinks)
        result: mx.array = original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        return result

    setattr(scaled_dot_product_attention, _MARK, original)
    return scaled_dot_product_attention
