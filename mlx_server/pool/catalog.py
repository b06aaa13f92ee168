"""Which models clients may ask for, and by which names."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_server.config import Config, PoolConfig
from mlx_server.engine.loading import ServedNames, served_names
from mlx_server.engine.models.store import find_in, find_pulled, models_in, pulled_names
from mlx_server.environment import expanded
from mlx_server.errors import ModelNotFoundError
from mlx_server.model_entries import ModelEntry, hub_id

LATEST_TAG = ":latest"
"""Clients of Ollama put it after every name, whichever route they use."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that clients may ask for, alone or with an adapter. `aliases` are other names of its base. `idle_ttl_s`
    None means that it is never unloaded for being idle."""

    names: ServedNames
    config: Config
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False
    idle_ttl_s: float | None = None

    @property
    def name(self) -> str:
        """The name in lists of models."""
        return self.names.model

    @property
    def root(self) -> str:
        """The model as configured: a folder, a hub id, or `smollm2`."""
        return self.config.model.model

    def offers(self) -> Iterator[Offer]:
        """The model alone, then with each of its adapters."""
        for adapter in (None, *self.names.adapters):
            yield Offer(self, adapter)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one name stands for: a model, alone or with one of its adapters."""

    spec: ModelSpec
    adapter: str | None = None

    @property
    def name(self) -> str:
        """The name in lists of models."""
        return self.spec.names.with_adapter(self.adapter)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use, beginning with the one in lists."""
        bases = (self.spec.names.base, *self.spec.aliases)
        return self.name, *(replace(self.spec.names, base=base).with_adapter(self.adapter) for base in bases)

    @property
    def parent(self) -> str | None:
        """The name of the model without the adapter; None if there is no adapter."""
        return None if self.adapter is None else self.spec.name

    @property
    def root(self) -> str:
        """As configured: the folder or hub id of the adapter, or the model."""
        folders = {adapter.name: adapter.folder for adapter in self.spec.config.model.adapters}
        return self.spec.root if self.adapter is None else folders[self.adapter]


class Catalog:
    """The configured models, and those in folders where clients may look for models.

    A client's name is only compared with existing names, and never used as a path.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._specs = {spec.name: spec for spec in _configured(config)}
        self._configured = tuple(self._specs)
        self._by_name = self._index()

    @property
    def configured(self) -> tuple[ModelSpec, ...]:
        """The configured models, the default one first."""
        return tuple(self._specs[name] for name in self._configured)

    def update(self, spec: ModelSpec) -> None:
        """Replaces a model by the same with other adapters."""
        self._specs = {**self._specs, spec.name: spec}  # threads may read the old one
        self._by_name = self._index()

    def _index(self) -> dict[str, Offer]:
        offers = [offer for spec in self._specs.values() for offer in spec.offers()]
        found = {offer.name: offer for offer in offers}
        for offer in offers:
            for name in offer.names:
                # Two ids may serve one folder: the folder's own name belongs to the first.
                found.setdefault(name, offer)
        for offer in self.configured[0].offers():
            if offer.adapter is not None:  # clients of vLLM write the adapter's name alone
                found.setdefault(offer.adapter, offer)
        return found

    def offer(self, name: str | None) -> Offer:
        """What a name stands for; the default model for None or an empty name. Looks on disk for names that are not
        configured. Raises `ModelNotFoundError`, which suggests the nearest name."""
        if not name:
            return Offer(self.configured[0])
        found = self.look_up(name)
        if found is None:
            self._check_adapter(name)
            raise model_not_found(name, self._names(), lambda near: self.look_up(near) is not None)
        return found

    def look_up(self, name: str) -> Offer | None:
        """Like `offer`, but None for an unknown name. A name with `LATEST_TAG` is also looked up without it, and the
        address of a page of the hub as the model's id."""
        written = (name, name.removesuffix(LATEST_TAG))
        ids = dict.fromkeys(hub_id(form) or form for form in written)
        for form in (*written, *ids):
            known = self._known(form)
            if known is not None:
                return known
        for form in ids:
            folder = self._find_folder(form)
            if folder is not None:
                return Offer(self._spec_of(form, str(folder)))
        return None

    def offered(self) -> Iterator[Offer]:
        """All offers: the configured models, then those in folders."""
        for name in self._names():
            known = self._known(name)
            # A pull that runs or was cut off leaves a model of the hub that is stored in part and cannot be found.
            if known is not None:
                yield known
            elif self._find_folder(name) is not None:
                yield Offer(self._spec_of(name, name))

    def _known(self, name: str) -> Offer | None:
        """The offer of a model that is configured, or that was updated and is still in its folder."""
        known = self._by_name.get(name)
        is_there = known is None or known.spec.name in self._configured or self._find_folder(known.spec.name)
        return known if is_there else None

    def _names(self) -> Iterable[str]:
        """The names of the offers, and of models of the hub that are stored in part. Fast, for any number of models."""
        pool = self._config.pool
        names = [offer.name for spec in self._specs.values() for offer in spec.offers()]
        names += [name for folder in _folders(pool) for name in models_in(folder)]
        return dict.fromkeys([*names, *(pulled_names() if pool.pulled_models else ())])

    def missing(self) -> Iterator[str]:
        """A sentence for each name in the settings that stands for nothing yet: folders of models, and models of tiers.
        Looks on disk."""
        for folder in _folders(self._config.pool):
            if not os.access(f"{folder}/", os.R_OK | os.X_OK):  # the slash is for files
                yield f"model_folders names {folder}, which is not a folder that can be read."
        for tier in self._config.tiers.values():
            for name in tier.models or ():
                try:
                    self.offer(name)
                except ModelNotFoundError as error:
                    yield f"[tiers.{tier.name}] allows a model that is not served: {error.message}"

    def _check_adapter(self, name: str) -> None:
        """Raises `ModelNotFoundError` that lists the offers of a model, if only the adapter in the name is unknown."""
        base = name.rpartition(":")[0] or name
        for spec in self._specs.values():
            if base in (spec.names.base, *spec.aliases) and self._known(spec.name) is not None:
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


def model_not_found(
    name: str, served: Iterable[str], is_served: Callable[[str], bool] = lambda near: True
) -> ModelNotFoundError:
    """The error for a name that is not in `served`, with the most similar one that is, if it `is_served`. Owners, sizes
    and case are often written differently."""
    by_key = {_comparable(known): known for known in sorted(served, reverse=True)}
    close = difflib.get_close_matches(_comparable(name), by_key, n=1, cutoff=0.5)
    if close and is_served(near := by_key[close[0]]):
        return ModelNotFoundError(name, f"Did you mean `{near}`?")
    return ModelNotFoundError(name)


def _comparable(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _folders(pool: PoolConfig) -> list[Path]:
    return [expanded(folder) for folder in (pool.model_folders or "").split(os.pathsep) if folder]


def _configured(config: Config) -> Iterator[ModelSpec]:
    """The models of `[[models]]`; without any, the model of `[model]`, which is pinned."""
    for entry in config.models:
        ttl = config.pool.idle_ttl_s if entry.idle_ttl_s is None else entry.idle_ttl_s
        idle_ttl_s = None if entry.pinned else ttl or None
        aliases = tuple(name for name in entry.names if name != entry.id)
        own = config.for_model(entry)
        yield ModelSpec(served_names(own.model), own, aliases, entry.pinned, idle_ttl_s)
    if not config.models:
        model, names = config.model.model, served_names(config.model)
        # Clients may also use the name under which the model is configured.
        yield ModelSpec(names, config, () if model == names.base else (model,), is_pinned=True)
