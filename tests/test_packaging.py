"""What a release is made of: a wheel built from the sdist is whole and runs on its own, the formula and the release's
workflow say the same as pyproject.toml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from scripts.homebrew_formula import TEMPLATE, Download, downloads_of, filled, sdist_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must end well, and reads no package of the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def build(target: str, source: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=source)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, so that is whole, too."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment's Python: the wheel is installed there, and what it depends on is this environment's."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", wheel, cwd=folder)
    return python


def package_files() -> set[str]:
    """All that is in the package's folder, as paths in the wheel."""
    files = (path.relative_to(ROOT).as_posix() for path in (ROOT / "mlx_server").rglob("*") if path.is_file())
    return {file for file in files if "__pycache__" not in file}


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert inside == package_files()
    assert {Path(name).suffix for name in inside} >= {".py", ".typed", ".msl", ".cpp", ".h", ".html", ".css", ".js"}


@pytest.mark.slow
def test_what_is_uploaded_passes_the_checks_of_the_index(sdist: Path, wheel: Path) -> None:
    out = run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=wheel.parent)
    assert out.count("PASSED") == 2


@pytest.mark.slow
def test_the_wheel_runs_in_an_environment_of_its_own(python: Path, tmp_path: Path) -> None:
    code = "import mlx_server; print(mlx_server.__file__, mlx_server.LLM.__name__)"
    file, name = run(python, "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(python.parents[1])
    assert name == "LLM"
    command = python.parent / "mlx-serve"
    assert run(command, "--version", cwd=tmp_path) == f"mlx-serve {PROJECT['version']}\n"
    assert "[model]" in run(command, "config", "default", cwd=tmp_path)


FORMULA = TEMPLATE.read_text(encoding="utf-8")


def stanza(pattern: str, formula: str = FORMULA) -> str:
    """The first group of what must be there once."""
    (found,) = re.findall(rf"^  {pattern}$", formula, re.MULTILINE)
    return str(found)


def test_the_formula_describes_the_project() -> None:
    desc = stanza('desc "(.*)"')
    assert len(desc) <= 80
    assert not re.match(r"(?i)(an?|the|mlx-serve)\b", desc)
    assert desc[0].isupper()
    assert desc[-1] != "."
    assert stanza('homepage "(.*)"').startswith("https://")
    assert stanza('license "(.*)"') == PROJECT["license"]
    assert f"/mlx_server-{PROJECT['version']}.tar.gz" in stanza('url "(.*)"')


def test_the_formula_has_what_brew_wants_in_its_order() -> None:
    order = [
        r"desc ",
        r"homepage ",
        r"url ",
        r"sha256 ",
        r"license ",
        r"depends_on arch: :arm64",
        r"depends_on macos: ",
    ]
    order += [r'depends_on "python@3.12"', r"def install", r"service do", r"test do"]
    places = [match.start() for stanza in order if (match := re.search(rf"^  {stanza}", FORMULA, re.MULTILINE))]
    assert len(places) == len(order)
    assert places == sorted(places)
    assert "virtualenv_install_with_resources" in FORMULA
    assert all(len(line) <= 118 for line in FORMULA.splitlines())
    assert not re.search(r"[ \t]$|\t|/Users/|/home/|/opt/", FORMULA, re.MULTILINE)


def test_the_formula_is_filled_in_from_a_release() -> None:
    files = [
        {"packagetype": "bdist_wheel", "url": "https://a/w.whl", "digests": {"sha256": "1" * 64}},
        {"packagetype": "sdist", "url": "https://a/s.tar.gz", "digests": {"sha256": "2" * 64}},
    ]
    report = {"install": [installed(name) for name in ("PyYAML", "mlx_server", "mlx-metal")]}
    sdist, resources = sdist_of({"urls": files}), downloads_of(report)
    assert [download.name for download in resources] == ["mlx-metal", "pyyaml"]
    formula = filled(FORMULA, sdist, resources)
    assert stanza('url "(.*)"', formula) == "https://a/s.tar.gz"
    assert stanza('sha256 "(.*)"', formula) == "2" * 64
    block = r'  resource "(.+)" do\n    url "(.+)",\n        using: :nounzip\n    sha256 "(.+)"\n  end\n'
    assert [Download(*found) for found in re.findall(block, formula)] == resources
    assert filled(formula, sdist, resources) == formula
    assert filled(formula, sdist, []) == filled(FORMULA, sdist, [])


def installed(name: str) -> dict[str, object]:
    archive = {"url": f"https://a/{name}.whl", "archive_info": {"hashes": {"sha256": "3" * 64}}}
    return {"metadata": {"name": name}, "download_info": archive}
