"""What a model's K/V depend on, as a short text: the root of all digests of its blocks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from mlx_server.kv_disk.files import Files

_NAME = "fingerprints.json"
_MAX_REMEMBERED = 1000
_MAX_BYTES = 16 * 2**20
_CHUNK_BYTES = 16 * 2**20
_PATTERNS = ("*.safetensors", "config.json", "adapter_config.json", "*.py")


def fingerprint(folder: Path, files: Files) -> str:
    """A digest of the names and contents of a model's or adapter's weights, configuration and code; not of their place.
    Equal for equal files only.

    All files are read once, at an SSD's speed, before the weights are loaded, which then come from the page cache. The
    digest of a file is remembered in `files` by its path, size, time and inode. Any thread; raises `OSError`.
    """
    known = _remembered(files)
    digest = xxhash.xxh3_128()
    seen: dict[str, str] = {}
    for path in sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)}):
        stat = path.stat()
        key = json.dumps([os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino])
        seen[key] = known.get(key) or _content_digest(path)
        digest.update(f"{path.name}\0{seen[key]}\0".encode())
    if not seen.keys() <= known.keys():
        kept = list({**known, **seen}.items())[-_MAX_REMEMBERED:]
        with contextlib.suppress(OSError):  # on a full disk, all files are read again after the next start
            files.replace(_NAME, json.dumps(dict(kept)).encode())
    return digest.hexdigest()


def root_key(parts: Iterable[str]) -> str:
    """Several texts as one, which no other texts can produce."""
    return json.dumps(list(parts))


def _content_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _remembered(files: Files) -> dict[str, str]:
    try:
        (text,) = files.read(_NAME, [0], _MAX_BYTES)
        known = json.loads(text)
        return {str(key): str(value) for key, value in known.items()}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}
