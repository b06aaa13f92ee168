"""Prints the Homebrew formula for a release on PyPI: the URL and digest of its sdist, and a resource for each package
that `pip` would install with it on Apple Silicon. Needs a Mac and Python 3.12 with pip, because pip evaluates
`sys_platform == 'darwin'` for the machine that it runs on.

example:
  python scripts/homebrew_formula.py 0.2.0 > Formula/mlx-serve.rb
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parents[1] / "packaging" / "homebrew" / "mlx-serve.rb"
NAME = "mlx-server"
ONLY_ON_A_MAC = "mlx-metal"
STORED = re.compile(r"https://files\.pythonhosted\.org/packages/[0-9a-f]{2}/[0-9a-f]{2}/[0-9a-f]{60}/[^/]+")
"""The URLs that Homebrew accepts: those of PyPI's JSON, not the short ones below `packages/source`."""

OLDEST_MACOS = ("--platform", "macosx_14_0_arm64", "--python-version", "3.12", "--only-binary=:all:")
"""Wheels for macOS 14 also run on later versions."""


@dataclass(frozen=True)
class Download:
    """A file of a release. `name` is the package's normalized name."""

    name: str
    url: str
    sha256: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="a release on PyPI, like 0.2.0")
    version = parser.parse_args().version
    with urllib.request.urlopen(f"https://pypi.org/pypi/{NAME}/{version}/json", timeout=30) as answer:
        release = json.load(answer)
    downloads = downloads_of(pip_report(version))
    if ONLY_ON_A_MAC not in {download.name for download in downloads}:
        sys.exit(f"{ONLY_ON_A_MAC} is not among the packages that pip would install; run this on a Mac.")
    sys.stdout.write(filled(TEMPLATE.read_text(encoding="utf-8"), sdist_of(release), downloads))


def pip_report(version: str) -> dict[str, Any]:
    """pip's report of what it would install, https://pip.pypa.io/en/stable/reference/installation-report/."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--target", folder, *OLDEST_MACOS, "--report", str(path), f"{NAME}=={version}"]
        subprocess.run(command, check=True)
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report


def sdist_of(release: Mapping[str, Any]) -> Download:
    """The sdist in PyPI's JSON of a release, https://docs.pypi.org/api/json/."""
    for file in release["urls"]:
        if file["packagetype"] == "sdist":
            return Download(NAME, file["url"], file["digests"]["sha256"])
    sys.exit(f"{NAME} {release['info']['version']} has no sdist on PyPI.")


def downloads_of(report: Mapping[str, Any]) -> list[Download]:
    """All packages of pip's report except this one, sorted by name."""
    downloads = []
    for package in report["install"]:
        name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
        info = package["download_info"]
        if name != NAME:
            downloads.append(Download(name, info["url"], info["archive_info"]["hashes"]["sha256"]))
    return sorted(downloads, key=lambda download: download.name)


def filled(template: str, sdist: Download, resources: Iterable[Download]) -> str:
    """The template with its downloads replaced by these. Raises `ValueError` for a URL that Homebrew would refuse."""
    resources = list(resources)
    for download in (sdist, *resources):
        if not STORED.fullmatch(download.url):
            raise ValueError(f"{download.name}: {download.url} is no URL of the form {STORED.pattern}")
    text = re.sub(r"  resource .*?\n  end\n\n", "", template, flags=re.DOTALL)
    text = re.sub(r'^  url ".*"', f'  url "{sdist.url}"', text, count=1, flags=re.MULTILINE)
    text = re.sub(r'^  sha256 ".*"', f'  sha256 "{sdist.sha256}"', text, count=1, flags=re.MULTILINE)
    blocks = "".join(_resource(download) for download in resources)
    return text.replace("  def install\n", f"{blocks}  def install\n", 1)


def _resource(download: Download) -> str:
    how = ",\n        using: :nounzip" if download.url.endswith(".whl") else ""
    lines = [f'resource "{download.name}" do', f'  url "{download.url}"{how}', f'  sha256 "{download.sha256}"', "end"]
    return "".join(f"  {line}\n" for line in lines) + "\n"


if __name__ == "__main__":
    main()
