"""Fetches a model, so that it can be served without a network, and prints the folder that it is in.

examples:
  mlx-serve pull smollm2
  mlx-serve pull mlx-community/Qwen3-0.6B-4bit
"""

from __future__ import annotations

import argparse
import logging

from mlx_server.config import DEFAULT_MODEL
from mlx_server.runtime.models.loader import resolve_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"`{DEFAULT_MODEL}` (the default), or a hub id like owner/name"
    )


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(resolve_model(args.model))
    return 0
