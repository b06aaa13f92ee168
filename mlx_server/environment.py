"""The process around the package: the installed version, what installs an extra, the operating system, the limit of
open files, and environment variables that libraries read on import."""

from __future__ import annotations

import logging
import os
import platform
import resource
from importlib import metadata

logger = logging.getLogger(__name__)


def version() -> str:
    """The version of the distribution; `unknown` if the package runs without being installed."""
    try:
        return metadata.version("mlx-server")
    except metadata.PackageNotFoundError:
        return "unknown"


def install_command(extra: str) -> str:
    """What to run for the packages of an extra. There is no release on the package index, so it names the checkout."""
    return f"pip install '.[{extra}]' (in the checkout)"


def is_mac() -> bool:
    return platform.system() == "Darwin"  # with `sys.platform`, type checkers would skip the code for other systems


def raise_file_limit(wanted: int) -> int:
    """Raises the limit of open files to `wanted` if it is lower, as far as the system allows, and returns it; `wanted`
    if there is no limit. Lowers nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
        except (OSError, ValueError):
            logger.debug("The limit of open files stays at %d", soft)
    return soft


def quiet_libraries() -> None:
    """To be called before transformers and pydantic are imported. Values that the user has set stay."""
    # transformers would warn every user that PyTorch is missing, which is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    # pydantic would import logfire if it is installed, which takes a second, even without tracing.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "logfire-plugin")
