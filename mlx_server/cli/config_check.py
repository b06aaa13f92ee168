"""Shows the settings that result from the defaults, --config, the environment and the flags, as TOML.

examples:
  mlx-serve config check my.toml
  MLX_SERVE_SERVER_PORT=9000 mlx-serve config check
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlx_server.cli.settings_flags import add_setting_flags, config_from
from mlx_server.cli.settings_toml import effective_document
from mlx_server.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the same as --config FILE")
    add_setting_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.file is not None:
        if args.config is not None:
            raise ConfigError(f"The file is {args.file}, and --config is {args.config}: give one of them.")
        args.config = args.file
    print(effective_document(config_from(args)), end="")
    return 0
