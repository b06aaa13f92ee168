"""What surrounds the package in its process: the version installed, and what libraries read when they are imported."""

from __future__ import annotations

import os
from importlib import metadata


def version() -> str:
    """The distribution's version; `unknown` when the package runs without having been installed."""
    try:
        return metadata.version("mlx-server")
    except metadata.PackageNotFoundError:
        return "unknown"


def quiet_libraries() -> None:
    """Before transformers and pydantic are imported. What the user has set stays."""
    # transformers would tell every user that PyTorch is missing, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # pydantic would import logfire, a second's work, traced or not, only because it is installed.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "logfire-plugin")
