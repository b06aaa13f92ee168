"""The compiler that builds kernels for the host, and the cache of its builds."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from emulator.errors import EmulatorError

NATIVE = Path(__file__).parent / "native"

_MACHINE_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-Wall", "-Werror", "-fno-exceptions", "-fno-rtti")
# Not optimized: most kernels are launched a few times, and to optimize one takes as long as forty builds of it.
_KERNEL_FLAGS = (
    *("-std=c++17", "-O0", "-g1", "-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-omit-frame-pointer", "-ftrivial-auto-var-init=pattern"),
    *("-Wall", "-Werror", "-Wdouble-promotion", "-Wimplicit-float-conversion", "-Wno-unknown-attributes"),
    *("-Wno-unused-variable", "-Wno-unused-function", "-Wno-pass-failed"),
)
_UNDEFINED_BEHAVIOUR = (
    "-fsanitize=undefined",
    "-fno-sanitize=function,vptr,float-cast-overflow,float-divide-by-zero",
    "-fsanitize-trap=undefined",
)
# Clang instruments only accesses in the default address space, so these two need a build without the others.
_RACES = ("-DEMULATOR_RACE_BUILD", "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0")
_ALIGNMENT = ("-fsanitize=alignment", "-fsanitize-trap=alignment")


class Toolchain:
    """Builds shared libraries into `folder`, named by the hash of their text. Raises `LookupError` with what was tried
    if no clang++ works."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sources = "".join(path.read_text() for path in sorted(NATIVE.rglob("*")) if path.is_file())
        self._compiler, machine = self._first_that_works()
        self._runtime = _find_runtime(self._compiler)
        self._symbolizer = _find_symbolizer()
        # Kernels look up the machine's functions by name.
        self.machine = ctypes.CDLL(str(machine), mode=ctypes.RTLD_GLOBAL)

    def build_kernel(self, text: str, name: str, *, check_races: bool) -> Path:
        """The shared library of a translated kernel. It checks address spaces, overflow and local bounds, or else data
        races and the alignment of vectors. Raises `EmulatorError` of kind compile."""
        checks = (*_RACES, *_ALIGNMENT) if check_races else _UNDEFINED_BEHAVIOUR
        include = ("-isystem", str(NATIVE / "include"), "-I", str(NATIVE))
        try:
            return self._build(self._compiler, text, name, (*_KERNEL_FLAGS, *checks, *include), self._runtime)
        except subprocess.CalledProcessError as error:
            raise EmulatorError("compile", error.stderr) from None

    def with_lines(self, message: str, library: Path) -> str:
        """`message` with code offsets replaced by lines of the kernel, if a symbolizer is installed."""
        if self._symbolizer is None:
            return message

        def line(found: re.Match[str]) -> str:
            command = [self._symbolizer, f"--obj={library}", found.group(1)]
            frames = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
            places = [frame for frame in frames if re.search(r"\.msl:[1-9]", frame)]
            return Path(places[-1]).name if places else found.group(0)

        return re.sub(r"\{\+(0x[0-9a-f]+)\}", line, message)

    def _first_that_works(self) -> tuple[list[str], Path]:
        failures = []
        text = (NATIVE / "machine.cpp").read_text()
        for compiler in _compilers():
            try:
                return compiler, self._build(compiler, text, "machine", (*_MACHINE_FLAGS, "-I", str(NATIVE)))
            except (subprocess.CalledProcessError, OSError) as error:
                failures.append(f"{' '.join(compiler)}: {getattr(error, 'stderr', error)}")
        raise LookupError("no clang++ found: install clang 19 or the ziglang package\n" + "\n".join(failures))

    def _build(
        self, compiler: list[str], text: str, name: str, flags: tuple[str, ...], runtime: str | None = None
    ) -> Path:
        """With the compiler's `runtime` alone, it is linked without the compiler, which takes ten times as long."""
        key = hashlib.sha256("\0".join((text, self._sources, *compiler, *flags)).encode()).hexdigest()[:20]
        library = self._folder / f"{name}-{key}.so"
        if library.exists():
            return library
        stem = self._folder / f"{name}-{key}-{os.getpid()}"
        source, unlinked, linked = (stem.with_suffix(suffix) for suffix in (".cpp", ".o", ".tmp"))
        source.write_text(text)
        link = [*compiler, str(unlinked)] if runtime is None else ["ld", str(unlinked), runtime]
        # Two commands, because linking with sanitizer flags would add a sanitizer's runtime.
        for command in (
            [*compiler, *flags, "-c", str(source), "-o", str(unlinked)],
            [*link, "-shared", "-o", str(linked)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(linked, library)  # another worker may build the same
        return library


def _compilers() -> list[list[str]]:
    named = os.environ.get("EMULATOR_CXX")
    if named:
        return [named.split()]
    found = [path for n in range(24, 16, -1) if (path := shutil.which(f"clang++-{n}"))]
    plain = shutil.which("clang++")
    commands = [[path] for path in (*found, plain) if path]
    if importlib.util.find_spec("ziglang") is not None:
        commands.append([sys.executable, "-m", "ziglang", "c++"])
    return commands


def _find_runtime(compiler: list[str]) -> str | None:
    """What the compiler adds to code without a standard library: conversions of half. None if it does not say."""
    found = subprocess.run([*compiler, "-print-libgcc-file-name"], capture_output=True, text=True, check=False)
    path = found.stdout.strip()
    return path if shutil.which("ld") and Path(path).is_file() else None


def _find_symbolizer() -> str | None:
    names = ["llvm-symbolizer", *(f"llvm-symbolizer-{n}" for n in range(24, 16, -1))]
    return next((path for name in names if (path := shutil.which(name))), None)
