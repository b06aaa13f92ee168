"""`mlx-serve config`, the flags of settings, and settings as TOML."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from mlx_server.api.auth.keys import KeyRing
from mlx_server.api.http.listener import check_tls
from mlx_server.combinations import without_effect
from mlx_server.config import Config, load_config, settings
from mlx_server.errors import ConfigError
from mlx_server.request import Priority
from mlx_server.setting import Setting, keys

_METAVARS = {str: "TEXT", int: "N", float: "X"}
_PLACEHOLDERS = {str: '"..."', int: "...", float: "..."}
_HEAD = """\
# Every setting of mlx-serve with its default. Give a copy with `--config FILE`, or set MLX_SERVE_<SECTION>_<NAME>
# in the environment, or use the flag of the same name (--max-num-seqs); the later one wins.
# Written by `mlx-serve config default`.
"""
_TAIL = """
# Tiers of API keys, any number of them: [tiers.NAME]. See configs/tiers.toml for an example with every setting.

# Several models instead of one, each with its own settings of [model] and [cache]: [[models]]. See configs/models.toml
# for an example, and docs/models.md.
"""


def add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the same as --config FILE")
    add_setting_flags(parser)


def run_check(args: argparse.Namespace) -> int:
    """Shows the effective settings (from the defaults, --config, the environment and the flags) as TOML, after checking
    them and the files of keys and certificates that they name.

    examples:
      mlx-serve config check my.toml
      MLX_SERVE_SERVER_PORT=9000 mlx-serve config check
    """
    if args.file is not None:
        if args.config is not None:
            raise ConfigError(f"The file is {args.file}, and --config is {args.config}: give one of them.")
        args.config = args.file
    config = config_from(args)
    check_tls(config.server)
    KeyRing(config)  # reads the files of keys
    print(effective_document(config), end="")
    for fault in without_effect(config):
        print(f"mlx-serve: warning: {fault}", file=sys.stderr)
    return 0


def add_default(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run_default(args: argparse.Namespace) -> int:
    """Prints a TOML file with every setting and its default, to start from.

    example:
      mlx-serve config default > my.toml
    """
    print(default_document(), end="")
    return 0


def add_setting_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--config` and a flag for each setting. Values stay text; the settings check and convert them."""
    add_config_flag(parser)
    for section, group in _sections():
        flags = parser.add_argument_group(f"[{section}]")
        for setting in group:
            _add_flag(flags, setting)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings; flags win over it")


def config_from(args: argparse.Namespace) -> Config:
    """The configuration from the defaults, the file, the environment and the given flags. Raises `ConfigError`."""
    flags = dict(vars(args))
    named = flags.pop("named_model", None)
    if named is not None:
        if flags["model"] not in (None, named):
            raise ConfigError(f"The model is {named}, and --model is {flags['model']}: give one of them.")
        flags["model"] = named
    return load_config(args.config, flags=flags)


def _add_flag(group: Any, setting: Setting) -> None:
    is_switch = isinstance(setting.default, bool)
    shown = ("on" if setting.default else "off") if is_switch else setting.default
    about = setting.help + ("" if shown in (None, "") else f" (default: {shown})")
    kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if setting.choices:
        kind = {"choices": setting.choices}
    elif not is_switch:
        kind = {"action": "append" if setting.name == "adapter" else "store", "metavar": _METAVARS[setting.type]}
    group.add_argument(setting.flag, default=None, help=about.replace("%", "%%"), **kind)


def default_document() -> str:
    """Every setting with its help and default, commented out."""
    return _HEAD + "".join(_default_section(name, group) for name, group in _sections()) + _TAIL


def effective_document(config: Config) -> str:
    """The effective values. Secrets are named and not shown."""
    lines = []
    for name, group in _sections():
        values = getattr(config, name)
        lines += [f"[{name}]", *(_effective_line(setting, getattr(values, setting.name), config) for setting in group)]
        lines.append("")
    for tier in config.tiers.values():
        lines += [f"[tiers.{toml_value(tier.name)}]", *_given_lines(tier, "name"), ""]
    for entry in config.models:
        given = entry.overrides.items()
        overrides = (f"{name} = {toml_value('' if value is None else value)}" for name, value in given)
        lines += ["[[models]]", *_given_lines(entry, "overrides"), *overrides, ""]
    return "\n".join(lines)


def _sections() -> Iterator[tuple[str, Iterator[Setting]]]:
    return groupby(settings(), key=lambda setting: setting.section)


def _default_section(name: str, group: Iterator[Setting]) -> str:
    lines = ["", f"[{name}]"]
    for setting in group:
        choices = f": {', '.join(setting.choices)}" if setting.choices else ""
        value = _PLACEHOLDERS[setting.type] if setting.default is None else toml_value(setting.default)
        lines += [f"# {setting.help}{choices}", f"# {setting.name} = {value}"]
    return "\n".join(lines) + "\n"


def _effective_line(setting: Setting, value: Any, config: Config) -> str:
    if setting.name == "model" and config.models:
        return "# model is not used: there are [[models]]"
    if value is None:
        return f"# {setting.name} is not set"
    if setting.is_secret:
        return f"# {setting.name} is set, and not shown"
    return f"{setting.name} = {toml_value(value)}"


def _given_lines(section: Any, but: str) -> Iterator[str]:
    """The values that are set of a tier or model, without the field `but`."""
    for name in keys(section):
        value = getattr(section, name)
        if name != but and value is not None:
            yield f"{name} = {toml_value(value)}"


def toml_value(value: Any) -> str:
    """A TOML literal; JSON's strings and booleans are TOML's as well."""
    if isinstance(value, Priority):
        return toml_value(value.name.lower())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(key)} = {toml_value(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)
