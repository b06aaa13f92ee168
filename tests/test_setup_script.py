"""What `./scripts/serve` and `./scripts/test` set up, on pretended Macs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

SCRIPT = Path(__file__).parents[1] / "scripts" / "_setup.sh"
TOOLS = ("cat", "cksum", "cp", "cut", "dirname", "mkdir", "rm")
PYTHON = f"""#!/bin/sh
case "$1 $2" in
  -c*) shift; exec {sys.executable} -c 'import platform, sys
sys.platform, platform.machine = "darwin", lambda: "MACHINE"
exec(sys.argv.pop(1))' "$@" ;;
  "-m venv") for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
esac
"""


class Mac:
    """A checkout on a Mac whose PATH has an Intel Python, and an arm64 one that is not on it."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self.checkout = folder / "checkout"
        self.native = folder / "native" / "python3"
        self.darwin = "23.1.0"
        self.python = self.checkout / ".venv" / "bin" / "python"
        for path in (self.programs, self.native.parent, self.checkout / "scripts", self.python.parent):
            path.mkdir(parents=True)
        for name in ("_setup.sh", "../pyproject.toml"):
            shutil.copy(SCRIPT.parent / name, self.checkout / "scripts" / name)
        for tool in TOOLS:
            (self.programs / tool).symlink_to(shutil.which(tool) or "")
        self.write(self.programs / "python3", PYTHON.replace("MACHINE", "x86_64"))
        self.write(self.native, PYTHON.replace("MACHINE", "arm64"))
        self.write(self.programs / "sw_vers", "#!/bin/sh\necho 13.6.1\n")

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def set_up(self, **environment: object) -> tuple[int, str]:
        """The status and what was said."""
        uname = f'#!/bin/sh\n[ "$1" = -r ] && echo {self.darwin} || echo Darwin\n'
        self.write(self.programs / "uname", uname)
        command = [shutil.which("bash") or "", "-euo", "pipefail", "-c", "source scripts/_setup.sh; setup run"]
        variables = {"PATH": str(self.programs), **{name: str(value) for name, value in environment.items()}}
        done = subprocess.run(command, cwd=self.checkout, env=variables, capture_output=True, text=True)
        return done.returncode, done.stderr


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    return Mac(tmp_path)


def test_an_environment_of_an_intel_python_is_made_again(mac: Mac) -> None:
    shutil.copy(mac.programs / "python3", mac.python)
    status, said = mac.set_up(PYTHON=mac.native)
    assert status == 0, said
    assert "has no working Python 3.11 to 3.15 for Apple silicon; creating it again." in said
    assert mac.python.read_text() == mac.native.read_text()
    assert mac.set_up() == (0, "")


def test_an_intel_python_alone_is_refused(mac: Mac) -> None:
    status, said = mac.set_up()
    assert status == 1
    assert "Python 3.11 to 3.15 for Apple silicon is required, but none was found." in said


def test_an_intel_python_that_uv_finds_is_not_taken(mac: Mac) -> None:
    uv = f'#!/bin/sh\n[ "$1" = venv ] && {mac.programs}/python3 -m "$@"\n'
    mac.write(mac.programs / "uv", uv)
    assert "for Apple silicon is required" in mac.set_up()[1]
    mac.native.rename(mac.programs / "python3.12")
    status, said = mac.set_up()
    assert status == 0, said
    assert mac.python.read_text() == (mac.programs / "python3.12").read_text()


def test_an_older_macos_is_named(mac: Mac) -> None:
    mac.darwin = "22.6.0"
    status, said = mac.set_up(PYTHON=mac.native)
    assert (status, mac.python.exists()) == (1, False)
    assert said.splitlines()[-1] == "error: This is macOS 13.6.1, and MLX needs macOS 14 or later on Apple silicon."


@pytest.mark.skipif(Path(sys.prefix).name != ".venv-lowest", reason="only ./scripts/test-lowest installs them")
def test_the_lowest_versions_that_are_declared_are_installed() -> None:
    """A bound that no installation can reach says nothing."""
    project = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(line) for line in [*project["dependencies"], *project["optional-dependencies"]["fleet"]]]
    lowest = {
        one.name: Version(bound.version)
        for one in wanted
        if one.marker is None or one.marker.evaluate()
        for bound in one.specifier
        if bound.operator == ">="
    }
    assert {name: Version(metadata.version(name)) for name in lowest} == lowest
