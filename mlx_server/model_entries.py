"""The models of a server that has several: declared as `[[models]]`, each with settings of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_server.adapter_entries import parse_adapters
from mlx_server.errors import ConfigError
from mlx_server.setting import Setting, declare, declared, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model. `id` is what clients call it, beside its aliases; `overrides` are settings of [model] and [cache]
    by name, for this model only."""

    id: str
    model: str
    aliases: tuple[str, ...] = ()
    pinned: bool = declare(False, "load it at start, and keep it until an admin unloads it")
    idle_ttl_s: float | None = declare(None, "unload it when nobody has used it for so long; 0 is never", minimum=0.0)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that clients may call it. The model as it is written here is a name, too."""
        return tuple(dict.fromkeys((self.id, *self.aliases, self.model)))

    @property
    def own_names(self) -> frozenset[str]:
        """Those that no other model may have: id and aliases, alone and with each adapter."""
        names = {self.id, *self.aliases}
        adapters = parse_adapters(self.overrides.get("adapter") or "", "adapter")
        return frozenset(names | {f"{name}:{adapter.name}" for name in names for adapter in adapters})


_OWN: Mapping[str, Setting] = {setting.name: setting for setting in declared("models", ModelEntry)}
_INSTEAD = {"served_model_name": "id"}


def parse_models(tables: Any, settings: Iterable[Setting], source: str) -> tuple[ModelEntry, ...]:
    """The entries in their order; the first one is the default. `settings` are those that an entry may override.
    Raises `ConfigError` with `source`."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{source}: models must be written as [[models]], one such section a model.")
    known = {setting.name: setting for setting in settings if setting.name not in ("model", *_INSTEAD)}
    entries = tuple(_parse_entry(table, known, f"{source}: [[models]] {i}") for i, table in enumerate(tables, 1))
    _check_names(entries, source)
    return entries


def _parse_entry(table: Mapping[str, Any], known: Mapping[str, Setting], where: str) -> ModelEntry:
    values: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    for key, value in table.items():
        if key in _INSTEAD:
            raise ConfigError(f"{where}: {key} is not for [[models]]; use {_INSTEAD[key]}.")
        if key in _OWN:
            values[key] = _OWN[key].parse(value, where)
        elif key in known:
            overrides[key] = known[key].parse(value, where)
        elif key == "aliases":
            values[key] = _aliases(value, where)
        elif key in ("id", "model"):
            values[key] = _name(key, value, where)
        else:
            raise ConfigError(f"{where}: unknown key {key}{nearest(key, ('id', 'model', 'aliases', *_OWN, *known))}")
    if "model" not in values:
        raise ConfigError(f"{where}: model is missing; it names a folder, a hub id, or `smollm2`.")
    values.setdefault("id", values["model"].rstrip("/").rpartition("/")[2])
    return ModelEntry(**values, overrides=overrides)


def _name(key: str, value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: {key} is {value!r}; it must be a name.")
    return value


def _aliases(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigError(f'{where}: aliases is {value!r}; it must be a list like ["gpt-4o-mini"].')
    return tuple(_name("an alias", name, where) for name in value)


def _check_names(entries: Iterable[ModelEntry], source: str) -> None:
    """Ids, aliases and adapters' names are each of one model; the same weights may be served under several ids."""
    owners: dict[str, str] = {}
    for entry in entries:
        for name in entry.own_names:
            if name in owners:
                raise ConfigError(
                    f"{source}: the name {name} is that of two [[models]], {owners[name]} and {entry.id}."
                )
            owners[name] = entry.id
