"""One budget for all models, and what a model does as the machine's memory fills up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_threads import run_virtually

from mlx_server.config import Config, MemoryConfig, ModelConfig, load_config
from mlx_server.engine.memory.budget import MemoryBudget
from mlx_server.engine.memory.guard import KvMemory, MemoryGuard, MemoryWatch, PressureLevel
from mlx_server.engine.memory.need import MemoryNeed, estimate_need, step_bytes
from mlx_server.errors import ConfigError, InsufficientMemoryError
from mlx_server.outputs import ModelRunnerOutput
from mlx_server.runtime.memory import MemoryReading
from tests.batching.worlds import FakeStore, World, make_request, make_scheduler

MIB = 2**20


def reading(available: int, total: int = 1000, device: int = 1000, device_used: int = 0) -> MemoryReading:
    """In MiB."""
    return MemoryReading(total * MIB, available * MIB, device * MIB, device_used * MIB)


def metal_reading(available: int, active: int) -> MemoryReading:
    """In MiB, of a Mac with 1,000 MiB, of which MLX's arrays take `active`."""
    return MemoryReading(1000 * MIB, available * MIB, 800 * MIB, active * MIB, active * MIB)


def need(weights: int, activations: int = 0, kv: int = 0) -> MemoryNeed:
    """In MiB."""
    return MemoryNeed(weights * MIB, activations * MIB, kv * MIB)


# --- what steps take --------------------------------------------------------------------------------------------


