"""A load that is given up before its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_server.config import Config, ModelConfig
from mlx_server.engine import parts
from mlx_server.engine.engine import AsyncEngine
from mlx_server.engine.parts import GivenModels, Surroundings, load_parts
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.executor import MLXThread
from tests.device_memory import active_bytes
from tests.engine_worlds import make_folder


async def test_a_cancelled_load_ends_on_the_mlx_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_on: list[threading.Thread] = []

    def endless(*_: object) -> Iterator[float]:
        try:
            while True:
                yield 0.5
        finally:
            ended_on.append(threading.current_thread())

    monkeypatch.setattr(parts, "load_in_pieces", endless)
    config = Config(model=ModelConfig(model=str(make_folder(tmp_path / "m"))))
    thread = MLXThread()
    around = Surroundings(thread, on_progress=lambda share: loading.cancel())
    loading = asyncio.ensure_future(load_parts(config, around, given=GivenModels()))
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert ended_on == [await asyncio.wrap_future(thread.call(threading.current_thread))]
    thread.stop()


async def test_a_load_that_fails_late_holds_nothing_while_its_error_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise ModelLoadError("There is no runner.")
        yield

    monkeypatch.setattr(parts, "make_runner", refuse)
    folder = make_folder(tmp_path / "m")
    engine = AsyncEngine(Config(model=ModelConfig(model=str(folder))))
    before = active_bytes()
    with pytest.raises(ModelLoadError, match="There is no runner") as caught:
        await engine.start()
    assert active_bytes() - before < 1000, "a few numbers that MLX keeps, and no weights"
    assert caught.value.__traceback__ is not None
    await engine.stop()
