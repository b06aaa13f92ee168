"""Real engines whose pools grow and shrink under load: the same tokens as with a fixed pool, and all memory back."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import mlx.core as mx
import psutil
import pytest

from mlx_server.config import CacheConfig, Config, MemoryConfig, ModelConfig, SchedulerConfig, load_config
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.memory import budget as memory_budget
from mlx_server.engine.memory.budget import MemoryBudget, MemoryShare
from mlx_server.engine.memory.guard import MemoryWatch
from mlx_server.engine.memory.need import MemoryNeed, estimate_need
from mlx_server.engine.parts import GivenModels, Surroundings
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.errors import ConfigError, InsufficientMemoryError
from mlx_server.pool.model_pool import build_pool
from mlx_server.request import FinishReason
from mlx_server.runtime.attention.interface import ReferenceBackend
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.cache.layers import discover_layers
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.memory import MemoryReading, bounded_memory, read_memory, resident_memory
from mlx_server.runtime.models.loader import LoadedModel
from tests.architectures import config_of
from tests.batching.worlds import is_starving
from tests.conformance import Subject
from tests.device_memory import active_bytes, held_bytes
from tests.engine_worlds import (
    NATIVE_BACKEND,
    built,
    greedy,
    make_folder,
    make_llm,
    on_the_cpu,
    plain_greedy,
    random_prompts,
)
from tests.tiny_models import describe_model_folder

MIB = 2**20
NUM_REQUESTS = 60

IN_BOTH_BACKENDS = pytest.mark.parametrize(
    "backend", [pytest.param("reference", marks=pytest.mark.full), NATIVE_BACKEND]
)


class Machine:
    """A memory of 1 GiB, of which others use as much as the test says."""

    def __init__(self) -> None:
        self.used = 0.0

    def read(self) -> MemoryReading:
        return MemoryReading(2**30, int((1 - self.used) * 2**30), 2**30, 0)


@pytest.fixture
def thread() -> Iterator[MLXThread]:
    thread = MLXThread()
    yield thread
    thread.stop()


@asynccontextmanager
async def engine_with(
    share: MemoryShare,
    thread: MLXThread,
    backend: str,
    loaded: LoadedModel | None = None,
    watch: MemoryWatch | None = None,
    **cache: object,
) -> AsyncIterator[AsyncEngine]:
    model, config = built("llama")
    settings = Config(
        model=ModelConfig(model="tiny", attention_backend=backend),
        cache=CacheConfig(**cache),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=128),
    )
    loaded = loaded or LoadedModel("tiny", model, dict(config), None)
    engine = AsyncEngine(settings, Surroundings(thread, share=share, watch=watch), given=GivenModels(loaded))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def make_share(machine: Machine, limit: int = 2**29) -> MemoryShare:
    return MemoryBudget(limit, 0, machine.read).take("tiny", MemoryNeed(0, 0, 0))


def churn() -> list[GenerationRequest]:
    rng = random.Random(5)
    shared = random_prompts([200], seed=1)[0]
    owns = random_prompts([rng.randrange(1, 300) for _ in range(NUM_REQUESTS)], seed=2)
    return [
        GenerationRequest(
            request_id=f"r{index}",
            prompt_token_ids=(shared if rng.random() < 0.4 else []) + own,
            sampling=greedy(rng.randrange(1, 60)),
        )
        for index, own in enumerate(owns)
    ]


async def tokens_of(stream: RequestStream) -> list[int]:
    deltas = [delta async for delta in stream]
    assert deltas[-1].finish_reason is FinishReason.LENGTH, deltas[-1]
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def serve_all(engine: AsyncEngine) -> list[list[int]]:
    """All of the churn, a few requests at a time."""
    gate = asyncio.Semaphore(20)

    async def one(request: GenerationRequest) -> list[int]:
        async with gate:
            return await tokens_of(engine.submit(request))

    return await asyncio.gather(*map(one, churn()))


@IN_BOTH_BACKENDS
async def test_a_pool_that_grows_and_shrinks_under_load_gives_the_same_tokens(thread, backend):
    machine = Machine()
    async with engine_with(make_share(machine), thread, backend, num_kv_blocks=400) as engine:
        wanted = await serve_all(engine)
        block_bytes = engine.info.block_bytes
        assert engine.stats().num_pool_growths == engine.stats().num_pool_cuts == 0

    share = make_share(machine)
    watch = MemoryWatch(share.read)
    async with engine_with(share, thread, backend, watch=watch, kv_cache_memory=str(400 * block_bytes)) as engine:
        assert engine.info.num_blocks == 64 < engine.info.max_blocks == 400
        serving = asyncio.ensure_future(serve_all(engine))
        rng = random.Random(0)
        num_given = 0
        while not serving.done():
            await asyncio.sleep(0.02)
            num_given += await engine.give_memory(rng.randrange(1, 100) * block_bytes)
            machine.used = rng.choice([0.5, 0.5, 0.5, 0.83, 0.87, 0.95, 0.99])
            watch.sample()
            engine.scheduler.check_integrity()
            assert share.need.kv_bytes >= engine.stats().kv_pool_bytes
        assert await serving == wanted
        await asyncio.sleep(0.05)
        engine.scheduler.check_integrity()
        stats = engine.stats()
        assert share.need.kv_bytes == stats.kv_pool_bytes
        assert num_given > 0
        assert min(stats.num_pool_growths, stats.num_pool_cuts, stats.num_blocks_moved) >= 5
        assert stats.num_pressure_holds > 0


@pytest.mark.parametrize("architecture", ["qwen3_5", "deepseek_v3", "gemma4"])
async def test_models_that_run_group_by_group_are_moved_too(thread, architecture):
    """Their K/V are read through views, and what is recurrent is kept beside the blocks."""
    subject = Subject(architecture)
    prompts, max_tokens = random_prompts((90, 61, 5, 120, 33)), (12, 20, 30, 9, 15)
    wanted = [reference.token_ids for reference in subject.wanted(prompts, max_tokens)]
    loaded = LoadedModel(architecture, subject.model, subject.config, None)
    async with engine_with(make_share(Machine()), thread, NATIVE_BACKEND, loaded, kv_cache_memory="8MB") as engine:
        for turn in range(3):
            await engine.give_memory(10**9)
            assert engine.stats().num_blocks == 8 * len(engine.info.windows)
            asked = [
                GenerationRequest(request_id=f"{turn}-{index}", prompt_token_ids=prompt, sampling=greedy(count))
                for index, (prompt, count) in enumerate(zip(prompts, max_tokens, strict=True))
            ]
            answers = asyncio.gather(*(tokens_of(engine.submit(request)) for request in asked))
            while not answers.done():
                await asyncio.sleep(0.005)
                await engine.give_memory(5 * engine.info.block_bytes)
                engine.scheduler.check_integrity()
            assert await answers == wanted
        stats = engine.stats()
        assert min(stats.num_pool_growths, stats.num_pool_cuts) >= 5


async def test_one_who_cannot_grow_waits_for_memory(thread):
    machine = Machine()
    prompt = random_prompts([250])[0]
    wanted = plain_greedy("llama", [prompt], [30])[0]
    share = make_share(machine)
    watch = MemoryWatch(share.read)
    async with engine_with(share, thread, NATIVE_BACKEND, watch=watch, kv_cache_memory="8MB") as engine:
        await engine.give_memory(60 * engine.info.block_bytes)
        assert engine.stats().num_blocks == 8
        machine.used = 0.95
        request = GenerationRequest(request_id="r", prompt_token_ids=prompt, sampling=greedy(30))
        stream = engine.submit(request)
        async with asyncio.timeout(10):
            while engine.stats().num_generated_tokens < 7:  # noqa: ASYNC110 - what is waited for is no event of ours
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert engine.stats().num_generated_tokens == 7, "up to the last slot of 256"
        assert is_starving(engine.scheduler)
        machine.used = 0.5
        watch.sample()
        assert await tokens_of(stream) == wanted


# --- what loading takes, and what unloading gives back --------------------------------------------------------------


@on_the_cpu
async def test_a_loaded_model_stays_within_what_was_estimated(thread):
    config = Config(
        model=ModelConfig(model="random:mini", attention_backend="cpu"),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
    )
    need = estimate_need(config)
    share = MemoryBudget(2**31, 0, Machine().read).take("mini", need)
    before = active_bytes()
    engine = AsyncEngine(config, Surroundings(thread, share=share))
    await engine.start()
    try:
        assert share.need.weights_bytes == pytest.approx(need.weights_bytes, rel=0.01)
        assert share.need.kv_bytes == need.kv_bytes == engine.stats().kv_pool_bytes
        mx.reset_peak_memory()
        prompt = random_prompts([128])[0]
        await tokens_of(engine.submit(GenerationRequest(request_id="r", prompt_token_ids=prompt, sampling=greedy(2))))
        peak = mx.get_peak_memory() - before - share.need.weights_bytes
        assert 0.2 * need.activation_bytes <= peak <= need.activation_bytes
    finally:
        await engine.stop()


@on_the_cpu
@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "expected"),
    [  # 6 arrays a step: tokens x (384 + 4 x 384) and rows, 16 at least, x 16,384 logits, of 4 bytes
        (8, 128, 6 * 4 * (128 * 1920 + 16 * 16_384)),
        (8, 129, 6 * 4 * (129 * 1920 + 16 * 16_384)),
        (17, 128, 6 * 4 * (128 * 1920 + 17 * 16_384)),
    ],
)
def test_what_a_step_takes_is_estimated_from_its_tokens_and_rows(num_seqs, num_tokens, expected):
    limits = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    need = estimate_need(Config(model=ModelConfig(model="random:mini"), scheduler=limits))
    assert need.activation_bytes == expected


# Estimates of pools are compared with every architecture's in test_architectures.


@pytest.mark.parametrize(("bits", "share"), [("8", 10 / 32), ("k8v4", 8 / 32), ("4", 6 / 32), ("auto", 1)])
def test_fewer_bits_and_no_prefixes_are_estimated(tmp_path, bits, share):
    """Of 32 bits a number; a scale and a bias of 32 bits for 32 numbers are two more each."""
    described = config_of("qwen3_5")
    described["text_config"]["head_dim"] = 64
    folder = describe_model_folder(described, tmp_path / "m")
    no_drafts = SchedulerConfig(speculate="off")  # which need a second state
    whole, fewer, uncached = (
        estimate_need(Config(model=ModelConfig(model=str(folder)), cache=cache, scheduler=no_drafts)).kv_bytes
        for cache in (CacheConfig(), CacheConfig(kv_bits=bits), CacheConfig(prefix_caching=False))
    )
    slot_bytes = (whole - uncached) // 16
    assert slot_bytes > 0, "four requests run, and four states are kept for prefixes beside each"
    states, blocks = 20 * slot_bytes, whole - 20 * slot_bytes
    assert fewer - states == pytest.approx(share * blocks, rel=0.01)


async def test_recurrent_state_leaves_others_what_they_hold(thread):
    """The second of two models gets slots for as many requests as its share of what is free holds."""
    subject = Subject("qwen3_5")
    loaded = LoadedModel("qwen3_5", subject.model, subject.config, None)
    slot_bytes = PagedKVCache(discover_layers(subject.model), ReferenceBackend()).slot_bytes
    budget = MemoryBudget(loaded.weight_bytes + 100 * slot_bytes, 0, Machine().read)
    budget.take("other", MemoryNeed(60 * slot_bytes, 0, 0))
    share = budget.take("qwen3_5", MemoryNeed(loaded.weight_bytes, 0, 10 * slot_bytes))
    async with engine_with(share, thread, NATIVE_BACKEND, loaded, num_kv_blocks=8) as engine:
        info = engine.info
        assert (info.max_num_seqs, info.num_checkpoints, info.num_spares) == (8, 6, 2), "a fifth of 40 each"
        assert 0 < engine.info.state_bytes <= share.need.kv_bytes <= 40 * slot_bytes
        assert engine.stats().kv_pool_bytes == share.need.kv_bytes
        assert budget.held_bytes <= budget.limit_bytes


@pytest.mark.slow
@IN_BOTH_BACKENDS
async def test_unloading_gives_weights_and_pool_back(thread, backend):
    """The native pool lies outside MLX's memory, so the process is asked, too."""
    process = psutil.Process()

    async def serve() -> int:
        share = make_share(Machine())
        async with engine_with(share, thread, backend, kv_cache_memory="40MB") as engine:
            await serve_all(engine)
            return engine.stats().kv_pool_bytes

    await serve()  # what is allocated once: threads, buffers, caches of libraries
    before, resident = held_bytes(), process.memory_info().rss
    for _ in range(4):
        kv_pool_bytes = await serve()
    assert kv_pool_bytes >= 5 * MIB

    def num_leaked() -> tuple[int, int]:
        return held_bytes() - before, process.memory_info().rss - resident

    # Threads and the loop may hold the last engine for a moment; a leak would stay.
    for _ in range(50):
        if num_leaked()[0] <= 0.05 * kv_pool_bytes:
            break
        await asyncio.sleep(0.1)
    in_mlx, in_process = num_leaked()
    assert in_mlx <= 0.05 * kv_pool_bytes
    assert in_process <= 2 * kv_pool_bytes, "four pools would be twice as much"


