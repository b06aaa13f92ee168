"""Builds a C++ source of this package with the system's compiler on first use, and loads it.

The library is kept in the kernels folder under a name that holds a hash of everything it depends on: source,
flags, compiler and CPU. So a folder shared by several machines, or an updated compiler, never yields code that
this CPU cannot run. It is compiled beside its place and moved there in one step: processes that build at the same
time each move a whole file of the same content.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILE_TIMEOUT_S = 300.0
_COMPILERS = ("c++", "clang++", "g++")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")


class NativeBuildError(RuntimeError):
    """The library cannot be built or loaded here; the message says why, in one line."""


def load_library(source: Path, folder: Path) -> ctypes.CDLL:
    """The library of `source`, which includes headers beside it alone, compiled into `folder` unless it is there
    already. Raises `NativeBuildError`."""
    compiler = find_compiler()
    command = [*compiler, *_FLAGS, _tuning_flag()]
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    version = _run([*compiler, "--version"]).stdout
    parts = [*texts, *(part.encode() for part in (*command, version, _cpu()))]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]
    library = folder / f"{source.stem}-{key}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(command, source, library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeBuildError(f"{library} cannot be built or loaded: {error}") from error


def find_compiler() -> list[str]:
    """The command of the C++ compiler: `CXX` where it is set, else the first known one that is installed."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for command in [configured] if configured else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]) is not None:
            return command
    if configured:
        raise NativeBuildError(f"CXX is `{shlex.join(configured)}`, which is not installed")
    hint = "`xcode-select --install`" if _is_mac() else "the package `g++` or `clang`"
    raise NativeBuildError(f"No C++ compiler ({', '.join(_COMPILERS)}) is installed; {hint} brings one")


def _compile(command: list[str], source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, library.name)
        status = _run([*command, str(source), "-o", str(built)])
        if status.returncode != 0:
            lines = [line.strip() for line in status.stderr.splitlines() if "error" in line.lower()]
            reason = lines[0] if lines else f"exit status {status.returncode}"
            raise NativeBuildError(f"`{shlex.join(command)}` cannot compile {source.name}: {reason}")
        built.replace(library)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"`{command[0]}` did not finish within {COMPILE_TIMEOUT_S:.0f} s") from error


def _tuning_flag() -> str:
    """Compiles for this very CPU. Clang names that differently on Arm."""
    is_mac_arm = _is_mac() and platform.machine() == "arm64"
    return "-mcpu=native" if is_mac_arm else "-march=native"


def _is_mac() -> bool:
    return platform.system() == "Darwin"  # type checkers take what `sys.platform` is elsewhere for unreachable


def _cpu() -> str:
    """What decides which instructions may be used: the model and, where they are listed, the features."""
    if _is_mac():
        return _run(["sysctl", "-n", "machdep.cpu.brand_string"]).stdout
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.startswith(wanted))
