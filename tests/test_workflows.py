"""The workflows can run: their images exist, and so do the commands, options and files that they name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_docs import parser_of

ROOT = Path(__file__).parents[1]
IMAGES = {"macos-15", "macos-26", "ubuntu-24.04"}
"""Of GitHub's; older ones of macOS are gone."""

OURS = ".venv/bin/mlx-serve"
RESULTS = "results"


def jobs() -> Iterator[dict[str, Any]]:
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        yield from yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()


def steps() -> list[dict[str, Any]]:
    return [step for job in jobs() for step in job["steps"]]


def commands() -> list[list[str]]:
    """The words of each command of each step, without what comes after a pipe."""
    lines = [line for step in steps() for line in step.get("run", "").splitlines()]
    parts = [part for line in lines for part in line.split("&&")]
    return [shlex.split(part.partition("2>&1 |")[0].strip().removeprefix("sudo ")) for part in parts]


def test_images_are_those_that_there_are() -> None:
    assert {image for job in jobs() for image in job["strategy"]["matrix"]["os"]} <= IMAGES


def test_commands_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(RESULTS).mkdir()
    assert len(commands()) > 5
    for words in commands():
        if words[0].startswith("./"):
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
    """Those that make kernels as the GPU that is there wants them, by the names of their files."""
    named = {path.name for words in commands() for word in words if "*" in word for path in ROOT.glob(word)}
    assert named == {path.name for path in (ROOT / "tests" / "runtime" / "kernels").glob("test_metal_kernels*.py")}
    assert {"test_metal_kernels_writer.py", "test_metal_kernels_plan.py", "test_metal_kernels_quantized.py"} <= named


@pytest.mark.parametrize("words", [words for words in commands() if any(word.startswith("tests") for word in words)])
def test_skips_and_results_of_tests_are_kept(words: list[str]) -> None:
    assert "-rs" in words
    assert any(word.startswith(f"--junitxml={RESULTS}/") for word in words)


def test_nothing_waits_for_the_success_of_another() -> None:
    """Once the packages are installed and the GPU was found, each step runs, and what it leaves is uploaded."""
    for job in jobs():
        names = [step.get("name") for step in job["steps"]]
        for step in job["steps"][names.index("Install") + 2 :]:
            assert "always()" in step["if"], step
        assert job["steps"][-1]["with"]["path"] == RESULTS
