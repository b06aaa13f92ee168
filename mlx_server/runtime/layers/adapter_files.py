"""Adapters in files: mlx-lm's LoRA and DoRA, and PEFT's LoRA; and the layers that they are made into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import load_adapters

from mlx_server.errors import ModelLoadError
from mlx_server.model_entries import Adapter
from mlx_server.runtime.layers.peft import BASE_LAYER, PEFT_WEIGHTS, SETTINGS_FILE, apply_peft
from mlx_server.runtime.models.folder import TensorHeader, read_headers, read_model_json

WEIGHTS_FILE = "adapters.safetensors"
ADAPTER_FILES = (SETTINGS_FILE, WEIGHTS_FILE, PEFT_WEIGHTS)
"""The files of an adapter: all that is fetched of one on the hub."""


def check_files(adapter: Adapter) -> None:
    """Raises `ModelLoadError` if the folder has no adapter."""
    missing = [name for name in (SETTINGS_FILE, _weights_file(adapter)) if not (adapter.path / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"The adapter {adapter.folder} has no {' and no '.join(missing)}; it must be a folder that mlx_lm.lora has "
            f"written, or PEFT, with {PEFT_WEIGHTS}, or the hub's id of one."
        )


def apply_adapter(model: Any, adapter: Adapter) -> None:
    """Applies an adapter to `model` for all rows. Its weights are lazy until they are evaluated. Raises
    `ModelLoadError` if the folder has no adapter, or one for another model."""
    check_files(adapter)
    folder, weights = adapter.path, _weights_file(adapter)
    try:
        if weights == PEFT_WEIGHTS:
            apply_peft(model, adapter)
        else:
            load_adapters(model, str(folder))
        for layer in [layer for layer in model.modules() if "lora_b" in layer]:
            layer.scale = float(layer.scale)
            if not math.isfinite(layer.scale):
                raise ValueError(f"its scale is {layer.scale}")
    except Exception as error:  # mlx-lm raises errors of any kind for bad files
        raise ModelLoadError(
            f"The adapter {adapter.folder} does not fit the model, or is damaged ({type(error).__name__}: {error}). "
            "Take one that was made for this model, or fetch it again."
        ) from error
    model.eval()  # without dropout


def must_be_merged(adapter: Adapter) -> bool:
    """Whether an adapter must be merged into the model, because it is more than products of two matrices beside the
    model's own: DoRA, or full weights. False for settings that cannot be read, which loading refuses."""
    try:
        return _kind(adapter) != "lora"
    except ModelLoadError:
        return False


def merged_adapter(adapters: Sequence[Adapter]) -> Adapter | None:
    """The adapter that is merged into the model for all requests: the only one given, if it cannot differ by request.
    Else None. One of the hub is never merged: the model's name would depend on whether it was fetched before."""
    is_one = len(adapters) == 1 and adapters[0].fetched is None
    return adapters[0] if is_one and must_be_merged(adapters[0]) else None


def adapter_tensors(adapter: Adapter) -> list[TensorHeader]:
    """The headers of an adapter's own tensors; empty if there is no file."""
    path = adapter.path / _weights_file(adapter)
    headers = read_headers(path) if path.is_file() else {}
    return [header for name, header in headers.items() if not name.endswith(BASE_LAYER)]


def _weights_file(adapter: Adapter) -> str:
    """mlx-lm's, unless there is only PEFT's."""
    is_peft = not (adapter.path / WEIGHTS_FILE).is_file() and (adapter.path / PEFT_WEIGHTS).is_file()
    return PEFT_WEIGHTS if is_peft else WEIGHTS_FILE


def _kind(adapter: Adapter) -> str:
    """The adapter's type as mlx-lm names it: lora, dora or full."""
    settings = read_model_json(adapter.path / SETTINGS_FILE)
    return str(settings.get("fine_tune_type", "lora"))


def take_layers(model: Any, adapter: Adapter) -> dict[str, nn.Module]:
    """The layers that mlx-lm makes for an adapter, by path. The model is left as it was."""
    if must_be_merged(adapter) and _kind(adapter) == "full":
        raise _refusal(adapter, "replaces weights of the model")
    before = dict(model.named_modules())
    apply_adapter(model, adapter)
    changed = {path: layer for path, layer in model.named_modules() if before.get(path, layer) is not layer}
    replace_modules(model, {path: before[path] for path in changed})
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
        if adapter.fetched is not None:
            remedy = f"serve the model with this adapter alone, from the folder {adapter.fetched}"
    return ModelLoadError(f"The adapter {adapter.name} {what}, which cannot differ by request; {remedy}.")


def replace_modules(model: Any, modules: dict[str, nn.Module]) -> None:
    if modules:
        model.update_modules(tree_unflatten(list(modules.items())))
