"""What an engine says of itself before, while and after a model is loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from mlx.utils import tree_flatten

from mlx_server.batching.limits import QueueLimits, SchedulerLimits
from mlx_server.batching.scheduler import ContinuousBatchingScheduler
from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.engine import observed
from mlx_server.engine.engine import AsyncEngine, EngineState
from mlx_server.engine.observed import notify
from mlx_server.engine.parts import GivenModels, Surroundings
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    ServeError,
)
from mlx_server.outputs import EngineStats
from mlx_server.request import FinishReason
from mlx_server.runtime.executor import MLXThread
from mlx_server.runtime.models.loader import LoadedModel, is_gpu
from mlx_server.runtime.models.random_models import build_random
from mlx_server.sampling_params import SamplingParams
from mlx_server.tiers import Tier
from tests.architectures import config_of
from tests.engine_worlds import built, greedy

CONFIG = Config(
    model=ModelConfig(model="tiny", max_model_len=256),
    cache=CacheConfig(num_kv_blocks=32),
    scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, speculate="off"),
)


def given() -> GivenModels:
    model, config = built("llama")
    return GivenModels(LoadedModel("llama", model, dict(config), None))


@asynccontextmanager
async def engine_of(config: Config = CONFIG, **more: Any) -> AsyncIterator[AsyncEngine]:
    """Of a model without a tokenizer. It is not started."""
    thread = MLXThread()
    engine = AsyncEngine(config, Surroundings(thread), given=given(), **more)
    try:
        yield engine
    finally:
        await engine.stop()
        thread.stop()


def ask(engine: AsyncEngine, name: str, num_tokens: int = 8, **more: Any) -> RequestStream:
    sampling = replace(greedy(num_tokens), **more)
    return engine.submit(GenerationRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling=sampling))


async def read(stream: RequestStream) -> int:
    return len([token_id async for delta in stream for token_id in delta.token_ids])


async def test_before_it_is_loaded_it_serves_nothing_and_counts_nothing() -> None:
    async with engine_of() as engine:
        assert (engine.state, engine.error) == (EngineState.LOADING, None)
        assert engine.stats() == EngineStats()
        assert (engine.num_streams, engine.idle_kv_bytes, await engine.give_memory(10**9)) == (0, 0, 0)
        with pytest.raises(OverloadedError, match=r"llama is not loaded \(loading\)|tiny is not loaded \(loading\)"):
            _ = engine.max_model_len
        with pytest.raises(OverloadedError, match="is loading") as caught:
            ask(engine, "early")
        assert caught.value.retry_after_s == 5.0


async def test_a_model_without_a_tokenizer_takes_and_gives_ids_alone() -> None:
    async with engine_of() as engine:
        await engine.start()
        assert (engine.has_tokenizer, engine.default_sampling) == (False, SamplingParams())
        assert (engine.vision, engine.pooling, engine.max_model_len) == (None, None, 256)
        for name in ("tokenizer", "chat", "grammars"):
            with pytest.raises(InvalidRequestError, match="has no tokenizer; send token ids"):
                getattr(engine, name)
        with pytest.raises(InvalidRequestError, match="Stop strings need a tokenizer"):
            ask(engine, "stop", stop=("a",))
        assert await read(ask(engine, "a")) == 8


async def test_its_figures_are_those_of_its_parts_and_outlast_it() -> None:
    async with engine_of() as engine:
        await engine.start()
        loaded = engine.stats()
        blocks = engine.scheduler.blocks
        assert (loaded.num_blocks, loaded.max_num_blocks, loaded.num_layer_groups) == (32, blocks.max_blocks, 1)
        assert (loaded.num_free_blocks, loaded.num_cached_blocks, loaded.num_state_checkpoints) == (32, 0, 0)
        assert loaded.kv_pool_bytes == 32 * engine.info.block_bytes
        parameters = tree_flatten(built("llama").model.parameters())
        assert loaded.weight_bytes == sum(array.nbytes for _, array in parameters)
        streams = [ask(engine, name, 100) for name in "abc"]
        assert (engine.num_streams, engine.stats().num_running + engine.stats().num_waiting) == (3, 3)
        await anext(streams[0])
        assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 1)
        assert not engine.reset_prefix_cache(), "requests hold blocks"
        assert await asyncio.gather(*map(read, streams)) == [99, 100, 100]
        assert (engine.num_streams, engine.stats().num_running) == (0, 0)
        done = engine.stats()
        assert done.num_cached_blocks > 0
        assert engine.reset_prefix_cache()
        assert engine.stats().num_cached_blocks == 0
        await engine.stop()
        after = engine.stats()
        assert (after.num_blocks, after.weight_bytes, after.num_running) == (0, 0, 0)
        assert after.num_prompt_tokens_computed == done.num_prompt_tokens_computed > 0
        metrics = engine.metrics
    async with engine_of(metrics=metrics) as again:
        assert again.stats().num_prompt_tokens_computed == done.num_prompt_tokens_computed
        await again.start()
        assert await read(ask(again, "a")) == 8
        assert again.stats().num_prompt_tokens_computed > done.num_prompt_tokens_computed


async def test_idle_blocks_are_counted_in_bytes_and_given_away() -> None:
    async with engine_of() as engine:
        await engine.start()
        idle_bytes, block_bytes = engine.idle_kv_bytes, engine.info.block_bytes
        assert 0 < idle_bytes < 32 * block_bytes, "a pool keeps what it needs to be of use"
        assert await engine.give_memory(2 * block_bytes) == 2 * block_bytes
        assert engine.idle_kv_bytes == idle_bytes - 2 * block_bytes
        assert engine.stats().num_blocks == 30
        assert await read(ask(engine, "a")) == 8


async def test_an_output_that_cannot_be_read_ends_its_own_request_alone_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = RequestStream.put

    def put(self: RequestStream, *arguments: Any) -> None:
        if self.request.request_id == "b":
            raise ValueError("no text")
        plain(self, *arguments)

    monkeypatch.setattr(RequestStream, "put", put)
    async with engine_of() as engine:
        await engine.start()
        streams = [ask(engine, name) for name in "ab"]
        assert await read(streams[0]) == 8
        with pytest.raises(ServeError, match="The output cannot be turned into text: no text"):
            await read(streams[1])
        assert (engine.num_streams, engine.stats().num_running) == (0, 0)
        (record,) = [record for record in caplog.records if record.exc_info]
        assert record.getMessage() == "The output of b cannot be shown"
        assert engine.metrics.finished == {FinishReason.ERROR: 1, FinishReason.LENGTH: 1}


async def test_a_prompt_counts_once_however_many_answers_it_gets() -> None:
    async with engine_of() as engine:
        await engine.start()
        streams = [
            engine.submit(
                GenerationRequest(
                    request_id=str(index),
                    prompt_token_ids=[1, 2, 3],
                    sampling=greedy(2),
                    sample_index=index,
                    num_samples=3,
                )
            )
            for index in range(3)
        ]
        assert await asyncio.gather(*map(read, streams)) == [2, 2, 2]
        asked = engine.metrics.by_name["request_params_n"]
        assert (asked.count, asked.total) == (1, 3.0)


async def test_a_model_that_cannot_be_loaded_leaves_a_dead_engine() -> None:
    thread = MLXThread()
    engine = AsyncEngine(replace(CONFIG, model=ModelConfig(model="/nowhere/at/all")), Surroundings(thread))
    try:
        with pytest.raises(ModelLoadError, match="There is no model"):
            await engine.start()
        assert engine.state is EngineState.DEAD
        assert engine.error is not None
        assert "There is no model" in engine.error
        with pytest.raises(EngineDeadError, match="has died: There is no model"):
            ask(engine, "a")
        await engine.stop()
        assert engine.state is EngineState.DEAD
    finally:
        thread.stop()


async def test_a_reader_that_fails_keeps_nobody_else_from_reading(caplog: pytest.LogCaptureFixture) -> None:
    async with engine_of() as engine:
        await engine.start()
        first, second = ask(engine, "a"), ask(engine, "b")

        def fail() -> None:
            raise ValueError("closed")

        first.on_output = fail
        assert await read(second) == 8
        assert "A reader failed on its output" in caplog.text
        assert len([token_id for delta in first.take() for token_id in delta.token_ids]) == 8


async def test_the_end_of_the_loop_is_told_even_if_the_scheduler_cannot_be_tidied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_of() as engine:
        await engine.start()
        stream = ask(engine, "a", 200)
        await anext(stream)

        def explode(*_: Any) -> None:
            raise ValueError("broken")

        monkeypatch.setattr(ContinuousBatchingScheduler, "fail_all", explode)
        monkeypatch.setattr(ContinuousBatchingScheduler, "schedule", explode)
        with pytest.raises(EngineDeadError, match="has died: ValueError: broken"):
            await read(stream)
        assert (engine.state, engine.error, engine.num_streams) == (EngineState.DEAD, "ValueError: broken", 0)
        assert "was left as it is" in caplog.text


def test_a_listener_that_fails_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(observed, "_logged_s", {})
    monkeypatch.setattr(observed.time, "monotonic", lambda: now[0])

    def listen(value: int) -> int:
        return 10 // value

    assert notify(listen, 5) == 2
    for seconds, num_lines in ((0.0, 1), (59.9, 1), (0.1, 2), (1.0, 2)):
        now[0] += seconds
        assert notify(listen, 0) is None
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == num_lines


# --- what settings make of it ---------------------------------------------------------------------------------------


async def test_settings_reach_the_scheduler_in_seconds_and_by_tier() -> None:
    scheduler = SchedulerConfig(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        aging_rate=0.5,
        target_step_ms=250.0,
        max_step_ms=400.0,
        max_num_waiting=7,
        max_queued_tokens=99,
        queue_timeout_s=3.0,
        speculate="off",
    )
    tiers = {
        "free": Tier(name="free", max_num_waiting=1),
        "gold": Tier(name="gold", max_queued_tokens=2),
        "plain": Tier(name="plain"),
    }
    async with engine_of(replace(CONFIG, scheduler=scheduler, tiers=tiers), max_chunk_tokens=32) as engine:
        await engine.start()
        limits = engine.scheduler.limits
        assert limits == SchedulerLimits(
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_chunk_tokens=32,
            aging_rate=0.5,
            target_step_s=0.25,
            cheap_rows=32 if is_gpu() else 128,
            max_step_s=0.4,
            context_doubling_tokens=engine.info.context_doubling_tokens,
            queue=QueueLimits(max_num_waiting=7, max_queued_tokens=99),
            tiers={
                "free": QueueLimits(max_num_waiting=1, max_queued_tokens=99),
                "gold": QueueLimits(max_num_waiting=7, max_queued_tokens=2),
            },
            queue_timeout_s=3.0,
            deduplicate_prefixes=True,
        )
    scheduler = replace(scheduler, target_step_ms=None, queue_timeout_s=0.0)
    async with engine_of(replace(CONFIG, scheduler=scheduler)) as engine:
        await engine.start()
        limits = engine.scheduler.limits
        assert (limits.target_step_s, limits.queue_timeout_s, limits.max_chunk_tokens) == (None, None, None)
        assert limits.tiers == {}


@pytest.mark.parametrize(("num_blocks", "limit", "expected"), [(32, 512, 512), (16, 512, 512), (8, 512, 256)])
async def test_the_context_is_what_the_pool_holds_at_most(
    caplog: pytest.LogCaptureFixture, num_blocks: int, limit: int, expected: int
) -> None:
    config = replace(
        CONFIG,
        model=ModelConfig(model="tiny", max_model_len=limit),
        cache=CacheConfig(num_kv_blocks=num_blocks),
        scheduler=replace(CONFIG.scheduler, max_num_seqs=1),
    )
    async with engine_of(config) as engine:
        await engine.start()
        assert engine.max_model_len == expected
        warned = f"The KV pool can hold {expected} tokens, so the context is limited to that instead of {limit}"
        assert (warned in caplog.text) is (expected < limit)


async def test_a_context_beyond_the_model_s_and_too_small_a_step_are_refused() -> None:
    own = given().model
    assert own is not None
    beyond = own.max_model_len + 1
    async with engine_of(replace(CONFIG, model=ModelConfig(model="tiny", max_model_len=beyond))) as engine:
        with pytest.raises(ConfigError, match=f"--max-model-len is {beyond}; the model's limit is {own.max_model_len}"):
            await engine.start()
    for num_seqs, fits in ((33, False), (32, True)):
        scheduler = replace(CONFIG.scheduler, max_num_seqs=num_seqs, max_num_batched_tokens=32)
        async with engine_of(replace(CONFIG, scheduler=scheduler)) as engine:
            if fits:
                await engine.start()
            else:
                with pytest.raises(ConfigError, match="must be at least --max-num-seqs, 33"):
                    await engine.start()


@pytest.mark.parametrize(("architecture", "has_checkpoints"), [("llama", False), ("mamba2", True)])
async def test_prefixes_are_cached_unless_that_is_off(architecture: str, has_checkpoints: bool) -> None:
    described = config_of(architecture)
    loaded = GivenModels(LoadedModel(architecture, build_random(described, 1), described, None))
    for is_on in (True, False):
        config = replace(CONFIG, cache=replace(CONFIG.cache, prefix_caching=is_on))
        thread = MLXThread()
        engine = AsyncEngine(config, Surroundings(thread), given=loaded)
        try:
            await engine.start()
            assert engine.scheduler.blocks.enable_prefix_caching is is_on
            assert (engine.scheduler.blocks.checkpoints is not None) is (is_on and has_checkpoints)
            assert engine.scheduler.limits.deduplicate_prefixes is not has_checkpoints
        finally:
            await engine.stop()
            thread.stop()
