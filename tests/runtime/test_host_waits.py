"""Nothing reads an array while a step is built: that would wait for the steps on the device, which then waits for the
host, at each step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.outputs import NewRequestData, ScheduledChunk, SchedulerOutput
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.loader import make_runner
from mlx_server.sampling_params import SamplingParams
from tests.vision_configs import CONFIGS
from tests.vision_worlds import tiny_vlm

_READERS = ("item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """By which methods and functions arrays are read, or waited for, meanwhile."""
    reads: list[str] = []
    with monkeypatch.context() as patched:
        for name in _READERS:
            original = getattr(mx.array, name)

            def read(array: mx.array, *args: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
                reads.append(_name)
                return _original(array, *args, **more)

            patched.setattr(mx.array, name, read)
        for name in ("eval", "synchronize"):
            patched.setattr(mx, name, lambda *_, _name=name, **__: reads.append(_name))
        yield reads


def runner_of(model_type: str) -> ModelRunner:
    runner, info = exhaust(
        make_runner(
            tiny_vlm(model_type).loaded,
            Config(
                model=ModelConfig(attention_backend="auto"),
                cache=CacheConfig(num_kv_blocks=32),
                scheduler=SchedulerConfig(max_num_seqs=2, speculate="off"),
            ),
            PoolRoom(256, 2**28, 2**28),
        )
    )
    assert info.no_vision == ""
    return runner


def chunk(runner: ModelRunner, name: str, start: int, num_tokens: int, block: int | None = None) -> ScheduledChunk:
    """Known tokens of a prompt, or the one that is still being sampled."""
    groups = len(runner.cache.windows)
    blocks = () if block is None else tuple((groups * block + group,) for group in range(groups))
    known = (5,) * num_tokens if block is not None else None
    return ScheduledChunk(name, start, num_tokens, known, blocks, True, int(block is None))


@pytest.mark.skipif(
    sys.version_info >= (3, 15), reason="from Python 3.15 on, methods of MLX's arrays cannot be replaced"
)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_steps_of_models_that_see_are_built_without_a_wait(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of text: a prompt, then its decode beside another prompt, then both decodes, all launched ahead."""
    runner = runner_of(model_type)
    new = [NewRequestData(name, (5,) * 9, (), SamplingParams(), frozenset()) for name in "ab"]
    with counted_reads(monkeypatch) as reads:
        runner.launch(SchedulerOutput(0, (chunk(runner, "a", 0, 9, 1),), (new[0],)))
        runner.launch(
            SchedulerOutput(1, (chunk(runner, "a", 9, 1), chunk(runner, "b", 0, 9, 2)), (new[1],)),
        )
        last = runner.launch(SchedulerOutput(2, (chunk(runner, "a", 10, 1), chunk(runner, "b", 9, 1))))
    assert reads == []
    assert set(runner.fetch(last).sampled) == {"a", "b"}
    runner.close()
