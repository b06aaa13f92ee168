"""Building native code on first use: once, in whichever process, and with a clear word when it cannot be done."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_server.runtime.attention.backends import choose_backend
from mlx_server.runtime.attention.interface import LayerSpec
from mlx_server.runtime.kernels.cpu import build as build_module
from mlx_server.runtime.kernels.cpu import native
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.kernels.cpu.build import NativeBuildError, Unit, build

SOURCE = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'


def write_source(folder: Path, answer: str = "42", text: str = SOURCE) -> Path:
    folder.mkdir(exist_ok=True)
    source = folder / "answer.cpp"
    source.write_text(text)
    source.with_name("answer.h").write_text(f"#define ANSWER {answer}\n")
    return source


def built(source: Path, cache: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(build(source.stem, [Unit(source)], cache)))


def recording_compiler(folder: Path) -> Path:
    """A compiler that notes each compilation in the file `log` beside it."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\ncase "$*" in *.cpp*) echo "$@" >> {folder}/log;; esac\nexec c++ "$@"\n')
    script.chmod(0o755)
    return script


def test_builds_once_with_the_compiler_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{recording_compiler(tmp_path)} -DUNUSED")
    cache = tmp_path / "home" / "kernels"
    for answer in ("42", "42", "43", "42"):
        source = write_source(tmp_path / "source", answer)
        assert built(source, cache).answer() == int(answer)
    commands = (tmp_path / "log").read_text().splitlines()
    assert len(commands) == len(list(cache.iterdir())) == 2
    assert all(command.startswith("-DUNUSED -std=c++17") for command in commands)


def test_each_version_of_mlx_and_nanobind_has_a_library_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()

    def note(name: str, units: Sequence[Unit], folder: Path, **more: Sequence[str]) -> Path:
        names.add(build_module._Builder(["c++"], ()).key(units, more["versions"]))
        raise NativeBuildError("not built")

    monkeypatch.setattr(native, "build", note)
    for mlx, nanobind in (("1", "3.1"), ("1", "3.1"), ("2", "3.1"), ("2", "3.2")):
        monkeypatch.setattr(native, "_digest_of_mlx", lambda _, mlx=mlx: mlx)
        monkeypatch.setattr(native.metadata, "version", lambda _, nanobind=nanobind: nanobind)
        with pytest.raises(NativeBuildError, match="not built"):
            native.load(tmp_path)
    assert len(names) == 3


def test_what_killed_builds_left_is_removed_and_present_builds_are_not(tmp_path: Path) -> None:
    """Later, too: the library that is built next, at once, stays for good."""
    source = write_source(tmp_path / "source")
    built(source, tmp_path / "kernels")
    old, present = tmp_path / "kernels" / "building-1", tmp_path / "kernels" / "building-2"
    for folder in (old, present):
        folder.mkdir(parents=True)
        (folder / "0.o").touch()
    os.utime(old, (0, 0))
    built(source, tmp_path / "kernels")
    assert not old.exists()
    assert present.exists()


BUILD = """
import ctypes, sys
from pathlib import Path
from mlx_server.runtime.kernels.cpu.build import Unit, build
source, cache = map(Path, sys.argv[1:])
print(ctypes.CDLL(str(build(source.stem, [Unit(source)], cache))).answer())
"""


