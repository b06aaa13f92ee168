"""The models of one server, within one memory budget: loaded on demand, and unloaded to make room for others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from mlx_server.config import Config, PoolConfig
from mlx_server.engine.engine import AsyncEngine, EngineState
from mlx_server.engine.fair_slots import in_daemon_thread
from mlx_server.engine.memory.budget import MemoryBudget
from mlx_server.engine.memory.guard import MemoryWatch
from mlx_server.engine.memory.need import MemoryNeed, estimate_need
from mlx_server.engine.parts import Surroundings, find_device_fault
from mlx_server.engine.prefixes.kv_events import open_events
from mlx_server.errors import (
    EngineDeadError,
    InsufficientMemoryError,
    ModelNotFoundError,
    OverloadedError,
    PermissionDeniedError,
    ServeError,
)
from mlx_server.pool.catalog import Catalog, Offer, model_not_found
from mlx_server.pool.pool_adapters import PoolAdapters
from mlx_server.pool.pooled_model import Lease, LoadResult, ModelState, PooledModel
from mlx_server.pool.room import Changes, RoomMaker, UnwantedError
from mlx_server.request import FinishReason
from mlx_server.tiers import Tier

logger = logging.getLogger(__name__)

SHUTDOWN = "The server is shutting down; send the request elsewhere."
_SHUTDOWN_RETRY_S = 5.0
_SWEEP_S = 1.0
_TOGETHER_S = 1.0
_MAX_DEATHS = 3
"""If so many engines die in a row and no request has been answered between, replacing them does not help."""


class ModelPool:
    """Finds, loads and unloads models. Event-loop thread only."""

    def __init__(
        self,
        catalog: Catalog,
        budget: MemoryBudget,
        settings: PoolConfig,
        around: Surroundings,
        *,
        new_engine: Callable[..., AsyncEngine] = AsyncEngine,
        estimate: Callable[[Config], MemoryNeed] = estimate_need,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All engines share the thread, the disk and the publisher of KV events of `around`, which the pool closes.
        `estimate` says how much memory a model will need; it runs in a worker thread."""
        self.budget = budget
        self.disk, self.events = around.disk, around.events
        self._catalog = catalog
        self._settings = settings
        self._around = around
        self._new_engine = new_engine
        self._estimate = estimate
        self._clock = clock
        self._models = {spec.name: PooledModel(spec) for spec in catalog.configured}
        self._loads: dict[str, asyncio.Task[Exception | None]] = {}
        self._unloads: set[asyncio.Task[None]] = set()
        self._room_turn = asyncio.Lock()
        self._load_turn = asyncio.Lock()
        self._changes = Changes()
        self._watch = MemoryWatch(budget.read)
        self._room = RoomMaker(budget, settings, self.models, self._unload, self._changes, clock)
        self.adapters = PoolAdapters(self, catalog, self._room)
        self._sweeper: asyncio.Task[None] | None = None
        self.is_starting = True
        self.is_stopping = False
        self._death: str | None = None
        self._num_deaths = self._num_answers = 0

    # --- models and engines ---------------------------------------------------------------------------------

    def models(self) -> tuple[PooledModel, ...]:
        """All configured models, the default one first, then others that have been asked for."""
        return tuple(self._models.values())

    def engines(self) -> tuple[AsyncEngine, ...]:
        """The engines that can be read, in the same order."""
        return tuple(engine for model in self.models() if (engine := model.loaded_engine) is not None)

    def counted_engines(self) -> tuple[AsyncEngine, ...]:
        """The last engine of each model that is or was loaded; it has the counts of earlier ones."""
        engines = (model.engine if model.is_loaded else model.past for model in self._models.values())
        return tuple(engine for engine in engines if engine is not None)

    def find(self, name: str | None) -> PooledModel:
        """The model with this name or alias, in any state; the default one for None or an empty name. Raises
        `ModelNotFoundError`."""
        return self.model_of(self.offer(name))

    def model_of(self, offer: Offer) -> PooledModel:
        """The model of an offer, in any state."""
        return self._models.get(offer.spec.name) or self._models.setdefault(offer.spec.name, PooledModel(offer.spec))

    def offer(self, name: str | None) -> Offer:
        """What a name stands for: a model, alone or with one of its adapters. Raises `ModelNotFoundError`."""
        return self._held(name) or self._catalog.offer(name)

    def look_up(self, name: str) -> Offer | None:
        """Like `offer`, but None for an unknown name."""
        return self._held(name) or self._catalog.look_up(name)

    async def offered(self, tier: Tier | None = None) -> list[Offer]:
        """All offers, or those that the tier may use. Looks on disk, in a thread."""
        offers = await asyncio.to_thread(lambda: list(self._catalog.offered()))
        allowed = None if tier is None or tier.models is None else set(self._served(tier.models))
        return [self._held(offer.name) or offer for offer in offers if allowed is None or offer.name in allowed]

    def may_use(self, tier: Tier, name: str | None) -> bool:
        """Whether the tier may use the model, by any of its names. A model with an adapter counts as a model of its
        own. Raises `ModelNotFoundError`."""
        return tier.models is None or self.offer(name).name in self._served(tier.models)

    def check_access(self, tier: Tier, name: str | None) -> None:
        """Raises `PermissionDeniedError` for a model that the tier may not use, and `ModelNotFoundError`, whose
        suggestion is a model that the tier may use."""
        try:
            is_allowed = self.may_use(tier, name)
        except ModelNotFoundError as error:
            raise model_not_found(error.model, self._served(tier.models or ())) from None
        if not is_allowed:
            raise PermissionDeniedError(
                f"Keys of the tier {tier.name} may not use the model `{self.offer(name).name}`; they may use "
                f"{', '.join(tier.models or ())}."
            )

    def is_configured(self, offer: Offer) -> bool:
        """Whether the model is configured, as opposed to found in a folder."""
        return any(spec.name == offer.spec.name for spec in self._catalog.configured)

    def death(self) -> str | None:
        """Why nothing can be generated until the process restarts; None while all is well, or an engine that has died
        is replaced."""
        return self._death or (None if self._around.thread.is_alive else "The MLX thread has ended.")

    # --- use ------------------------------------------------------------------------------------------------

    async def acquire(self, name: str | None) -> Lease:
        """The use of a model, which is loaded first if necessary; requests for a model that is loading wait for that
        one load. Raises `ModelNotFoundError`, `OverloadedError` if the model cannot be loaded now,
        `InsufficientMemoryError` if it never can, and `EngineDeadError`."""
        model = self.find(name)
        while True:
            self._check_alive()
            if model.takes_new(self._clock()):
                return Lease(model, self._clock, self._on_used)
            if model.is_loaded:
                await self._changes.wait()
                continue
            if model.failure is not None and self._clock() < model.retry_s:
                raise model.refusal(model.failure, self._clock())
            # Counted while it waits, so that the model is not unloaded for the next one before this request has used
            # it.
            lease = Lease(model, self._clock, self._on_used)
            try:
                await self._wait_for_load(model)
                if model.is_ready:
                    return lease
            except BaseException:
                lease.end()
                raise
            lease.end()

    async def load(self, name: str | None) -> PooledModel:
        """Loads a model, also after a failure. `unload` ends the load, a cancelled caller not. Raises as `acquire`."""
        model = self.find(name)
        self._check_alive()
        while model.state is ModelState.DRAINING:
            await self._changes.wait()
            self._check_alive()
        model.is_asked_for, model.last_used_s = not model.is_ready, self._clock()  # a load is a use
        if model.is_asked_for:
            await self._wait_for_load(model)
        return model

    async def unload(self, name: str | None, drain_timeout_s: float) -> PooledModel:
        """Unloads a model when all leases have ended, also of requests that wait for its load; what is still open after
        `drain_timeout_s` fails. A drain in progress can only become shorter. A load that no request waits for is
        cancelled. Does nothing if the model is not loaded."""
        model = self.find(name)
        model.is_lost, model.keep_alive_s = False, None
        await self._unload(model, drain_timeout_s)
        return model

    def keep_alive(self, name: str | None, idle_s: float) -> bool:
        """Sets how long a loaded model may be idle, until it is unloaded or this is called again: infinity is forever,
        and 0 unloads even a pinned model, which takes no other time. Changes nothing if the model is not loaded.
        Returns whether the time holds. Raises `ModelNotFoundError`."""
        model = self.find(name)
        if model.engine is not None:
            model.keep_alive_s, model.is_lost = idle_s, model.is_lost and idle_s > 0
        return model.idle_ttl_s == (None if math.isinf(idle_s) else idle_s)

    async def expire_idle(self) -> None:
        """Unloads models that have been idle for too long."""
        for model in self.models():
            ttl_s = model.idle_ttl_s
            if ttl_s is not None and model.is_idle and self._clock() - model.last_used_s >= ttl_s:
                logger.info("Unloading %s: nobody has used it for %g s", model.name, ttl_s)
                await self._unload(model)

    def retry_lost(self) -> None:
        """Starts to load models that are to be kept, whose engines have died and that could not be loaded again at
        once."""
        for model in self.models():
            if model.is_lost and model.is_down and self._clock() >= model.retry_s:
                self._load_task(model)

    # --- life -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Loads the pinned models, one after another. Raises (and logs) the reason if one cannot be loaded."""
        for model in self.models():
            if model.spec.is_pinned:
                try:
                    await self._wait_for_load(model)
                except ServeError as refusal:
                    raise (model.failure or refusal) from None
        self.is_starting = False
        self._sweeper = asyncio.create_task(self._sweep(), name="idle models")

    async def stop(self, drain_timeout_s: float) -> None:
        """Refuses who has no lease yet, and unloads all models at once, each when its leases have ended; what is still
        open after `drain_timeout_s` fails."""
        self.is_stopping = True
        self._changes.notify()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.gather(*(self._unload(model, drain_timeout_s) for model in self.models()))
        await asyncio.to_thread(self._around.close)

    # --- inside ---------------------------------------------------------------------------------------------

    def _held(self, name: str | None) -> Offer | None:
        """A model that has an engine can be found even if its folder is gone."""
        base, _, adapter = (name or "").rpartition(":")
        for model, own in ((self._models.get(name or ""), None), (self._models.get(base), adapter)):
            if model is not None and model.engine is not None and own in (None, *model.spec.names.adapters):
                return Offer(model.spec, own)
        return None

    def _served(self, names: Iterable[str]) -> list[str]:
        """The names in lists of those of these models that are served."""
        return [offer.name for offer in map(self.look_up, names) if offer is not None]

    def _check_alive(self) -> None:
        if self.is_stopping:
            raise OverloadedError(SHUTDOWN, _SHUTDOWN_RETRY_S)
        death = self.death()
        if death is not None:
            raise EngineDeadError(death)

    def _on_used(self, model: PooledModel) -> None:
        if not model.users:
            self._changes.notify()

    async def _wait_for_load(self, model: PooledModel) -> None:
        """Waits for the load of the model, which is started if there is none. Raises the reason if it fails."""
        failure = await asyncio.shield(self._load_task(model))
        if failure is not None:
            raise model.refusal(failure, self._clock())

    def _load_task(self, model: PooledModel) -> asyncio.Task[Exception | None]:
        """The load of the model, which is started if there is none."""
        if model.name not in self._loads:
            model.begin_load()
            model.retry_s = 0.0
            self._loads[model.name] = asyncio.create_task(self._load(model), name=f"load {model.name}")
        return self._loads[model.name]

    async def _load(self, model: PooledModel) -> Exception | None:
        """Loads the model: from LOADING to READY, FAILED, or UNLOADED if the load was cancelled, there was no room, or
        nobody waits for it any more. Returns why the model is not ready; None if it is."""
        logger.info("Loading %s", model.name)
        try:
            if model.share is None:
                model.need = await in_daemon_thread(lambda: self._estimate(model.spec.config))
                await self._take_room(model, model.need)
            async with self._load_turn:
                await self._start_engine(model)
        except (asyncio.CancelledError, UnwantedError):
            model.give_up_load(LoadResult.GIVEN_UP)
            cancelled = f"Loading the model `{model.name}` was cancelled; try again."
            return OverloadedError(SHUTDOWN if self.is_stopping else cancelled, _SHUTDOWN_RETRY_S)
        except OverloadedError as error:
            logger.warning("The model %s cannot be loaded now: %s", model.name, error)
            model.give_up_load(LoadResult.NO_ROOM)
            model.retry_s = self._clock() + self._settings.retry_failed_s
            return error
        except Exception as error:
            logger.error(
                "The model %s cannot be loaded: %s",
                model.name,
                error,
                exc_info=None if isinstance(error, ServeError) else error,
            )
            model.fail_load(error.with_traceback(None), self._clock() + self._settings.retry_failed_s)
            return error
        finally:
            del self._loads[model.name]
            self._changes.notify()
        return None

    async def _take_room(self, model: PooledModel, need: MemoryNeed) -> None:
        """Books the model's memory. Models that must wait for models in use do so one after another; others do not wait
        for them."""
        deadline_s = self._clock() + self._settings.room_timeout_s
        if await self._room.make_at_once(model, need):
            model.share = self.budget.take(model.name, need)
            return
        async with self._room_turn:
            await self._room.make(model, need, deadline_s)
            model.share = self.budget.take(model.name, need)

    async def _start_engine(self, model: PooledModel) -> None:
        assert model.share is not None, "memory is booked before it is used"

        def on_progress(part: float) -> None:
            model.load_progress = part

        around = replace(
            self._around,
            is_shared=lambda: self._others_work(model),
            on_progress=on_progress,
            share=model.share,
            watch=self._watch,
            on_death=lambda: self._on_death(model),
        )
        metrics = None if model.past is None else model.past.metrics
        model.engine = self._new_engine(model.spec.config, around, metrics=metrics)
        await model.engine.start()
        model.become_ready(self._clock())
        logger.info("%s is ready, %.0f MiB", model.name, model.held_bytes / 2**20)

    def _others_work(self, model: PooledModel) -> bool:
        """Called more than once a step."""
        others = self._models.values()
        return any(other.engine.num_streams for other in others if other is not model and other.engine is not None)

    async def _unload(self, model: PooledModel, drain_timeout_s: float = 0.0) -> None:
        """Returns when the model is unloaded. Cancelling the caller does not stop the unload."""
        ends_s = self._clock() + drain_timeout_s
        if (task := self._loads.get(model.name)) is not None:
            # Also for 0 s: a task that is cancelled before it starts would run none of its code.
            await asyncio.wait((task,), timeout=drain_timeout_s if model.users and not self.is_stopping else 0.0)
            if not task.cancelling():  # a second time would end the clean-up after the first
                task.cancel()
            await asyncio.wait((task,))
        self._begin_unload(model, ends_s - self._clock())
        while model.state is ModelState.DRAINING:
            await self._changes.wait()

    def _begin_unload(self, model: PooledModel, drain_timeout_s: float) -> None:
        if model.is_ready:
            model.begin_drain()
            task = asyncio.create_task(self._stop_engine(model), name=f"unload {model.name}")
            self._unloads.add(task)
            task.add_done_callback(self._unloads.discard)
        if model.is_loaded:
            asyncio.get_running_loop().call_later(drain_timeout_s, model.drain_over.set)

    def _on_death(self, model: PooledModel) -> None:
        """The engine of the model has died: it is unloaded, and loaded again without a request if it is pinned or to be
        kept forever, else for the next request. The process must end if that would not help."""
        assert model.engine is not None, "a model that dies has an engine"
        reason = f"The engine of {model.name} has died: {model.engine.error or 'unknown reason'}."
        model.num_deaths += 1
        helps = self._around.thread.is_alive and self._around.ranks.group is None
        helps = helps and (self._count_death(model) < _MAX_DEATHS or self._others_work(model))
        if not helps:
            self._death = reason
            return
        logger.warning("%s The model is unloaded.", reason)
        is_kept = (model.spec.is_pinned and model.keep_alive_s != 0) or model.keep_alive_s == math.inf
        model.is_lost = model.is_ready and is_kept
        self._pause_loads(model, reason)
        self._begin_unload(model, 0.0)

    def _pause_loads(self, model: PooledModel, reason: str) -> None:
        """A model that dies again and again is not loaded again and again beside the streams of others."""
        now, pause_s = self._clock(), self._settings.retry_failed_s
        if now - model.died_s < pause_s and self._others_work(model):
            model.failure, model.retry_s = EngineDeadError(reason), now + pause_s
        model.died_s = now

    def _count_death(self, model: PooledModel) -> int:
        """How often engines have died since a request was answered. Several that die together have met one fault."""
        if any(self._clock() - other.died_s < _TOGETHER_S for other in self._models.values() if other is not model):
            return self._num_deaths
        finished = (engine.metrics.finished for engine in self.counted_engines())
        num_answers = sum(counts[FinishReason.STOP] + counts[FinishReason.LENGTH] for counts in finished)
        self._num_deaths = 1 if num_answers > self._num_answers else self._num_deaths + 1
        self._num_answers = num_answers
        return self._num_deaths

    async def _stop_engine(self, model: PooledModel) -> None:
        assert model.engine is not None, "a model that is drained has an engine"
        try:
            await model.drain_over.wait()
            if model.users:
                logger.warning("Unloading %s while %d requests use it: their time is over", model.name, model.num_users)
            await model.engine.stop()
            if model.engine.state is EngineState.DEAD:
                fault = await find_device_fault(self._around.thread)
                if fault is not None:
                    self._death = f"The device computes nothing any more: {fault}"
        finally:
            model.become_unloaded()
            logger.info("%s is unloaded", model.name)
            if model.is_lost and not self.is_stopping and self._clock() >= model.retry_s:
                self._load_task(model)
                with contextlib.suppress(InsufficientMemoryError):  # at once, before another load can take the room
                    model.share = None if model.need is None else self.budget.take(model.name, model.need)
            self._changes.notify()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.retry_lost()
            await self.expire_idle()


def build_pool(config: Config) -> ModelPool:
    """The pool that `config` describes, with nothing loaded. Raises `ConfigError`."""
    catalog, events = Catalog(config), open_events(config)
    for fault in catalog.missing():
        logger.warning("%s", fault)
    around = replace(Surroundings.alone(config.memory), events=events)
    if config.fleet.tensor_parallel_size > 1:
        from mlx_server.engine.distributed.leader import gather_ranks  # needs the extra `fleet`

        around = replace(around, ranks=gather_ranks(config, around.thread))
    budget = MemoryBudget.of(config.memory, around.ranks.read_memory)
    if around.disk is not None and events is not None:
        around.disk.store.on_change = events.on_disk_change
    return ModelPool(catalog, budget, config.pool, around)
