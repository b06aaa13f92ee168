"""The process around the package: the installed version, what installs an extra, the operating system, home and cache
folders, standard streams, the limit of open files, threads that it does not wait for when it ends, and environment
variables that libraries read on import."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import platform
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from mlx_server.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_INPUT = 100_000_000
"""Most characters or bytes of prompts that a command sends to a server."""

_MAX_SETTINGS_BYTES = 1_000_000
_DISKS = Path("/Volumes")
_TMUTIL = "/usr/bin/tmutil"
_TMUTIL_S = 10.0


def version() -> str:
    """The version of the distribution; `unknown` if the package runs without being installed."""
    try:
        return metadata.version("mlx-server")
    except metadata.PackageNotFoundError:
        return "unknown"


def install_command(extra: str) -> str:
    """What to run for the packages of an extra. There is no release on the package index, so it names the checkout."""
    return f"pip install '.[{extra}]' (in the checkout)"


def is_mac() -> bool:
    return platform.system() == "Darwin"  # with `sys.platform`, type checkers would skip the code for other systems


def expanded(path: str) -> Path:
    """The path, with the home folder for a leading `~` or `~user`. Raises `ConfigError` if that is unknown, or if the
    path is not UTF-8."""
    try:
        full = Path(path).expanduser()
        str(full).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"The path {full} is not UTF-8, as libraries that read models need it. Rename it, or name another; "
            "MLX_SERVE_HOME is the folder of models and caches."
        ) from error
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: the home folder {Path(path).parts[0]} is unknown. Write the path in full, or set HOME; "
            "MLX_SERVE_HOME is the folder of models and caches."
        ) from error
    return full


def exists(path: Path) -> bool:
    """Whether there is anything at the path. Raises `OSError` if that cannot be known, in a folder that may not be read
    for example: from Python 3.14 on, `Path.exists` says no."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last is of a NUL in the path
        return False
    return True


def check_mounted(path: Path) -> None:
    """Raises `FileNotFoundError` for a path on a disk of a Mac that is not attached: there, root could make folders on
    the system's disk, and others get an error about permissions."""
    try:
        place = Path(os.path.realpath(path))
    except ValueError:  # of a NUL in the path
        return
    disk = Path(*place.parts[: len(_DISKS.parts) + 1])
    if is_mac() and disk.parent == _DISKS and not disk.is_mount():
        raise FileNotFoundError(errno.ENOENT, "no disk is mounted there; attach it", str(disk))


def make_cache_folder(folder: Path, mode: int = 0o777) -> None:
    """Makes a folder and its parents, unless it exists, for large files that can be made again: on a Mac, a new one is
    left out of Time Machine's backups, if the system allows. Waits for that. Raises `OSError`."""
    check_mounted(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True, mode=mode)
    if is_new and is_mac():
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = [_TMUTIL, "addexclusion", str(folder)]
            subprocess.run(command, check=False, capture_output=True, timeout=_TMUTIL_S)


def read_settings(path: Path) -> str:
    """The text of a small file that a user names, without a byte order mark. Raises `UnicodeDecodeError`, and what
    `read_file` raises."""
    return read_file(path, _MAX_SETTINGS_BYTES, "a file of settings or of a key").decode("utf-8-sig")


def read_file(path: Path, max_bytes: int, what: str) -> bytes:
    """The bytes of a file that a user names: `what` it should be. A pipe is read until its writers close it, and is
    empty without one. Raises `OSError`, and `ConfigError` for a file that is too long, as a device without end is."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        os.set_blocking(file.fileno(), True)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ConfigError(f"{path} has more than {max_bytes:,} bytes; name {what}.")
    return content


def read_stdin() -> str:
    """Standard input, as prompts. Raises `ConfigError` for more than `MAX_INPUT` characters."""
    text = sys.stdin.read(MAX_INPUT + 1)
    if len(text) > MAX_INPUT:
        raise ConfigError(f"Standard input has more than {MAX_INPUT:,} characters; send less at a time.")
    return text


def open_streams() -> None:
    """Opens closed standard streams to nowhere, before a file or a socket gets their numbers. From now on, reading
    bytes or writing characters that have no place in a stream's encoding does not fail. Call it once, at the start of a
    process."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number, which is the stream's
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape" if mode == "r" else "backslashreplace")


def raise_file_limit(wanted: int) -> int:
    """Raises the limit of open files to `wanted` if it is lower, as far as the system allows, and returns it; `wanted`
    if there is no limit. Lowers nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
        except (OSError, ValueError):
            logger.debug("The limit of open files stays at %d", soft)
    return soft


def run_all(jobs: Sequence[Callable[[], None]], most: int, stop: threading.Event) -> None:
    """Runs all jobs, up to `most` at a time, and waits for them. After the first error, which is raised, no more begin,
    and `stop` is set, so that those in progress can end. They run on daemon threads: a process that ends does not wait
    for these, as it would for a thread pool."""
    todo, failures = iter(jobs), list[BaseException]()

    def work() -> None:
        try:
            for job in todo:
                if stop.is_set():
                    return
                job()
        except BaseException as error:
            failures.append(error)
            stop.set()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(most, len(jobs)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
    if failures:
        raise failures[0]


def quiet_libraries() -> None:
    """To be called before transformers and pydantic are imported. Values that the user has set stay."""
    # transformers would warn every user that PyTorch is missing, which is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # pydantic would import logfire if it is installed, which takes a second, even without tracing.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "logfire-plugin")