def test_processes_that_build_at_once_all_succeed(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    cache = tmp_path / "kernels"
    command = [sys.executable, "-c", BUILD, str(source), str(cache)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [builder.communicate(timeout=60)[0] for builder in builders] == ["42\n"] * 4
    assert [path.suffix for path in cache.iterdir()] == [".so"]


ENDS = """
import sys, threading, time
from pathlib import Path
from mlx_server.runtime.kernels.cpu.build import Unit, build
source, cache, mark = map(Path, sys.argv[1:])
threading.Thread(target=build, args=(source.stem, [Unit(source)], cache), daemon=True).start()
while not mark.exists():
    time.sleep(0.01)
"""


def test_a_process_that_ends_does_not_wait_for_its_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, mark = tmp_path / "compiler", tmp_path / "pid"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *.cpp*) echo $$ > {mark}.new; mv {mark}.new {mark}; exec sleep 120;; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    arguments = [str(write_source(tmp_path / "source")), str(tmp_path / "kernels"), str(mark)]
    try:
        subprocess.run([sys.executable, "-c", ENDS, *arguments], timeout=60, check=True)
    finally:
        os.kill(int(mark.read_text()), signal.SIGKILL)
    assert list((tmp_path / "kernels").iterdir()) == []


@pytest.mark.parametrize("num_cpus", [1, 2])
def test_no_more_compilers_run_at_a_time_than_there_are_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cpus: int
) -> None:
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *.cpp*) echo 1 >> LOG; sleep 0.2; c++ "$@"; echo -1 >> LOG;; *) exec c++ "$@";; esac\n'
    )
    compiler.write_text(compiler.read_text().replace("LOG", str(log)))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build_module, "usable_cpus", lambda: num_cpus)
    units = [Unit(write_source(tmp_path / name)) for name in "abc"]
    for unit in units[1:]:
        unit.source.write_text("")
    build("answer", units, tmp_path / "kernels")
    running = list(accumulate(map(int, log.read_text().split())))
    assert (max(running), running[-1], len(running)) == (num_cpus, 0, 6)


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    source = write_source(tmp_path / "source")
    with pytest.raises(NativeBuildError, match=r"No C\+\+ compiler \(c\+\+, clang\+\+, g\+\+\) is installed; .*"):
        built(source, tmp_path / "home")
    monkeypatch.setenv("CXX", "icpx -O2")
    with pytest.raises(NativeBuildError, match="CXX is `icpx -O2`, which is not installed"):
        built(source, tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_without_the_library_there_is_no_cpu_backend_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(folder: Path) -> None:
        raise NativeBuildError("no headers")

    monkeypatch.setattr(native, "load", load)
    monkeypatch.setattr(native, "_found", lru_cache(native._found.__wrapped__))
    with pytest.raises(NativeBuildError, match="no headers"):
        CpuBackend()
    if mx.default_device() == mx.cpu:
        spec = LayerSpec(num_kv_heads=1, key_dim=32, value_dim=32, dtype=mx.float32)
        assert [choose_backend("auto", [spec]).name for _ in range(2)] == ["reference"] * 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [
        "The native CPU operations are not used, so products and attention are MLX's own and take longer: no headers."
    ]


def test_with_a_compiler_that_cannot_run_or_speaks_no_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, compiler = write_source(tmp_path / "source"), tmp_path / "compiler"
    compiler.write_bytes(b"\x7fELF of another machine")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeBuildError, match=r"compiler` cannot be run: .*Exec format error"):
        built(source, tmp_path / "kernels")
    compiler.write_bytes(b"#!/bin/sh\nprintf 'error: \\351\\n' >&2\nexit 1\n")
    with pytest.raises(NativeBuildError, match=r"cannot compile answer.cpp: error: \ufffd"):
        built(source, tmp_path / "kernels")


def test_with_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_source(tmp_path / "source", "undeclared_name")
    cache = tmp_path / "kernels"
    monkeypatch.setenv("CXX", str(recording_compiler(tmp_path)))
    monkeypatch.setattr(build_module, "usable_cpus", lambda: 1)
    with pytest.raises(NativeBuildError, match=r"cannot compile answer.cpp: .*error.*undeclared_name"):
        build("answer", [Unit(source)] * 3, cache)
    assert list(cache.iterdir()) == []
    assert len((tmp_path / "log").read_text().splitlines()) == 1  # the others would be in vain


def test_with_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    (tmp_path / "kernels").write_text("a file, not a folder")
    with pytest.raises(NativeBuildError, match=r"kernels.* cannot be built: File exists; MLX_SERVE_HOME names"):
        built(source, tmp_path / "kernels")
