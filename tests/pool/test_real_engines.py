"""The pool with a real engine: steps that fail, memory that is freed, drains that are cut short."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.config import Config, ModelConfig
from mlx_server.engine import parts
from mlx_server.engine.engine import EngineState
from mlx_server.engine.memory.budget import MemoryBudget
from mlx_server.engine.parts import Surroundings
from mlx_server.engine.request_stream import GenerationRequest, RequestStream
from mlx_server.errors import EngineDeadError, OverloadedError
from mlx_server.pool.catalog import Catalog
from mlx_server.pool.model_pool import ModelPool
from mlx_server.pool.pooled_model import ModelState
from mlx_server.runtime.model_runner import ModelRunner
from tests.api.worlds import until
from tests.device_memory import active_bytes
from tests.engine_worlds import greedy, make_folder


def ask(name: str, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling=greedy(max_tokens))


async def read(stream: RequestStream) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]


@pytest.mark.parametrize("where", ["launch", "fetch"])
async def test_a_failed_step_ends_its_requests_and_the_model_is_loaded_again(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request gets the answer of before, and the memory of the dead engine is free. Nor do late errors of the
    device matter: where the device is waited for, and while the model is unloaded."""
    logging.disable()  # pytest would keep the error's frames
    config = Config(model=ModelConfig(model=str(make_folder(tmp_path / "model"))))
    now_s = 0.0
    budget, around = MemoryBudget.of(config.memory), Surroundings.alone(config.memory)
    pool = ModelPool(Catalog(config), budget, config.pool, around, clock=lambda: now_s)
    await pool.start()
    try:
        with await pool.acquire(None) as engine:
            wanted = await read(engine.submit(ask("first", 20)))
            used_bytes = active_bytes()
            streams = [engine.submit(ask(f"r{i}", 200)) for i in range(3)]
            await anext(streams[0])
            now_s = 100.0

            def explode(*arguments: Any) -> None:
                raise MemoryError("[malloc] Unable to allocate 8 bytes")

            def wait_for_device() -> None:
                unloading.append("wait")
                explode()

            def close(self: ModelRunner) -> None:
                unloading.append("close")
                original(self)
                explode()

            unloading: list[str] = []

            original = ModelRunner.close
            with monkeypatch.context() as late, monkeypatch.context() as broken:
                late.setattr(parts, "wait_for_device", wait_for_device)
                late.setattr(ModelRunner, "close", close)
                broken.setattr(ModelRunner, where, explode)
                for stream in streams:
                    with pytest.raises(EngineDeadError, match=r"engine of model has died: MemoryError: .*8 bytes$"):
                        await read(stream)
                broken.undo()
                assert pool.death() is None
                await until(lambda: pool.find(None).is_ready)
                assert unloading == ["wait", "close"]
        with await pool.acquire(None) as engine:
            assert await read(engine.submit(ask("first", 20))) == wanted
            assert engine.stats().num_generated_tokens >= 2 * 20
        await until(lambda: active_bytes() - used_bytes < 2**18)  # a model takes over 2**19
    finally:
        logging.disable(logging.NOTSET)
        await pool.stop(0.0)


async def test_an_unloaded_model_is_freed_at_once(tmp_path: Path) -> None:
    """And not when garbage is collected the next time: its room is given to another model."""
    config = Config(model=ModelConfig(model=str(make_folder(tmp_path / "model"))))
    budget, around = MemoryBudget.of(config.memory), Surroundings.alone(config.memory)
    pool = ModelPool(Catalog(config), budget, config.pool, around)
    await pool.start()
    loaded_bytes = active_bytes()
    gc.disable()
    try:
        for _ in range(3):
            with await pool.acquire(None) as engine:
                assert len(await read(engine.submit(ask("r", 5)))) == 5
            assert mx.get_active_memory() > loaded_bytes - 2**18
            await pool.unload(None, 0.0)
            assert mx.get_active_memory() < loaded_bytes - 2**19
    finally:
        gc.enable()
        await pool.stop(0.0)


@pytest.mark.parametrize("ends", ["unload", "stop"])
async def test_a_model_that_drains_is_unloaded_sooner_if_asked_again(ends: str, tmp_path: Path) -> None:
    """Also when the server stops meanwhile."""
    config = Config(model=ModelConfig(model=str(make_folder(tmp_path / "model"))))
    pool = ModelPool(Catalog(config), MemoryBudget.of(config.memory), config.pool, Surroundings.alone(config.memory))
    await pool.start()
    try:
        with await pool.acquire(None) as engine:
            stream = engine.submit(ask("long", 2000))
            await anext(stream)
            waiting = asyncio.gather(pool.unload(None, 600.0), pool.unload(None, 900.0))
            await asyncio.sleep(0)
            assert pool.find(None).state is ModelState.DRAINING
            assert engine.state is EngineState.READY
            await (pool.stop(0.0) if ends == "stop" else pool.unload(None, 0.0))
            assert [model.state for model in await waiting] == [ModelState.UNLOADED] * 2
            with pytest.raises(OverloadedError, match="was shut down"):
                await read(stream)
    finally:
        await pool.stop(0.0)
