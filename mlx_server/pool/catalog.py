"""Which models may be asked for, and by which names."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_server.config import Config, PoolConfig
from mlx_server.engine.loading import ServedNames, served_names
from mlx_server.engine.models.store import find_in, find_pulled, models_in, stored_models
from mlx_server.errors import ModelNotFoundError
from mlx_server.model_entries import ModelEntry


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that may be asked for, alone or with an adapter. `aliases` are other names of its base. `idle_ttl_s` None
    is never."""

    names: ServedNames
    config: Config
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False
    idle_ttl_s: float | None = None

    @property
    def name(self) -> str:
        """The one that it is listed under."""
        return self.names.model

    @property
    def root(self) -> str:
        """The model as it was configured: a folder, a hub id, or `smollm2`."""
        return self.config.model.model

    def offers(self) -> Iterator[Offer]:
        """What clients may ask for by it: the model, then with each of its adapters."""
        for adapter in (None, *self.names.adapters):
            yield Offer(self, adapter)

    def offers_by_name(self) -> Iterator[tuple[str, Offer]]:
        """The same, by every name."""
        for base in (self.names.base, *self.aliases):
            names = replace(self.names, base=base)
            for offer in self.offers():
                yield names.with_adapter(offer.adapter), offer


@dataclass(frozen=True, slots=True)
class Offer:
    """What a client asks for by one name: a model with one of its adapters, or without."""

    spec: ModelSpec
    adapter: str | None = None

    @property
    def name(self) -> str:
        """The one that it is listed under."""
        return self.spec.names.with_adapter(self.adapter)

    @property
    def parent(self) -> str | None:
        """The name of the model without the adapter."""
        return None if self.adapter is None else self.spec.name

    @property
    def root(self) -> str:
        """As it was configured: the adapter's folder, or the model."""
        folders = dict(self.spec.config.model.adapters)
        return self.spec.root if self.adapter is None else folders[self.adapter]


class Catalog:
    """The models of a configuration, and those that lie where clients may look for them.

    A name that a client sends is only ever compared with names that are there: it is never taken for a path.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._specs = {spec.name: spec for spec in _configured(config)}
        self._by_name: dict[str, Offer] = {offer.name: offer for spec in self.configured for offer in spec.offers()}
        for spec in self.configured:
            for name, offer in spec.offers_by_name():
                # The same folder may be served under two ids: its own name is the first one's.
                self._by_name.setdefault(name, offer)

    @property
    def configured(self) -> tuple[ModelSpec, ...]:
        """In their order, the default one first."""
        return tuple(self._specs.values())

    def offer(self, name: str | None) -> Offer:
        """What that name stands for; the default model for None or an empty name. Looks at the disk for names that are
        not configured. Raises `ModelNotFoundError`, which tells of the nearest one."""
        if not name:
            return Offer(self.configured[0])
        found = self.look_up(name)
        if found is None:
            self._check_adapter(name)
            raise model_not_found(name, [offer.name for offer in self.offered()])
        return found

    def look_up(self, name: str) -> Offer | None:
        """The same for a name that may stand for nothing."""
        known = self._by_name.get(name)
        if known is not None:
            return known
        folder = self._find_folder(name)
        return None if folder is None else Offer(self._spec_of(name, str(folder)))

    def offered(self) -> Iterator[Offer]:
        """Everything that may be asked for: what is configured, then what lies in the folders."""
        for spec in self.configured:
            yield from spec.offers()
        pool = self._config.pool
        names = [name for folder in _folders(pool) for name in models_in(folder)]
        if pool.pulled_models:
            names += [model.name for model in stored_models()]
        for name in dict.fromkeys(names):
            if name not in self._by_name:
                yield Offer(self._spec_of(name, name))

    def _check_adapter(self, name: str) -> None:
        """Raises `ModelNotFoundError` that tells what there is, if the name is a model's but for its adapter."""
        base = name.rpartition(":")[0] or name
        for spec in self.configured:
            if base in (spec.names.base, *spec.aliases):
                raise ModelNotFoundError(name, f"There is {', '.join(offer.name for offer in spec.offers())}.")

    def _find_folder(self, name: str) -> Path | None:
        for folder in _folders(self._config.pool):
            found = find_in(folder, name)
            if found is not None:
                return found
        return find_pulled(name) if self._config.pool.pulled_models else None

    def _spec_of(self, name: str, model: str) -> ModelSpec:
        config = self._config.for_model(ModelEntry(id=name, model=model))
        return ModelSpec(served_names(config.model), config, idle_ttl_s=self._config.pool.idle_ttl_s or None)


def model_not_found(name: str, served: Collection[str]) -> ModelNotFoundError:
    """The refusal of a name that is none of `served`, with the nearest of those. Makers of models, sizes and case are
    often written differently."""
    by_key = {_comparable(known): known for known in sorted(served, reverse=True)}
    close = difflib.get_close_matches(_comparable(name), by_key, n=1, cutoff=0.5)
    return ModelNotFoundError(name, f"Did you mean `{by_key[close[0]]}`?") if close else ModelNotFoundError(name)


def _comparable(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _folders(pool: PoolConfig) -> list[Path]:
    return [Path(folder).expanduser() for folder in (pool.model_folders or "").split(os.pathsep) if folder]


def _configured(config: Config) -> Iterator[ModelSpec]:
    """Of `[[models]]`; without any, the one model of `[model]`, which is pinned."""
    for entry in config.models:
        ttl = config.pool.idle_ttl_s if entry.idle_ttl_s is None else entry.idle_ttl_s
        idle_ttl_s = None if entry.pinned else ttl or None
        aliases = tuple(name for name in entry.names if name != entry.id)
        own = config.for_model(entry)
        yield ModelSpec(served_names(own.model), own, aliases, entry.pinned, idle_ttl_s)
    if not config.models:
        model, names = config.model.model, served_names(config.model)
        # Clients that name the model as it was configured find it under its served name, too.
        yield ModelSpec(names, config, () if model == names.base else (model,), is_pinned=True)
