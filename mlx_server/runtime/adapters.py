"""LoRA and DoRA adapters, as mlx-lm trains and saves them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import load_adapters

from mlx_server.adapter_entries import Adapter
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.adapter_layers import (
    AdaptedEmbedding,
    AdaptedExpertLinear,
    AdaptedExperts,
    AdaptedLinear,
    ExpertRoute,
    LowRank,
)
from mlx_server.runtime.adapter_rows import AdapterRows
from mlx_server.runtime.tensor_headers import TensorHeader, read_headers

SETTINGS_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"


def apply_adapter(model: Any, adapter: Adapter) -> None:
    """Puts an adapter into `model`, which has it for every row from now on; its weights are lazy until they are
    evaluated. Raises `ModelLoadError` for a folder that holds none, or one made for another model."""
    folder = adapter.path
    missing = [name for name in (SETTINGS_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"--adapter {adapter.folder} has no {' and no '.join(missing)}; it must be a folder that mlx_lm.lora has "
            "written."
        )
    try:
        load_adapters(model, str(folder))
    except Exception as error:  # mlx-lm raises whatever the files make it raise
        raise ModelLoadError(
            f"The adapter in {folder} does not fit the model: {type(error).__name__}: {error}"
        ) from error
    model.eval()  # without dropout


def install_adapters(model: Any, adapters: Sequence[Adapter]) -> AdapterRows:
    """Puts adapters into `model` so that each row of a batch has the one that it asks for, or none; what says which.
    Raises like `apply_adapter`, and for an adapter that changes a layer in a way that cannot be computed by rows."""
    rows = AdapterRows([adapter.name for adapter in adapters])
    parts: defaultdict[str, list[LowRank]] = defaultdict(list)
    for index, adapter in enumerate(adapters):
        for path, layer in _take_layers(model, adapter).items():
            parts[path].append(_low_rank(index, layer))
    for path, experts in list(model.named_modules()):
        if isinstance(experts, SwitchGLU | SwitchMLP):
            _adapt_experts(model, path, experts, parts, rows)
    modules = dict(model.named_modules())
    _replace(model, {path: _adapted(modules[path], parts[path], rows) for path in parts})
    return rows


def must_be_merged(adapter: Adapter) -> bool:
    """Whether an adapter is, by its settings, more than products of two matrices beside a model's own: DoRA, or full
    weights. What cannot be read is for loading to refuse."""
    try:
        return _kind(adapter) != "lora"
    except (OSError, ValueError, AttributeError):
        return False


def merged_adapter(adapters: Sequence[Adapter]) -> Adapter | None:
    """The adapter that a model has for all requests: its only one, if that cannot differ by request."""
    return adapters[0] if len(adapters) == 1 and must_be_merged(adapters[0]) else None


def adapter_tensors(adapter: Adapter) -> list[TensorHeader]:
    """What the header of its file says of an adapter's weights; nothing if it is not there."""
    path = adapter.path / WEIGHTS_FILE
    return list(read_headers(path).values()) if path.is_file() else []


def _kind(adapter: Adapter) -> str:
    """mlx-lm's name of it: lora, dora or full."""
    settings = json.loads((adapter.path / SETTINGS_FILE).read_text(encoding="utf-8"))
    return str(settings.get("fine_tune_type", "lora"))


def _take_layers(model: Any, adapter: Adapter) -> dict[str, nn.Module]:
    """The layers that mlx-lm makes of an adapter, by their paths; the model is left as it was."""
    if must_be_merged(adapter) and _kind(adapter) == "full":
        raise _refusal(adapter, "replaces weights of the model")
    before = dict(model.named_modules())
    apply_adapter(model, adapter)
    changed = {path: layer for path, layer in model.named_modules() if before.get(path, layer) is not layer}
    _replace(model, {path: before[path] for path in changed})
    for path, layer in changed.items():
        owner = before.get(path.rpartition(".")[0])
        is_known = isinstance(layer, LoRALinear | LoRAEmbedding) or (
            isinstance(layer, LoRASwitchLinear) and isinstance(owner, SwitchGLU | SwitchMLP)
        )
        if not is_known:
            raise _refusal(adapter, f"makes {path} a {type(layer).__name__}")
    return changed


def _refusal(adapter: Adapter, what: str) -> ModelLoadError:
    remedy = "put it into the model with `mlx_lm.fuse`, and serve the result"
    if must_be_merged(adapter):
        remedy = f"serve the model with this adapter alone: --adapter {adapter.folder} and no other"
    return ModelLoadError(f"The adapter {adapter.name} {what}, which cannot differ by request; {remedy}.")


def _low_rank(adapter: int, layer: Any) -> LowRank:
    """Of one of mlx-lm's layers; of experts it has both matrices transposed."""
    lora_b = (layer.scale * layer.lora_b).astype(layer.lora_b.dtype)
    if isinstance(layer, LoRASwitchLinear):
        return LowRank(adapter, layer.lora_a.swapaxes(-1, -2), lora_b.swapaxes(-1, -2))
    return LowRank(adapter, layer.lora_a, lora_b)


def _adapt_experts(
    model: Any, path: str, experts: nn.Module, parts: dict[str, list[LowRank]], rows: AdapterRows
) -> None:
    """Takes the parts of a layer of experts, if there are any, and puts them into it: all of its products must know
    how a mixed batch is told."""
    kinds = SwitchLinear | QuantizedSwitchLinear
    products = {name: child for name, child in experts.children().items() if isinstance(child, kinds)}
    own = {name: parts.pop(f"{path}.{name}", []) for name in products}
    if any(own.values()):
        route = ExpertRoute(rows)
        experts.update_modules({name: AdaptedExpertLinear(child, own[name], route) for name, child in products.items()})
        adapters = {part.adapter for some in own.values() for part in some}
        _replace(model, {path: AdaptedExperts(experts, adapters, route)})


def _adapted(base: nn.Module, parts: Sequence[LowRank], rows: AdapterRows) -> nn.Module:
    kind = AdaptedEmbedding if isinstance(base, nn.Embedding | nn.QuantizedEmbedding) else AdaptedLinear
    return kind(base, parts, rows)


def _replace(model: Any, modules: dict[str, nn.Module]) -> None:
    if modules:
        model.update_modules(tree_unflatten(list(modules.items())))
