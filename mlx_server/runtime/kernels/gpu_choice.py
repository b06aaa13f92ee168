"""The kernel variants that `mlx-serve bench kernels` found fastest, kept in a file for the backends to start with.

An entry holds for one chip and one attention shape, the whole file for one version of the decode kernels. It
changes speed only: whatever is wrong with it, the backends take the default variants.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_server import config
from mlx_server.runtime.kernels.gpu_kernels import read_text
from mlx_server.runtime.kernels.gpu_variant import (
    DTYPES,
    DecodeShape,
    KernelVariant,
    check_variant,
    default_variant,
    unsupported_reason,
)

logger = logging.getLogger(__name__)

_VERSION = 1
_KERNEL_FILES = ("paged_decode.msl", "paged_reduce.msl")
_SIZES = ("num_query_heads", "num_kv_heads", "key_dim", "value_dim")
_FAULTS = (ValueError, TypeError, LookupError, AttributeError)
"""What reading raises for a file that is not ours, or no longer."""


class _Place(NamedTuple):
    """What a choice was measured for."""

    chip: str
    shape: DecodeShape


def choices_path() -> Path:
    """The file, in the user's cache folder."""
    return config.home() / "kernels" / "variants.json"


def load_choice() -> Callable[[DecodeShape], KernelVariant]:
    """What GPU backends take as `choose_variant`: the stored choice for this chip, else `default_variant`.

    A file that cannot be read, holds anything but choices that can be launched, or was measured with other
    kernels is ignored as a whole, with one warning.
    """
    path = choices_path()
    try:
        choices = _read(path)
    except (OSError, *_FAULTS) as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning("%s is ignored (%s); `mlx-serve bench kernels` writes it anew.", path, reason)
        choices = {}
    chip = chip_name()
    here = {place.shape: variant for place, variant in choices.items() if place.chip == chip}
    return lambda shape: here.get(shape) or default_variant(shape)


def store_choices(variants: Mapping[DecodeShape, KernelVariant]) -> Path:
    """Keeps `variants` for this chip, beside what the file says of other chips and shapes; a file that cannot be
    used is replaced. Others see the old file or the new one. Raises `OSError`."""
    path = choices_path()
    try:
        choices = _read(path)
    except _FAULTS:
        choices = {}
    chip = chip_name()
    choices.update({_Place(chip, shape): variant for shape, variant in variants.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps(_document(choices), indent=2) + "\n")
    return path


def chip_name() -> str:
    """The chip of MLX's default device, as its maker calls it."""
    return str(mx.device_info().get("device_name", platform.processor()))


def _read(path: Path) -> dict[_Place, KernelVariant]:
    """All choices; none if there is no file."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["version"] != _VERSION or document["kernels"] != _kernels_digest():
        raise ValueError("it was measured with other kernels")
    return dict(_parse(entry) for entry in document["choices"])


def _parse(entry: Mapping[str, Any]) -> tuple[_Place, KernelVariant]:
    """Raises one of `_FAULTS` for what no backend could launch."""
    dtypes = {_dtype_name(dtype): dtype for dtype in DTYPES}
    sizes = {name: _whole(value) for name, value in entry["shape"].items()}
    bits = entry["kv_bits"]
    shape = DecodeShape(**sizes, dtype=dtypes[entry["dtype"]], bits=None if bits is None else _whole(bits))
    tokens = entry["partition_tokens"]
    variant = KernelVariant(
        **{name: _whole(value) for name, value in entry["variant"].items()},
        partition_tokens=None if tokens is None else _whole(tokens),
    )
    reason = unsupported_reason(shape)
    if reason is not None:
        raise ValueError(reason)
    check_variant(shape, variant)
    return _Place(str(entry["chip"]), shape), variant


def _document(choices: Mapping[_Place, KernelVariant]) -> dict[str, Any]:
    entries = []
    for (chip, shape), variant in choices.items():
        sizes = {name: getattr(shape, name) for name in _SIZES}
        cut = dataclasses.asdict(variant)
        tokens = cut.pop("partition_tokens")
        entry = {"chip": chip, "shape": sizes, "dtype": _dtype_name(shape.dtype), "kv_bits": shape.bits}
        entries.append({**entry, "variant": cut, "partition_tokens": tokens})
    return {"version": _VERSION, "kernels": _kernels_digest(), "choices": entries}


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a positive whole number")
    return value


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _kernels_digest() -> str:
    """Another text of the kernels has other best variants."""
    texts = "\0".join(read_text(name) for name in _KERNEL_FILES)
    return hashlib.sha256(texts.encode()).hexdigest()[:16]


def _replace(path: Path, text: str) -> None:
    """Written beside its place and moved there in one step."""
    handle, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
