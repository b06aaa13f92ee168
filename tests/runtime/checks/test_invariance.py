"""Models whose bits cannot be made independent of the batch."""

from __future__ import annotations

import mlx.nn as nn
import pytest

from mlx_server.config import CacheConfig
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.checks.invariance import compute_by_row
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.models.loader import LoadedModel, exhaust, make_runner
from tests.engine_worlds import NATIVE_BACKEND, on_the_cpu
from tests.tiny_models import tiny_model


@on_the_cpu
def test_adapters_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"with adapters \(one, two\)"):
        compute_by_row(nn.Linear(8, 8), CpuBackend(1), ["one", "two"])


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
        backend=NATIVE_BACKEND,
        pool=CacheConfig(num_kv_blocks=64),
        max_num_tokens=1000,
        max_num_seqs=4,
        kv_limit_bytes=10**9,
        state_limit_bytes=10**8,
        batch_invariant=True,
    )
    with pytest.raises(ModelLoadError, match="bits depend on the batch"):
        exhaust(steps)
