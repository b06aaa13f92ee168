"""Ends the launchd agent that `mlx-serve service install` has made, and removes its file."""

from __future__ import annotations

import argparse
import sys

from mlx_server.cli.service import agent_path, end_agent
from mlx_server.errors import ServeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    path = agent_path()
    if not path.exists():
        raise ServeError(f"There is no agent at {path}.")
    if sys.platform == "darwin":
        end_agent()
    path.unlink()
    print(f"{path} is removed.")
    return 0
