"""The policy of the pool: names, loads, eviction, turns, failure. Engines are fakes, memory is numbers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from mlx_server.config import Config, PoolConfig
from mlx_server.engine.distributed.ranks import Ranks
from mlx_server.engine.engine import EngineState
from mlx_server.engine.memory.budget import MemoryBudget, MemoryShare
from mlx_server.engine.memory.need import MemoryNeed
from mlx_server.engine.models import store
from mlx_server.engine.parts import Surroundings
from mlx_server.errors import (
    EngineDeadError,
    InsufficientMemoryError,
    InsufficientStorageError,
    ModelLoadError,
    ModelNotFoundError,
    OverloadedError,
)
from mlx_server.model_entries import ModelEntry
from mlx_server.observability.engine_metrics import EngineMetrics
from mlx_server.pool import model_pool
from mlx_server.pool.catalog import Catalog
from mlx_server.pool.model_pool import ModelPool
from mlx_server.pool.pooled_model import Lease, LoadResult, ModelState
from mlx_server.request import FinishReason
from mlx_server.runtime.memory import MemoryReading
from mlx_server.tiers import Tier
from tests.api.worlds import until

MIB = 2**20


@dataclass
class Engine:
    """Loads when `gate` is open and stops when `stop_gate` is; `refusal` is what it fails with."""

    name: str
    gate: asyncio.Event
    stop_gate: asyncio.Event
    around: Surroundings
    metrics: EngineMetrics
    refusal: Exception | None = None
    state: EngineState = EngineState.LOADING
    error: str | None = None
    num_streams: int = 0
    idle_kv_bytes: int = 0
    gives: bool = True
    gives_at_once: int = 2**62

    @property
    def share(self) -> MemoryShare | None:
        return self.around.share

    async def give_memory(self, num_bytes: int) -> int:
        if not self.gives:
            return 0
        given = min(num_bytes, self.idle_kv_bytes, self.gives_at_once)
        self.idle_kv_bytes -= given
        assert self.share is not None
        self.share.shrink(given)
        return given

    async def start(self) -> None:
        self.around.on_progress(0.25)
        await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        self.state = EngineState.READY

    def die(self) -> None:
        self.state, self.error = EngineState.DEAD, "bad luck"
        self.around.on_death()

    async def stop(self) -> None:
        await self.stop_gate.wait()
        if self.state is not EngineState.DEAD:
            self.state = EngineState.STOPPED


@dataclass
class Factory:
    """Makes engines, and stands for the MLX thread. `made` has every engine ever made, `refusals` what loading a model
    fails with; `fault` is the device's."""

    made: list[Engine] = field(default_factory=list)
    refusals: dict[str, Exception] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    stop_gate: asyncio.Event = field(default_factory=asyncio.Event)
    is_alive: bool = True
    fault: Exception | None = None

    def call(self, function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        if self.fault is None:
            future.set_result(function())
        else:
            future.set_exception(self.fault)
        return future

    def make(self, config: Config, around: Surroundings, *, metrics: EngineMetrics | None) -> Engine:
        name = config.model.served_model_name or ""
        engine = Engine(name, self.gate, self.stop_gate, around, metrics or EngineMetrics(10), self.refusals.get(name))
        self.made.append(engine)
        return engine

    def stop(self) -> None:
        self.is_alive = False

    def loads(self) -> list[str]:
        return [engine.name for engine in self.made]


class World:
    """Models of 100 MiB each in a budget for two, on a clock that stands still. Other programs use `others_mib` of
    the machine's memory of `total_mib`, of which `reserve_mib` are to stay free."""

    def __init__(
        self,
        *names: str,
        entries: tuple[ModelEntry, ...] = (),
        limit_mib: int = 200,
        total_mib: int = 2**21,
        others_mib: int = 0,
        reserve_mib: int = 0,
        **settings: Any,
    ):
        self.now_s = 1000.0
        self.need_mib: dict[str, int] = {}
        entries = entries or tuple(ModelEntry(id=name, model=f"/models/{name}") for name in names)
        config = Config(models=entries, pool=PoolConfig(**settings))
        self.factory = Factory()
        self.factory.gate.set()
        self.factory.stop_gate.set()
        self.pool = ModelPool(
            Catalog(config),
            MemoryBudget(limit_mib * MIB, reserve_mib * MIB, read=self._read),
            config.pool,
            Surroundings(self.factory),  # type: ignore[arg-type]
            new_engine=self.factory.make,  # type: ignore[arg-type]
            estimate=lambda config: MemoryNeed(self.need_mib.get(config.model.model, 100) * MIB, 0, 0),
            clock=lambda: self.now_s,
        )
        self._total_bytes, self._others_bytes = total_mib * MIB, others_mib * MIB

    def _read(self) -> MemoryReading:
        available = max(0, self._total_bytes - self._others_bytes - self.pool.budget.held_bytes)
        return MemoryReading(self._total_bytes, available, self._total_bytes, 0)

    async def use(self, name: str) -> None:
        """A short request."""
        self.now_s += 1.0
        (await self.pool.acquire(name)).end()

    def states(self) -> dict[str, str]:
        return {model.name: model.state.value for model in self.pool.models()}

    def loaded(self) -> set[str]:
        return {name for name, state in self.states().items() if state == "ready"}


@contextlib.asynccontextmanager
async def world_of(*names: str, **settings: Any) -> AsyncIterator[World]:
    world = World(*names, **settings)
    await world.pool.start()
    yield world
    world.factory.gate.set()
    await world.pool.stop(0.0)
    assert world.pool.budget.held_bytes == 0


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "found"), [(None, "a"), ("", "a"), ("a", "a"), ("/models/b", "b"), ("bee", "b")])
async def test_a_name_finds_its_model(name: str | None, found: str):
    entries = (ModelEntry(id="a", model="/models/a"), ModelEntry(id="b", model="/models/b", aliases=("bee",)))
    async with world_of(entries=entries) as world:
        with await world.pool.acquire(name) as engine:
            assert engine.name == found  # type: ignore[attr-defined]
        assert world.factory.loads() == [found]


async def test_one_model_is_found_as_it_was_configured_and_by_its_own_name():
    catalog = Catalog(Config())
    assert catalog.offer(None).spec == catalog.offer("smollm2").spec
    assert catalog.offer(None).spec.is_pinned


