"""Settings as TOML text: with their defaults, as a file to start from, or with the values in force."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from mlx_server.config import Config, settings
from mlx_server.model_entries import ModelEntry
from mlx_server.setting import Setting
from mlx_server.tiers import Tier

_HEAD = """\
# Every setting of mlx-serve with its default. Give a copy with `--config FILE`, or set MLX_SERVE_<SECTION>_<NAME>
# in the environment, or use the flag of the same name (--max-num-seqs); the later one wins.
# Written by `mlx-serve config default`.
"""
_TIERS = """
# Tiers of API keys, any number of them: [tiers.NAME]. configs/tiers.toml is an example with every key of one.
"""
_MODELS = """
# Several models instead of one, each with settings of [model] and [cache] of its own: [[models]]. configs/models.toml
# is an example, docs/models.md tells more.
"""
_PLACEHOLDERS = {str: '"..."', int: "...", float: "..."}


def default_document() -> str:
    """Every setting, commented out, under its help."""
    return _HEAD + "".join(_default_section(name, list(group)) for name, group in _sections()) + _TIERS + _MODELS


def effective_document(config: Config) -> str:
    """The values in force. Secrets are named, never shown."""
    lines = []
    for name, group in _sections():
        lines.append(f"[{name}]")
        lines.extend(
            _effective_line(setting, getattr(getattr(config, name), setting.name), config) for setting in group
        )
        lines.append("")
    for tier in config.tiers.values():
        lines += [*_tier_lines(tier), ""]
    for entry in config.models:
        lines += [*_model_lines(entry), ""]
    return "\n".join(lines)


def _tier_lines(tier: Tier) -> Iterator[str]:
    yield f"[tiers.{toml_value(tier.name)}]"
    yield f"priority = {toml_value(tier.priority.name.lower())}"
    if tier.is_admin:
        yield "admin = true"
    for name, value in tier.limits():
        yield f"{name} = {value}"
    if tier.models is not None:
        yield f"models = [{', '.join(map(toml_value, tier.models))}]"
    if tier.floors:
        floors = (f"{toml_value(path)} = {toml_value(level.name.lower())}" for path, level in tier.floors.items())
        yield f"floors = {{ {', '.join(floors)} }}"


def _model_lines(entry: ModelEntry) -> Iterator[str]:
    yield "[[models]]"
    yield f"id = {toml_value(entry.id)}"
    yield f"model = {toml_value(entry.model)}"
    if entry.aliases:
        yield f"aliases = [{', '.join(map(toml_value, entry.aliases))}]"
    yield f"pinned = {toml_value(entry.pinned)}"
    if entry.idle_ttl_s is not None:
        yield f"idle_ttl_s = {toml_value(entry.idle_ttl_s)}"
    for name, value in entry.overrides.items():
        yield f"{name} = {toml_value(value)}"


def _sections() -> Iterator[tuple[str, Iterator[Setting]]]:
    return groupby(settings(), key=lambda setting: setting.section)


def _default_section(name: str, group: list[Setting]) -> str:
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


def toml_value(value: str | bool | int | float) -> str:
    """A TOML literal; JSON's strings and booleans are TOML's as well."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)
