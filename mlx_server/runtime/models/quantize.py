"""`--quantize`: a folder of whole weights as one in few bits, made once, of the layers that `mlx_lm.convert` takes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.blueprint import why_blind
from mlx_server.runtime.models.conversions import Recipe, made_folder, save_shard, write_index, write_json
from mlx_server.runtime.models.folder import HUB_FILES, is_whole_file, read_headers, read_model_json
from mlx_server.runtime.models.progress import Report

_VERSION = 1
"""A higher number makes folders anew that an older version has quantised."""
_SHARD_BYTES = 2**30
_NOT_COPIED = frozenset({"config.json", "files.json", "made.json", "model.safetensors.index.json"})
_INNER_FILES = ("[0-9]_*/*.json", "[0-9]_*/*.safetensors", "additional_chat_templates/*.jinja")
"""Of folders within the model's: modules around it, as sentence-transformers numbers them, and templates."""

_FORMS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "4": {"group_size": 64, "bits": 4, "mode": "affine"},
        "8": {"group_size": 64, "bits": 8, "mode": "affine"},
        "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    }
)
"""By the setting's values: MLX's own default sizes of groups."""

Load = Callable[[Path], tuple[Any, dict[str, Any], str]]
"""Gives the lazy model of a folder, its configuration, and why it has no vision encoder; empty if it has one."""


def quantized_folder(name: str, folder: Path, form: str, load: Load) -> Path:
    """The folder of the model that a user calls `name`, in `form`; made first if need be. Any thread. Raises
    `ModelLoadError` for a model that is quantised already, and `DownloadError` where the disk is too small.

    A model that sees keeps its vision encoder, whole. Needs memory for the layer that is being quantised and a shard
    of those that are.
    """
    sees = not why_blind(folder)
    _refuse_quantized(name, read_model_json(folder / "config.json"))
    weights = sorted(folder.glob("model*.safetensors"))
    total, whole = sum(path.stat().st_size for path in weights), _whole_bytes(weights) if sees else 0
    needed = int(whole + (total - whole) * _share(weights, form))
    needed += sum(path.stat().st_size for path in _others(folder))
    recipe = Recipe(
        source=name,
        name=f"{Path(name.rstrip('/')).name}-{form}",
        stage="quantizing",
        files=[folder / "config.json", *weights],
        version=f"quantize {form} {_VERSION}" + (" with its vision encoder" if sees else ""),
        needed_bytes=needed,
    )
    return made_folder(recipe, lambda work, report: _Quantization(folder, form, load).write(work, report))


def _refuse_quantized(name: str, config: Mapping[str, Any]) -> None:
    for place in (config, config.get("text_config") or {}):
        found = place.get("quantization") or place.get("quantization_config")
        if found:
            bits = found.get("bits") or found.get("quant_method") or "few"
            raise ModelLoadError(
                f"{name} is quantised already ({bits} bits), and --quantize is for whole weights: leave it out."
            )


def _share(weights: list[Path], form: str) -> float:
    """What is left of whole weights: codes, and a scale and an offset for each group. One-dimensional tensors, which
    stay whole, are few."""
    kinds = [tensor["dtype"] for path in weights for tensor in read_headers(path).values()]
    whole_bits = 32 if kinds and max(set(kinds), key=kinds.count) == "F32" else 16
    sizes = _FORMS[form]
    around = 8 if sizes["mode"] == "mxfp4" else 2 * whole_bits
    return float((sizes["bits"] + around / sizes["group_size"]) / whole_bits)


@dataclass(frozen=True, slots=True)
class _Quantization:
    folder: Path
    form: str
    load: Load

    def write(self, work: Path, report: Report) -> None:
        """Shard after shard; those that are there are kept."""
        model, config, no_vision = self.load(self.folder)
        sees = not no_vision
        config["quantization"] = config["quantization_config"] = _quantize(model, self.form, _LANGUAGE if sees else "")
        arrays = tree_flatten(model.parameters())
        del model
        total_bytes = sum(path.stat().st_size for path in self.folder.glob("model*.safetensors"))
        num_bytes = sum(array.nbytes for _, array in arrays)
        names = list(_shards(arrays))
        by_name, index = dict(arrays), {}
        del arrays
        for rank, shard in enumerate(names, 1):
            path = work / f"model-{rank:05}-of-{len(names):05}.safetensors"
            was_kept = is_whole_file(path)
            parts = {name: by_name.pop(name) for name in shard}
            part_bytes = sum(array.nbytes for array in parts.values())
            if not was_kept:
                for array in parts.values():  # one by one: each whole matrix is freed once it is packed
                    mx.eval(array)
                save_shard(path, parts, {})
            index.update(dict.fromkeys(shard, path.name))
            report(total_bytes * part_bytes // num_bytes, was_kept=was_kept)
        _copy_others(self.folder, work)
        write_index(work, index)
        write_json(work / "config.json", config)


_LANGUAGE = "language_model."
"""What the names of the language part's layers begin with in a model that sees; others are of its encoder."""


def _whole_bytes(weights: list[Path]) -> int:
    """Of weights that are no language model's, as models of the hub and mlx-vlm's name them."""
    headers = [item for path in weights for item in read_headers(path).items()]
    spans = [tensor["data_offsets"] for name, tensor in headers if re.search("vis|projector|connector", name)]
    return sum(end - begin for begin, end in spans)


def _quantize(model: Any, form: str, prefix: str) -> dict[str, Any]:
    """Lazily, the layers whose names begin with `prefix`; what config.json has to say of it. A model of mlx-lm may have
    layers of its own choice."""
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


def _shards(arrays: list[tuple[str, mx.array]]) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, array in arrays:
        if names and held + array.nbytes > _SHARD_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += array.nbytes
    yield names


def _others(folder: Path) -> list[Path]:
    """What is kept as it is: tokenizer, templates, settings, code, heads, and modules around the model. A folder may
    hold much else: the same weights in other formats, checkpoints, a repository."""
    inner = [path for pattern in _INNER_FILES for path in folder.glob(pattern)]
    found = {path for pattern in HUB_FILES if "/" not in pattern for path in folder.glob(pattern)}
    kept = [path for path in found if path.name not in _NOT_COPIED and not path.match("model*.safetensors")]
    return sorted(path for path in (*inner, *kept) if path.is_file())


def _copy_others(folder: Path, work: Path) -> None:
    for path in _others(folder):
        target = work / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
