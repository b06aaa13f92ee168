"""The native CPU code as a Mac's processor runs it: compiled for 64-bit Arm and run by an emulator, where both are
installed (Debian: g++-aarch64-linux-gnu, qemu-user-static), and for this machine."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlx_server.runtime.kernels import cpu
from mlx_server.runtime.kernels.cpu.build import FAST_FLAGS, find_compiler, instruction_sets

SOURCES = Path(cpu.__file__).parent
CHECKS = Path(__file__).with_name("native_checks.cpp")


BEST, *OLDER = instruction_sets() or [None]
ARM = "aarch64-linux-gnu"
EMULATOR = "qemu-aarch64-static"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(compiler: Sequence[str], runner: Sequence[str], folder: Path) -> str:
    program = str(folder / "checks")
    sources = [*(str(SOURCES / name) for name in ("products.cpp", "attention.cpp", "layer.cpp")), str(CHECKS)]
    run(*compiler, "-std=c++17", *FAST_FLAGS, "-pthread", "-static", f"-I{SOURCES}", *sources, "-o", program)
    return run(*runner, program, *(["few"] if runner else []))


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param([f"{ARM}-g++"], id="gcc", marks=pytest.mark.full),
        pytest.param(["clang++-19", f"--target={ARM}"], id="clang"),  # as on a Mac
    ],
)
def test_on_arm(compiler: list[str], tmp_path: Path):
    missing = [name for name in (compiler[0], f"{ARM}-g++", EMULATOR) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} cannot be found")
    assert check(compiler, [EMULATOR], tmp_path) == "0 wrong\n"


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="Macs have no static programs")
@pytest.mark.parametrize("isa", [BEST, *(pytest.param(isa, marks=pytest.mark.full) for isa in OLDER)])
def test_here(isa: str | None, tmp_path: Path):
    """With instruction sets of this processor. So what the checks say of Arm is not their own fault."""
    assert check([*find_compiler(), *([f"-march={isa}"] if isa else [])], [], tmp_path) == "0 wrong\n"
