"""Adds adapters to a model that serves, and removes them, in pieces between its steps.

An adapter is first put into a copy of the model's modules, which share its weights, and compared there with plain
mlx-lm, as a model is when it is loaded. Only what has passed is joined to the layers that serve, one after another: no
request uses the new columns before the last layer has them, nor the old ones when the first layer gives them up.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_server.errors import ModelLoadError
from mlx_server.model_entries import Adapter
from mlx_server.runtime.attention.backends import choose_in_pieces
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.cache.layers import attention_specs, discover_layers
from mlx_server.runtime.checks.probe import Probe
from mlx_server.runtime.layers.adapters import (
    AdaptedExpertLinear,
    AdaptedExperts,
    AdaptedLayer,
    AdapterRows,
    LowRankColumns,
    install_adapters,
    is_adapted,
    join_layer,
    leave_layer,
)
from mlx_server.runtime.layers.cpu import forget_layer
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.loader import LoadedModel, Pieces, compute_dtype, evaluate


def add_adapter(loaded: LoadedModel, runner: ModelRunner, adapter: Adapter, dtype: str) -> Pieces[None]:
    """Adds an adapter to the model that `runner` runs, under its key. `dtype` is the setting of the model. MLX thread;
    other steps run at each yield. Raises `ModelLoadError`, and leaves the model as it was, for an adapter of another
    model, and for one that can only be loaded with the model."""
    model = plain_copy(loaded.model)
    rows = install_adapters(model, (adapter,))
    if runner.images is not None and any(
        is_adapted(part) for name, part in model.children().items() if name != "language_model"
    ):
        raise ModelLoadError(
            f"The adapter {adapter.name} changes the vision encoder, and all requests share its results: start the "
            "server with this adapter, without images."
        )
    yield from evaluate(_convert(model, compute_dtype(dtype)))
    yield from _check(loaded, runner, model, rows, adapter)
    live, modules = loaded.adapters, dict(loaded.model.named_modules())
    index = live.add(adapter.key)
    try:
        for path, columns in _columns(model).items():
            changed = join_layer(loaded.model, modules, path, columns.part(index), live)
            columns.clear()  # frees the copy
            _settle(modules, path, changed)
            yield 1.0
    except BaseException:
        for _ in remove_adapter(loaded.model, live, adapter.key):
            """All at once: the model is closed, or MLX fails."""
        raise


def remove_adapter(model: Any, rows: AdapterRows, key: str) -> Pieces[int]:
    """Removes an adapter that no request uses, and returns how many bytes it had. As `add_adapter`."""
    index = rows.keys.index(key)
    modules, num_bytes = dict(model.named_modules()), 0
    adapted = [path for path, module in modules.items() if isinstance(module, AdaptedLayer | AdaptedExperts)]
    for path in adapted:
        if index in modules[path].layout.adapters:
            before = _num_bytes(modules[path])
            _settle(modules, path, changed := leave_layer(model, modules, path, index))
            num_bytes += before - _num_bytes(changed)
            yield 1.0
    rows.keys[index] = None
    mx.clear_cache()  # returns the memory to the system
    return num_bytes


def plain_copy(model: nn.Module) -> Any:
    """The model's modules once more, around the same arrays: without adapters, and without the stand-ins that a runner
    has set in their namespaces."""
    copies: dict[int, nn.Module] = {}

    def copied(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(copied, value))
        if isinstance(value, AdaptedLayer | AdaptedExperts | AdaptedExpertLinear):
            inner = {AdaptedExperts: "experts", AdaptedExpertLinear: "linear"}
            return copied(value[inner.get(type(value), "base")])
        if isinstance(value, nn.Module):
            if id(value) not in copies:
                kind: Any = type(value)
                copies[id(value)] = twin = kind.__new__(kind)
                dict.update(twin, {name: copied(part) for name, part in value.items()})
                own = {name: part for name, part in vars(value).items() if name not in value}
                vars(twin).update(own)
                forget_layer(twin)
            return copies[id(value)]
        return {name: copied(part) for name, part in value.items()} if isinstance(value, dict) else value

    return copied(model)


def _columns(model: nn.Module) -> dict[str, LowRankColumns]:
    """The layers of a model with one adapter, by their paths in the model without."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            found[path] = module
        elif isinstance(module, AdaptedExperts):
            found |= {f"{path}.{name}": part for name, part in module.products.items() if part.layout.adapters}
    return found


def _num_bytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _convert(model: nn.Module, dtype: mx.Dtype | None) -> list[mx.array]:
    """Has the matrices of the adapter in the type in which the model computes; returns them. Lazy."""
    for columns in _columns(model).values():
        for name in ("lora_a", "lora_b") if dtype is not None else ():
            columns[name] = columns[name].astype(dtype)
    return [columns[name] for columns in _columns(model).values() for name in ("lora_a", "lora_b")]


def _check(loaded: LoadedModel, runner: ModelRunner, model: Any, rows: AdapterRows, adapter: Adapter) -> Pieces[None]:
    """Compares batches with plain mlx-lm, at the level at which the model serves. Raises `ModelLoadError`."""
    probe = yield from Probe.in_pieces(model, loaded.vocab_size, rows)
    layers = discover_layers(model)
    yield 1.0
    cache = PagedKVCache(layers, (yield from choose_in_pieces("auto", attention_specs(layers))))
    trial = ModelRunner(model, cache, loaded.vocab_size, rows)
    yield 1.0
    try:
        trial.forward.use(runner.forward.level, selects_rows=runner.forward.selects_rows)
        reason = yield from probe.difference(trial)
    finally:
        trial.close()
    if reason is not None:
        raise ModelLoadError(
            f"With the adapter {adapter.name} the model does not compute in batches what mlx-lm does ({reason}). It "
            "may be served if it is loaded with the model: start the server with it (--adapter)."
        )


def _settle(modules: dict[str, nn.Module], path: str, changed: nn.Module) -> None:
    """After a change of the layer at `path`: computes its new matrices, and has the layers around it look again at
    their parts."""
    mx.eval(changed.parameters())
    parts = path.split(".")
    for length in range(len(parts)):
        forget_layer(modules.get(".".join(parts[:length])))