async def test_a_folder_that_two_models_serve_is_the_first_ones_name():
    catalog = Catalog(Config(models=(ModelEntry(id="a", model="/models/x"), ModelEntry(id="b", model="/models/x"))))
    assert [catalog.offer(name).spec.name for name in ("a", "b", "/models/x")] == ["a", "b", "a"]


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    "name",
    [
        *("../secret", "..", ".", "/", "models/../../secret", "inside/..", "../folder/inside", "inside/", "./inside"),
        *("~", "~root", "inside\0", "nested/deep", "file", "a/b", "%2e%2e/secret", "..\\secret", "hidden/inside"),
    ],
)
async def test_no_name_leads_out_of_the_folders_of_models(tmp_path: Path, name: str):
    model_folder(tmp_path / "secret")
    model_folder(tmp_path / "folder" / "inside")
    model_folder(tmp_path / "folder" / "nested" / "deep")
    (tmp_path / "folder" / "file").write_text("")
    async with world_of("a", model_folders=f"{tmp_path / 'folder'}:{tmp_path / 'none'}", pulled_models=True) as world:
        for asked in (name, str(tmp_path / "secret")):
            with pytest.raises(ModelNotFoundError):
                await world.pool.acquire(asked)
        assert (await world.pool.load("inside")).spec.root == str(tmp_path / "folder" / "inside")


