"""GGUF files: the formats of converted weights, and the entry to `conversion.py`."""

from __future__ import annotations

import enum
import re
from pathlib import Path

import mlx.core as mx

from mlx_server.errors import ModelLoadError, ServeError
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.models.progress import Report

_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

_REMEDY = (
    "Fetch the file again, take another one of the same model, or look for the model in mlx-lm's format at "
    "https://huggingface.co/mlx-community."
)

CONVERSION = 2
"""A higher number makes the server convert again what an older version converted."""


class WeightFormat(enum.StrEnum):
    """How converted weights are stored."""

    PACKED = "packed"
    """Groups of 32 codes, with as many bits as in the file where MLX supports that; tensors without groups in 16
    bits."""

    FLOAT32 = "float32"
    """Expanded to float32. On a CPU, MLX's own products are about 20 times faster in float32 than in any other type."""


def native_weight_format() -> WeightFormat:
    """The format that suits the device in use: packed on Metal and on a CPU with the native library, float32 otherwise.
    Waits for the library, see `native.library`."""
    if mx.default_device() == mx.cpu:
        return WeightFormat.FLOAT32 if native.library() is None else WeightFormat.PACKED
    return WeightFormat.PACKED if mx.metal.is_available() else WeightFormat.FLOAT32


def split_names(name: str) -> list[str]:
    """The names of all files of a split model, given one of them; for other files `name` alone."""
    match = _SPLIT_NAME.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{index:05}-of-{match[3]}.gguf" for index in range(1, int(match[3]) + 1)]


def convert_gguf(
    source: Path, folder: Path, weight_format: WeightFormat, report: Report = lambda *_, **__: None
) -> None:
    """Writes config.json, the weights and the tokenizer's files into the existing folder `folder`. `source` may be one
    of several files of a model. `report` gets the number of converted bytes of the source, as they are done.

    Raises `ModelLoadError` if the file is not GGUF, if its architecture, a tensor or its vocabulary is unknown, or if
    it contradicts itself. Needs memory for about 1 GiB of weights.
    """
    from mlx_server.runtime.models.gguf.conversion import Conversion  # importing its reader takes half a second

    paths = [source.with_name(name) for name in split_names(source.name)]
    try:
        Conversion.of(paths, weight_format).write(folder, report)
    except OSError:
        raise
    except Exception as error:  # libraries meet contradictions that are not looked for with errors of any kind
        other = f"It cannot be converted ({type(error).__name__}: {error})."
        fault = error.message if isinstance(error, ServeError) else other
        raise ModelLoadError(f"{source}: {fault} {_REMEDY}") from error
