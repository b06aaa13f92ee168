"""Prints the changelog's section of a version: python scripts/release_notes.py v0.2.0. Exit status 1 if the version is
not pyproject.toml's or has no section."""

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
    notes = section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if notes is None:
        sys.exit(f"CHANGELOG.md has no section `## [{version}]` with text.")
    print(notes)


def section(changelog: str, version: str) -> str | None:
    """The text below the heading of `version`; None if there is none."""
    found = re.search(rf"^## \[{re.escape(version)}\].*\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE)
    return (found[1].strip() or None) if found else None


if __name__ == "__main__":
    main()