def test_the_experts_of_a_model_that_names_their_width_as_the_only_one_are_as_wide():
    """Mixtral says `intermediate_size`, Qwen3-MoE `moe_intermediate_size`."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
    experts = {**sizes, "num_experts_per_tok": 2}
    work = {"weights_bytes": 2**34, "num_tokens": 2048, "num_seqs": 64, "context_tokens": 4096}
    device = {"item_bytes": 2, "buffer_elements": 96 << 20}
    needs = [
        step_bytes({**experts, name: 14336}, **work, **device)
        for name in ("intermediate_size", "moe_intermediate_size")
    ]
    assert needs[0] == needs[1]


def test_sizes_that_are_left_out_follow_from_the_others():
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
    whole = {**sizes, "intermediate_size": 4 * 4096, "head_dim": 128, "num_key_value_heads": 32}
    work = {"weights_bytes": 2**32, "num_tokens": 2048, "num_seqs": 64, "context_tokens": 4096}
    device = {"item_bytes": 2, "buffer_elements": 96 << 20}
    assert step_bytes(sizes, **work, **device) == step_bytes(whole, **work, **device)


def test_what_command_buffers_hold_is_booked_and_what_is_wide_and_long():
    """The example of `step_bytes`: 1.9 GiB for the buffers, 0.36 GiB for the rest."""
    llama = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    booked_bytes = step_bytes(
        {**llama, "intermediate_size": 14336, "vocab_size": 128256},
        weights_bytes=4_500_000_000,
        num_tokens=2048,
        num_seqs=64,
        context_tokens=32768,
        item_bytes=2,
        buffer_elements=96 << 20,
    )
    assert booked_bytes / 2**30 == pytest.approx(1.90 + 0.36, abs=0.01)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 2048, "intermediate_size": [8192, 16384]},  # as Gemma 3n has them, for each layer
        {"d_model": 2048, "intermediate_size": 16384},
    ],
)
def test_sizes_go_by_several_names_and_may_differ_by_layer(tmp_path, sizes):
    plain = {"hidden_size": 2048, "intermediate_size": 16384}
    needs = []
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"weight": mx.zeros((2, 2))})
    (tmp_path / "tokenizer.json").write_text("{}")
    for found in (plain, sizes):
        described = {"model_type": "own", "model_file": "own.py", "vocab_size": 320, **found}
        (tmp_path / "config.json").write_text(json.dumps(described))
        needs.append(estimate_need(Config(model=ModelConfig(model=str(tmp_path)))))
    assert needs[0] == needs[1]
    assert needs[0].activation_bytes > 0


# --- the budget -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "reserve", "wanted"),
    [("auto", "10%", (450, 100)), ("300MiB", "0", (300, 0)), ("50%", "1MiB", (250, 1))],
)
def test_limit_and_reserve_are_sizes_or_shares(limit, reserve, wanted):
    settings = MemoryConfig(memory_limit=limit, memory_reserve=reserve)
    budget = MemoryBudget.of(settings, lambda: reading(900, device=500))
    assert (budget.limit_bytes / MIB, budget.reserve_bytes / MIB) == wanted


@pytest.mark.parametrize("value", ["lots", "101%", "-3%"])
def test_what_is_no_size_and_no_share_is_refused(value):
    with pytest.raises(ConfigError, match=f"--memory-limit: memory_limit is '{value}'"):
        load_config(environ={}, flags={"memory_limit": value})


def test_a_model_that_does_not_fit_is_refused_with_the_numbers():
    budget = MemoryBudget(600 * MIB, 100 * MIB, lambda: reading(800))
    budget.take("first", need(300, 50, 50))
    with pytest.raises(InsufficientMemoryError) as refusal:
        budget.take("second", need(250, 20, 10))
    assert refusal.value.message.startswith(
        "The model second needs 280 MiB (weights 250 MiB, activations 20 MiB, first KV blocks 10 MiB), and 200 MiB "
        "may be used: the limit is 600 MiB, held are 400 MiB (first 400 MiB); 800 MiB are available on the system, "
        "of which 100 MiB stay in reserve."
    )
    assert budget.missing_bytes(need(250, 20, 10)) == 80 * MIB
    assert budget.held_bytes == 400 * MIB


def test_the_systems_memory_bounds_what_may_be_taken_too():
    budget = MemoryBudget(900 * MIB, 100 * MIB, lambda: reading(250))
    assert budget.free_bytes == 150 * MIB
    with pytest.raises(InsufficientMemoryError, match="150 MiB may be used"):
        budget.take("model", need(151))


def test_a_reading_does_not_depend_on_whether_a_step_runs():
    """400 MiB stay, and a step takes up to the 100 that are booked for it."""
    now = [metal_reading(900, 0)]
    budget = MemoryBudget(700 * MIB, 50 * MIB, lambda: now[0])
    budget.take("model", need(300, 100, 100)).settle(need(300, 100, 100))
    now[0] = metal_reading(500, 400)
    idle, free = budget.read(), budget.free_bytes
    assert (idle.available_bytes / MIB, idle.device_used_bytes / MIB) == (400, 500)
    assert free == 200 * MIB
    for step in (30, 100):
        now[0] = metal_reading(500 - step, 400 + step)
        assert (budget.read().pressure, budget.free_bytes) == (idle.pressure, free)


def test_what_is_booked_for_a_model_that_still_loads_is_in_no_reading():
    """Its steps do not run yet; the memory that is seen to be in use is of its weights."""
    now = [metal_reading(900, 0)]
    budget = MemoryBudget(700 * MIB, 0, lambda: now[0])
    share = budget.take("model", need(300, 100, 100))
    now[0] = metal_reading(750, 150)
    assert budget.read() == now[0]
    share.settle(need(300, 100, 100))
    assert budget.read() != now[0]


def test_what_a_step_takes_beyond_its_booking_counts():
    now = [metal_reading(900, 0)]
    budget = MemoryBudget(700 * MIB, 0, lambda: now[0])
    budget.take("model", need(300, 100, 100)).settle(need(300, 100, 100))
    now[0] = metal_reading(350, 550)
    assert budget.read().device_used_bytes == 550 * MIB
    assert budget.free_bytes == 200 * MIB


def test_memory_that_is_not_mlx_s_is_read_as_it_is():
    budget = MemoryBudget(700 * MIB, 0, lambda: reading(600))
    budget.take("model", need(300, 100, 100))
    assert budget.read() == reading(600)


def test_mlx_keeps_within_the_budget_as_long_as_there_are_models(monkeypatch):
    limits = [7]

    def set_memory_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "set_memory_limit", set_memory_limit)
    budget = MemoryBudget(600, 0, lambda: reading(900))
    first, second = budget.take("first", MemoryNeed(1, 0, 0)), budget.take("second", MemoryNeed(1, 0, 0))
    assert limits == [7, 600]
    first.release()
    assert limits == [7, 600]
    second.release()
    assert limits == [7, 600, 7]
    budget.take("third", MemoryNeed(1, 0, 0)).release()
    assert limits == [7, 600, 7, 600, 7]


def test_what_a_model_gives_back_others_may_take():
    budget = MemoryBudget(600 * MIB, 0, lambda: reading(1000))
    share = budget.take("a", need(400, 0, 100))
    assert not share.grow(101 * MIB)
    assert share.grow(100 * MIB)
    assert budget.free_bytes == 0
    share.shrink(150 * MIB)
    assert budget.free_bytes == 150 * MIB
    share.settle(need(450, 0, 50))
    assert budget.held_bytes == 500 * MIB
    share.release()
    assert budget.free_bytes == 600 * MIB


def test_no_pool_grows_into_what_is_promised_to_a_model_that_still_loads():
    budget = MemoryBudget(900 * MIB, 100 * MIB, lambda: reading(500))
    running = budget.take("running", need(100))
    running.settle(need(100))
    loading = budget.take("loading", need(300))
    assert (budget.free_bytes, budget.missing_bytes(need(101))) == (100 * MIB, MIB)
    assert running.growable_bytes(1.0) == 100 * MIB
    assert running.growable_bytes(0.85) == 50 * MIB, "which the weights to come are part of"
    assert not running.grow(101 * MIB)
    assert running.grow(100 * MIB)
    assert loading.growable_bytes(1.0) == 400 * MIB, "its own weights are no other's"


def test_pools_keep_away_from_the_pressure_at_which_they_must_shrink():
    available = [300]
    share = MemoryBudget(1000 * MIB, 0, lambda: reading(available[0])).take("a", need(10))
    now = [0.0]
    supply = KvMemory(share, MIB, lambda: now[0])
    assert supply.take(1, 150, is_needed=False) == 100, "to 80 percent of 1000, of which 700 are in use"
    available[0], now[0] = 195, 1.0
    assert supply.take(1, 150, is_needed=False) == 0, "cached content goes"
    assert supply.take(20, 150, is_needed=True) == 20, "no request waits, and nothing is taken in advance"
    available[0], now[0] = 115, 2.0
    assert supply.take(6, 6, is_needed=True) == 0, "89 percent"
    assert supply.take(5, 6, is_needed=True) == 5


def test_the_device_has_a_bound_of_its_own():
    now = reading(900, device=500, device_used=350)
    assert now.pressure == pytest.approx(0.7)
    assert now.room_below(0.8) == 50 * MIB
    assert now.room_below(0.6) == 0


def test_a_refusal_ends_when_the_model_gives_memory_back():
    """That of its draft model, for one."""
    share = MemoryBudget(100 * MIB, 0, lambda: reading(1000)).take("a", need(90, kv=10))
    supply, drafts = (KvMemory(share, MIB, lambda: 0.0) for _ in range(2))
    assert supply.take(1, 4, is_needed=True) == 0
    drafts.give_back(3)
    assert supply.take(1, 4, is_needed=True) == 3


def test_a_refusal_stands_for_a_moment_so_that_a_full_pool_does_not_ask_for_every_block():
    readings, now = [0], [0.0]

    def read() -> MemoryReading:
        readings[0] += 1
        return reading(1000)

    share = MemoryBudget(100 * MIB, 0, read).take("a", need(90))
    supply = KvMemory(share, 2 * MIB, lambda: now[0])
    assert supply.take(1, 3, is_needed=True) == 3
    assert supply.take(3, 4, is_needed=True) == 0
    asked = readings[0]
    assert supply.take(3, 4, is_needed=True) == 0
    assert readings[0] == asked
    assert supply.take(2, 4, is_needed=True) == 2, "less than what was refused"
    assert supply.take(1, 4, is_needed=True) == 0
    asked, now[0] = readings[0], 0.25
    assert supply.take(1, 4, is_needed=True) == 0
    assert readings[0] > asked
    supply.give_back(4)
    assert supply.take(3, 4, is_needed=True) == 4


# --- pressure ---------------------------------------------------------------------------------------------------


def test_levels_are_entered_at_their_mark_and_left_well_below():
    marks = {
        0.84: 0,
        0.85: 85,
        0.83: 85,
        0.819: 0,
        0.93: 92,
        0.90: 92,
        0.88: 85,
        0.98: 97,
        0.945: 97,
        0.935: 92,
        0.1: 0,
    }
    level, seen = PressureLevel.NONE, {}
    for pressure in marks:
        level = seen[pressure] = level.after(pressure)
    assert seen == marks


class Model:
    """One on a pool of 64 blocks of 1 MiB."""

    def __init__(self, store: FakeStore | None = None) -> None:
        self.share = MemoryBudget(1000 * MIB, 0, lambda: reading(1000)).take("m", need(10, 0, 64))
        supply = KvMemory(self.share, MIB, lambda: 0.0)
        self.world = World(make_scheduler(64, max_blocks=96, supply=supply, store=store), store=store)
        self.guard = MemoryGuard(self.world.scheduler, supply)

    @property
    def num_blocks(self) -> int:
        return self.world.scheduler.blocks.num_blocks


class Scene:
    """Models in a memory of which as many MiB of 1,000 are used as the test says."""

    def __init__(self, *models: Model) -> None:
        self.used = 0
        self.models = models
        self.watch = MemoryWatch(lambda: reading(1000 - self.used))

    def sample(self, used: int) -> PressureLevel:
        self.used = used
        self.watch.sample()
        for model in self.models:
            model.world.step()
        return self.watch.level


@asynccontextmanager
async def watched(*models: Model) -> AsyncIterator[Scene]:
    """While it is entered, nothing but the test runs: the watch does not come to sample by itself."""
    scene = Scene(*models)
    for model in models:
        scene.watch.join(model.guard)
    try:
        yield scene
    finally:
        for model in models:
            scene.watch.leave(model.guard)


async def test_each_level_does_its_part_and_says_so(caplog):
    caplog.set_level(logging.INFO)
    model = Model()
    world = model.world
    world.add(make_request("high", 30, 200, priority=0), make_request("low", 30, 200, priority=2))
    world.step()

    async with watched(model) as scene:
        assert scene.sample(840) is PressureLevel.NONE
        assert model.num_blocks == 64
        assert scene.sample(860) is PressureLevel.EVICT
        assert model.num_blocks == 64 - 28, "half of what is idle beyond the least"
        assert scene.sample(930) is PressureLevel.HOLD
        world.add(make_request("third", 30, 20))
        world.step()
        assert world.running_ids() == ["high", "low"]
        assert scene.sample(975) is PressureLevel.PREEMPT
        assert world.running_ids() == ["high"]
        assert model.num_blocks == 8, "the least"
        assert scene.sample(975) is PressureLevel.PREEMPT
        assert world.running_ids() == ["high"], "the last one goes on"
        assert scene.sample(500) is PressureLevel.NONE
    world.step()
    assert len(world.running_ids()) == 3
    world.finish()
    world.check_tokens()

    counters = model.guard.counters
    assert (counters.num_pressure_holds, counters.num_pressure_preemptions) == (1, 1)
    assert counters.num_pressure_cuts == world.scheduler.blocks.counters.num_pool_cuts == 3
    assert [record.message for record in caplog.records] == [
        "Memory is 86 % full; the KV pools free idle and cached blocks",
        "Memory is 93 % full; no new request starts",
        "Memory is 98 % full; requests of the lowest priority are preempted",
        "Memory is 50 % full; back to normal",
    ]


def test_the_watch_goes_on_after_a_reading_that_failed(caplog):
    model, num_readings = Model(), 0

    def read() -> MemoryReading:
        nonlocal num_readings
        num_readings += 1
        if num_readings == 1:
            raise OSError("nothing to read")
        return reading(140)

    async def three_seconds() -> PressureLevel:
        watch = MemoryWatch(read)
        watch.join(model.guard)
        await asyncio.sleep(2.5)
        watch.leave(model.guard)
        await asyncio.sleep(2.5)
        return watch.level

    assert run_virtually(three_seconds()) is PressureLevel.EVICT
    assert num_readings == 3
    assert "nothing to read" in caplog.text


async def test_what_is_cut_is_booked_back_when_the_device_has_done_it():
    model = Model()
    async with watched(model) as scene:
        scene.used = 860
        scene.watch.sample()
        assert model.share.need.kv_bytes == 64 * MIB
        model.world.step()
        assert model.share.need.kv_bytes == model.num_blocks * MIB == 36 * MIB


async def test_who_asks_for_memory_waits_for_what_was_cut_for_him():
    """And not for an earlier cut, which is booked back first."""
    model = Model()
    scheduler = model.world.scheduler
    model.guard.act(PressureLevel.EVICT)
    steps = [scheduler.schedule(0.0)]
    giving = asyncio.create_task(model.guard.give_memory(5 * MIB, 5.0))
    await asyncio.sleep(0)
    steps.append(scheduler.schedule(0.0))
    done = []
    for step in steps:
        assert step is not None
        scheduler.update(ModelRunnerOutput(step.step_id, {}))
        for _ in range(3):
            await asyncio.sleep(0)
        done.append((giving.done(), model.share.need.kv_bytes // MIB))
    assert done == [(False, 36), (True, 31)]
    assert await giving == 5 * MIB


def with_a_prefix(*, is_slow: bool) -> Model:
    """40 blocks that are to be saved, by a disk that `is_slow` to begin."""
    store = FakeStore()
    store.most_room = 0 if is_slow else 4
    model = Model(store)
    model.world.add(make_request("a", 40 * 32, 1))
    model.world.finish()
    return model


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_cut_under_pressure_waits_two_samples_for_the_disk(is_slow: bool) -> None:
    """And only one if all is saved by then; at the last level it does not wait."""
    model = with_a_prefix(is_slow=is_slow)
    counters = model.world.scheduler.counters
    async with watched(model) as scene:
        seen = []
        for _ in range(3):
            scene.sample(870)
            while not is_slow and model.world.step():
                pass
            seen.append(model.num_blocks)
        assert seen == ([64, 64, 36] if is_slow else [64, 36, 22])
        assert counters.num_blocks_not_saved == (4 if is_slow else 0)
    hurried = with_a_prefix(is_slow=True)
    async with watched(hurried) as scene:
        scene.sample(980)
        assert hurried.num_blocks == 8


@pytest.mark.parametrize("is_slow", [False, True])
def test_who_asks_for_memory_waits_while_it_is_saved_and_half_of_his_time_at_most(is_slow: bool) -> None:
    model = with_a_prefix(is_slow=is_slow)
    world = model.world

    async def gives() -> float:
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        giving = asyncio.create_task(model.guard.give_memory(50 * MIB, 4.0))
        while not giving.done():
            await asyncio.sleep(0.01)
            world.step()
        assert await giving == 50 * MIB
        return loop.time() - asked_s

    took_s = run_virtually(gives())
    assert (1.99 < took_s < 2.1) if is_slow else (took_s < 0.3), "virtual seconds"
    assert len(world.store.blocks) == (0 if is_slow else 40)


async def test_of_two_models_the_one_with_the_lowest_request_preempts():
    chat, batch = Model(), Model()
    chat.world.add(make_request("chat-high", 30, 200, priority=0), make_request("chat-normal", 30, 200, priority=1))
    batch.world.add(*(make_request(f"batch-{name}", 30, 200, priority=2) for name in ("a", "b", "c")))
    async with watched(chat, batch) as scene:
        scene.sample(500)
        scene.sample(500)  # chat-normal has sat the first step out
        seen = []
        for _ in range(5):
            scene.sample(980)
            seen.append(chat.world.running_ids() + batch.world.running_ids())
        assert seen == [
            ["chat-high", "chat-normal", "batch-a", "batch-b"],
            ["chat-high", "chat-normal", "batch-a"],
            ["chat-high", "batch-a"],
            ["chat-high", "batch-a"],
            ["chat-high", "batch-a"],
        ], "one at a time, whichever ranks lowest; each model's last one goes on"
        assert [model.guard.counters.num_pressure_preemptions for model in (chat, batch)] == [1, 2]
        assert batch.num_blocks == chat.num_blocks == 8
        scene.sample(500)
    for model in (chat, batch):
        model.world.finish()
        model.world.check_tokens()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=2, max_size=3))
async def test_whoever_waits_for_memory_ranked_lowest_of_all(tiers):
    """With the priorities of each model's requests: whoever is left ranks no lower, or is alone."""
    models = [Model() for _ in tiers]
    for number, (model, priorities) in enumerate(zip(models, tiers, strict=True)):
        for index, priority in enumerate(priorities):
            arrival_s = index / 10 + number / 100
            model.world.add(make_request(f"{number}-{index}", 20, 100, priority=priority, arrival_s=arrival_s))
    async with watched(*models) as scene:
        scene.sample(500)
        for _ in range(sum(map(len, tiers))):
            running = [list(model.world.scheduler.running()) for model in models]
            scene.sample(980)
            left = [list(model.world.scheduler.running()) for model in models]
            victims = [r for before, after in zip(running, left, strict=True) for r in before if r not in after]
            could_wait = [request for requests in running if len(requests) > 1 for request in requests]
            assert victims == sorted(could_wait, key=lambda r: (r.priority, r.arrival_s))[-1:]
        assert [model.world.scheduler.num_running for model in models] == [min(1, len(p)) for p in tiers]
        scene.sample(500)


def test_nothing_is_free_where_more_is_used_than_there_is():
    available = 900
    budget = MemoryBudget(800 * MIB, 100 * MIB, lambda: reading(available=available))
    share, loading = budget.take("m", need(10)), budget.take("n", need(20))
    available = 40
    assert budget.free_bytes == share.growable_bytes(0.5) == 0
    share.release()
    loading.release()
    assert budget.missing_bytes(need(10)) == 70 * MIB, "the reserve, too"
