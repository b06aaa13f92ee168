"""A command-line flag for every setting, derived from their one declaration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mlx_server.config import Config, load_config, settings
from mlx_server.errors import ConfigError
from mlx_server.setting import Setting

_METAVARS = {str: "TEXT", int: "N", float: "X"}


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """What `mlx-serve serve` takes: the model as a bare word, or any of the flags."""
    parser.add_argument("named_model", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    add_setting_flags(parser)


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and the flags. Values stay text: the settings themselves check and convert them."""
    add_config_flag(parser)
    groups: dict[str, Any] = {}
    for setting in settings():
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(f"[{setting.section}]")
        _add_flag(groups[setting.section], setting)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings; flags win over it")


def config_from(args: argparse.Namespace) -> Config:
    """Defaults, the file, the environment and the flags that were given. Raises `ConfigError`."""
    flags = dict(vars(args))
    named = flags.pop("named_model", None)
    if named is not None:
        if flags["model"] not in (None, named):
            raise ConfigError(f"The model is {named}, and --model is {flags['model']}: give one of them.")
        flags["model"] = named
    return load_config(args.config, flags=flags)


def _add_flag(group: Any, setting: Setting) -> None:
    shown = "" if setting.default is None else f" (default: {_shown(setting.default)})"
    kind: dict[str, Any]
    if setting.type is bool:
        kind = {"action": argparse.BooleanOptionalAction}
    else:
        kind = {"action": "append" if setting.is_joined else "store", "metavar": _metavar(setting)}
    group.add_argument(setting.flag, default=None, help=(setting.help + shown).replace("%", "%%"), **kind)


def _metavar(setting: Setting) -> str:
    return "{" + ",".join(setting.choices) + "}" if setting.choices else _METAVARS[setting.type]


def _shown(default: Any) -> str:
    return ("on" if default else "off") if isinstance(default, bool) else f"{default}"
