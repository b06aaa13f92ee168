"""GGUF files: in which format their weights are kept here, and their conversion, which `conversion.py` does."""

from __future__ import annotations

import enum
import re
from pathlib import Path

import mlx.core as mx

from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.models.progress import Report

_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class WeightFormat(enum.StrEnum):
    """How converted weights are stored."""

    PACKED = "packed"
    """In groups of 32 codes, of as many bits as in the file where MLX has them, the rest in 16 bits."""

    FLOAT32 = "float32"
    """Expanded. On a CPU, MLX's own products of float32 are some 20 times faster than of anything else."""


def native_weight_format() -> WeightFormat:
    """The format that suits the device in use: packed on Metal, and on a CPU where the native library multiplies it;
    float32 elsewhere. Waits for the library, see `native.library`."""
    if mx.default_device() == mx.cpu:
        return WeightFormat.FLOAT32 if native.library() is None else WeightFormat.PACKED
    return WeightFormat.PACKED if mx.metal.is_available() else WeightFormat.FLOAT32


def split_names(name: str) -> list[str]:
    """The names of the files of a model that is split into several, given one of them; else `name` alone."""
    match = _SPLIT_NAME.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{index:05}-of-{match[3]}.gguf" for index in range(1, int(match[3]) + 1)]


def convert_gguf(
    source: Path, folder: Path, weight_format: WeightFormat, report: Report = lambda *_, **__: None
) -> None:
    """Writes config.json, the weights and the tokenizer's files into `folder`, which must exist and may hold whole
    shards of the same conversion. `source` may be one of several files of a model. `report` gets the bytes of the
    source that were converted, as they are.

    Raises `ModelLoadError` when the file is no GGUF, or has an architecture, tensor or vocabulary that is not known
    here. Needs memory for the largest shard.
    """
    from mlx_server.runtime.models.gguf.conversion import Conversion  # its reader takes half a second to import

    paths = [source.with_name(name) for name in split_names(source.name)]
    Conversion.of(paths, weight_format).write(folder, report)
