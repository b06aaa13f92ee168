"""Model folders in mlx-lm's format that this server makes from other weights, once, and keeps.

    home/models/<name>-<key>/           complete; `made.json` says what it was made from
    home/conversions/<name>-<key>.lock  held by the process that makes it; others wait

The key depends on the source (its name, length and time of change) and on the version of the code that makes the
folder. A folder appears by one rename, so an interrupted conversion leaves nothing and starts again. `mlx-serve models
ls` lists these folders, and `models rm` deletes them.
"""

from __future__ import annotations

import contextlib
import errno
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
from mlx_server.environment import check_mounted, make_cache_folder
from mlx_server.errors import DownloadError, InsufficientStorageError, ModelLoadError
from mlx_server.runtime.models.folder import damaged_files, missing_parts, write_manifest
from mlx_server.runtime.models.gguf import CONVERSION, WeightFormat, convert_gguf, split_names
from mlx_server.runtime.models.progress import Report, shown

logger = logging.getLogger(__name__)

RECIPE_FILE = "made.json"
_GROWTH = 1.5
"""Upper bound for the size of a converted folder relative to its GGUF file: 6-bit numbers become 8-bit ones."""
_SHARD_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a folder is made from: `files` of the folder of the first, or of folders in it. `source` is the model's name
    as configured, `name` the folder's name before its key."""

    source: str
    name: str
    stage: str
    files: Sequence[Path]
    version: str
    needed_bytes: int

    def content(self) -> dict[str, object]:
        """What the folder's `made.json` must say; otherwise the folder is made again."""
        folder = self.files[0].parent
        marks = {str(path.relative_to(folder)): [path.stat().st_size, path.stat().st_mtime_ns] for path in self.files}
        return {"files": marks, "version": self.version}


def gguf_folder(name: str, path: Path) -> Path:
    """The converted folder of a GGUF file that the user calls `name`; converts the file first if necessary. Raises
    `ModelLoadError`, and `InsufficientStorageError` if the disk is too small."""
    recipe = _gguf_recipe(name, path)
    return made_folder(recipe, lambda folder, report: convert_gguf(path, folder, WeightFormat.PACKED, report))


def find_converted(path: Path) -> Path | None:
    """The folder that `gguf_folder` made from that file, if any."""
    try:
        folder = _place(_gguf_recipe(path.name, path))
    except (OSError, ModelLoadError):
        return None
    return folder if (folder / RECIPE_FILE).is_file() else None


def _gguf_recipe(name: str, path: Path) -> Recipe:
    files = [path.with_name(part) for part in split_names(path.name)]
    missing = [part.name for part in files if not part.is_file()]
    if missing:
        raise ModelLoadError(f"{path} is one of {len(files)} files of a model, and {missing[0]} is missing.")
    needed = int(sum(part.stat().st_size for part in files) * _GROWTH)
    return Recipe(name, path.name.removesuffix(".gguf"), "converting", files, f"gguf {CONVERSION}", needed)


def made_folder(recipe: Recipe, make: Callable[[Path, Report], None]) -> Path:
    """The complete folder; calls `make` to fill an empty one if it does not exist yet. Raises `DownloadError` if
    nothing can be written, and whatever `make` raises."""
    try:
        folder, content = _place(recipe), recipe.content()
        if is_made(folder, RECIPE_FILE, content):
            return folder
        with scratch_folder(home() / "conversions" / f"{folder.name}.lock", f"makes {folder.name}") as work:
            if not is_made(folder, RECIPE_FILE, content):
                check_space(home(), f"{recipe.stage} {recipe.source}", recipe.needed_bytes)
                logger.info("%s %s; it is kept in %s.", recipe.stage.capitalize(), recipe.source, folder)
                with shown(recipe.source, recipe.stage, sum(path.stat().st_size for path in recipe.files)) as report:
                    make(work, report)
                finish(work, folder, RECIPE_FILE, content)
    except OSError as error:
        raise storage_error(recipe.source, error) from error
    return folder