async def test_a_model_too_large_for_the_budget_is_refused_before_it_is_loaded(tmp_path, thread):
    folder = make_folder(tmp_path / "m")
    config = Config(model=ModelConfig(model=str(folder)), memory=MemoryConfig(memory_limit="100kB"))
    engine = AsyncEngine(config, Surroundings(thread))
    before = active_bytes()
    with pytest.raises(
        InsufficientMemoryError, match=r"needs \d+ MiB \(weights 1 MiB, .*the limit is 0 MiB, held are 0"
    ):
        await engine.start()
    assert active_bytes() - before < 1024, "constants of the trace at most"
    await engine.stop()


@pytest.mark.slow
def test_a_server_whose_model_does_not_fit_says_so_and_ends():
    command = [sys.executable, "-m", "mlx_server", "serve", "--model", "random:mini", "--port", "0"]
    ended = subprocess.run(
        [*command, "--memory-limit", "50MiB"], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "The model random:mini needs" in ended.stderr
    assert "(weights 10" in ended.stderr
    assert "the limit is 50 MiB" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_with_a_budget_of_its_own_gives_it_back(monkeypatch, fails):
    bounds: list[str] = []

    @contextmanager
    def bounded(num_bytes: int) -> Iterator[None]:
        bounds.append("set")
        yield
        bounds.append("put back")

    monkeypatch.setattr(memory_budget, "bounded_memory", bounded)
    if fails:
        with pytest.raises(ConfigError), make_llm("llama", max_model_len=10**6):
            pass
    else:
        with make_llm("llama"):
            assert bounds == ["set"]
    assert bounds == ["set", "put back"]


# --- Metal's limits -------------------------------------------------------------------------------------------------


class FakeMetal:
    """The limits that MLX sets, with what they were before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limits = {"wired": 0, "cache": 7, "memory": 800}
        self.refusal: Exception | None = None
        self.wired: list[int] = []
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 900})
        monkeypatch.setattr(mx, "set_wired_limit", lambda limit: self._set("wired", limit))
        monkeypatch.setattr(mx, "set_cache_limit", lambda limit: self._set("cache", limit))
        monkeypatch.setattr(mx, "set_memory_limit", lambda limit: self._set("memory", limit))

    def _set(self, name: str, limit: int) -> int:
        if name == "wired":
            self.wired.append(limit)
            if self.refusal is not None:
                raise self.refusal
        before, self.limits[name] = self.limits[name], limit
        return before


def test_metals_limits_are_set_and_put_back(monkeypatch):
    metal = FakeMetal(monkeypatch)
    with resident_memory(wire=True):
        assert metal.limits == {"wired": 900, "cache": 2**30, "memory": 800}
    assert metal.limits == {"wired": 0, "cache": 7, "memory": 800}


def test_limits_last_as_long_as_anyone_holds_them(monkeypatch):
    """Whoever came first may leave first, as two offline engines of one process may be closed."""
    metal = FakeMetal(monkeypatch)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    first, second = ExitStack(), ExitStack()
    first.enter_context(resident_memory(wire=True))
    first.enter_context(bounded_memory(600))
    second.enter_context(resident_memory(wire=False))
    second.enter_context(bounded_memory(500))
    assert metal.limits == {"wired": 900, "cache": 2**30, "memory": 600}
    first.close()
    assert metal.limits == {"wired": 0, "cache": 2**30, "memory": 500}
    second.close()
    assert metal.limits == {"wired": 0, "cache": 7, "memory": 800}


@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize(("flags", "wired"), [({}, []), ({"wire_memory": True}, [900, 0])])
async def test_nothing_is_wired_unless_asked_for(monkeypatch, is_pooled, flags, wired):
    metal = FakeMetal(monkeypatch)
    config = load_config(environ={}, flags={"model": "random:mini", "kv_cache_memory": "64MB", **flags})
    pool = build_pool(config) if is_pooled else None
    engine = AsyncEngine(config) if pool is None else None
    await (pool or engine).start()
    served = engine or pool.engines()[0]
    assert metal.limits == {"wired": max([0, *wired]), "cache": 2**30, "memory": 800}
    request = GenerationRequest(request_id="r", prompt_token_ids=[1, 2, 3], sampling=greedy(2))
    assert len(await tokens_of(served.submit(request))) == 2
    await (pool.stop(0.0) if pool else engine.stop())
    assert metal.wired == wired
    assert metal.limits == {"wired": 0, "cache": 7, "memory": 800}


def test_a_system_that_wires_no_memory_is_served_all_the_same(monkeypatch, caplog):
    metal = FakeMetal(monkeypatch)
    metal.refusal = ValueError("exceeds the system's limit")
    with resident_memory(wire=True):
        assert metal.limits == {"wired": 0, "cache": 2**30, "memory": 800}
    assert metal.limits == {"wired": 0, "cache": 7, "memory": 800}
    assert "cannot be kept resident" in caplog.text


def test_a_metal_device_is_read_by_its_working_set(monkeypatch):
    FakeMetal(monkeypatch)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 600)
    now = read_memory()
    assert (now.device_bytes, now.device_used_bytes) == (900, 600)
    assert now.total_bytes == psutil.virtual_memory().total


def test_a_discrete_gpu_is_read_by_its_own_memory(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 1000, "free_memory": 700})
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 400)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 100)
    assert read_memory() == MemoryReading(1000, 600, 1000, 400, active_bytes=400)
