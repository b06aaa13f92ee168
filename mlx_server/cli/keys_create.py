"""Makes a key and prints it, once. Running servers accept it from their next request on.

The first key closes the server: from then on, every request needs one.

examples:
  mlx-serve keys create --label "Ada's laptop"
  mlx-serve keys create --config my.toml --tier interactive --label editor
"""

from __future__ import annotations

import argparse

from mlx_server.cli.keys import add_key_flags, hand_over, open_keys
from mlx_server.cli.settings_flags import config_from
from mlx_server.errors import ConfigError
from mlx_server.setting import nearest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", default=None, help="a tier of the configuration; default: `api_key_tier`")
    parser.add_argument("--label", default="", help="what the list shows: who has it, or what for")
    add_key_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    tier = args.tier or config.server.api_key_tier
    if tier not in config.tiers:
        raise ConfigError(
            f"--tier: {tier} is no tier of the configuration (--config FILE){nearest(tier, config.tiers)}"
        )
    with open_keys(config, creates=True) as file:
        hand_over(file.add(tier, args.label), tier)
    return 0
