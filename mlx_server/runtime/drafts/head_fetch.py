"""Fetches only the tensors of a head from a model on the hub, by HTTP byte ranges.

    GET model.safetensors.index.json                   which file has which tensor
    GET model-00041-of-00041.safetensors  bytes 0-7    the length of its header, then the header with tensors' positions
                                          bytes a-b    runs of adjacent tensors

The result is kept as a safetensors file with these tensors: home/heads/<owner>--<name>.safetensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import huggingface_hub
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session

from mlx_server.config import home
from mlx_server.errors import DownloadError
from mlx_server.runtime.models.folder import TensorHeader
from mlx_server.runtime.models.made_folders import storage_error

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 * 2**20
_PIECE_BYTES = 64 * 2**20
_TIMEOUT_S = 60.0
_NOT_FOUND = 404
_PARTIAL = 206


def fetch_heads(origin: str, pattern: re.Pattern[str]) -> Path:
    """A file with the tensors of the hub's model `origin` whose names start with `pattern`; fetched if it does not
    exist. Raises `DownloadError`."""
    path = home() / "heads" / f"{origin.replace('/', '--')}.safetensors"
    if path.is_file():
        return path
    partial = path.with_name(f".partial-{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            _fetch(origin, pattern, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except DownloadError:
        raise
    except Exception as error:  # of the disk, of the HTTP library, or because the answer is not the expected JSON
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            heads = f"the multi-token-prediction heads of {origin}"
            raise storage_error(heads, error, folder=str(path.parent)) from error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DownloadError(
            f"Cannot fetch the multi-token-prediction heads of {origin} ({reason}). Check --mtp-from and the "
            "connection, or choose another --speculate."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def _get(origin: str, file_name: str, span: tuple[int, int] | None = None) -> bytes:
    """A file of `origin`, or its bytes [first, end); empty if there is no such file."""
    headers = dict(build_hf_headers())
    if span is not None:
        headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
    url = huggingface_hub.hf_hub_url(origin, file_name)
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as answer:
        if answer.status_code == _NOT_FOUND:
            return b""
        answer.raise_for_status()
        if span is not None and answer.status_code != _PARTIAL:  # before the whole file arrives
            raise DownloadError(f"The server of {origin} does not support byte ranges.")
        content: bytes = answer.read()
        return content


def _files(origin: str, pattern: re.Pattern[str]) -> list[str]:
    """The files that may have tensors with such names."""
    index = _get(origin, _INDEX)
    if not index:
        return ["model.safetensors"]
    return sorted({file for name, file in json.loads(index)["weight_map"].items() if pattern.match(name)})


def _header(origin: str, file_name: str) -> tuple[int, dict[str, TensorHeader]]:
    """The position of a file's data, and its tensors."""
    length = int.from_bytes(_get(origin, file_name, (0, 8)), "little")
    if not 0 < length < _MAX_HEADER_BYTES:
        raise DownloadError(f"{origin} has no weights in safetensors files.")
    return 8 + length, json.loads(_get(origin, file_name, (8, 8 + length)))


def _fetch(origin: str, pattern: re.Pattern[str], target: IO[bytes]) -> None:
    """Writes a safetensors file with the tensors file by file, in their order there."""
    parts: list[tuple[str, int, dict[str, TensorHeader]]] = []
    for file_name in _files(origin, pattern):
        start, tensors = _header(origin, file_name)
        found = {name: tensor for name, tensor in tensors.items() if pattern.match(name)}
        parts.append((file_name, start, dict(sorted(found.items(), key=lambda item: item[1]["data_offsets"][0]))))
    if not any(tensors for _, _, tensors in parts):
        raise DownloadError(f"{origin} has no multi-token-prediction heads in its weights, either.")
    header = _header_of([tensors for _, _, tensors in parts])
    target.write(len(header).to_bytes(8, "little") + header)
    for file_name, start, tensors in parts:
        for first, end in _runs(tensors):
            for piece in range(start + first, start + end, _PIECE_BYTES):
                span = piece, min(piece + _PIECE_BYTES, start + end)
                content = _get(origin, file_name, span)
                if len(content) != span[1] - span[0]:
                    raise DownloadError(f"{file_name} of {origin} was cut short; try again.")
                target.write(content)


def _header_of(parts: list[dict[str, TensorHeader]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensors in parts:
        for name, tensor in tensors.items():
            begin, end = tensor["data_offsets"]
            header[name] = {**tensor, "data_offsets": [place, place + end - begin]}
            place += end - begin
    text = json.dumps(header).encode()
    return text + b" " * (-len(text) % 8)


def _runs(tensors: Mapping[str, TensorHeader]) -> Iterator[tuple[int, int]]:
    """The byte ranges of tensors in the order of their positions; adjacent ranges are joined."""
    first = end = 0
    for tensor in tensors.values():
        begin, stop = tensor["data_offsets"]
        if begin != end:
            yield first, end
            first = begin
        end = stop
    yield first, end
