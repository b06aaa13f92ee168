"""Builds C++ sources of this package with the system's compiler on first use.

A library's name in the kernels folder holds a hash of everything it depends on: sources, flags, compiler, instruction
set and the versions of what it is built against. So a folder shared by several machines, or an updated package, never
gives code that cannot run here. A library is built in a temporary folder and moved in one step: processes that build at
the same time each move a complete file of the same content.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlx_server.environment import is_mac, run_all

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 300.0
ISA_VARIABLE = "MLX_SERVE_CPU_ISA"
_SCRATCH = "building-"
_COMPILERS = ("c++", "clang++", "g++")
_FLAGS = ("-std=c++17", "-fPIC", "-pthread")
FAST_FLAGS = ("-O3", "-ffp-contract=fast")

_X86_SETS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2", "f16c"},
    "x86-64-v3": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
    "x86-64": set(),
}
"""Instruction sets, best first, and the CPU features that each needs, as Linux names them."""


class NativeBuildError(RuntimeError):
    """The library cannot be built or loaded here. The message says why in one line."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A source file and its flags. Changes of headers in its folder count, too."""

    source: Path
    flags: tuple[str, ...] = FAST_FLAGS


def build(
    name: str, units: Sequence[Unit], folder: Path, *, link: Sequence[str] = (), versions: Sequence[str] = ()
) -> Path:
    """The shared library of `units` in `folder`; compiles the units unless it is there already, in their order and as
    many at a time as there are CPUs. `versions` are of what it is built against. Raises `NativeBuildError`."""
    builder = _Builder(find_compiler(), tuple(link))
    library = folder / f"{name}-{builder.key(units, versions)}.so"
    try:
        for left in folder.glob(f"{_SCRATCH}*"):  # by a process that was killed
            with contextlib.suppress(OSError):  # another process has removed it meanwhile
                if time.time() - left.stat().st_mtime > 2 * COMPILE_TIMEOUT_S:
                    shutil.rmtree(left, ignore_errors=True)
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            logger.info("Compiling %s for this machine, once; it takes some seconds.", name)
            builder.make(units, library)
    except OSError as error:
        reason = error.strerror or error
        raise NativeBuildError(f"{library} cannot be built: {reason}; MLX_SERVE_HOME names another folder") from error
    return library


@dataclass(frozen=True, slots=True)
class _Builder:
    compiler: list[str]
    link: tuple[str, ...]

    def key(self, units: Sequence[Unit], versions: Sequence[str]) -> str:
        paths = [path for unit in units for path in (unit.source, *sorted(unit.source.parent.glob("*.h")))]
        texts = [path.read_bytes() for path in dict.fromkeys(paths)]
        commands = [" ".join(self._compile(unit)) for unit in units]
        version = _run([*self.compiler, "--version"]).stdout
        parts = [*texts, *(part.encode() for part in (*commands, *self.link, *versions, version))]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]

    def make(self, units: Sequence[Unit], library: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=library.parent) as scratch:
            objects = [Path(scratch, f"{index}.o") for index in range(len(units))]
            jobs = [
                partial(self._check, [*self._compile(unit), "-c", str(unit.source), "-o", str(path)], unit.source)
                for unit, path in zip(units, objects, strict=True)
            ]
            run_all(jobs, usable_cpus(), threading.Event())
            built = Path(scratch, library.name)
            self._check([*self.compiler, "-shared", *_FLAGS, *map(str, objects), "-o", str(built), *self.link], library)
            built.replace(library)

    def _compile(self, unit: Unit) -> list[str]:
        return [*self.compiler, *_FLAGS, *_set_flags(), *unit.flags]

    @staticmethod
    def _check(command: list[str], what: Path) -> None:
        status = _run(command)
        if status.returncode != 0:
            lines = [line.strip() for line in status.stderr.splitlines() if "error" in line.lower()]
            reason = lines[0] if lines else f"exit status {status.returncode}"
            raise NativeBuildError(f"`{command[0]}` cannot compile {what.name}: {reason}")


def find_compiler() -> list[str]:
    """The command of the C++ compiler: `CXX` if it is set, else the first known one that is installed."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for command in [configured] if configured else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]) is not None:
            return command
    if configured:
        raise NativeBuildError(f"CXX is `{shlex.join(configured)}`, which is not installed")
    hint = "`xcode-select --install`" if is_mac() else "the package `g++` or `clang`"
    raise NativeBuildError(f"No C++ compiler ({', '.join(_COMPILERS)}) is installed; {hint} brings one")


def usable_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def instruction_sets() -> list[str]:
    """The x86 instruction sets that this CPU has, best first. None on other processors: the compiler's default target
    has what is used (NEON)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    features = _features()
    return [name for name, needed in _X86_SETS.items() if needed <= features]


def instruction_set() -> str | None:
    """The best of `instruction_sets`, or the one that `MLX_SERVE_CPU_ISA` names; None if there are none."""
    present = instruction_sets()
    forced = os.environ.get(ISA_VARIABLE)
    if not present or forced is None:
        return present[0] if present else None
    if forced not in _X86_SETS:
        raise NativeBuildError(f"{ISA_VARIABLE} is {forced!r}; it must be one of {', '.join(_X86_SETS)}")
    return forced


def _set_flags() -> list[str]:
    name = instruction_set()
    return [] if name is None else [f"-march={name}"]


def _features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # OpenBLAS, for MLX alone
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
            env=environ,
        )
    except OSError as error:
        raise NativeBuildError(f"`{command[0]}` cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"`{command[0]}` did not finish within {COMPILE_TIMEOUT_S:.0f} s") from error
