"""What a release is made of: a wheel built from the sdist is whole and runs on its own, the formula and the release's
workflow say the same as pyproject.toml."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.homebrew_formula import STORED, TEMPLATE, Download, downloads_of, filled, sdist_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DECLARED = [Requirement(line) for line in PROJECT["dependencies"]]
OF_EXTRAS = [Requirement(line) for extra in PROJECT["optional-dependencies"].values() for line in extra]


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
    """A new environment's Python: the wheel is installed there, and beside it only what it requires, which is linked
    from this environment."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    link_requirements(site)
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", wheel, cwd=folder)
    return python


def required(requirements: list[Requirement]) -> set[str]:
    """The names of all distributions that these bring, directly or not."""
    found: dict[str, set[str]] = defaultdict(set)
    while requirements:
        wanted = requirements.pop()
        name = canonicalize_name(wanted.name)
        if (wanted.marker and not wanted.marker.evaluate()) or (name in found and wanted.extras <= found[name]):
            continue
        found[name] |= wanted.extras
        for line in metadata.requires(name) or []:
            inner = Requirement(line)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in {"", *found[name]}):
                inner.marker = None
                requirements.append(inner)
    return set(found)


def link_requirements(site: Path) -> None:
    """Links the files of the project's requirements, and no others, into `site`: whole folders where all that is in
    them is required."""
    here, wanted = Path(sysconfig.get_path("purelib")), required(list(DECLARED))
    owners, files = defaultdict(set), defaultdict(list)
    for distribution in metadata.distributions(path=[str(here)]):
        name = canonicalize_name(distribution.name)
        for file in distribution.files or []:
            if file.parts[0] not in ("..", "__pycache__"):
                owners[file.parts[0]].add(name)
                files[name, file.parts[0]].append(file)
    for top, names in owners.items():
        if names <= wanted:
            (site / top).symlink_to(here / top)
            continue
        for file in (file for name in names & wanted for file in files[name, top]):
            if not (site / file).is_symlink():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).symlink_to(here / file)


def imported() -> Iterator[tuple[str, str, bool]]:
    """Each import in the package of another library: its name, the file and line, and whether it happens with the
    module's own. Not those for the type checker alone."""
    for path in (ROOT / "mlx_server").rglob("*.py"):
        waiting: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), True)]
        while waiting:
            node, is_top = waiting.pop()
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "mlx_server"}:
                yield name, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", is_top
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
                is_top = is_top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                waiting += [(child, is_top) for child in ast.iter_child_nodes(node)]


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


IMPORT_ALL = """
import importlib, pkgutil, mlx_server
for module in pkgutil.walk_packages(mlx_server.__path__, "mlx_server."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            print(module.name, error.name)
"""


@pytest.mark.slow
def test_every_module_can_be_imported_where_there_is_only_what_the_wheel_requires(python: Path, tmp_path: Path) -> None:
    """But those of an optional feature, which are imported once that feature has looked for its extra."""
    ranks = {"rank_link", "leader", "follower"}
    failed = [line.split() for line in run(python, "-c", IMPORT_ALL, cwd=tmp_path).splitlines()]
    assert {(name.rpartition(".")[2], missing) for name, missing in failed} == {(rank, "msgspec") for rank in ranks}
    for missing in ("mlx_vlm", "redis", "zmq", "PIL", "pytest"):
        code = f"import importlib.util; print(importlib.util.find_spec({missing!r}))"
        assert run(python, "-c", code, cwd=tmp_path) == "None\n"


PARTS = {"logfire": "logfire-sdk"}
"""Distributions whose modules are in another one, which they pin."""

FEATURES = {"msgspec": "mlx_server/engine/distributed/rank_link.py"}
"""Libraries of extras that a module of an optional feature imports with its own: the feature looks for them first."""


def test_imported_libraries_are_declared() -> None:
    """With the project's dependencies; those that functions import may be of an extra."""
    providers = metadata.packages_distributions()
    always, extras = ({canonicalize_name(wanted.name) for wanted in part} for part in (DECLARED, OF_EXTRAS))
    always |= {part for whole, part in PARTS.items() if whole in always}
    found = list(imported())
    assert {"fastapi", "starlette", "mlx", "PIL"} <= {name for name, _, _ in found}
    for name, place, is_top in found:
        distributions = {canonicalize_name(provider) for provider in providers.get(name, ())}
        may_be_extra = not is_top or FEATURES.get(name) == place.partition(":")[0]
        declared = always | extras if may_be_extra else always
        assert distributions & declared, f"{place} imports {name} of {distributions}: declare it in pyproject.toml"


