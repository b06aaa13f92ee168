"""The `cpu` backend over K/V in 8 and 4 bits: MLX's own numbers, read in place, and nothing else of a step changed.

Pools start full of NaN scales, so reading one number outside a request's context turns an output into NaN.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.errors import ConfigError
from mlx_server.runtime.attention.backends import choose_backend
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.cpu.attention import CpuBackend, CpuPool
from mlx_server.runtime.kernels.trials import exact_rows
from tests.attention_worlds import ALL_BITS, EIGHT, FOUR, Floats, Layer, Span, World, as_stored, make_step
from tests.runtime.kernels.test_cpu_backend import QUANTISED_TOLERANCE, poisoned_pool

MIXED = (Span(299, 300), Span(0, 1), Span(31, 32), Span(250, 351), Span(0, 33))


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend(threads=2)


def attend(cpu: CpuBackend, world: World) -> Floats:
    return world.attend(cpu, poisoned_pool(cpu, world.layer, world.num_blocks))


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((40, 1, 1, 64)),
        np.full((40, 1, 1, 64), -3.25),
        np.full((40, 1, 1, 64), 1e-12),
        np.linspace(1, 2, 40 * 64).reshape(40, 1, 1, 64),
        np.linspace(-2, -1, 40 * 64).reshape(40, 1, 1, 64),
        np.where(np.arange(40 * 64) % 64 == 17, 1e4, np.sin(np.arange(40 * 64))).reshape(40, 1, 1, 64),
        np.random.default_rng(0).standard_cauchy((40, 1, 1, 64)) * 1e-3,
    ],
    ids=["zero", "constant", "tiny", "positive", "negative", "one far out", "of all sizes"],
)
def test_rows_come_back_as_from_mlx(cpu: CpuBackend, rows: Floats, bits: KvBits) -> None:
    """In a window of one token each output is that token's V. MLX rounds once more between product and sum."""
    world = World(Layer(1, 1, 64, 64, window=1, bits=bits), [Span(0, 40)])
    world.rows[0][2] = rows.astype(np.float32)
    differences = np.abs(attend(cpu, world) - as_stored(world.rows[0][2], bits.values)).max(axis=-1)
    assert (differences <= np.abs(world.rows[0][2]).max(axis=-1) * 2.0**-23).all()


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_rows_that_lose_nothing_come_back_to_the_bit(cpu: CpuBackend, bits: KvBits) -> None:
    layer = Layer(2, 2, 96, 128, window=1, bits=bits)
    world = World(layer, [Span(0, 70)])
    rows = exact_rows(np.random.default_rng(0), (70, 2, 1, 128), mx.float32, bits.values)
    world.rows[0][2] = np.array(rows)
    assert len(np.unique(world.rows[0][2])) > 2**bits.values
    np.testing.assert_array_equal(attend(cpu, world), world.rows[0][2])


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_a_chunk_sees_itself_as_the_pool_has_it(cpu: CpuBackend, bits: KvBits) -> None:
    """So where a prompt is cut changes nothing."""
    layer = Layer(6, 2, 64, 96, bits=bits)
    world = World(layer, [Span(0, 100)])
    whole = attend(cpu, world)
    pool = poisoned_pool(cpu, layer, world.num_blocks)
    outs = [
        world.attend_step(cpu, pool, make_step([Span(start, end)], world.tables), [slice(start, end)])
        for start, end in ((0, 1), (1, 40), (40, 77), (77, 100))
    ]
    np.testing.assert_allclose(np.concatenate(outs), whole, rtol=0, atol=QUANTISED_TOLERANCE)


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_tokens_written_side_by_side_share_no_byte(bits: KvBits) -> None:
    layer = Layer(2, 2, 64, 64, bits=bits)
    world = World(layer, [Span(0, 1500), Span(0, 700)])
    pools = []
    for threads in (1, 5, 5, 5):
        backend = CpuBackend(threads)
        pools.append(poisoned_pool(backend, layer, world.num_blocks))
        world.attend(backend, pools[-1])
    for pool in pools[1:]:
        np.testing.assert_array_equal(pool.keys, pools[0].keys)
        np.testing.assert_array_equal(pool.values, pools[0].values)


def test_pools_of_every_kind_share_one_backend(cpu: CpuBackend) -> None:
    worlds = [World(Layer(4, 2, 64, 64, bits=bits), MIXED) for bits in (None, *ALL_BITS, None, FOUR)]
    pools = [cpu.make_pool(world.layer.spec, world.num_blocks) for world in worlds]
    for world, pool in zip(worlds, pools, strict=True):
        np.testing.assert_allclose(world.attend(cpu, pool), world.expected(), rtol=0, atol=QUANTISED_TOLERANCE)


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_a_pool_takes_what_its_spec_says(cpu: CpuBackend, bits: KvBits) -> None:
    spec = Layer(4, 2, 96, 128, bits=bits).spec
    pool = cpu.make_pool(spec, 10)
    assert pool.keys.nbytes + pool.values.nbytes == 10 * spec.block_bytes
    # 96 and 128 numbers in groups of 32, a scale and a bias of 4 bytes each.
    assert spec.block_bytes == 32 * 2 * ((96 * bits.keys + 128 * bits.values) // 8 + 8 * (3 + 4))


def test_dimensions_that_cannot_be_quantised_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 32; one is 80"):
        LayerSpec(2, 80, 64, mx.float32, bits=EIGHT)


def test_quantised_layers_get_the_backend_that_whole_ones_get() -> None:
    whole = LayerSpec(2, 64, 64, mx.float32)
    for bits in ALL_BITS:
        assert choose_backend("auto", [replace(whole, bits=bits)]).name == choose_backend("auto", [whole]).name


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the cpu backend is for MLX on the CPU")
def test_a_backend_that_reads_quantised_rows_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OneCodeOff(CpuBackend):
        def attend(self, pool: CpuPool, *args: Any, **kwargs: Any) -> mx.array:
            out = super().attend(pool, *args, **kwargs)
            return out + 2.0**-6 if pool.spec.bits else out

    factories = {"cpu": OneCodeOff, "reference": ReferenceBackend}
    monkeypatch.setattr("mlx_server.runtime.attention.backends._FACTORIES", factories)
    whole = LayerSpec(2, 64, 64, mx.float32)
    assert choose_backend("auto", [whole]).name == CpuBackend.name
    with caplog.at_level(logging.WARNING):
        assert choose_backend("auto", [replace(whole, bits=EIGHT)]).name == "reference"
    assert caplog.messages == [
        "The cpu attention backend is not used: its self-test is off by 1.6e-02 with 64 head dimensions."
    ]
    with pytest.raises(ConfigError, match="--attention-backend cpu cannot be used here: its self-test is off by"):
        choose_backend("cpu", [replace(whole, bits=EIGHT)])
