"""What a folder held when it was made, so that a file that was cut short or changed since is noticed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAME = "files.json"


def write_manifest(folder: Path) -> None:
    """Notes the length, the time and the SHA-256 of every file in `folder`, and sees to it that they are on the disk:
    what a power cut takes then was not there before."""
    files = {path.name: _mark(path) for path in sorted(folder.iterdir())}
    (folder / _NAME).write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def damaged_files(folder: Path) -> list[str]:
    """The names of those that are not what they were; the manifest's own, if that cannot be read. Only files that were
    written since are read as a whole."""
    try:
        files = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        return [name for name, mark in files.items() if not _is_as_marked(folder / name, mark)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [_NAME]


def sha256_of(path: Path) -> str:
    """Of all of a file, in hexadecimal digits."""
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
