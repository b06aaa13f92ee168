"""A model as its configuration describes it, without weights: shows what it keeps of tokens before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.attention import ReferenceBackend
from mlx_server.runtime.kv_cache import PagedKVCache
from mlx_server.runtime.layers import discover_layers

_MISSING_PACKAGES = {"olmo": "ai2-olmo"}
"""Packages without which some of mlx-lm's modules end the process when they are imported."""

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
"""Types of weights by the names that settings give them."""


def model_classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], Any]:
    """mlx-lm's classes of the model and of its arguments. Raises `ModelLoadError` if it has none for `config`."""
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelLoadError("The configuration names no model_type; add it to config.json.")
    try:
        classes: tuple[type[nn.Module], Any] = _get_classes(dict(config))
    except SystemExit as error:
        package = _MISSING_PACKAGES.get(model_type, "that is not installed")
        raise ModelLoadError(
            f"Models of type {model_type} are not served: mlx-lm's module for them needs the package {package} to be "
            "imported at all."
        ) from error
    except ValueError as error:
        raise ModelLoadError(f"{error} Convert the model to one that mlx-lm knows, or update mlx-lm.") from error
    return classes


def build_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of `config` with mlx-lm's own initial weights, which are lazy. Raises `ModelLoadError` if mlx-lm cannot
    build it."""
    model_class, arguments_class = model_classes(config)
    try:
        return model_class(arguments_class.from_dict(dict(config)))
    except Exception as error:  # mlx-lm raises errors of any kind
        raise ModelLoadError(
            f"mlx-lm cannot build a model of type {config['model_type']} from this config.json: "
            f"{type(error).__name__}: {error}"
        ) from error


def build_blank(config: Mapping[str, Any], dtype: mx.Dtype) -> nn.Module:
    """As `build_model`, with zeros of type `dtype` that take no memory. Any thread; nothing is computed."""
    model = build_model(config)

    def zeros_like(parameter: mx.array) -> mx.array:
        kind = dtype if mx.issubdtype(parameter.dtype, mx.floating) else parameter.dtype
        return mx.broadcast_to(mx.array(0, kind), parameter.shape)

    model.update(tree_map(zeros_like, model.parameters()))
    return model.eval()


def foresee_cache(config: Mapping[str, Any], dtype: str) -> PagedKVCache:
    """The caches that the model of `config` will have with weights of type `dtype`, one of `DTYPES`, not allocated.
    Any thread. Raises `ModelLoadError` for a model that cannot be served, as far as that shows."""
    return PagedKVCache(discover_layers(build_blank(config, DTYPES[dtype])), ReferenceBackend())
