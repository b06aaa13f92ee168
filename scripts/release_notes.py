"""Prints the changelog's section of a version: python scripts/release_notes.py v0.2.0. Exit status 1 if the version is
not pyproject.toml's, or has no section, or if `[Unreleased]` has text."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    version = sys.argv[1].removeprefix("v")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if version != declared:
        sys.exit(f"The tag is for version {version}, but pyproject.toml says {declared}.")
    try:
        print(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version))
    except ValueError as error:
        sys.exit(str(error))


def notes(changelog: str, version: str) -> str:
    """The section of `version`. Raises `ValueError` if it is missing, or would not have all changes."""
    unreleased = section(changelog, "Unreleased")
    if unreleased is not None:
        num_lines = len(unreleased.splitlines())
        raise ValueError(
            f"CHANGELOG.md has {num_lines} lines under `## [Unreleased]`, which {version} would contain but not name. "
            "Rename that heading to `## [VERSION] - DATE`, and set the same version in pyproject.toml and in the tag."
        )
    found = section(changelog, version)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no section `## [{version}]` with text.")
    return found


def section(changelog: str, version: str) -> str | None:
    """The text below the heading of `version`; None if there is none."""
    found = re.search(rf"^## \[{re.escape(version)}\].*\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE)
    return (found[1].strip() or None) if found else None


if __name__ == "__main__":
    main()
