"""What a safetensors file says of its tensors, read without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_server.errors import ModelLoadError

TensorHeader = dict[str, Any]
"""`dtype` in safetensors' names, `shape`, and `data_offsets` within the file's data."""

_MAX_BYTES = 100 * 2**20


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """By the tensors' names. Raises `ModelLoadError` for what is no safetensors file, or not there."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_BYTES:
                raise ValueError("no header")
            headers = json.loads(file.read(length))
        headers.pop("__metadata__", None)
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"{path} is no safetensors file, or a broken one; fetch it again.") from error
    return dict(headers)
