"""A load that is given up before its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_server.config import Config, ModelConfig
from mlx_server.engine import parts
from mlx_server.engine.parts import GivenModels, Surroundings, load_parts
from mlx_server.runtime.executor import MLXThread
from tests.engine_worlds import make_folder


async def test_a_cancelled_load_ends_on_the_mlx_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_on: list[threading.Thread] = []

    def endless(*_: object) -> Iterator[float]:
        try:
            while True:
                yield 0.5
        finally:
            ended_on.append(threading.current_thread())

    monkeypatch.setattr(parts, "read_model", endless)
    config = Config(model=ModelConfig(model=str(make_folder(tmp_path / "m"))))
    thread = MLXThread()
    around = Surroundings(thread, on_progress=lambda share: loading.cancel())
    loading = asyncio.ensure_future(load_parts(config, around, given=GivenModels()))
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert ended_on == [await asyncio.wrap_future(thread.call(threading.current_thread))]
    thread.stop()
