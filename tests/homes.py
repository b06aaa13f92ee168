"""Homes for servers under test."""

from __future__ import annotations

from pathlib import Path

from mlx_server import config


def with_kernels(home: Path) -> Path:
    """`home` with the native libraries of the user who runs the tests, because compiling them takes half a minute."""
    kernels = config.home() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "kernels").exists():
        (home / "kernels").symlink_to(kernels)
    return home
