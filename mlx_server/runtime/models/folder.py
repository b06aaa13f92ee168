"""Whether a folder holds a whole model in mlx-lm format, found without loading it: from the names of its files, the
headers of its safetensors files, and the manifest of a folder that we have made."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_server.errors import ModelLoadError

TensorHeader = dict[str, Any]
"""`dtype` in safetensors' names, `shape`, and `data_offsets` within the file's data."""

CONTEXT_KEYS = (
    "max_position_embeddings",
    "max_seq_len",
    "n_positions",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
"""Under which of these names a `config.json` says how many tokens the model was made for: the first that is there."""

HUB_FILES = (
    "*.json",
    "*.jsonl",
    "*.jinja",
    "*.py",
    "*.txt",
    "*.tiktoken",
    "tokenizer.model",
    "tiktoken.model",
    "model*.safetensors",
    "mtp*.safetensors",
    "*_Dense/model.safetensors",
)
"""What is fetched of a model of the hub."""

_MAX_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class _Header:
    """Of a safetensors file, which has `num_bytes` when it is complete."""

    tensors: dict[str, TensorHeader]
    num_bytes: int


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """By the tensors' names. Raises `ModelLoadError` if there is no safetensors file, or a broken one."""
    return _read(path).tensors


def _read(path: Path) -> _Header:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_BYTES:
                raise ValueError("no header")
            tensors = dict(_parsed(file.read(length)))
        tensors.pop("__metadata__", None)
        if not all(map(_is_tensor, tensors.values())):
            raise ValueError("no tensors")
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (OSError, ValueError, TypeError) as error:
        raise ModelLoadError(f"{path} is no safetensors file, or a broken one; fetch it again.") from error
    return _Header(tensors, 8 + length + end)


def _is_tensor(found: Any) -> bool:
    """Whether the header of a file that anybody may have written describes a tensor."""
    if not isinstance(found, dict) or not isinstance(found.get("dtype"), str):
        return False
    shape, span = found.get("shape"), found.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(span, list) or len(span) != 2:
        return False
    return all(type(number) is int and number >= 0 for number in (*shape, *span))


def _parsed(text: str | bytes) -> Any:
    """Raises `ValueError` for what is no JSON, or nested so deeply that nobody can read it."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_model_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty if there is no such file. Raises `ModelLoadError`."""
    if not path.is_file():
        return {}
    try:
        content = _parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error}. Pull the model again.") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object. Pull the model again.")
    return content


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.json", "vocab.txt")
_OTHER_WEIGHTS = ("*.gguf", "*.safetensors", "*.bin", "*.pt", "*.pth")


def missing_parts(folder: Path) -> list[str]:
    """What `folder` lacks to be loaded, in words for the user; empty when it is complete."""
    return [*_config_faults(folder), *_weight_faults(folder), *_tokenizer_faults(folder)]


def _config_faults(folder: Path) -> list[str]:
    try:
        config = _parsed((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ["config.json"]
    except (OSError, ValueError) as error:
        return [f"a readable config.json ({error})"]
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        return ["model_type in config.json"]
    return [] if isinstance(config.get("text_config") or {}, dict) else ["an object as text_config in config.json"]


def _weight_faults(folder: Path) -> list[str]:
    present = {path.name for path in folder.glob("model*.safetensors")}
    if not present:
        return [f"weights, model*.safetensors{_hint(folder)}"]
    lacking = [f"the weights {name}" for name in _indexed_files(folder) if not (folder / name).is_file()]
    return lacking + [fault for name in sorted(present) if (fault := _file_fault(folder / name)) is not None]


def _file_fault(path: Path) -> str | None:
    """What is wrong with a file of weights, as its header and its length tell: a copy or a download was cut short."""
    try:
        wanted, there = _read(path).num_bytes, path.stat().st_size
    except (ModelLoadError, OSError):
        return f"readable weights in {path.name}, which is broken (fetch it again)"
    if there >= wanted:
        return None
    return f"the rest of {path.name}, of which {there:,} of {wanted:,} bytes are there (fetch it again)"


def _hint(folder: Path) -> str:
    """What may be done with weights of another format."""
    others = [path for pattern in _OTHER_WEIGHTS for path in sorted(folder.glob(pattern))]
    if not others:
        return ""
    if others[0].suffix == ".gguf":
        return f" (it has GGUF files: serve one of them, {others[0]})"
    if others[0].suffix == ".safetensors":
        return f" (it has {others[0].name}; name the files model*.safetensors)"
    return (
        f" (it has {others[0].name}, which may run code when it is read and so is not; look for the same model in "
        "safetensors, or load it with transformers and call save_pretrained)"
    )


def is_whole_file(path: Path) -> bool:
    """Whether there is a safetensors file that is as long as its header says."""
    return path.is_file() and _file_fault(path) is None


def _indexed_files(folder: Path) -> list[str]:
    """The shards that the index names; none when the weights are in one file."""
    try:
        index = _parsed((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ["named by model.safetensors.index.json, which is unreadable"]


def _tokenizer_faults(folder: Path) -> list[str]:
    if any(path.is_file() for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        return []
    return ["a tokenizer (tokenizer.json or tokenizer.model)"]


_MANIFEST = "files.json"


def write_manifest(folder: Path) -> None:
    """Writes down the length, the time and the SHA-256 of every file directly in `folder`, and syncs them to the disk,
    so that a power cut cannot damage the folder later."""
    files = {path.name: _mark(path) for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / _MANIFEST).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def damaged_files(folder: Path) -> list[str]:
    """The names of files that differ from the manifest; the manifest's own name if that cannot be read. Only files that
    were written since are read as a whole."""
    try:
        files = _parsed((folder / _MANIFEST).read_text(encoding="utf-8"))
        return [name for name, mark in files.items() if not _is_as_marked(folder / name, mark)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [_MANIFEST]


def sha256_of(path: Path) -> str:
    """Of a whole file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mark(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256_of(path)}


def _is_as_marked(path: Path, mark: Mapping[str, Any]) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_size != mark["bytes"]:
        return False
    return bool(status.st_mtime_ns == mark["mtime_ns"] or sha256_of(path) == mark["sha256"])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
