"""The workflows can run: their images exist, and so do the commands, options and files that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.release_notes import notes, section
from tests.test_docs import parser_of

ROOT = Path(__file__).parents[1]
IMAGES = {"macos-15", "macos-26", "ubuntu-24.04"}
"""Of GitHub's; older ones of macOS are gone."""

OURS = ".venv/bin/mlx-serve"
RESULTS = "results"
TESTS = ("linux", "macos", "nightly")
"""The workflows that test a checkout."""

SUDO = re.compile(r"^sudo (--preserve-env=\w+ )?")


def workflow(name: str) -> dict[str, Any]:
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def jobs(*names: str) -> Iterator[dict[str, Any]]:
    for name in names:
        yield from workflow(name)["jobs"].values()


def steps() -> list[dict[str, Any]]:
    return [step for job in jobs(*TESTS) for step in job["steps"]]


def commands() -> list[list[str]]:
    """The words of each command of each step, without what comes after a pipe."""
    lines = [line for step in steps() for line in step.get("run", "").splitlines()]
    parts = [part for line in lines for part in line.split("&&")]
    return [shlex.split(SUDO.sub("", part.partition("2>&1 |")[0].strip())) for part in parts]


def test_images_are_those_that_there_are() -> None:
    for job in jobs(*TESTS, "release"):
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
            continue
        named = job["strategy"]["matrix"]["os"] if "matrix" in job["runs-on"] else [job["runs-on"]]
        assert set(named) <= IMAGES


def test_commands_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(RESULTS).mkdir()
    assert len(commands()) > 5
    for words in commands():
        if words[0].startswith(("./", ".ci/")):
            assert (ROOT / words[0]).stat().st_mode & 0o100, words[0]
        elif words[0] == OURS:
            parser, rest = parser_of(words[1:])
            assert parser is not None
            parser.parse_args(rest)
        elif words[0] == ".venv/bin/python":
            compile(words[words.index("-c") + 1], "a workflow", "exec")
        else:
            assert words[0] in ("mkdir", "apt-get")


def test_named_tests_are_there() -> None:
    patterns = [word for words in commands() for word in words if word.startswith("tests")]
    assert patterns
    for pattern in patterns:
        assert list(ROOT.glob(pattern)), pattern


def test_every_file_of_kernel_tests_runs_on_a_mac() -> None:
    """All that are named for Metal, that make kernels as the GPU that is there wants them, or that compute on it what
    decides which kernels are used. Those of other folders are in the default suite."""
    (step,) = (step for step in steps() if step.get("name") == "Kernels on the GPU")
    named = {path.name for word in shlex.split(step["run"]) if word.startswith("tests") for path in ROOT.glob(word)}
    files = list((ROOT / "tests" / "runtime" / "kernels").glob("test_*.py"))
    makers = {path.name for path in files if re.search(r"\b(kernel_maker|make_backend)\b", path.read_text("utf-8"))}
    assert {"test_metal_products.py", "test_metal_kernels.py"} <= makers
    assert named == makers | {path.name for path in files if "_metal_" in path.name} | {"test_product_choice.py"}


def test_changes_pass_everything_on_linux() -> None:
    """On each push to main and each pull request, and all results are kept."""
    linux = workflow("linux")
    assert {**linux[True], "push": None} == {"push": None, "pull_request": None, "workflow_call": None}  # YAML's `on`
    assert linux[True]["push"] == {"branches": ["main"]}
    (job,) = linux["jobs"].values()
    assert [".ci/run"] in commands()
    assert f"--junitxml={RESULTS}/" in job["env"]["PYTEST_ADDOPTS"]
    assert {"-rs"} <= set(job["env"]["PYTEST_ADDOPTS"].split())


def test_long_sweeps_run_once_a_night() -> None:
    found = [step for job in jobs("nightly") for step in job["steps"] if " -m full " in step.get("run", "")]
    assert len(found) == 1
    assert found[0]["timeout-minutes"] > 60


@pytest.mark.parametrize("words", [words for words in commands() if any(word.startswith("tests") for word in words)])
def test_skips_and_results_of_tests_are_kept(words: list[str]) -> None:
    assert "-rs" in words
    assert any(word.startswith(f"--junitxml={RESULTS}/") for word in words)


def test_nothing_waits_for_the_success_of_another() -> None:
    """Once the packages are installed and the GPU was found, each step runs, and what it leaves is uploaded."""
    for job in jobs(*TESTS):
        names = [step.get("name") for step in job["steps"]]
        for step in job["steps"][names.index("Install") + 2 :]:
            assert "always()" in step["if"], step
        assert job["steps"][-1]["with"]["path"] == RESULTS


def test_only_what_was_tried_is_published_and_only_then_announced() -> None:
    release = workflow("release")
    needs = {name: job.get("needs") for name, job in release["jobs"].items()}
    tried = {"test": None, "build": None, "try": "build", "publish": ["test", "try"]}
    assert needs == {**tried, "announce": "publish", "homebrew": "announce"}
    assert release["jobs"]["test"] == {"uses": "./.github/workflows/linux.yml"}
    assert release["permissions"] == {"contents": "read"}
    rights = {name: job["permissions"] for name, job in release["jobs"].items() if "permissions" in job}
    write = {"contents": "write"}
    assert rights == {"publish": {"id-token": "write"}, "announce": write, "homebrew": write}


def test_both_files_of_a_release_are_installed() -> None:
    tried = workflow("release")["jobs"]["try"]
    assert tried["strategy"]["matrix"]["file"] == ["whl", "tar.gz"]
    (install,) = (step["run"] for step in tried["steps"] if "clean/bin/python -m pip install" in step.get("run", ""))
    assert install.endswith(" dist/*.${{ matrix.file }}")


def test_commands_of_a_release_are_there() -> None:
    text = "\n".join(step.get("run", "") for job in jobs("release") for step in job.get("steps", ()))
    scripts = re.findall(r"scripts/\w+\.py", text)
    ours = re.findall(r"clean/bin/mlx-serve ([^&\n]+)", text)
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)
    assert "--version" in {line.strip() for line in ours}
    for line in ours:
        words = shlex.split(line)
        if words != ["--version"]:
            parser, rest = parser_of(words)
            assert parser is not None
            parser.parse_args(rest)


def test_a_release_has_its_section_of_the_changelog() -> None:
    changelog = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-11-22\n\n### Added\n- one\n\n## [0.1.0]\n- zero\n"
    assert section(changelog, "0.2.0") == "### Added\n- one"
    assert section(changelog, "0.1.0") == "- zero"
    assert section(changelog, "Unreleased") is None
    assert section(changelog, "0.2") is None


def test_a_release_leaves_nothing_unreleased() -> None:
    changelog = "# Changelog\n\n## [Unreleased]\n\n{}## [0.2.0] - 2026-11-22\n- one\n"
    assert notes(changelog.format(""), "0.2.0") == "- one"
    assert notes(changelog.replace("## [Unreleased]\n\n{}", ""), "0.2.0") == "- one"
    with pytest.raises(ValueError, match=r"3 lines under `## \[Unreleased\]`.*Rename that heading"):
        notes(changelog.format("### Added\n- two\n- three\n\n"), "0.2.0")
    with pytest.raises(ValueError, match=r"no section `## \[0.3.0\]`"):
        notes(changelog.format(""), "0.3.0")
