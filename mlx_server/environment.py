"""The process around the package: the installed version, what installs an extra, and environment variables that
libraries read on import."""

from __future__ import annotations

import os
from importlib import metadata


def version() -> str:
    """The version of the distribution; `unknown` if the package runs without being installed."""
    try:
        return metadata.version("mlx-server")
    except metadata.PackageNotFoundError:
        return "unknown"


def install_command(extra: str) -> str:
    """What to run for the packages of an extra. There is no release on the package index, so it names the checkout."""
    return f"pip install '.[{extra}]' (in the checkout)"


def quiet_libraries() -> None:
    """To be called before transformers and pydantic are imported. Values that the user has set stay."""
    # transformers would warn every user that PyTorch is missing, which is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # pydantic would import logfire if it is installed, which takes a second, even without tracing.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "logfire-plugin")
