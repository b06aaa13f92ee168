"""Fetches the tensors of a head out of a model of the hub, and nothing else of it: their byte ranges, by HTTP.

    GET model.safetensors.index.json                   which file has which tensor
    GET model-00041-of-00041.safetensors  bytes 0-7    the length of its header, then the header: where tensors lie
                                          bytes a-b    runs of tensors that lie side by side

What comes is written as a safetensors file of the same tensors, and kept: home/heads/<owner>--<name>.safetensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import huggingface_hub
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session

from mlx_server.config import home
from mlx_server.errors import DownloadError
from mlx_server.runtime.models.folder import TensorHeader

_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100 * 2**20
_PIECE_BYTES = 64 * 2**20
_TIMEOUT_S = 60.0
_NOT_FOUND = 404
_PARTIAL = 206


def fetched_heads(origin: str, pattern: re.Pattern[str]) -> Path:
    """A file with those tensors of the hub's model `origin` whose names begin as `pattern` says, fetched if it is not
    there. Raises `DownloadError`."""
    path = home() / "heads" / f"{origin.replace('/', '--')}.safetensors"
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _appearing(path) as file:
            _fetch(_Origin(origin), pattern, file)
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(
            f"Cannot keep the multi-token-prediction heads of {origin} in {path.parent}: {error.strerror or error}. "
            "Make room or give the right to write there, or set MLX_SERVE_HOME to another folder."
        ) from error
    except Exception as error:  # what was sent is no JSON, or of another form
        raise _not_fetched(origin, error) from error
    return path


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears there whole, or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".partial-", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _not_fetched(origin: str, error: Exception) -> DownloadError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return DownloadError(
        f"Cannot fetch the multi-token-prediction heads of {origin} ({reason}). Check --mtp-from and the "
        "connection, or choose another --speculate."
    )


class _Origin:
    """A model of the hub, read by HTTP."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._headers = build_hf_headers()
        self._session = get_session()

    def get(self, file_name: str, span: tuple[int, int] | None = None) -> bytes | None:
        """A file, or its bytes [first, end); None if there is no such file. Raises `DownloadError`."""
        try:
            return self._get(file_name, span)
        except DownloadError:
            raise
        except Exception as error:  # of the hub's client and its HTTP library
            raise _not_fetched(self.name, error) from error

    def _get(self, file_name: str, span: tuple[int, int] | None) -> bytes | None:
        headers = dict(self._headers)
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        url = huggingface_hub.hf_hub_url(self.name, file_name)
        with self._session.stream("GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as answer:
            if answer.status_code == _NOT_FOUND:
                return None
            answer.raise_for_status()
            if span is not None and answer.status_code != _PARTIAL:  # before the whole file comes
                raise DownloadError(f"The server of {self.name} sends whole files only, and no parts of them.")
            content: bytes = answer.read()
        if span is not None and len(content) != span[1] - span[0]:
            raise DownloadError(f"{file_name} of {self.name} was cut short on its way; try again.")
        return content

    def files(self, pattern: re.Pattern[str]) -> list[str]:
        """Those that have tensors with such names, as far as that is known."""
        index = self.get(_INDEX)
        if index is None:
            return [_ONE_FILE]
        return sorted({file for name, file in json.loads(index)["weight_map"].items() if pattern.match(name)})

    def header(self, file_name: str) -> tuple[int, dict[str, TensorHeader]]:
        """Where a file's data begin, and its tensors."""
        prefix = self.get(file_name, (0, 8))
        length = 0 if prefix is None else int.from_bytes(prefix, "little")
        if not 0 < length < _MAX_HEADER_BYTES:
            raise DownloadError(f"{self.name} has no weights in safetensors files.")
        return 8 + length, json.loads(self.get(file_name, (8, 8 + length)) or b"{}")


def _fetch(origin: _Origin, pattern: re.Pattern[str], target: IO[bytes]) -> None:
    """Writes a safetensors file: the tensors file by file, in the order in which they lie there."""
    parts: list[tuple[str, int, dict[str, TensorHeader]]] = []
    for file_name in origin.files(pattern):
        start, tensors = origin.header(file_name)
        wanted = {name: tensor for name, tensor in tensors.items() if pattern.match(name)}
        if wanted:
            by_place = sorted(wanted.items(), key=lambda item: item[1]["data_offsets"][0])
            parts.append((file_name, start, dict(by_place)))
    if not parts:
        raise DownloadError(f"{origin.name} has no multi-token-prediction heads in its weights, either.")
    header = _header_of([tensors for _, _, tensors in parts])
    target.write(len(header).to_bytes(8, "little") + header)
    for file_name, start, tensors in parts:
        for first, end in _runs(tensors):
            for piece in range(start + first, start + end, _PIECE_BYTES):
                content = origin.get(file_name, (piece, min(piece + _PIECE_BYTES, start + end)))
                if content is None:
                    raise DownloadError(f"{file_name} of {origin.name} has gone meanwhile; try again.")
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
    """The tensors' bytes, joined where one begins at the end of another. They are in the order of their places."""
    first = end = -1
    for tensor in tensors.values():
        begin, stop = tensor["data_offsets"]
        if begin != end:
            if end > first:
                yield first, end
            first = begin
        end = stop
    if end > first:
        yield first, end
