"""Blocks as bytes: what is read out of one block and written into another is the same K/V, in every kind of pool."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.outputs import STATES, CopyPlace, PoolChange
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.cache.block_contents import BlockContents
from mlx_server.runtime.cache.kv_cache import PagedKVCache, PagedLayerCache, StateLayerCache
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.gpu.pool import GpuPool
from tests.attention_worlds import EIGHT_FOUR
from tests.engine_worlds import on_the_cpu

pytestmark = on_the_cpu


class GpuLikeBackend:
    """Makes the pools of a GPU in the CPU's memory, which is the GPU's own on a Mac."""

    name = "gpu-like"
    needs_synchronous_steps = False

    def make_pool(self, spec: LayerSpec, num_blocks: int, max_blocks: int | None = None) -> GpuPool:
        return GpuPool.make(spec, num_blocks)

    def change_pool(self, pool: GpuPool, change: PoolChange) -> GpuPool:
        pool.change(change)
        return pool


def fill(cache: PagedKVCache, block_id: int) -> list[np.ndarray]:
    """Random numbers in one block of each pool, as the pool's type has them."""
    rng = np.random.default_rng(block_id)
    written = []
    for pool in cache.pools:
        content = pool.contents[0]
        for name in ("keys", "values"):
            array = getattr(content.memory, name)
            rows = rng.standard_normal(array.shape[1:]).astype(np.float32)
            array[block_id] = (
                mx.array(rows).astype(array.dtype) if array.dtype != mx.uint32 else mx.array(rows).view(mx.uint32)
            )
            mx.eval(array)
            setattr(content.memory, name, array)
            written.append(np.array(array[block_id].astype(mx.float32)))
    return written


def stored(cache: PagedKVCache, block_id: int) -> list[np.ndarray]:
    sides = [getattr(pool.contents[0].memory, name) for pool in cache.pools for name in ("keys", "values")]
    return [np.array(side[block_id].astype(mx.float32)) for side in sides]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", [None, EIGHT_FOUR], ids=str)
def test_a_gpus_blocks_go_out_and_come_back(dtype: mx.Dtype, bits: KvBits | None) -> None:
    specs = [LayerSpec(2, 64, 64, dtype, bits), LayerSpec(1, 128, 64, dtype, bits)]
    cache = PagedKVCache([PagedLayerCache(None, spec) for spec in specs], GpuLikeBackend())  # type: ignore[arg-type]
    cache.allocate(6, num_slots=1)
    written = [fill(cache, block_id) for block_id in (1, 4)]
    contents = BlockContents(cache)
    saved = contents.read([CopyPlace(1), CopyPlace(4)])
    assert [len(content) for content in saved] == [cache.block_bytes] * 2
    contents.write([(CopyPlace(5), saved[0]), (CopyPlace(2), saved[1])])
    for block_id, wanted in ((5, written[0]), (2, written[1]), (1, written[0])):
        for got, one in zip(stored(cache, block_id), wanted, strict=True):
            np.testing.assert_array_equal(got, one)
    assert not any(side.any() for side in stored(cache, 3)), "no other block was touched"
    contents.forget()
    cache.change(PoolChange(9))
    assert contents.read([CopyPlace(5)])[0] == saved[0]
    contents.write([(CopyPlace(8), saved[1])])
    for got, one in zip(stored(cache, 8), written[1], strict=True):
        np.testing.assert_array_equal(got, one)


def test_states_of_all_layers_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait is a round trip to the device, and a hybrid has dozens of arrays of states."""
    layers = [StateLayerCache([mx.zeros((1, 3, 8), mx.bfloat16), mx.zeros((1, 4, 4))]) for _ in range(5)]
    cache = PagedKVCache([*layers, PagedLayerCache(None, LayerSpec(1, 64, 64, mx.float32))], ReferenceBackend())
    cache.allocate(4, num_slots=2, num_checkpoints=4)
    contents, rng = BlockContents(cache), np.random.default_rng(1)
    states = [memoryview(rng.integers(0, 100, contents.state_bytes(), np.uint8)) for _ in range(3)]
    waits: list[list[mx.array]] = []
    evaluate = mx.eval

    def counted(arrays: list[mx.array]) -> None:
        waits.append(arrays)
        evaluate(arrays)

    monkeypatch.setattr(mx, "eval", counted)
    monkeypatch.setattr(mx, "synchronize", lambda: None)
    places = [CopyPlace(number, STATES) for number in (0, 2, 3)]
    contents.write(list(zip(places, states, strict=True)))
    before = len(waits)
    assert contents.read(places) == tuple(states)
    assert len(waits) - before == 1
    assert all(array.dtype == mx.uint8 and array.ndim == 1 for array in waits[-1]), "no view is left to be computed"
    rounds = len(waits)
    contents.write(list(zip(places[::-1], states, strict=True)))
    assert len(waits) - rounds <= 1 + 10, "that of the readings of each array, and one"
    assert contents.read(places) == tuple(states[::-1])