def test_namespaces_are_declared_by_what_is_imported_of_them() -> None:
    """Distributions share the folder `opentelemetry`, so the test above would accept any of them."""
    spans = (ROOT / "mlx_server" / "observability" / "spans.py").read_text(encoding="utf-8")
    modules = [line.split()[1] for line in spans.splitlines() if line.startswith("from opentelemetry")]
    assert modules
    names = {canonicalize_name(wanted.name) for wanted in DECLARED}
    owned = {file.as_posix(): name for name in names if "opentelemetry" in name for file in metadata.files(name) or []}
    for module in modules:
        path = module.replace(".", "/")
        assert module == "opentelemetry" or f"{path}.py" in owned or f"{path}/__init__.py" in owned, module


def test_versions_that_are_installed_are_declared() -> None:
    """What the tests ran with is within the bounds, and there are bounds on both sides."""
    for wanted in [*DECLARED, *OF_EXTRAS]:
        assert {specifier.operator for specifier in wanted.specifier} == {">=", "<"}, wanted
        if wanted.marker is None or wanted.marker.evaluate():
            assert wanted.specifier.contains(metadata.version(wanted.name), prereleases=True), wanted


def test_hints_install_from_the_checkout() -> None:
    """There is no release on the index, so a command that names the project there fails, or fetches another's."""
    texts = {path: path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")}
    texts |= {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    texts |= {path: path.read_text(encoding="utf-8") for path in (ROOT / "mlx_server").rglob("*.py")}
    for path, text in texts.items():
        assert not re.search(r"install '?mlx-serve|mlx-server\[|uvx mlx-serve", text), path
    named = re.findall(r"install_command\(['\"](\w+)|install '\.\[(\w+)\]", "".join(texts.values()))
    assert {code or prose for code, prose in named} == PROJECT["optional-dependencies"].keys()


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
    assert STORED.fullmatch(stanza('url "(.*)"'))
    assert stanza('url "(.*)"').endswith(f"/mlx_server-{PROJECT['version']}.tar.gz")


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
    assert "    keep_alive successful_exit: false\n    process_type :interactive\n" in FORMULA  # as `service install`
    assert all(len(line) <= 118 for line in FORMULA.splitlines() if not line.startswith("  url "))  # as rubocop does
    assert not re.search(r"[ \t]$|\t|/Users/|/home/|/opt/", FORMULA, re.MULTILINE)


def test_the_formula_is_filled_in_from_a_release() -> None:
    files = [
        {"packagetype": "bdist_wheel", "url": stored("w.whl"), "digests": {"sha256": "1" * 64}},
        {"packagetype": "sdist", "url": stored("s.tar.gz"), "digests": {"sha256": "2" * 64}},
    ]
    report = {"install": [installed(name) for name in ("PyYAML", "mlx_server", "mlx-metal")]}
    sdist, resources = sdist_of({"urls": files}), downloads_of(report)
    assert [download.name for download in resources] == ["mlx-metal", "pyyaml"]
    formula = filled(FORMULA, sdist, resources)
    assert stanza('url "(.*)"', formula) == stored("s.tar.gz")
    assert stanza('sha256 "(.*)"', formula) == "2" * 64
    block = r'  resource "(.+)" do\n    url "(.+)",\n        using: :nounzip\n    sha256 "(.+)"\n  end\n'
    assert [Download(*found) for found in re.findall(block, formula)] == resources
    assert filled(formula, sdist, resources) == formula
    assert filled(formula, sdist, []) == filled(FORMULA, sdist, [])


@pytest.mark.parametrize("path", ["source/m/mlx-server/s.tar.gz", f"ab/cd/{'0' * 59}/s.tar.gz", "s.tar.gz"])
def test_other_urls_than_homebrew_accepts_are_refused(path: str) -> None:
    wrong = Download("mlx-server", f"https://files.pythonhosted.org/packages/{path}", "2" * 64)
    right = Download("mlx-server", stored("s.tar.gz"), "2" * 64)
    for sdist, resources in ((wrong, []), (right, [wrong])):
        with pytest.raises(ValueError, match="is no URL of the form"):
            filled(FORMULA, sdist, resources)


def stored(name: str) -> str:
    """A URL as PyPI's JSON has it."""
    return f"https://files.pythonhosted.org/packages/ab/cd/{'0e' * 30}/{name}"


def installed(name: str) -> dict[str, object]:
    archive = {"url": stored(f"{name}.whl"), "archive_info": {"hashes": {"sha256": "3" * 64}}}
    return {"metadata": {"name": name}, "download_info": archive}
