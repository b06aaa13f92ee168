"""The adapters of a model, as settings write them: folders, each with a name for clients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from mlx_server.errors import ConfigError

_FORBIDDEN = frozenset(":/=")


class Adapter(NamedTuple):
    """A folder that mlx-lm has written an adapter to. Clients call a model with it `model:name`."""

    name: str
    folder: str

    @property
    def path(self) -> Path:
        return Path(self.folder).expanduser()


def parse_adapters(text: str, source: str) -> tuple[Adapter, ...]:
    """Out of a list joined by `:`, each as NAME=FOLDER, or as FOLDER, whose last part is the name then. Raises
    `ConfigError` with `source`."""
    adapters = tuple(_parse(part) for part in text.split(os.pathsep) if part)
    folders: dict[str, str] = {}
    for name, folder in adapters:
        if not name or not folder or _FORBIDDEN & set(name):
            raise ConfigError(
                f"{source}: {name!r} in {folder!r} is no adapter; write NAME=FOLDER, with none of `:/=` in NAME."
            )
        if name in folders:
            raise ConfigError(
                f"{source}: {folders[name]} and {folder} both are the adapter {name}; name one of them otherwise, as "
                f"OTHER={folder}."
            )
        folders[name] = folder
    return adapters


def _parse(text: str) -> Adapter:
    name, separator, folder = text.partition("=")
    if separator and "/" not in name:
        return Adapter(name, folder)
    return Adapter(Path(text.rstrip("/")).name, text)
