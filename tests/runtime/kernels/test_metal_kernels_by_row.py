"""`GpuBackend.by_row`: tokens of prompts with the bits of decodes, beside anyone and in any chunk."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from emulator.worlds import Chunk, make_backend, step_of, step_rows

from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.gpu import plan as gpu_plan
from mlx_server.runtime.kernels.gpu.backend import GpuBackend
from tests.attention_worlds import FOUR

NUM_HEADS = 6
TABLE = (3, 7, 1, 0)
LENGTH = 100


def spec_of(bits: KvBits | None) -> LayerSpec:
    return LayerSpec(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32, bits=bits)


def by_row() -> GpuBackend:
    backend = make_backend(num_cores=1)
    backend.by_row = True
    return backend


def attend(backend: GpuBackend, spec: LayerSpec, cuts: list[int], others: int, window: int | None) -> np.ndarray:
    """A request of `LENGTH` tokens, computed in chunks between `cuts` beside decodes of other lengths."""
    rows = step_rows(0, spec, NUM_HEADS, LENGTH)
    sinks = mx.array(np.linspace(-1, 2, NUM_HEADS), mx.float32)
    pool = backend.make_pool(spec, 16)
    outs = []
    for start, end in pairwise(cuts):
        beside = [Chunk((8 + 2 * other, 9 + 2 * other), 10 + 17 * other) for other in range(others)]
        mine = Chunk(TABLE, start, end - start)
        is_decode = end - start == 1
        step = step_of([mine, *beside] if is_decode else [*beside, mine], others + is_decode)
        theirs = step_rows(1, spec, NUM_HEADS, max(1, others))
        both = [
            mx.concatenate([a[start:end], b[:others]] if is_decode else [b[:others], a[start:end]])
            for a, b in zip(rows, theirs, strict=True)
        ]
        out = backend.attend(pool, *both, backend.plan(step), scale=0.2, window=window, sinks=sinks)
        mx.eval(out, *backend.state(pool))
        first = 0 if is_decode else others
        outs.append(np.array(out)[first : first + end - start])
    return np.concatenate(outs)


@pytest.mark.parametrize("bits", [None, FOUR], ids=str)
@pytest.mark.parametrize("window", [None, 45])
def test_a_row_has_the_same_bits_in_any_chunk_beside_any_others(bits: KvBits | None, window: int | None) -> None:
    backend, spec = by_row(), spec_of(bits)
    wanted = attend(backend, spec, [0, LENGTH], 0, window)
    np.testing.assert_array_equal(attend(backend, spec, [0, 33, 34, 90, 99, LENGTH], 3, window), wanted)
    if bits is None:
        close = attend(ReferenceBackend(), spec, [0, LENGTH], 0, window)  # type: ignore[arg-type]
        np.testing.assert_allclose(wanted, close, atol=1e-5, rtol=0)


def test_many_rows_are_launched_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, spec = by_row(), spec_of(None)
    wanted = attend(backend, spec, [0, LENGTH], 2, None)
    monkeypatch.setattr(gpu_plan, "DECODES_AT_ONCE", 40)
    metadata = backend.plan(step_of([Chunk(TABLE, 0, LENGTH)], 0))
    assert [len(tables) for tables in metadata.block_tables] == [40, 40, 20]
    np.testing.assert_array_equal(attend(backend, spec, [0, LENGTH], 2, None), wanted)