async def test_folders_and_pulled_models_are_offered_only_where_they_are_asked_for(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    model_folder(tmp_path / "home" / "models" / "pulled")
    model_folder(tmp_path / "folder" / "own")
    closed, open_ = World("a"), World("a", model_folders=str(tmp_path / "folder"), pulled_models=True)
    assert [offer.name for offer in await closed.pool.offered()] == ["a"]
    assert [offer.name for offer in await open_.pool.offered()][:3] == ["a", "own", "pulled"]
    with pytest.raises(ModelNotFoundError):
        closed.pool.find("pulled")
    assert open_.pool.find("pulled").spec.root == str(tmp_path / "home" / "models" / "pulled")
    for world in (closed, open_):
        await world.pool.stop(0.0)


async def test_a_model_that_is_being_pulled_is_not_offered(tmp_path: Path, monkeypatch):
    """Lists of models are made of offers, each of which must be found."""
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    model_folder(tmp_path / "hub" / "models--owner--new" / "snapshots" / ("0" * 40))  # not yet named in refs/
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert store.pulled_names() == ["owner/new"]
    async with world_of("a", pulled_models=True) as world:
        assert [offer.name for offer in await world.pool.offered()] == ["a"]
        with pytest.raises(ModelNotFoundError, match=r"does not exist\. GET /v1/models lists"):
            await world.pool.acquire("owner/new-4bit")


async def test_a_model_of_the_hub_is_one_by_all_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    repo = tmp_path / "hub" / "models--owner--name"
    model_folder(repo / "snapshots" / ("c" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    entries = (ModelEntry(id="owner/name", model="owner/name", aliases=("mine",)), ModelEntry(id="b", model="b"))
    pages = ("hf.co/owner/name:latest", "https://huggingface.co/owner/name", "hf.co/owner/name", "owner/name:latest")
    async with world_of(entries=entries, pulled_models=True) as world:
        assert {world.pool.find(name).name for name in (*pages, "mine")} == {"owner/name"}
        assert [offer.name for offer in await world.pool.offered()] == ["owner/name", "b"]
    async with world_of("b", pulled_models=True) as world:
        assert {world.pool.find(name).name for name in pages} == {"owner/name"}
        assert [offer.name for offer in await world.pool.offered()] == ["b", "owner/name"]


async def test_names_in_settings_that_stand_for_nothing_are_reported(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    model_folder(tmp_path / "home" / "models" / "pulled")
    model_folder(tmp_path / "folder" / "own")
    adapter = {"adapter": f"terse={tmp_path}"}
    entries = (
        ModelEntry(id="a", model="/models/a", aliases=("b",), overrides=adapter),
        ModelEntry(id="c", model="o/c"),
    )
    served = ("a", "b", "/models/a", "a:terse", "b:terse", "o/c")
    tiers = {"all": Tier(name="all"), "some": Tier(name="some", models=(*served, "c:terse", "own", "pulled", "nope"))}

    def missing(**pool: Any) -> list[str]:
        return list(Catalog(Config(models=entries, tiers=tiers, pool=PoolConfig(**pool))).missing())

    found = missing()
    assert [sentence.split("`")[1] for sentence in found] == ["c:terse", "own", "pulled", "nope"]
    start = "[tiers.some] allows a model that is not served: The model `"
    assert all(sentence.startswith(start) for sentence in found)
    folders = [tmp_path / "folder", tmp_path / "none", tmp_path / ("x" * 300)]
    found = missing(model_folders=":".join(map(str, folders)), pulled_models=True)
    for folder in folders[1:]:
        assert found.pop(0) == f"model_folders names {folder}, which is not a folder that can be read."
    assert [sentence.split("`")[1] for sentence in found] == ["c:terse", "nope"]


# --- loading ----------------------------------------------------------------------------------------------------


async def test_all_who_wait_share_one_load():
    async with world_of("a") as world:
        world.factory.gate.clear()
        waiting = [asyncio.create_task(world.pool.acquire("a")) for _ in range(10)]
        await until(lambda: world.factory.made)
        assert world.states() == {"a": "loading"}
        await until(lambda: world.pool.find("a").load_progress == 0.25)
        waiting[0].cancel()
        world.factory.gate.set()
        leases = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(leases[0], asyncio.CancelledError)
        assert world.factory.loads() == ["a"]
        model = world.pool.find("a")
        assert (model.num_users, model.num_loads) == (9, 1)
        for lease in leases[1:]:
            assert isinstance(lease, Lease)
            lease.end()
            lease.end()
        assert model.num_users == 0


async def test_pinned_models_are_loaded_at_start_and_others_at_first_use():
    entries = (ModelEntry(id="a", model="a"), ModelEntry(id="b", model="b", pinned=True))
    async with world_of(entries=entries) as world:
        assert world.states() == {"a": "unloaded", "b": "ready"}
        assert not world.pool.is_starting


async def test_what_keeps_a_pinned_model_from_being_loaded_ends_the_start():
    world = World(entries=(ModelEntry(id="a", model="a", pinned=True),))
    world.factory.refusals["a"] = ModelLoadError("no weights")
    with pytest.raises(ModelLoadError, match="no weights"):
        await world.pool.start()
    assert world.pool.is_starting
    await world.pool.stop(0.0)


async def test_a_load_that_is_given_up_is_reported_and_can_be_repeated():
    async with world_of("a") as world:
        world.factory.gate.clear()
        waiting = asyncio.create_task(world.pool.acquire("a"))
        await until(lambda: world.factory.made)
        await world.pool.unload("a", 0.0)
        with pytest.raises(OverloadedError, match="was cancelled"):
            await waiting
        assert world.states() == {"a": "unloaded"}
        assert world.pool.budget.held_bytes == 0
        world.factory.gate.set()
        await world.use("a")


async def test_requests_that_wait_for_a_load_are_served_before_the_model_is_unloaded():
    async with world_of("a") as world:
        world.factory.gate.clear()
        waiting = [asyncio.create_task(world.pool.acquire("a")) for _ in range(2)]
        await until(lambda: world.factory.made)
        unloading = asyncio.create_task(world.pool.unload("a", 600.0))
        await asyncio.sleep(0.02)
        assert world.states() == {"a": "loading"}
        world.factory.gate.set()
        leases = await asyncio.gather(*waiting)
        await until(lambda: world.states() == {"a": "draining"})
        for lease in leases:
            lease.end()
        await unloading
        assert (world.states(), world.factory.loads()) == ({"a": "unloaded"}, ["a"])


@pytest.mark.parametrize("again", [True, False], ids=["asked again", "its time is over"])
async def test_a_load_that_takes_longer_than_an_unload_gives_it_is_given_up(again: bool):
    async with world_of("a") as world:
        world.factory.gate.clear()
        waiting = asyncio.create_task(world.pool.acquire("a"))
        await until(lambda: world.factory.made)
        unloading = asyncio.create_task(world.pool.unload("a", 600.0 if again else 0.01))
        await asyncio.sleep(0)
        if again:
            await world.pool.unload("a", 0.0)
        with pytest.raises(OverloadedError, match="was cancelled"):
            await waiting
        await unloading
        assert (world.states(), world.factory.loads()) == ({"a": "unloaded"}, ["a"])


async def test_an_unload_does_not_wait_for_a_load_that_nobody_waits_for():
    async with asyncio.timeout(20), world_of("a") as world:
        world.factory.gate.clear()
        waiting = asyncio.create_task(world.pool.acquire("a"))
        await until(lambda: world.factory.made)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await world.pool.unload("a", 600.0)
        assert world.states() == {"a": "unloaded"}


async def test_an_unload_ends_a_load_that_only_admins_asked_for():
    """Those wait for their own load, and no request does."""
    async with asyncio.timeout(20), world_of("a") as world:
        world.factory.gate.clear()
        loading = [asyncio.create_task(world.pool.load("a")) for _ in range(2)]
        await until(lambda: world.factory.made)
        assert world.pool.find("a").num_users == 0
        await world.pool.unload("a", 600.0)
        assert world.states() == {"a": "unloaded"}
        for load in loading:
            with pytest.raises(OverloadedError, match="was cancelled"):
                await load
        waiting = asyncio.create_task(world.pool.acquire("a"))
        await until(lambda: len(world.factory.made) == 2)
        loading = [asyncio.create_task(world.pool.load("a"))]
        unloading = asyncio.create_task(world.pool.unload("a", 600.0))
        await asyncio.sleep(0.02)
        world.factory.gate.set()
        assert (await loading[0]).name == "a"
        (await waiting).end()
        await unloading
        assert world.states() == {"a": "unloaded"}


async def test_a_load_of_a_model_that_is_ready_counts_as_a_use_of_it():
    async with world_of("a", idle_ttl_s=10.0) as world:
        await world.use("a")
        world.now_s += 9.0
        await world.pool.load("a")
        world.now_s += 9.0
        await world.pool.expire_idle()
        assert world.loaded() == {"a"}
        world.now_s += 1.0
        await world.pool.expire_idle()
        assert world.loaded() == set()


async def test_a_load_of_a_model_that_drains_begins_when_it_is_unloaded():
    async with asyncio.timeout(20), world_of("a") as world:
        lease, unload = await begin_drain(world)
        loading = asyncio.create_task(world.pool.load("a"))
        await asyncio.sleep(0.02)
        assert not loading.done()
        lease.end()
        await unload
        assert (await loading).state is ModelState.READY
        assert world.factory.loads() == ["a", "a"]


async def test_a_load_counts_in_the_time_of_an_unload_that_waits_for_it():
    async with asyncio.timeout(20), world_of("a") as world:
        world.factory.gate.clear()
        waiting = asyncio.create_task(world.pool.acquire("a"))
        await until(lambda: world.factory.made)
        unloading = asyncio.create_task(world.pool.unload("a", 600.0))
        await asyncio.sleep(0)
        world.now_s += 600.0
        world.factory.gate.set()
        lease = await waiting
        await unloading
        lease.end()


async def test_one_watch_is_kept_over_the_memory_of_all_models():
    async with world_of("a", "b") as world:
        for name in ("a", "b"):
            await world.use(name)
        first, second = (engine.around.watch for engine in world.factory.made)
        assert first is second


async def test_how_loads_end_is_counted():
    async with world_of("a", "b", limit_mib=100, when_full="fail", retry_failed_s=0.0) as world:
        world.factory.refusals["a"] = ModelLoadError("The weights are broken.")
        with pytest.raises(OverloadedError):
            await world.use("a")
        del world.factory.refusals["a"]
        world.factory.gate.clear()
        waiting = asyncio.create_task(world.pool.acquire("a"))
        await until(lambda: len(world.factory.made) == 2)
        await world.pool.unload("a", 0.0)
        with pytest.raises(OverloadedError):
            await waiting
        world.factory.gate.set()
        with await world.pool.acquire("a"), pytest.raises(OverloadedError):
            await world.pool.acquire("b")
        a, b = world.pool.models()
        assert a.loads == {"failed": 1, "given_up": 1, "ready": 1, "no_room": 0}
        assert b.loads == {"failed": 0, "given_up": 0, "ready": 0, "no_room": 1}
        assert (a.num_loads, b.num_loads) == (1, 0)


async def test_a_load_that_is_given_up_twice_is_cleaned_up_first(monkeypatch: pytest.MonkeyPatch):
    cleaning, may_end, ends = asyncio.Event(), asyncio.Event(), []

    async def start(self: Engine) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await may_end.wait()
            ends.append(self.name)

    monkeypatch.setattr(Engine, "start", start)
    async with world_of("a") as world:
        waiting = asyncio.create_task(world.pool.acquire("a"))
        await until(lambda: world.factory.made)
        await asyncio.sleep(0)
        unloads = [asyncio.create_task(world.pool.unload("a", 0.0))]
        await cleaning.wait()
        unloads.append(asyncio.create_task(world.pool.unload("a", 0.0)))
        await asyncio.sleep(0.02)
        assert world.pool.budget.held_bytes > 0, "what is loaded is not freed yet"
        may_end.set()
        await asyncio.gather(*unloads)
        assert ends == ["a"]
        with pytest.raises(OverloadedError, match="was cancelled"):
            await waiting


async def test_a_load_may_be_given_up_before_it_has_begun():
    async with world_of("a") as world:
        world.factory.gate.clear()
        waiting = asyncio.create_task(world.pool.acquire("a"))
        giving_up = asyncio.create_task(world.pool.unload("a", 0.0))
        with pytest.raises(OverloadedError, match="was cancelled"):
            await waiting
        await giving_up
        assert world.states() == {"a": "unloaded"}
        world.factory.gate.set()
        await world.use("a")


# --- failure ----------------------------------------------------------------------------------------------------


async def test_a_failure_is_remembered_for_a_while_and_harms_no_other_model(caplog: pytest.LogCaptureFixture):
    async with world_of("a", "b", retry_failed_s=30.0) as world:
        world.factory.refusals["a"] = ModelLoadError("The weights are broken.")
        waiting = [asyncio.create_task(world.pool.acquire("a")) for _ in range(3)]
        for refusal in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(refusal, OverloadedError)
            assert refusal.message.startswith("The model `a` is not loaded: The weights are broken.")
            assert refusal.retry_after_s == 30.0
        assert world.states()["a"] == "failed"
        assert str(world.pool.find("a").failure) == "The weights are broken."
        assert world.pool.budget.held_bytes == 0
        await world.use("b")
        del world.factory.refusals["a"]
        with pytest.raises(OverloadedError, match="weights are broken"):
            await world.use("a")
        assert world.factory.loads() == ["a", "b"]
        world.now_s += 30.0
        await world.use("a")
        assert world.pool.find("a").failure is None
        assert world.loaded() == {"a", "b"}


async def test_a_disk_that_is_too_small_is_named_as_such_and_tried_again_later():
    """As a pull is answered: clients need not try again by themselves."""
    async with world_of("a", retry_failed_s=30.0) as world:
        world.factory.refusals["a"] = InsufficientStorageError("The cache has 0.01 GB free.")
        for _ in range(2):
            with pytest.raises(InsufficientStorageError, match=r"`a` is not loaded: The cache has .* again in \d+ s"):
                await world.use("a")
        assert world.factory.loads() == ["a"]
        del world.factory.refusals["a"]
        world.now_s += 30.0
        await world.use("a")


async def test_an_explicit_load_does_not_wait_for_the_pause_to_end():
    async with world_of("a") as world:
        world.factory.refusals["a"] = RuntimeError("secret")
        with pytest.raises(OverloadedError, match="the server's log has the reason") as caught:
            await world.use("a")
        assert "secret" not in caught.value.message
        del world.factory.refusals["a"]
        assert (await world.pool.load("a")).state is ModelState.READY


# --- dead engines -----------------------------------------------------------------------------------------------


def pinned_and(*names: str) -> tuple[ModelEntry, ...]:
    others = (ModelEntry(id=name, model=f"/models/{name}") for name in names)
    return (ModelEntry(id="a", model="/models/a", pinned=True), *others)


async def test_three_deaths_in_a_row_without_an_answer_or_the_death_of_the_thread_end_everything():
    """Answers of any model count, those of earlier engines do not, nor do requests that were aborted."""
    async with world_of("a", "b") as world:
        for dies, answers, ended in (
            ("a", "a", FinishReason.STOP),
            ("a", "a", FinishReason.ERROR),
            ("a", "b", FinishReason.LENGTH),
            ("b", "b", FinishReason.ERROR),
            ("a", "a", FinishReason.ABORT),
        ):
            assert world.pool.death() is None
            for name in ("a", "b"):
                await world.use(name)
            alive = {engine.name: engine for engine in world.factory.made}
            alive[answers].metrics.finished[ended] += 1
            alive[dies].die()
        assert world.pool.death() == "The engine of a has died: bad luck."
        assert [world.pool.find(name).num_deaths for name in "ab"] == [4, 1]
        for name in ("a", "b"):
            with pytest.raises(EngineDeadError, match="bad luck"):
                await world.pool.acquire(name)
    world = World("a")
    world.factory.is_alive = False
    assert world.pool.death() == "The MLX thread has ended."


async def test_a_model_that_dies_again_and_again_does_not_end_the_streams_of_others():
    async with world_of("a", "b") as world:
        with await world.pool.acquire("b") as b:
            b.num_streams = 1
            for _ in range(5):
                await world.use("a")
                world.factory.made[-1].die()
                assert world.pool.death() is None
                world.now_s += 30.0
            b.num_streams = 0
        await world.use("a")
        world.factory.made[-1].die()
        assert world.pool.death() is not None


async def test_several_models_that_die_together_have_met_one_fault():
    """As of a device, whose error fails the steps of all models."""
    async with world_of("a", "b") as world:
        for num_faults in (1, 2, 3):
            for name in "ab":
                await world.use(name)
            for engine in world.factory.made[-2:]:
                assert (world.pool.death() is None) == (num_faults < 3 or engine is world.factory.made[-2])
                engine.die()
        assert world.pool.death() is not None


@pytest.mark.parametrize("is_pinned", [True, False])
async def test_a_model_that_dies_again_and_again_is_loaded_after_a_pause_beside_streams_of_others(is_pinned: bool):
    async with world_of(entries=pinned_and("b")) if is_pinned else world_of("a", "b") as world:

        async def dies() -> None:
            with await world.pool.acquire("a") as a:
                a.die()
            await until(lambda: world.states()["a"] != "draining")

        with await world.pool.acquire("b") as b:
            b.num_streams = 1
            await dies()
            world.now_s += 29.0
            await dies()
            for waited_s in (0.0, 29.0):
                world.now_s += waited_s
                world.pool.retry_lost()
                with pytest.raises(OverloadedError) as refused:
                    await world.pool.acquire("a")
                assert str(refused.value) == (
                    "The model `a` is not loaded: The engine of a has died: bad luck. "
                    f"It may be tried again in {30 - waited_s:.0f} s."
                )
                assert refused.value.retry_after_s == 30.0 - waited_s
            world.now_s += 1.0
            world.pool.retry_lost()
            assert world.states()["a"] == ("loading" if is_pinned else "unloaded")
            await dies()
            assert world.pool.find("a").failure is None, "the last death was long ago"
            await dies()
            await world.pool.load("a")
            b.num_streams = 0
            await dies()
            assert world.pool.find("a").failure is None, "nobody else is streaming"


async def test_a_death_on_a_broken_device_ends_everything():
    """The device is asked after each death, but not when a model is unloaded."""
    async with world_of("a") as world:
        world.factory.fault = RuntimeError("[METAL] Ignored")
        await world.use("a")
        await world.pool.unload("a", 0.0)
        assert world.pool.death() is None
        await world.use("a")
        world.factory.made[-1].die()
        await until(lambda: world.states()["a"] == "unloaded")
        assert world.pool.death() == "The device computes nothing any more: [METAL] Ignored"


async def test_an_engine_that_dies_is_replaced():
    """At once if the model is pinned, else at the next request; other models go on. Counts continue."""
    async with world_of(entries=pinned_and("b")) as world:
        await world.use("b")
        first_a, first_b = world.factory.made
        first_a.die()
        first_b.die()
        assert world.pool.death() is None
        with await world.pool.acquire("b") as engine:
            assert engine.metrics is first_b.metrics
        await until(lambda: world.loaded() == {"a", "b"})
        assert sorted(world.factory.loads()) == ["a", "a", "b", "b"]


async def test_a_model_that_nobody_pinned_is_loaded_again_only_for_a_request():
    async with world_of("a") as world:
        await world.use("a")
        world.factory.made[0].die()
        await until(lambda: world.states() == {"a": "unloaded"})
        world.pool.retry_lost()
        assert world.states() == {"a": "unloaded"}
        assert world.pool.budget.held_bytes == 0
        await world.use("a")
        assert world.loaded() == {"a"}


async def test_a_model_that_is_to_be_kept_forever_is_loaded_again_and_kept():
    async with world_of("a", idle_ttl_s=10.0) as world:
        await world.use("a")
        world.pool.keep_alive("a", math.inf)
        world.factory.made[0].die()
        await until(lambda: len(world.factory.made) == 2 and world.loaded() == {"a"})
        world.now_s += 1000.0
        await world.pool.expire_idle()
        assert world.loaded() == {"a"}
        await world.pool.unload("a", 0.0)
        await world.use("a")
        world.now_s += 10.0
        await world.pool.expire_idle()
        assert world.loaded() == set()


async def test_a_pinned_model_that_cannot_be_loaded_again_is_tried_until_it_can():
    async with world_of(entries=pinned_and()) as world:
        world.factory.refusals["a"] = ModelLoadError("the disk is asleep")
        world.factory.made[0].die()
        await until(lambda: world.states() == {"a": "failed"})
        world.pool.retry_lost()
        assert world.factory.loads() == ["a", "a"], "not before the pause between loads has passed"
        for num_loads in (3, 4):
            world.now_s += 30.0
            world.pool.retry_lost()
            await until(lambda: world.states() == {"a": "failed"})
            assert len(world.factory.made) == num_loads
        del world.factory.refusals["a"]
        world.now_s += 30.0
        world.pool.retry_lost()
        await until(lambda: world.loaded() == {"a"})
        world.pool.retry_lost()
        assert len(world.factory.made) == 5


async def test_the_pool_itself_tries_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_pool, "_SWEEP_S", 0.001)
    async with world_of(entries=pinned_and()) as world:
        world.factory.refusals["a"] = ModelLoadError("the disk is asleep")
        world.factory.made[0].die()
        await until(lambda: world.states() == {"a": "failed"})
        del world.factory.refusals["a"]
        world.now_s += 30.0
        await until(lambda: world.loaded() == {"a"})


async def test_a_pinned_model_that_finds_no_room_again_is_tried_after_a_pause():
    async with world_of(entries=pinned_and("b"), when_full="fail") as world:
        lease = await world.pool.acquire("b")
        world.factory.refusals["a"] = ModelLoadError("the disk is asleep")
        world.factory.made[0].die()
        await until(lambda: world.states()["a"] == "failed")
        del world.factory.refusals["a"]
        world.need_mib["/models/a"] = 150
        for num_tries in (1, 2):
            world.now_s += 30.0
            for _ in range(3):
                world.pool.retry_lost()
                await until(lambda: world.states()["a"] == "unloaded")
            assert world.pool.find("a").loads[LoadResult.NO_ROOM] == num_tries
        lease.end()
        world.now_s += 30.0
        world.pool.retry_lost()
        await until(lambda: world.loaded() == {"a"})


async def test_a_load_that_waits_for_room_does_not_get_that_of_a_pinned_model_that_died():
    async with world_of(entries=pinned_and("b", "c")) as world:
        lease = await world.pool.acquire("b")
        waiting = asyncio.create_task(world.pool.acquire("c"))
        await until(lambda: world.states()["c"] == "loading")
        await asyncio.sleep(0.02)
        world.factory.made[0].die()
        await until(lambda: world.loaded() == {"a", "b"})
        assert world.states()["c"] == "loading"
        lease.end()
        (await waiting).end()
        assert world.loaded() == {"a", "c"}


@pytest.mark.parametrize("asked", ["unload", "unload before", "keep alive 0 before", "keep alive 0 after"])
async def test_a_pinned_model_that_was_asked_to_go_is_not_loaded_again(asked: str):
    async with world_of(entries=pinned_and()) as world:
        if asked == "keep alive 0 before":
            world.pool.keep_alive("a", 0.0)
        world.factory.stop_gate.clear()
        unload = asyncio.create_task(world.pool.unload("a", 9.0)) if asked == "unload before" else None
        await asyncio.sleep(0.01)
        world.factory.made[0].die()
        world.factory.stop_gate.set()
        if unload is not None:
            await unload
        if asked == "unload":
            await world.pool.unload("a", 0.0)
        elif asked == "keep alive 0 after":
            world.pool.keep_alive("a", 0.0)
        await until(lambda: world.states() == {"a": "unloaded"})
        world.now_s += 60.0
        world.pool.retry_lost()
        assert world.factory.loads() == ["a"]


async def test_a_pool_that_has_stopped_leaves_no_task():
    async with world_of("a") as world:
        await world.use("a")
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_engine_that_dies_during_a_stop_is_not_replaced():
    world = World(entries=pinned_and())
    await world.pool.start()
    world.factory.made[0].die()
    await world.pool.stop(0.0)
    assert world.factory.loads() == ["a"]
    assert world.pool.budget.held_bytes == 0


@pytest.mark.parametrize("why", ["the thread has ended", "several machines"])
async def test_what_a_load_would_not_mend_is_not_loaded_again(why: str):
    async with world_of(entries=pinned_and()) as world:
        world.factory.is_alive = why != "the thread has ended"
        if why == "several machines":
            ranks = Ranks()
            ranks.group = object()  # type: ignore[assignment]
            world.pool._around = replace(world.pool._around, ranks=ranks)
        world.factory.made[0].die()
        assert world.pool.death() == "The engine of a has died: bad luck."
        assert world.factory.loads() == ["a"]


# --- eviction ---------------------------------------------------------------------------------------------------


async def test_the_model_that_was_used_least_recently_makes_room():
    async with world_of("a", "b", "c") as world:
        for name in ("a", "b", "a", "c"):
            await world.use(name)
        assert world.loaded() == {"a", "c"}
        await world.use("b")
        assert world.loaded() == {"b", "c"}
        assert world.factory.loads() == ["a", "b", "c", "b"]
        assert world.pool.budget.held_bytes == 200 * MIB


async def test_pinned_models_and_those_in_use_stay():
    entries = (
        ModelEntry(id="a", model="a", pinned=True),
        *(ModelEntry(id=name, model=name) for name in "bcd"),
    )
    async with world_of(entries=entries, limit_mib=300, when_full="fail") as world:
        busy = await world.pool.acquire("b")
        await world.use("c")
        await world.use("d")
        assert world.loaded() == {"a", "b", "d"}
        busy.end()
        also_busy = await world.pool.acquire("d")
        await world.use("c")
        assert world.loaded() == {"a", "c", "d"}
        also_busy.end()


@pytest.mark.parametrize(("limit_mib", "pinned"), [(50, False), (150, True)])
async def test_what_can_never_fit_is_refused_with_the_numbers_and_evicts_nobody(limit_mib: int, pinned: bool):
    entries = (ModelEntry(id="a", model="a", pinned=pinned), ModelEntry(id="b", model="b"))
    world = World(entries=entries, limit_mib=limit_mib)
    world.need_mib["a"] = 40 if not pinned else 100
    await world.pool.start()
    await world.use("a")
    for _ in range(2):
        with pytest.raises(InsufficientMemoryError, match=rf"model b needs 100 MiB .* the limit is {limit_mib} MiB"):
            await world.use("b")
    assert world.states() == {"a": "ready", "b": "failed"}
    await world.pool.stop(0.0)


@pytest.mark.parametrize(
    ("asked_mib", "others_mib", "reserve_mib"),
    [(500, 700, 0), (100, 850, 100)],
    ids=["idle models are not enough", "more than the reserve is used"],
)
async def test_where_other_programs_leave_too_little_nobody_is_evicted_in_vain(
    asked_mib: int, others_mib: int, reserve_mib: int
):
    free = {"limit_mib": 1000, "total_mib": 1000, "others_mib": others_mib, "reserve_mib": reserve_mib}
    async with world_of(entries=own_names("a", "b"), **free) as world:
        world.need_mib["b"] = asked_mib
        world.need_mib["a"] = 50
        await world.use("a")
        with pytest.raises(InsufficientMemoryError, match=rf"model b needs {asked_mib} MiB"):
            await world.use("b")
        assert world.states() == {"a": "ready", "b": "failed"}


async def test_with_fail_a_model_that_needs_the_memory_of_busy_ones_is_refused_at_once():
    async with world_of("a", "b", "c", when_full="fail") as world:
        leases = [await world.pool.acquire(name) for name in ("a", "b")]
        with pytest.raises(OverloadedError, match=r"needs 100 MiB, 0 MiB are .*: a \(100 MiB\), b \(100 MiB\)"):
            await world.pool.acquire("c")
        assert world.states() == {"a": "ready", "b": "ready", "c": "unloaded"}
        leases[0].end()
        await world.use("c")
        assert world.loaded() == {"b", "c"}
        leases[1].end()


async def test_with_wait_it_is_loaded_as_soon_as_one_is_idle():
    async with world_of("a", "b", "c") as world:
        leases = [await world.pool.acquire(name) for name in ("a", "b")]
        waiting = asyncio.create_task(world.pool.acquire("c"))
        await asyncio.sleep(0.02)
        assert world.states()["c"] == "loading"
        leases[1].end()
        (await waiting).end()
        assert world.loaded() == {"a", "c"}
        leases[0].end()


def own_names(*names: str) -> tuple[ModelEntry, ...]:
    """Models that lie where their names say, so that tests can give each a size."""
    return tuple(ModelEntry(id=name, model=name) for name in names)


async def test_blocks_that_are_not_given_back_after_all_are_waited_for():
    """Those of a would be enough for b; while they were asked for, a request took them, and nobody is idle."""
    async with world_of(entries=own_names("a", "b")) as world:
        world.need_mib |= {"a": 200, "b": 200}
        busy = await world.pool.acquire("a")
        world.factory.made[0].idle_kv_bytes, world.factory.made[0].gives = 200 * MIB, False
        waiting = asyncio.create_task(world.pool.acquire("b"))
        await until(lambda: world.states()["b"] == "loading")
        await asyncio.sleep(0.02)
        assert world.states() == {"a": "ready", "b": "loading"}
        busy.end()
        (await waiting).end()
        assert world.loaded() == {"b"}


async def test_a_small_model_does_not_wait_behind_the_search_of_a_large_one():
    """c needs the room of a, which is in use; b fits beside a."""
    async with world_of(entries=own_names("a", "b", "c")) as world:
        world.need_mib |= {"b": 50, "c": 150}
        busy = await world.pool.acquire("a")
        waiting = asyncio.create_task(world.pool.acquire("c"))
        await until(lambda: world.states()["c"] == "loading")
        await asyncio.sleep(0.02)
        async with asyncio.timeout(5):
            await world.use("b")
        assert world.states() == {"a": "ready", "b": "ready", "c": "loading"}
        busy.end()
        (await waiting).end()
        assert world.loaded() == {"b", "c"}


async def test_a_model_that_may_take_the_place_of_an_idle_one_does_not_wait_either():
    async with world_of(entries=own_names("a", "b", "c", "d")) as world:
        world.need_mib |= {"d": 200}
        await world.use("b")
        busy = await world.pool.acquire("a")
        waiting = asyncio.create_task(world.pool.acquire("d"))
        await until(lambda: world.states()["d"] == "loading")
        await asyncio.sleep(0.02)
        async with asyncio.timeout(5):
            await world.use("c")
        assert world.loaded() == {"a", "c"}
        busy.end()
        (await waiting).end()
        assert world.loaded() == {"d"}


async def test_small_models_that_go_ahead_starve_no_large_one():
    """Each is always wanted; the large one gets its room all the same, and the others theirs after it."""
    async with world_of(entries=own_names("a", "b", "large"), residency_s=0.0) as world:
        world.need_mib |= {"large": 200}
        served = {"a": 0, "b": 0}
        is_over = False

        async def keep_asking(name: str) -> None:
            while not is_over:
                world.now_s += 0.01
                with await world.pool.acquire(name):
                    await asyncio.sleep(0.001)
                served[name] += 1

        asking = [asyncio.create_task(keep_asking(name)) for name in ("a", "b") * 2]
        try:
            await until(lambda: min(served.values()) > 5)
            async with asyncio.timeout(5):
                (await world.pool.acquire("large")).end()
            before = dict(served)
            await until(lambda: min(served[name] - before[name] for name in served) > 5)
        finally:
            is_over = True
            await asyncio.gather(*asking)


async def test_a_search_waits_for_a_model_that_is_being_loaded_beside_it():
    async with world_of(entries=own_names("a", "b", "c")) as world:
        world.need_mib |= {"c": 200}
        world.factory.gate.clear()
        loading = asyncio.create_task(world.pool.acquire("a"))
        await until(lambda: world.factory.made)
        waiting = asyncio.create_task(world.pool.acquire("c"))
        await asyncio.sleep(0.02)
        assert world.states()["c"] == "loading"
        world.factory.gate.set()
        (await loading).end()
        (await waiting).end()
        assert world.loaded() == {"c"}


async def test_waiting_has_an_end():
    async with world_of("a", "b", "c", room_timeout_s=0.05) as world:
        leases = [await world.pool.acquire(name) for name in ("a", "b")]
        waiting = asyncio.create_task(world.pool.acquire("c"))
        await until(lambda: world.states()["c"] == "loading")
        world.now_s += 1.0
        with pytest.raises(OverloadedError, match="in use"):
            await waiting
        for lease in leases:
            lease.end()


async def test_models_that_wait_one_behind_the_other_wait_no_longer_than_one():
    async with world_of("a", "b", "c", "d", "e", room_timeout_s=60.0) as world:
        leases = [await world.pool.acquire(name) for name in ("a", "b")]
        waiting = [asyncio.create_task(world.pool.acquire(name)) for name in ("c", "d", "e")]
        await until(lambda: [world.states()[name] for name in ("c", "d", "e")] == ["loading"] * 3)
        await asyncio.sleep(0.02)
        world.now_s += 60.0
        leases[0].end()
        (await waiting[0]).end()
        leases.append(await world.pool.acquire("c"))
        for other in waiting[1:]:
            with pytest.raises(OverloadedError, match="in use"):
                await other
        for lease in leases[1:]:
            lease.end()


async def test_a_busy_model_yields_when_its_time_is_over():
    """a is never idle, for there is always a new request; b waits for its turn all the same. New requests for a go on
    as long as those from before it yielded."""
    async with world_of("a", "b", limit_mib=100, residency_s=0.05) as world:
        first = await world.pool.acquire("a")
        waiting = asyncio.create_task(world.pool.acquire("b"))
        await asyncio.sleep(0.02)
        second = await world.pool.acquire("a")
        first.end()
        world.now_s += 0.05
        second_again = await world.pool.acquire("a")
        second.end()
        await until(lambda: world.pool.find("a").is_yielding)
        beside = await asyncio.wait_for(world.pool.acquire("a"), 1.0)
        second_again.end()
        late = asyncio.create_task(world.pool.acquire("a"))
        await asyncio.sleep(0.02)
        assert not late.done()
        beside.end()
        lease = await waiting
        assert world.loaded() == {"b"}
        lease.end()
        (await late).end()
        assert world.factory.loads() == ["a", "b", "a"]


@pytest.mark.parametrize("how", ["open for 50 s", "ended after 50 s"])
async def test_a_model_that_yields_takes_only_what_can_end_in_time(how: str):
    """Requests for a have taken 50 s, and b waits for up to 120 s: new ones for a are taken for 70 s."""
    async with world_of("a", "b", limit_mib=100, residency_s=10.0, room_timeout_s=120.0) as world:
        long = await world.pool.acquire("a")
        world.now_s += 50.0
        if how == "ended after 50 s":
            first, _ = await world.pool.acquire("a"), long.end()
        else:
            first = long
        waiting = asyncio.create_task(world.pool.acquire("b"))
        await until(lambda: world.pool.find("a").is_yielding)
        world.now_s += 69.0
        (await asyncio.wait_for(world.pool.acquire("a"), 1.0)).end()
        world.now_s += 1.0
        late = asyncio.create_task(world.pool.acquire("a"))
        await asyncio.sleep(0.02)
        assert not late.done()
        first.end()
        (await waiting).end()
        (await late).end()
        assert world.factory.loads() == ["a", "b", "a"]


async def test_a_model_that_yields_remembers_how_long_its_requests_take():
    """a takes what can end within the 120 s for which b waits, by what has ended since a yielded and before."""
    async with world_of("a", "b", limit_mib=100, residency_s=10.0, room_timeout_s=120.0) as world:

        async def yields_to_b() -> asyncio.Task[Lease]:
            world.now_s += 10.0
            waiting = asyncio.create_task(world.pool.acquire("b"))
            await until(lambda: world.pool.find("a").is_yielding)
            return waiting

        async def ask_late() -> asyncio.Task[Lease]:
            late = asyncio.create_task(world.pool.acquire("a"))
            await asyncio.sleep(0.02)
            assert not late.done()
            return late

        first, second = await world.pool.acquire("a"), await world.pool.acquire("a")
        waiting = await yields_to_b()
        world.now_s += 59.0
        first.end()  # after 69 s, so that 51 s would have been the time for new ones
        late = await ask_late()
        second.end()
        (await waiting).end()
        lease = await late
        waiting = await yields_to_b()
        world.now_s += 50.0
        (await asyncio.wait_for(world.pool.acquire("a"), 1.0)).end()
        world.now_s += 1.0
        late = await ask_late()
        lease.end()
        (await waiting).end()
        (await late).end()
        assert world.factory.loads() == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize("asked", ["by requests", "by an admin"])
async def test_room_is_made_for_nobody_who_has_gone(asked: str):
    """a was to yield to b, whose last request goes. What an admin asked for is loaded all the same."""
    async with world_of("a", "b", limit_mib=100, residency_s=0.0) as world:
        lease = await world.pool.acquire("a")
        ask = world.pool.acquire if asked == "by requests" else world.pool.load
        waiting = [asyncio.create_task(ask("b")) for _ in range(2)]
        await until(lambda: world.pool.find("a").is_yielding)
        first, lease = lease, await world.pool.acquire("a")
        first.end()
        late = asyncio.create_task(world.use("a"))
        waiting.pop().cancel()
        await asyncio.sleep(0.02)
        assert not late.done()
        waiting.pop().cancel()
        if asked == "by an admin":
            await asyncio.sleep(0.02)
            assert not late.done()
            lease.end()
        await late
        assert world.factory.loads() == (["a"] if asked == "by requests" else ["a", "b", "a"])
        assert world.pool.find("b").loads[LoadResult.GIVEN_UP] == (asked == "by requests")
        lease.end()
        await world.use("b")


async def test_a_request_that_comes_after_all_others_have_gone_is_served():
    """b waits behind c to make room, and nobody waits for b for a while."""
    async with world_of("a", "b", "c", limit_mib=100) as world:
        lease = await world.pool.acquire("a")
        first = asyncio.create_task(world.pool.acquire("c"))
        await asyncio.sleep(0.02)
        gone = asyncio.create_task(world.pool.acquire("b"))
        await asyncio.sleep(0.02)
        gone.cancel()
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(world.use("b"))
        await asyncio.sleep(0.02)
        lease.end()
        (await first).end()
        await waiting
        assert world.factory.loads() == ["a", "c", "b"]


async def test_what_was_loaded_for_someone_is_not_evicted_before_he_has_used_it():
    async with world_of("a", "b", limit_mib=100) as world:
        for _ in range(5):
            await asyncio.gather(*(world.use(name) for name in ("a", "b") * 5))
        assert len(world.factory.loads()) <= 10


def grow(world: World, name: str, mib: int) -> None:
    """The model's KV pool has so much more, all of it idle."""
    model = world.pool.find(name)
    assert model.share is not None
    assert model.share.grow(mib * MIB)
    model.engine.idle_kv_bytes += mib * MIB  # type: ignore[union-attr, misc]


async def test_idle_blocks_go_before_models_and_only_as_many_as_are_needed():
    async with world_of("a", "b", "c", limit_mib=300) as world:
        for name in "ab":
            await world.use(name)
        grow(world, "a", 30)
        grow(world, "b", 60)
        lease = await world.pool.acquire("b")
        await world.use("c")
        assert world.loaded() == {"a", "b", "c"}
        assert [world.pool.find(name).held_bytes // MIB for name in "abc"] == [100, 100, 100]
        lease.end()


async def test_blocks_that_are_given_in_pieces_are_asked_for_again():
    async with world_of("a", "b", "c", limit_mib=300) as world:
        for name in "ab":
            await world.use(name)
        grow(world, "b", 30)
        world.factory.made[1].gives_at_once = 20 * MIB
        await world.use("c")
        assert world.loaded() == {"a", "b", "c"}
        assert world.pool.find("b").held_bytes == 100 * MIB


async def test_blocks_stay_where_they_would_not_be_enough():
    async with world_of("a", "b", "c", limit_mib=250) as world:
        await world.use("a")
        await world.use("b")
        grow(world, "b", 40)
        await world.use("c")
        assert world.loaded() == {"b", "c"}
        assert world.pool.find("b").held_bytes == 140 * MIB


async def test_what_a_pinned_model_does_not_need_counts_as_room():
    entries = (ModelEntry(id="a", model="a", pinned=True), *(ModelEntry(id=name, model=name) for name in "bc"))
    async with world_of(entries=entries, limit_mib=300) as world:
        world.need_mib |= {"b": 50, "c": 180}
        await world.use("b")
        grow(world, "a", 150)
        await world.use("c")
        assert world.loaded() == {"a", "c"}
        assert world.pool.find("a").held_bytes // MIB == 120


async def test_idle_models_go_after_their_time_and_pinned_or_busy_ones_never():
    entries = (
        ModelEntry(id="a", model="a", pinned=True),
        ModelEntry(id="b", model="b"),
        ModelEntry(id="c", model="c", idle_ttl_s=5.0),
        ModelEntry(id="d", model="d", idle_ttl_s=0.0),
    )
    async with world_of(entries=entries, limit_mib=400, idle_ttl_s=20.0) as world:
        for name in "bcd":
            await world.use(name)
        lease = await world.pool.acquire("c")
        world.now_s += 10.0
        await world.pool.expire_idle()
        assert world.loaded() == {"a", "b", "c", "d"}
        lease.end()
        world.now_s += 5.0
        await world.pool.expire_idle()
        assert world.loaded() == {"a", "b", "d"}
        world.now_s += 1000.0
        await world.pool.expire_idle()
        assert world.loaded() == {"a", "d"}


async def test_a_loaded_model_whose_folder_has_gone_is_used_and_unloaded_by_its_name(tmp_path: Path):
    folder = model_folder(tmp_path / "folder" / "inside")
    async with world_of("a", model_folders=str(tmp_path / "folder")) as world:
        await world.use("inside")
        (folder / "config.json").unlink()
        folder.rmdir()
        await world.use("inside")
        assert world.pool.look_up("inside") is not None
        assert (await world.pool.unload("inside", 0.0)).state is ModelState.UNLOADED
        with pytest.raises(ModelNotFoundError):
            await world.use("inside")


# --- what engines are told and keep --------------------------------------------------------------------------------


async def test_an_engine_knows_when_others_have_work_and_continues_the_counts_of_the_one_before():
    async with world_of("a", "b") as world:
        await world.use("a")
        await world.use("b")
        a, b = world.factory.made
        a_is_shared, b_is_shared = (engine.around.is_shared for engine in world.factory.made)
        assert not a_is_shared()
        a.num_streams = 1
        assert not a_is_shared()
        assert b_is_shared()
        await world.pool.unload("a", 0.0)
        assert not b_is_shared()
        assert world.pool.engines() == (b,)
        assert world.pool.counted_engines() == (a, b)
        await world.use("a")
        assert world.factory.made[2].metrics is a.metrics
        assert b.metrics is not a.metrics


# --- the end ----------------------------------------------------------------------------------------------------


async def test_an_unloaded_model_is_loaded_for_the_next_request():
    async with world_of("a") as world:
        await world.use("a")
        for _ in range(2):
            assert (await world.pool.unload("a", 600.0)).state is ModelState.UNLOADED
        await world.use("a")
        assert world.factory.loads() == ["a", "a"]


async def begin_drain(world: World) -> tuple[Lease, asyncio.Task[Any]]:
    """A request that uses the model `a`, and an unload that waits for it: up to ten minutes, by the real clock."""
    lease = await world.pool.acquire("a")
    unload = asyncio.create_task(world.pool.unload("a", 600.0))
    await until(lambda: world.states()["a"] == "draining")
    return lease, unload


async def test_unloading_waits_for_all_who_use_the_model_and_then_for_nobody():
    """Whether they have streams in the engine or not yet. Who comes later waits for the next load."""
    async with world_of("a") as world:
        other = await world.pool.acquire("a")
        lease, unload = await begin_drain(world)
        late = asyncio.create_task(world.pool.acquire("a"))
        other.end()
        await asyncio.sleep(0.02)
        assert (world.states()["a"], world.factory.made[0].state) == ("draining", EngineState.READY)
        assert not late.done()
        lease.end()
        await unload
        assert world.factory.made[0].state is EngineState.STOPPED
        (await late).end()
        assert world.factory.loads() == ["a", "a"]


@pytest.mark.parametrize("ends", ["time", "death", "unload", "stop"])
async def test_a_drain_ends_without_those_who_use_the_model(ends: str):
    async with world_of("a") as world:
        lease, unload = await begin_drain(world)
        if ends == "time":
            await world.pool.unload("a", 0.01)
        elif ends == "death":
            world.factory.made[0].die()
        elif ends == "unload":
            await world.pool.unload("a", 0.0)
        else:
            await world.pool.stop(0.0)
        assert (await unload).state is ModelState.UNLOADED
        lease.end()


async def test_a_drain_does_not_become_longer_by_asking_again_nor_by_the_time_of_an_earlier_one():
    async with world_of("a") as world:
        (await world.pool.acquire("a")).end()
        await world.pool.unload("a", 0.02)
        lease, unload = await begin_drain(world)
        await asyncio.sleep(0.04)
        assert not unload.done(), "the time of the first one is over"
        shorter, longer = (asyncio.create_task(world.pool.unload("a", time_s)) for time_s in (0.01, 300.0))
        await asyncio.gather(unload, shorter, longer)
        lease.end()


async def test_stopping_refuses_who_waits_and_frees_everything():
    world = World("a", "b", limit_mib=100)
    await world.pool.start()
    lease = await world.pool.acquire("a")
    waiting = asyncio.create_task(world.pool.acquire("b"))
    await asyncio.sleep(0.02)
    stopping = asyncio.create_task(world.pool.stop(600.0))
    with pytest.raises(OverloadedError, match="shutting down; send the request elsewhere"):
        await waiting
    with pytest.raises(OverloadedError, match="shutting down"):
        await world.pool.acquire("a")
    assert (world.states(), world.factory.is_alive) == ({"a": "draining", "b": "unloaded"}, True)
    lease.end()
    await stopping
    assert (world.states(), world.factory.is_alive) == ({"a": "unloaded", "b": "unloaded"}, False)


async def test_a_download_keeps_nobody_from_stopping():
    world = World("a")
    await world.pool.start()
    gate = threading.Event()
    world.pool._estimate = lambda config: MemoryNeed(int(gate.wait(30)), 0, 0)
    waiting = asyncio.create_task(world.pool.acquire("a"))
    await until(lambda: world.states() == {"a": "loading"})
    await world.pool.stop(0.0)
    with pytest.raises(OverloadedError, match="shutting down"):
        await waiting
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "background"]
    assert thread.daemon
    gate.set()
    await asyncio.to_thread(thread.join)