def write_weights(folder: Path, sizes: Mapping[str, int], read: Callable[[str], Mapping[str, mx.array]]) -> None:
    """Writes the tensors that `read` returns for each name in `sizes`, in files of about 1 GiB by these sizes, and the
    index that mlx-lm reads if there are several files. Needs memory for one file at a time. Raises `OSError`."""
    parts: list[list[str]] = [[]]
    held = 0
    for name, num_bytes in sizes.items():
        if held and held + num_bytes > _SHARD_BYTES:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += num_bytes
    index: dict[str, str] = {}
    for rank, part in enumerate(parts, 1):
        file_name = f"model-{rank:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else "model.safetensors"
        weights = {tensor: array for name in part for tensor, array in read(name).items()}
        mx.eval(weights)  # here, so that what fails below is the disk
        try:
            mx.save_safetensors(str(folder / file_name), weights, metadata={"format": "mlx"})
        except RuntimeError as error:  # MLX does not say why a file cannot be written
            is_full = shutil.disk_usage(folder).free < sum(array.nbytes for array in weights.values())
            raise OSError(*(errno.ENOSPC, os.strerror(errno.ENOSPC)) if is_full else (str(error),)) from error
        index.update(dict.fromkeys(weights, file_name))
        weights.clear()  # before the next file's are read
    if len(parts) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _place(recipe: Recipe) -> Path:
    digest = hashlib.sha256(json.dumps(recipe.content(), sort_keys=True).encode()).hexdigest()
    return home() / "models" / f"{recipe.name}-{digest[:8]}"


def is_made(folder: Path, record: str, content: Mapping[str, object]) -> bool:
    """Whether `folder` is complete and its file `record` holds `content`, as `finish` leaves it."""
    try:
        recorded = json.loads((folder / record).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    if recorded != content or missing_parts(folder):
        return False
    damaged = damaged_files(folder)
    if damaged:
        logger.warning("Files of %s have changed (%s); the folder is made again.", folder, ", ".join(damaged))
    return not damaged


@contextlib.contextmanager
def scratch_folder(lock: Path, work: str) -> Iterator[Path]:
    """An empty folder beside the file `lock`, removed afterwards. One process at a time gets it, which does `work`; the
    system releases the lock when that process ends in any way."""
    check_mounted(lock)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("Another process %s; waiting for it.", work)
            fcntl.flock(file, fcntl.LOCK_EX)
        folder = lock.with_suffix(".partial")
        shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def check_space(folder: Path, action: str, needed_bytes: int, variable: str = "MLX_SERVE_HOME") -> None:
    """Raises `InsufficientStorageError` if the disk of `folder`, which `variable` sets, has no room for `action`."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise InsufficientStorageError(
            f"{folder} has {free / 1e9:.2f} GB free, and {action} needs up to {needed_bytes / 1e9:.2f} GB more. "
            f"Make room, or set {variable} to a folder on another disk."
        )


def finish(work: Path, folder: Path, record: str, content: Mapping[str, object]) -> None:
    """Moves a filled scratch folder to its place, in the place of an unusable one, with `content` in its file
    `record`."""
    write_json(work / record, content)
    write_manifest(work)
    make_cache_folder(folder.parent)
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(work, folder)


def storage_error(
    source: str, error: OSError, *, folder: str | None = None, variable: str = "MLX_SERVE_HOME"
) -> DownloadError:
    """The error for a model that cannot be written to `folder` (None: the home folder), which `variable` sets."""
    kind = InsufficientStorageError if error.errno in (errno.ENOSPC, errno.EDQUOT) else DownloadError
    return kind(
        f"Cannot keep {source} in {error.filename or folder or home()}: {error.strerror or error}. Make room or give "
        f"the right to write there, or set {variable} to another folder."
    )
