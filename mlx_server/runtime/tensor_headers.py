"""What a safetensors file says of its tensors, read without them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_server.errors import ModelLoadError

TensorHeader = dict[str, Any]
"""`dtype` in safetensors' names, `shape`, and `data_offsets` within the file's data."""

_MAX_BYTES = 100 * 2**20


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """By the tensors' names. Raises `ModelLoadError` for what is no safetensors file, or not there."""
    return _read(path).tensors


def whole_bytes(path: Path) -> int:
    """How long the file is when it is complete. Raises as `read_headers` does."""
    file = _read(path)
    try:
        return file.start + max((tensor["data_offsets"][1] for tensor in file.tensors.values()), default=0)
    except (KeyError, IndexError, TypeError) as error:
        raise _broken(path) from error


@dataclass(frozen=True, slots=True)
class _Header:
    """`start` is where the tensors' data begins in the file."""

    start: int
    tensors: dict[str, TensorHeader]


def _read(path: Path) -> _Header:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_BYTES:
                raise ValueError("no header")
            headers = json.loads(file.read(length))
        headers.pop("__metadata__", None)
    except (OSError, ValueError, AttributeError) as error:
        raise _broken(path) from error
    return _Header(8 + length, dict(headers))


def _broken(path: Path) -> ModelLoadError:
    return ModelLoadError(f"{path} is no safetensors file, or a broken one; fetch it again.")
