"""The models of a server with several, declared as `[[models]]`; the adapters of a model; ids of the Hugging Face
hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from mlx_server.environment import expanded
from mlx_server.errors import ConfigError
from mlx_server.setting import STRICT, Name, keys, read_table, refuse_unknown

NAME_FORM = "none of `:/=` and no control characters"
"""What the name of an adapter may not have, as errors say it."""

_HUB_ID = re.compile(r"[a-z0-9][\w.-]*/[a-z0-9][\w.-]*", re.ASCII | re.IGNORECASE)
_HUB_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+/[^/]+)/?")


def hub_id(name: str) -> str | None:
    """The id, owner/name, of a model on the Hugging Face hub, from its id or the address of its page; None if `name`
    has neither form."""
    page = _HUB_PAGE.fullmatch(name)
    found = name if page is None else page[1]
    return found if _HUB_ID.fullmatch(found) is not None else None


class Adapter(NamedTuple):
    """An adapter of mlx-lm or PEFT, as configured: a `folder`, or an id of the hub. Clients ask for it as `model:name`.
    `fetched` is where the hub's files are, once they are known to be there. `key` is a digest of its content, or else
    empty."""

    name: str
    folder: str
    fetched: Path | None = None
    key: str = ""

    @property
    def path(self) -> Path:
        return self.fetched or expanded(self.folder)


def parse_adapters(text: str) -> tuple[Adapter, ...]:
    """Parses a list joined by `:`; each part is NAME=FOLDER, or FOLDER, whose last part is then the name. An id of the
    hub may stand for a folder. Raises `ValueError`."""
    adapters = tuple(_parse_adapter(part) for part in text.split(os.pathsep) if part)
    folders: dict[str, str] = {}
    for name, folder, *_ in adapters:
        if not folder or not _is_name(name):
            raise ValueError(f"{name!r} in {folder!r} is not an adapter; write NAME=FOLDER, with {NAME_FORM} in NAME")
        if name in folders:
            raise ValueError(
                f"{folders[name]} and {folder} are both called {name}; give one of them another name, as OTHER={folder}"
            )
        folders[name] = folder
    return adapters


def check_adapter_names(value: Any) -> Any:
    """The value itself. Raises `ValueError` for a table with a name that would not come back from `parse_adapters`."""
    for name in value if isinstance(value, Mapping) else ():
        if not _is_name(str(name)):
            raise ValueError(f"{name!r} is not an adapter's name; write one with {NAME_FORM}")
    return value


def _is_name(name: str) -> bool:
    return name != "" and name.isprintable() and not set(name) & set(":/=")


def _parse_adapter(text: str) -> Adapter:
    name, separator, folder = text.partition("=")
    if separator and "/" not in name:
        return Adapter(name, folder)
    return Adapter(Path(text.rstrip("/")).name, text)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ModelEntry:
    """One model. Clients call it by `id` or an alias. It is loaded at start and kept until an admin unloads it if it is
    `pinned`; else it is unloaded after `idle_ttl_s` without use. `overrides` are settings of [model] and [cache] by
    name, for this model only."""

    id: Name
    model: Name
    aliases: tuple[Name, ...] = Field(default=(), strict=False)
    pinned: bool = False
    idle_ttl_s: float | None = Field(default=None, ge=0)
    overrides: Mapping[str, Any] = Field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use, including `model` as it is written here."""
        return tuple(dict.fromkeys((self.id, *self.aliases, self.model)))

    @property
    def own_names(self) -> frozenset[str]:
        """Names that no other model may have: id and aliases, alone and with each adapter."""
        names = {self.id, *self.aliases}
        adapters = parse_adapters(self.overrides.get("adapter") or "")
        return frozenset(names | {f"{name}:{adapter.name}" for name in names for adapter in adapters})


def read_models(tables: Any, overridable: Mapping[str, type], source: str) -> tuple[ModelEntry, ...]:
    """The entries in their order; the first one is the default model. `overridable` gives, for each setting that an
    entry may override, its section. Raises `ConfigError` with `source`."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{source}: models must be written as [[models]], one section for each model.")
    entries = tuple(_entry(table, overridable, f"{source}: [[models]] {i}") for i, table in enumerate(tables, 1))
    _check_names(entries, source)
    return entries


def _entry(table: Mapping[str, Any], overridable: Mapping[str, type], where: str) -> ModelEntry:
    if "served_model_name" in table:
        raise ConfigError(f"{where}: served_model_name is not allowed in [[models]]; use id.")
    own = keys(ModelEntry).keys() - {"overrides"}
    refuse_unknown(table, own | overridable.keys(), where)
    if "model" not in table:
        raise ConfigError(f"{where}: model is missing; it names a folder, a hub id, a GGUF file, or `smollm2`.")
    overrides = {
        name: getattr(read_table(overridable[name], {name: value}, where), name)
        for name, value in table.items()
        if name not in own
    }
    values = {name: value for name, value in table.items() if name in own}
    last_part = str(table["model"]).rstrip("/").rpartition("/")[2]
    entry = read_table(ModelEntry, {**values, "id": values.get("id", last_part)}, where, overrides=overrides)
    if entry.pinned and entry.idle_ttl_s:
        raise ConfigError(
            f"{where}: idle_ttl_s is {entry.idle_ttl_s:g}, and pinned is true, which keeps the model loaded when it is "
            "idle: leave one of them out."
        )
    return entry


def _check_names(entries: Iterable[ModelEntry], source: str) -> None:
    """Each id, alias and adapter name must belong to one model; the same weights may be served under several ids."""
    owners: dict[str, str] = {}
    for entry in entries:
        for name in entry.own_names:
            if name in owners:
                raise ConfigError(
                    f"{source}: the name {name} is that of two [[models]], {owners[name]} and {entry.id}; rename one."
                )
            owners[name] = entry.id
