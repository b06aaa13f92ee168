"""Models whose bits do not depend on the batch, and those whose bits cannot be made so."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from emulator.worlds import kernel_maker, make_backend
from mlx_lm.models import llama

from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.attention.regroup import possible_levels
from mlx_server.runtime.attention.seam import install_seam
from mlx_server.runtime.cache.kv_cache import PagedKVCache
from mlx_server.runtime.cache.layers import PoolRoom, discover_layers
from mlx_server.runtime.checks.invariance import check_invariance, compute_by_row
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.kernels.gpu.product_choice import MakeForm, ProductTimes, gpu_products
from mlx_server.runtime.kernels.gpu.products import Form, ProductKernels, ProductShape
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.layers import fixed_rows
from mlx_server.runtime.layers.adapters import AdapterRows
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.loader import LoadedModel, make_runner
from tests.engine_worlds import NATIVE_BACKEND, on_the_cpu
from tests.tiny_models import tiny_model


def _vector_is_fastest(
    shape: ProductShape, layers: Sequence[Any], candidates: Mapping[Form | None, MakeForm], counts: Sequence[int]
) -> Generator[None, None, ProductTimes]:
    yield
    return ProductTimes({form: (1.0 + (form != Form.VECTOR),) * len(counts) for form in candidates})


def _metal_runner(bits: int | None, *, exact: bool) -> ModelRunner:
    """Runs a small Llama with the kernels of a Mac for products and attention, like `make_runner`."""
    install_seam()
    arguments = llama.ModelArgs("llama", 128, 2, 128, 4, 1e-5, 96, num_key_value_heads=2, tie_word_embeddings=True)
    model = llama.Model(arguments)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    mx.eval(model.parameters())
    cache = PagedKVCache(discover_layers(model), make_backend(num_cores=1))
    products: Iterator[None] = gpu_products(
        model, ProductKernels(kernel_maker()), exact=exact, measure=_vector_is_fastest
    )
    for _ in products:
        pass
    if exact:
        exhaust(compute_by_row(model, cache.backend, ()))
    runner = ModelRunner(model, cache, 96, AdapterRows())
    runner.forward.use(possible_levels(cache.layers)[0], selects_rows=True)
    return runner


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, pytest.param(None, marks=pytest.mark.full)])
def test_steps_of_metal_kernels_give_a_request_the_same_bits_in_any_batch(
    bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, among others and alone; without --batch-invariant they do not."""
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path))
    monkeypatch.setattr("mlx_server.runtime.checks.invariance._LENGTHS", {"long": 48, "short": 10})
    exhaust(check_invariance(_metal_runner(bits, exact=True), 96))
    with pytest.raises(ModelLoadError, match="bits depend on the batch with the metal attention backend"):
        exhaust(check_invariance(_metal_runner(bits, exact=False), 96))


@on_the_cpu
def test_adapters_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"with adapters \(one, two\)"):
        exhaust(compute_by_row(nn.Linear(8, 8), CpuBackend(1), ["one", "two"]))


@on_the_cpu
def test_a_model_whose_logits_depend_on_the_batch_is_refused() -> None:
    model, config = tiny_model("llama")
    layer = model.layers[1].mlp
    plain = type(layer).__call__
    kind = type("Mixed", (type(layer),), {"__call__": lambda self, x: plain(self, x) + 1e-4 * len(x)})
    layer.__class__ = kind
    loaded = LoadedModel("llama", model, dict(config), None)
    steps = make_runner(
        loaded,
        Config(
            model=ModelConfig(attention_backend=NATIVE_BACKEND, batch_invariant=True),
            cache=CacheConfig(num_kv_blocks=64),
            scheduler=SchedulerConfig(max_num_seqs=4, speculate="off"),
        ),
        PoolRoom(1000, 10**9, 10**8),
    )
    with pytest.raises(ModelLoadError, match="bits depend on the batch"):
        exhaust(steps)


@on_the_cpu
def test_no_piece_of_a_load_computes_more_than_one_step() -> None:
    """And at most one decode, so streams of other models wait for that."""
    model = llama.Model(llama.ModelArgs("llama", 64, 2, 64, 2, 1e-5, 96))
    layer, calls = model.layers[1].mlp, []
    plain = type(layer).__call__
    layer.__class__ = type("Counted", (type(layer),), {"__call__": lambda self, x: calls.append(1) or plain(self, x)})
    steps = make_runner(
        LoadedModel("llama", model, {"vocab_size": 96}, None),
        Config(
            model=ModelConfig(attention_backend=NATIVE_BACKEND, batch_invariant=True),
            cache=CacheConfig(num_kv_blocks=64, kv_bits="8"),
            scheduler=SchedulerConfig(max_num_seqs=4, speculate="off"),
        ),
        PoolRoom(1000, 10**9, 10**8),
    )
    counts = []
    for _ in steps:
        counts.append(len(calls))
        calls.clear()
    assert (max(counts), sum(counts)) == (2, 33)


@on_the_cpu
def test_no_piece_of_a_load_tries_more_than_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all are equal; how many fail, and when, is up to the machine's BLAS."""
    tried = []

    def counted(a: mx.array, b: mx.array) -> bool:
        tried.append(len(a))
        return True

    monkeypatch.setattr(fixed_rows, "same_values", counted)
    counts = []
    for _ in compute_by_row(nn.Linear(8, 8), CpuBackend(1), ()):
        counts.append(len(tried))
        tried.clear()
    assert counts == [1] * len(counts)
    assert len(counts) > 20
