"""`--quantize`: makes a folder with quantised weights from one with float weights, once, as `mlx_lm.convert` does."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.blueprint import why_no_vision
from mlx_server.runtime.models.folder import HUB_FILES, matching, read_headers, read_model_json
from mlx_server.runtime.models.made_folders import Recipe, made_folder, write_json, write_weights
from mlx_server.runtime.models.progress import Report

_VERSION = 1
"""A higher number makes the server quantise again what an older version quantised."""
_NOT_COPIED = frozenset({"config.json", "files.json", "made.json", "model.safetensors.index.json"})
_INNER_FILES = ("[0-9]_*/*.json", "[0-9]_*/*.safetensors", "additional_chat_templates/*.jinja")
"""Files in subfolders that are copied: sentence-transformers' numbered modules, and templates."""

_FORMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "4": {"group_size": 64, "bits": 4, "mode": "affine"},
        "8": {"group_size": 64, "bits": 8, "mode": "affine"},
        "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    }
)
"""By the values of the setting, with MLX's default group sizes."""

Load = Callable[[Path], tuple[Any, dict[str, Any], str]]
"""Returns the lazy model of a folder, its configuration, and the reason why it has no vision encoder (empty if it
has)."""


def quantized_folder(name: str, folder: Path, form: str, load: Load) -> Path:
    """The folder of the model that the user calls `name`, quantised to `form`; made first if necessary. Any thread.
    Raises `ModelLoadError` for a model that is already quantised, `InsufficientStorageError` if the disk is too small.

    A vision encoder is kept unquantised. Needs memory for the layer that is being quantised and for about 1 GiB of
    quantised weights.
    """
    sees = not why_no_vision(folder)
    _refuse_quantized(name, read_model_json(folder / "config.json"))
    weights = sorted(folder.glob("model*.safetensors"))
    total, whole = sum(path.stat().st_size for path in weights), _whole_bytes(weights) if sees else 0
    needed = int(whole + (total - whole) * _share(weights, form))
    others = _others(folder)
    needed += sum(path.stat().st_size for path in others)
    recipe = Recipe(
        source=name,
        name=f"{Path(name.rstrip('/')).name}-{form}",
        stage="quantizing",
        files=[folder / "config.json", *weights, *others],
        version=f"quantize {form} {_VERSION}" + (" with its vision encoder" if sees else ""),
        needed_bytes=needed,
    )
    return made_folder(recipe, lambda work, report: _write(folder, form, load, work, report))


def _refuse_quantized(name: str, config: Mapping[str, Any]) -> None:
    for place in (config, config.get("text_config") or {}):
        found = place.get("quantization") or place.get("quantization_config")
        if found:
            bits = found.get("bits") or found.get("quant_method") or "few"
            raise ModelLoadError(
                f"{name} is already quantised ({bits} bits), and --quantize needs float weights: leave it out."
            )


def _share(weights: list[Path], form: str) -> float:
    """The size of quantised weights (codes, and a scale and an offset for each group) relative to the float weights.
    Ignores one-dimensional tensors, which stay as they are."""
    kinds = [tensor["dtype"] for path in weights for tensor in read_headers(path).values()]
    whole_bits = 32 if kinds and max(set(kinds), key=kinds.count) == "F32" else 16
    sizes = _FORMS[form]
    around = 8 if sizes["mode"] == "mxfp4" else 2 * whole_bits
    return float((sizes["bits"] + around / sizes["group_size"]) / whole_bits)


def _write(folder: Path, form: str, load: Load, work: Path, report: Report) -> None:
    model, config, no_vision = load(folder)
    config["quantization"] = config["quantization_config"] = _quantize(model, form, "" if no_vision else _LANGUAGE)
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    del model
    source_bytes = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    sizes = {name: int(array.nbytes) for name, array in arrays.items()}
    num_bytes = sum(sizes.values())

    def read(name: str) -> dict[str, mx.array]:
        array = arrays.pop(name)
        mx.eval(array)  # one by one: each float matrix is freed once it is packed
        report(source_bytes * sizes[name] // num_bytes)
        return {name: array}

    write_weights(work, sizes, read)
    for path in _others(folder):
        target = work / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
        report(path.stat().st_size)
    write_json(work / "config.json", config)


_LANGUAGE = "language_model."
"""Prefix of the layers of the language part in a model with a vision encoder."""


def _whole_bytes(weights: list[Path]) -> int:
    """The size of weights that do not belong to the language part, by the names that the hub and mlx-vlm give them."""
    headers = [item for path in weights for item in read_headers(path).items()]
    spans = [tensor["data_offsets"] for name, tensor in headers if re.search("vis|projector|connector", name)]
    return sum(end - begin for begin, end in spans)


def _quantize(model: Any, form: str, prefix: str) -> dict[str, Any]:
    """Quantises the layers whose names begin with `prefix`, lazily, and returns the description for config.json.
    mlx-lm's code of the model may exclude layers or choose other bits for them."""
    sizes = dict(_FORMS[form])
    described: dict[str, Any] = dict(sizes)
    own = getattr(model, "quant_predicate", None)

    def choose(path: str, module: Any) -> bool | dict[str, Any]:
        is_left = not path.startswith(prefix) or not hasattr(module, "to_quantized")
        if is_left or module.weight.shape[-1] % sizes["group_size"]:
            return False
        chosen: bool | dict[str, Any] = True if own is None else own(path, module)
        if isinstance(chosen, dict):
            described[path] = chosen
        return chosen

    nn.quantize(model, **sizes, class_predicate=choose)
    return described


def _others(folder: Path) -> list[Path]:
    """The files that are copied unchanged: tokenizer, templates, settings, code, heads, and modules around the model.
    The folder may hold other things: the same weights in other formats, checkpoints, a repository."""
    inner = [path for pattern in _INNER_FILES for path in folder.glob(pattern)]
    found = {path for pattern in HUB_FILES if "/" not in pattern for path in matching(folder, pattern)}
    kept = [path for path in found if path.name not in _NOT_COPIED and not path.match("model*.safetensors")]
    return sorted(path for path in (*inner, *kept) if path.is_file())
