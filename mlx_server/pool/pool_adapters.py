"""Adapters of the pool's models, loaded and unloaded while the models serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_server.engine.fair_slots import in_daemon_thread
from mlx_server.engine.loading import find_content
from mlx_server.engine.memory.need import MemoryNeed, adapter_bytes
from mlx_server.errors import (
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    OverloadedError,
    UnknownModelError,
)
from mlx_server.model_entries import NAME_FORM, Adapter, hub_id, parse_adapters
from mlx_server.pool.catalog import Catalog, ModelSpec
from mlx_server.pool.pooled_model import PooledModel
from mlx_server.pool.room import RoomMaker

if TYPE_CHECKING:
    from mlx_server.pool.model_pool import ModelPool

logger = logging.getLogger(__name__)


class PoolAdapters:
    """Changes the adapters of models: of their engines, and in the catalog, so that a model that is unloaded and loaded
    again has the same. Event-loop thread only."""

    def __init__(self, pool: ModelPool, catalog: Catalog, room: RoomMaker) -> None:
        self._pool = pool
        self._catalog = catalog
        self._room = room
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def load(self, name: str, place: str, *, in_place: bool) -> None:
        """Loads an adapter from a folder or the hub; its model is loaded before, if necessary. `name` is MODEL:NAME, or
        NAME for the default model. With `in_place` it may replace an adapter of that name, which requests that have
        begun keep. Raises `InvalidRequestError` for an adapter that this model cannot have, `UnknownModelError` if it
        is not there, what fetching raises, and what `ModelPool.acquire` does."""
        base, _, own = name.rpartition(":")
        model = self._pool.find(base)
        adapter = _parsed(name, own, place)
        if (other := self._pool.look_up(f"{model.name}:{own}")) is not None and other.adapter != own:
            raise InvalidRequestError(f"The name {other.name} is a model's: give the adapter another.", "lora_name")
        _check(model.spec, own, in_place=in_place)
        try:
            found = await in_daemon_thread(lambda: find_content(adapter))
            num_bytes = await asyncio.to_thread(adapter_bytes, found, model.spec.config.model)
            async with self._turns[model.name]:
                _check(model.spec, own, in_place=in_place)
                with await self._pool.acquire(model.name) as engine:
                    live = engine.adapters
                    if not live.has_content(found.key):
                        await self._room.make_at_once(model, MemoryNeed(num_bytes, 0, 0))
                    if not model.is_ready:
                        raise OverloadedError(f"The model {model.name} was unloaded; load the adapter again.", 5.0)
                    await live.load(found, num_bytes)
                    if not live.has(own):  # it was unloaded at once
                        return
                    others = [other for other in model.spec.config.model.adapters if other.name != own]
                    self._change(model, [*others, adapter])
        except UnknownModelError:
            raise
        except (ModelLoadError, ConfigError) as error:
            raise InvalidRequestError(error.message, "lora_path") from error
        logger.info("Loaded the adapter %s:%s from %s, %.0f MiB", model.name, own, place, num_bytes / 2**20)

    def unload(self, name: str) -> None:
        """From now on there is no adapter of this name. Requests that have begun keep it, and when the last has ended,
        its memory is freed. Raises `ModelNotFoundError`."""
        offer = self._pool.offer(name)
        if offer.adapter is None:
            raise ModelNotFoundError(name, f"It is a model; its adapters are {_listed(offer.spec)}.")
        model = self._pool.model_of(offer)
        self._change(model, [other for other in model.spec.config.model.adapters if other.name != offer.adapter])
        if model.is_ready and model.engine is not None:
            model.engine.adapters.unload(offer.adapter)
        logger.info("Unloaded the adapter %s", offer.name)

    def _change(self, model: PooledModel, adapters: Iterable[Adapter]) -> None:
        adapters = tuple(adapters)
        text = os.pathsep.join(f"{adapter.name}={adapter.folder}" for adapter in adapters)
        config, names = model.spec.config, tuple(adapter.name for adapter in adapters)
        model.spec = replace(
            model.spec,
            names=replace(model.spec.names, adapters=names),
            config=replace(config, model=replace(config.model, adapter=text or None)),
        )
        self._catalog.update(model.spec)
        if model.engine is not None:
            model.engine.names = model.spec.names


def _parsed(name: str, own: str, place: str) -> Adapter:
    """The adapter, as a configuration would have it."""
    with contextlib.suppress(ValueError):
        adapters = parse_adapters(f"{own}={hub_id(place) or place}")
        if [adapter.name for adapter in adapters] == [own]:
            return adapters[0]
    raise InvalidRequestError(
        f"lora_name is {name!r} and lora_path is {place!r}: the name must be NAME or MODEL:NAME, with {NAME_FORM} "
        f"in NAME, and the path a folder without `{os.pathsep}` or an id of the hub.",
        "lora_name",
    )


def _check(spec: ModelSpec, own: str, *, in_place: bool) -> None:
    """Raises `InvalidRequestError` if the model cannot have the adapter."""
    if own in spec.names.adapters and not in_place:
        raise InvalidRequestError(
            f"The adapter {spec.name}:{own} is loaded already; send load_inplace true to replace it.", "lora_name"
        )
    reason = ""
    if spec.names.merged is not None:
        reason = f"the adapter {spec.names.merged} is in its weights"
    elif spec.config.model.batch_invariant:
        reason = "it is served with --batch-invariant, and the products of adapters depend on the batch"
    elif spec.config.fleet.tensor_parallel_size > 1:
        reason = "it is split between machines"
    if reason:
        raise InvalidRequestError(f"The model {spec.name} takes no adapters: {reason}.", "lora_name")


def _listed(spec: ModelSpec) -> str:
    return ", ".join(f"{spec.name}:{name}" for name in spec.names.adapters) or "none"
