"""Tiers: what the callers of a server may do, how much of it, and how soon. Declared as `[tiers.NAME]`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_server.errors import ConfigError
from mlx_server.request import Priority
from mlx_server.setting import Setting, declare, declared, nearest

DEFAULT_TIER = "default"
"""The tier that every server has: of normal priority and without limits, unless it is declared otherwise."""

GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
"""What generates, and so may have a floor."""

_PRIORITIES = {priority.name.lower(): priority for priority in Priority}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier. None is no limit.

    The limits hold for each key by itself, but for the last two, which bound the queue of the whole tier.
    `is_admin` keys may change the server. `models` are names as clients write them, or served names. `floors` are the
    best priorities of some paths: `{"/v1/completions": LOW}` makes whatever comes by that path low, whoever sends it.
    """

    name: str = DEFAULT_TIER
    priority: Priority = Priority.NORMAL
    is_admin: bool = False
    max_concurrent_requests: int | None = declare(None, "most answers that are generated or wait at a time", minimum=1)
    requests_per_minute: int | None = declare(None, "most requests in any 60 seconds", minimum=1)
    tokens_per_minute: int | None = declare(None, "most prompt and output tokens in any 60 seconds", minimum=1)
    max_context_tokens: int | None = declare(None, "most tokens of prompt and output together", minimum=2)
    max_output_tokens: int | None = declare(None, "most output tokens; answers are cut there", minimum=1)
    max_num_waiting: int | None = declare(None, "most requests of all the tier's keys that may wait", minimum=1)
    max_queued_tokens: int | None = declare(None, "most prompt tokens of all the tier's keys that may wait", minimum=1)
    models: tuple[str, ...] | None = None
    floors: Mapping[str, Priority] = field(default_factory=dict)

    def priority_at(self, path: str) -> Priority:
        """The base priority of what comes by `path`."""
        return max(self.priority, self.floors.get(path, self.priority))

    def limits(self) -> Iterator[tuple[str, int]]:
        """The limits that are set, by name."""
        for setting in _LIMITS.values():
            value = getattr(self, setting.name)
            if value is not None:
                yield setting.name, value


_LIMITS: Mapping[str, Setting] = {setting.name: setting for setting in declared("tiers", Tier)}
_KEYS = ("priority", "admin", *_LIMITS, "models", "floors")


def default_tiers() -> dict[str, Tier]:
    """What a server has without declaring any."""
    return {DEFAULT_TIER: Tier()}


def parse_tiers(tables: Any, source: str) -> dict[str, Tier]:
    """Tiers by name, the default one always among them. Raises `ConfigError` with `source`."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{source}: tiers must be sections, like [tiers.{DEFAULT_TIER}].")
    return {**default_tiers(), **{name: _parse_tier(name, table, source) for name, table in tables.items()}}


def _parse_tier(name: str, table: Mapping[str, Any], source: str) -> Tier:
    where = f"{source}: [tiers.{name}]"
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _KEYS:
            raise ConfigError(f"{source}: unknown key {key} in [tiers.{name}]{nearest(key, _KEYS)}")
        if key in _LIMITS:
            values[key] = _LIMITS[key].parse(value, where)
        elif key == "priority":
            values[key] = _priority(key, value, where)
        elif key == "admin":
            values["is_admin"] = _flag(key, value, where)
        else:
            values[key] = _models(value, where) if key == "models" else _floors(value, where)
    return Tier(name=name, **values)


def _priority(name: str, value: Any, where: str) -> Priority:
    if not isinstance(value, str) or value not in _PRIORITIES:
        raise ConfigError(f"{where}: {name} is {value!r}; it must be one of {', '.join(_PRIORITIES)}.")
    return _PRIORITIES[value]


def _flag(name: str, value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {name} is {value!r}; it must be true or false.")
    return value


def _models(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise ConfigError(f"{where}: models is {value!r}; it must be a list of models' names, with at least one.")
    return tuple(value)


def _floors(value: Any, where: str) -> dict[str, Priority]:
    if not isinstance(value, dict):
        raise ConfigError(f'{where}: floors is {value!r}; it must be a table like {{ "/v1/completions" = "low" }}.')
    for path in value:
        if path not in GENERATING_PATHS:
            raise ConfigError(f"{where}: floors has the path {path!r}{nearest(path, GENERATING_PATHS)}")
    return {path: _priority(f"the floor of {path}", level, where) for path, level in value.items()}
