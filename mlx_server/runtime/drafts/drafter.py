"""Drafters in folders of their own, each made for one larger model: how any of them is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.drafts.heads import DrafterModel, quantize_as_stored
from mlx_server.runtime.models.folder import read_model_json
from mlx_server.runtime.models.loader import LoadedModel, Pieces, is_gpu, prepare_weights

Weights = dict[str, mx.array]


class BuiltDrafter(NamedTuple):
    """A drafter before its `weights` are in, which have the names in `model`. `config` describes its layers."""

    model: DrafterModel
    weights: Weights
    config: Mapping[str, Any]


ReadDrafter = Callable[[Mapping[str, Any], Weights, LoadedModel], BuiltDrafter]
"""Builds a drafter from its config.json and its files' tensors for a model. Raises `LookupError`, `TypeError` or
`ValueError` if they are of another kind or for another model."""


def load_drafter(read: ReadDrafter, name: str, folder: Path, target: LoadedModel, dtype: str) -> Pieces[LoadedModel]:
    """Loads the drafter in `folder` for its `target` model. MLX thread. Raises `ModelLoadError`."""
    try:
        model, layers = _build(read, folder, target)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # sizes of 0, other code
        reason = f"its config.json has no {error.args[0]}" if isinstance(error, KeyError) else error
        raise ModelLoadError(f"Cannot load {name} to draft for {target.name}: {reason}.") from error
    yield 0.0
    yield from prepare_weights(model, dtype)
    return LoadedModel(name, model, {**layers, "vocab_size": target.vocab_size}, None)


def _build(read: ReadDrafter, folder: Path, target: LoadedModel) -> tuple[DrafterModel, Mapping[str, Any]]:
    """The model, and the configuration of its layers."""
    config = read_model_json(folder / "config.json")
    stored: Weights = {}
    for path in sorted(folder.glob("model*.safetensors")):
        stored |= cast(Weights, mx.load(str(path)))
    model, weights, layers = read(config, stored, target)
    by_body = {name.removeprefix("model."): array for name, array in weights.items()}
    quantize_as_stored(model, config.get("quantization"), by_body)
    model.load_weights(list(weights.items()))
    if is_gpu():
        model.set_dtype(model.model.link.last_norm().weight.dtype)
    model.eval()
    return model, layers


def check_sizes(kind: str, sizes: Mapping[str, tuple[object, object]]) -> None:
    """Raises `ValueError` unless each size that a drafter of this `kind` was made for is that of the model, the
    second."""
    for name, (wanted, found) in sizes.items():
        if wanted != found:
            raise ValueError(f"its {name} is {wanted}, the model has {found}; take the {kind} made for this model")
