"""Folders in mlx-lm's format that are made here out of other weights, once, and kept.

    home/models/<name>-<key>/      complete; `made.json` has what it was made of
    home/conversions/<name>-<key>/ one in progress, or one that was cut off: the next run goes on with it

The key stands for the source as it was (its name, length and time) and for the version of what makes the folder. A
folder appears by one rename. One process at a time makes it; others wait. `mlx-serve models ls` lists these folders,
and `models rm` deletes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_server.config import home
from mlx_server.errors import DownloadError, ModelLoadError
from mlx_server.runtime.models.folder import damaged_files, missing_parts, write_manifest
from mlx_server.runtime.models.gguf import WeightFormat, convert_gguf, split_names
from mlx_server.runtime.models.progress import Report, shown

logger = logging.getLogger(__name__)

RECIPE_FILE = "made.json"
"""In folders that are made here."""
_GGUF_VERSION = 1
"""A higher number makes folders anew that an older version has converted."""
_GROWTH = 1.5
"""A converted folder takes at most this much of its GGUF file: numbers of 6 bits become such of 8."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a folder is made of: `source` is the model's name as configured, `name` the folder's before its key."""

    source: str
    name: str
    stage: str
    files: Sequence[Path]
    version: str
    needed_bytes: int

    def content(self) -> dict[str, object]:
        """What tells whether the folder has to be made anew."""
        marks = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in self.files}
        return {"files": marks, "version": self.version}

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def gguf_folder(name: str, path: Path) -> Path:
    """The converted folder of a GGUF file, which a user calls `name`; made first if need be. Raises `ModelLoadError`,
    and `DownloadError` where the disk is too small."""
    recipe = _gguf_recipe(name, path)
    return made_folder(recipe, lambda folder, report: convert_gguf(path, folder, WeightFormat.PACKED, report))


def find_converted(path: Path) -> Path | None:
    """The folder that `gguf_folder` has made of that file, if it has."""
    try:
        folder = _place(_gguf_recipe(path.name, path))
    except (OSError, ModelLoadError):
        return None
    return folder if (folder / RECIPE_FILE).is_file() else None


def _gguf_recipe(name: str, path: Path) -> Recipe:
    files = [path.with_name(part) for part in split_names(path.name)]
    missing = [part.name for part in files if not part.is_file()]
    if missing:
        raise ModelLoadError(f"{path} is one of {len(files)} files of a model, of which {missing[0]} is not there.")
    needed = int(sum(part.stat().st_size for part in files) * _GROWTH)
    return Recipe(name, path.name.removesuffix(".gguf"), "converting", files, f"gguf {_GGUF_VERSION}", needed)


def made_folder(recipe: Recipe, make: Callable[[Path, Report], None]) -> Path:
    """The complete folder. `make` is called for one that is not there; what an interrupted call of it has left there is
    in the folder that it gets. Raises `DownloadError` where nothing can be written, and what `make` raises."""
    try:
        folder, content = _place(recipe), recipe.content()
        if _is_made(folder, content):
            return folder
        work = home() / "conversions" / folder.name
        with held_lock(work.with_name(f"{work.name}.lock"), f"makes {work.name}"):
            if not _is_made(folder, content):
                _check_space(recipe, work)
                work.mkdir(exist_ok=True)
                logger.info("%s %s; it is kept in %s.", recipe.stage.capitalize(), recipe.source, folder)
                with shown(recipe.source, recipe.stage, recipe.num_bytes) as report:
                    make(work, report)
                (work / RECIPE_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")
                write_manifest(work)
                _put(work, folder)
    except OSError as error:
        raise not_kept(recipe.source, error) from error
    return folder


def save_shard(path: Path, weights: dict[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Writes a file of weights by one rename of what is on the disk."""
    partial = path.with_name(f"partial-{path.name}")
    mx.save_safetensors(str(partial), weights, metadata={"format": "mlx", **metadata})
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_index(folder: Path, shards: Mapping[str, str]) -> None:
    """Which tensor is in which shard, as mlx-lm reads it."""
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": shards})


def _place(recipe: Recipe) -> Path:
    digest = hashlib.sha256(json.dumps(recipe.content(), sort_keys=True).encode()).hexdigest()
    return home() / "models" / f"{recipe.name}-{digest[:8]}"


def _is_made(folder: Path, content: Mapping[str, object]) -> bool:
    try:
        recorded = json.loads((folder / RECIPE_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return bool(recorded == content) and not missing_parts(folder) and not damaged_files(folder)


@contextlib.contextmanager
def held_lock(path: Path, work: str) -> Iterator[None]:
    """Held by one process at a time, which does `work`; the system releases it when that process ends in any way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("Another process %s; waiting for it.", work)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def not_kept(source: str, error: OSError) -> DownloadError:
    """The refusal of a model that cannot be written."""
    return DownloadError(
        f"Cannot keep {source} in {error.filename or home()}: {error.strerror}. Make room or give the right to write "
        "there, or set MLX_SERVE_HOME to another folder."
    )


def _check_space(recipe: Recipe, work: Path) -> None:
    there = sum(path.stat().st_size for path in work.glob("*")) if work.is_dir() else 0
    free, needed = shutil.disk_usage(work.parent).free, recipe.needed_bytes - there
    if free < needed:
        raise DownloadError(
            f"{home()} has {free / 1e9:.2f} GB free, and {recipe.stage} {recipe.source} needs up to "
            f"{needed / 1e9:.2f} GB. Make room, or set MLX_SERVE_HOME to a folder on another disk."
        )


def _put(work: Path, folder: Path) -> None:
    """In its place; a folder there is of no use."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(work, folder)
