"""Models are loaded as on a Mac whose GPU computes some attention kernel wrongly, or refuses it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import pytest
from emulator.kernel import Emulator, text_name
from emulator.worlds import toolchain

from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.attention import backends
from mlx_server.runtime.attention.interface import ReferenceBackend
from mlx_server.runtime.cache.layers import PoolRoom
from mlx_server.runtime.kernels.gpu import backend as gpu_backend
from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.kernels import MakeKernel, PagedKernels, Scores
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, KernelVariant
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.loader import LoadedModel, RunnerInfo, make_runner
from mlx_server.runtime.models.random_models import build_random
from tests.tiny_models import tiny_model

NUM_HEADS, NUM_KV_HEADS, DIM = 8, 2, 32
WRONG_SUMS = ("weight * float(value", "1.5f * weight * float(value")
READS_ONCE_A_ROW = "metal reads K/V once for each row and gathers drafts: "
GATHERS = "metal decodes gather K/V instead of reading it in place: "

Load = Callable[..., tuple[ModelRunner, RunnerInfo]]
Mutations = Mapping[str, tuple[tuple[str, str], ...]]


def emulated(mutations: Mutations) -> MakeKernel:
    return Emulator(toolchain(), mutations=mutations).metal_kernel


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Load:
    """Loads a small Llama with these kernels; the log has warnings only."""
    caplog.set_level(logging.WARNING)

    def load_with(make_kernel: MakeKernel, *, batch_invariant: bool = False) -> tuple[ModelRunner, RunnerInfo]:
        makers = {"emulated": lambda: MetalBackend(make_kernel, num_cores=4), "reference": ReferenceBackend}
        monkeypatch.setattr(backends, "_FACTORIES", makers)
        heads = {"head_dim": DIM, "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS}
        config = {**tiny_model("llama").config, **heads}
        steps = make_runner(
            LoadedModel("llama", build_random(config, 0), config, None),
            Config(
                model=ModelConfig(attention_backend="auto", batch_invariant=batch_invariant),
                cache=CacheConfig(num_kv_blocks=64),
                scheduler=SchedulerConfig(max_num_seqs=4, speculate="off"),
            ),
            PoolRoom(1000, 10**9, 10**8),
        )
        return exhaust(steps)

    return load_with


def check(loaded: tuple[ModelRunner, RunnerInfo], caplog: pytest.LogCaptureFixture, warning: str) -> None:
    """The whole model runs in one ragged batch on the Metal backend, after these warnings alone."""
    runner, info = loaded
    runner.close()
    assert (info.backend, info.level) == ("metal", "ragged")
    assert caplog.messages
    assert all(message.startswith(warning) for message in caplog.messages), caplog.text


@pytest.mark.slow
def test_a_shared_kernel_that_is_wrong_is_not_used(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    check(load(emulated({"paged_shared": (WRONG_SUMS,)})), caplog, READS_ONCE_A_ROW)


@pytest.mark.slow
def test_a_decode_kernel_that_is_wrong_is_not_used(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    check(load(emulated({"paged_decode": (WRONG_SUMS,)})), caplog, GATHERS)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["paged_decode", "paged_shared"])
def test_a_pipeline_that_allows_fewer_threads_gets_fewer(
    load: Load, caplog: pytest.LogCaptureFixture, kernel: str
) -> None:
    emulate, widest = emulated({}), Counter[str]()

    def limited(**definition: Any) -> Any:
        name, run = text_name(definition["name"]), emulate(**definition)

        def call(**launch: Any) -> list[mx.array]:
            threads = launch["threadgroup"][0]
            if name == kernel and threads > 64:
                raise ValueError(f"Thread group size ({threads}) is greater than the maximum allowed (64)")
            widest[name] = max(widest[name], threads)
            return run(**launch)

        return call

    runner, info = load(limited)
    runner.close()
    assert (info.backend, info.level, caplog.messages) == ("metal", "ragged", [])
    assert widest[kernel] == 64


@pytest.mark.slow
def test_by_row_a_wrong_shared_kernel_does_not_matter_and_a_wrong_decode_kernel_is_refused(
    load: Load, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_server.runtime.checks.invariance._LENGTHS", {"long": 60, "short": 20})
    check(load(emulated({"paged_shared": (WRONG_SUMS,)}), batch_invariant=True), caplog, READS_ONCE_A_ROW)
    with pytest.raises(ModelLoadError, match="attention of this model gathers its rows"):
        load(emulated({"paged_decode": (WRONG_SUMS,)}), batch_invariant=True)


@pytest.mark.slow
def test_each_kind_of_layer_is_tested_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's layers are of one kind, those of the backend's self-test of another."""
    tests = Counter[tuple[str, int, bool]]()

    def counted(name: str) -> Any:
        test = getattr(gpu_backend, name)

        def count(kernels: PagedKernels, shape: DecodeShape, variant: KernelVariant, scores: Scores) -> str | None:
            tests[name, shape.num_query_heads, scores.sinks is not None] += 1
            failure: str | None = test(kernels, shape, variant, scores)
            return failure

        return count

    names = "decode_failure", "shared_failure"
    for name in names:
        monkeypatch.setattr(gpu_backend, name, counted(name))
    runner, _ = load(emulated({}))
    runner.close()
    kinds = (2 * NUM_KV_HEADS, True), (NUM_HEADS, False)
    assert tests == {(name, *kind): 1 for name in names for kind in kinds}
