"""What a model's name means on this machine: a folder, a GGUF file, or a model on the Hugging Face hub. This module is
quick to import, so that a wrong name is told at once."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from mlx_server.config import DEFAULT_MODEL
from mlx_server.environment import check_mounted, exists, expanded
from mlx_server.errors import ModelLoadError, UnknownModelError
from mlx_server.model_entries import hub_id
from mlx_server.runtime.models.folder import missing_parts

_SITE = r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
_HUB_FILE = re.compile(rf"(?:{_SITE})?([^/]+/[^/]+)/(?:(?:blob|resolve)/main/)?([^?]+\.gguf)(?:\?.*)?")
_OLLAMA_NAME = re.compile(r"[\w.-]+:[\w.-]+")
_TAGGED_ID = re.compile(rf"(?:{_SITE})?([^/]+/[^/:]+):[\w.-]+")


RANDOM_PREFIX = "random:"
"""Names of models with random weights begin with it."""


class Place(NamedTuple):
    """Where a model is: the `path` of a complete folder or of a GGUF file on this machine; otherwise None, and it is
    the `repo` of the hub, or a GGUF `file` there."""

    path: Path | None
    repo: str = ""
    file: str | None = None


def find_place(name: str) -> Place:
    """Asks nobody but this machine's disks. `name` is not the bundled model's. Raises `UnknownModelError` if it is
    neither here nor of a form that the hub has, `ModelLoadError` if what is here is no complete model, or `OSError`."""
    if not name:
        raise ModelLoadError("The name of the model is empty.")
    path = expanded(name)
    check_mounted(path)
    if exists(path):
        if path.is_dir():
            return Place(checked(path))
        if path.is_file() and path.suffix == ".gguf":
            return Place(path)
        raise ModelLoadError(f"{name} is a file; a model is a folder in mlx-lm's format, or a .gguf file.")
    if path.suffix == ".gguf" and _is_local(name, path):
        raise UnknownModelError(
            f"There is no file {name}. For a file on the hub, give its address: https://huggingface.co/"
            "owner/name/blob/main/FILE.gguf."
        )
    file = _HUB_FILE.fullmatch(name)
    if file is not None and (owner := hub_id(file[1])) is not None:
        return Place(None, owner, file[2])
    found = hub_id(name)
    if found is None:
        raise UnknownModelError(
            f"There is no model {name}: it is not a folder, not a hub id (owner/name), and not `{DEFAULT_MODEL}`."
            + _name_hint(name)
        )
    return Place(None, found)


def checked(folder: Path) -> Path:
    """The folder itself. Raises `ModelLoadError` if it is not a complete model in mlx-lm format."""
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ModelLoadError(f"{folder} cannot be read; check its permissions.")
    missing = missing_parts(folder)
    if missing:
        raise ModelLoadError(f"{folder} is not a complete model in mlx-lm format; it lacks {', and '.join(missing)}.")
    return folder


def _name_hint(name: str) -> str:
    if (tagged := _TAGGED_ID.fullmatch(name)) is not None:
        return f" Name the GGUF file, as {tagged[1]}/FILE.gguf: https://huggingface.co/{tagged[1]}/tree/main."
    hint = " Names with a colon are Ollama's: look for the model at https://huggingface.co/mlx-community."
    return "" if _OLLAMA_NAME.fullmatch(name) is None else hint


def _is_local(name: str, path: Path) -> bool:
    """Whether the name of a missing file means a file on this machine."""
    is_bare = len(path.parts) == 1 or name.startswith(("./", "../"))
    return is_bare or path.is_absolute() or Path(path.parts[0]).is_dir()
