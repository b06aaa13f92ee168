"""Layers of different shapes in one pool: each sees its blocks as if it were alone, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from emulator.worlds import Chunk, make_backend, step_of, step_rows
from hypothesis import given, settings

from mlx_server.outputs import BlockMove, PoolChange
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.cache.kv_cache import PagedKVCache, PagedLayerCache
from mlx_server.runtime.cache.layer_pools import LayerGroup, LayerPool, Place, group_layers, share_blocks
from mlx_server.runtime.cache.row_pool import KvBits, Slots
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.kernels.gpu import backend as gpu_backend

# --- what fits in a block -------------------------------------------------------------------------------------------


def spec_of(num_kv_heads: int, key_dim: int, value_dim: int | None = None, **more: Any) -> LayerSpec:
    return LayerSpec(num_kv_heads, key_dim, value_dim or key_dim, more.pop("dtype", mx.float16), **more)


@pytest.mark.parametrize(
    ("specs", "wanted"),
    [
        ([spec_of(16, 256), spec_of(4, 512)], [1, 2]),  # gemma-4-31b
        ([spec_of(8, 256), spec_of(2, 512)], [1, 2]),  # gemma-4-26b-a4b
        ([spec_of(1, 256), spec_of(1, 512)], [2, 1]),  # gemma-4-e2b
        ([spec_of(8, 192, 128), spec_of(4, 192, 128)], [1, 2]),  # mimo-v2-flash
        ([spec_of(4, 128), spec_of(4, 128)], [1, 1]),
        ([spec_of(2, 128), spec_of(4, 64)], [1, 1]),
        ([spec_of(2, 64), spec_of(3, 64)], [3, 2]),
        ([spec_of(2, 64), spec_of(1, 64), spec_of(1, 128)], [1, 2, 1]),
        ([spec_of(1, 16), spec_of(4, 32)], [8, 1]),
        ([spec_of(2, 64), spec_of(4, 32)], [1, 1]),
    ],
)
def test_several_small_layers_fill_the_block_of_a_large_one(specs: list[LayerSpec], wanted: list[int]) -> None:
    assert share_blocks(specs) == wanted
    blocks = {num_parts * spec.block_bytes for num_parts, spec in zip(wanted, specs, strict=True)}
    assert len(blocks) == 1


@pytest.mark.parametrize(
    "specs",
    [
        [spec_of(2, 128, 64), spec_of(2, 64, 64)],  # K would fit, V would not
        [spec_of(1, 64), spec_of(9, 64)],
        [spec_of(2, 64), spec_of(2, 64, dtype=mx.float32)],
    ],
)
def test_what_does_not_fit_evenly_is_not_shared(specs: list[LayerSpec]) -> None:
    assert share_blocks(specs) is None
    layers = [PagedLayerCache(window, spec) for window, spec in zip((24, None), specs, strict=True)]
    cache = PagedKVCache(layers, ReferenceBackend())
    assert cache.windows == (None,)
    assert cache.block_bytes == sum(spec.block_bytes for spec in specs)


def test_small_layers_stand_together_in_their_group() -> None:
    windows: list[int | None] = [64, None, 64, None, 64, None, 64]
    assert group_layers(windows, [1, 2, 1, 2, 1, 2, 1]) == [
        LayerGroup(None, ((1, 3), (5,))),
        LayerGroup(64, ((0,), (2,))),
        LayerGroup(64, ((4,), (6,))),
    ]


def test_layers_of_two_kinds_with_one_window_share_no_block_of_a_pool() -> None:
    assert group_layers([None, 8, None, None], [2, 1, 1, 2]) == [
        LayerGroup(None, ((0, 3),)),
        LayerGroup(None, ((2,),)),
        LayerGroup(8, ((1,),)),
    ]


_WIDE, _NARROW = {1024: 1, None: 2}, {1024: 2, None: 1}
"""How many layers with and without a window fill a block."""


@pytest.mark.parametrize(
    ("windows", "parts", "wanted"),
    [
        ([128, None] * 12, {}, [(None, 12), (128, 12)]),  # gpt-oss-20b
        ([4096, 4096, 4096, None] * 8, {}, [(None, 8), *[(4096, 8)] * 3]),  # command-r7b
        (([512] * 5 + [None]) * 4 + [512] * 2, {}, [(None, 4), *[(512, 4)] * 5, (512, 2)]),  # gemma-3-1b
        (([1024] * 5 + [None]) * 8, {}, [(None, 8), *[(1024, 8)] * 5]),  # gemma-3-12b
        ([1024] * 50 + [None] * 10, _WIDE, [(None, 5), *[(1024, 5)] * 10]),  # gemma-4-31b
        ([1024] * 25 + [None] * 5, _WIDE, [(None, 3), *[(1024, 3)] * 8, (1024, 1)]),  # gemma-4-26b-a4b
        ([1024] * 20 + [None] * 4, _NARROW, [(None, 2), (None, 2), *[(1024, 2)] * 5]),  # gemma-4-e4b
        ([1024] * 39 + [None] * 9, _WIDE, [(None, 5), *[(1024, 5)] * 7, (1024, 4)]),  # mimo-v2-flash
    ],
)
def test_groups_of_known_models_waste_little(
    windows: list[int | None], parts: dict[int | None, int], wanted: list[tuple[int | None, int]]
) -> None:
    groups = group_layers(windows, [parts.get(window, 1) for window in windows])
    assert [(group.window, len(group.pools)) for group in groups] == wanted


@given(st.lists(st.tuples(st.sampled_from([None, 24, 1000]), st.sampled_from([2, 3, 4])), min_size=1, max_size=40))
@settings(deadline=None)
def test_every_layer_has_a_place_of_its_own(kinds: list[tuple[int | None, int]]) -> None:
    layers = [PagedLayerCache(window, spec_of(num_kv_heads, 64)) for window, num_kv_heads in kinds]
    cache = PagedKVCache(layers, ReferenceBackend())
    windows = {window for window, _ in kinds}
    if windows == {None}:
        assert cache.windows == (None,)
        return
    assert set(cache.windows) == windows
    assert len(cache.groups) <= 12
    taken = set()
    for layer in layers:
        place = cache.places[layer.place]
        taken.add((place.group, id(layer.pool), place.part))
        assert cache.windows[place.group] == layer.window
        assert 0 <= place.part < place.num_parts
        assert layer.pool.spec.block_bytes == place.num_parts * layer.spec.block_bytes
    assert len(taken) == len(layers)
    pools = {id(layer.pool): layer.pool for layer in layers}
    assert cache.block_bytes == sum(pool.spec.block_bytes for pool in pools.values())


def test_a_place_has_the_part_of_each_block_that_is_its_layers() -> None:
    plan = step_of([Chunk((3, 1), 0, 34)], 0)
    part = Place(0, 1, 2).plan([plan])
    assert part.block_tables.tolist() == [[7, 3]]
    assert part.slot_mapping.tolist() == [7 * 32 + offset for offset in range(32)] + [3 * 32, 3 * 32 + 1]
    assert part.positions is plan.positions
    assert Place(0).plan([plan]) is plan


# --- what attention sees --------------------------------------------------------------------------------------------

NUM_HEADS = 8
LARGE = LayerSpec(num_kv_heads=4, key_dim=64, value_dim=64, dtype=mx.float32)
SMALL = LayerSpec(num_kv_heads=1, key_dim=128, value_dim=128, dtype=mx.float32)
"""Two layers like it fill a block of `LARGE`."""

LAYERS = ((LARGE, 0, (0, 1)), (SMALL, 1, (0, 2)), (SMALL, 1, (1, 2)))
"""Spec, group, and place in a block, (part, of how many)."""

STEPS = (
    (0, [(Chunk((3, 7), 0, 40), Chunk((2, 8), 0, 40)), (Chunk((1,), 0, 5), Chunk((6,), 0, 5))]),
    (1, [(Chunk((3, 7), 40), Chunk((2, 8), 40)), (Chunk((9, 0, 5), 0, 70), Chunk((10, 11, 4), 0, 70))]),
    (2, [(Chunk((3, 7), 41), Chunk((2, 8), 41)), (Chunk((9, 0, 5), 70), Chunk((10, 11, 4), 70))]),
)
"""(decodes, chunks in both groups' blocks) of each step, on a pool of 12 blocks."""

CHANGES = {1: PoolChange(16), 2: PoolChange(10, (BlockMove(10, 1), BlockMove(11, 6)), num_blocks_cut=6)}
"""Before the last step, the second request gets the blocks of one that has left."""

BACKENDS: dict[str, Callable[[], Any]] = {
    "reference": ReferenceBackend,
    "reference, 8 bits": ReferenceBackend,
    "cpu": lambda: CpuBackend(threads=2),
    "cpu, 8 bits": lambda: CpuBackend(threads=2),
    "cpu, 4 bits": lambda: CpuBackend(threads=2),
    "metal": make_backend,
    "metal, 8 bits": make_backend,
}


def attend_all(backend: Any, bits: KvBits | None, *, is_shared: bool) -> list[np.ndarray]:
    """All layers on all steps, in one pool or each in its own."""
    specs = [replace(spec, bits=bits) for spec, _, _ in LAYERS]
    pools = [LayerPool(specs[0], specs)] * len(LAYERS) if is_shared else [LayerPool(spec) for spec in specs]
    for pool in dict.fromkeys(pools):
        pool.allocate(backend, 12, 16)
    outs = []
    moved: dict[int, int] = {}
    for index, (num_decodes, requests) in enumerate(STEPS):
        if index in CHANGES:
            for pool in dict.fromkeys(pools):
                pool.change(CHANGES[index])
            moved |= dict(CHANGES[index].moves)
        for layer, (spec, pool) in enumerate(zip(specs, pools, strict=True)):
            _, group, (part, num_parts) = LAYERS[layer]
            chunks = [replace(c[group], blocks=tuple(moved.get(b, b) for b in c[group].blocks)) for c in requests]
            step = step_of(chunks, num_decodes)
            plan = Place(0, part, num_parts).plan([step]) if is_shared else step
            queries, keys, values = step_rows(10 * index + layer, spec, NUM_HEADS, step.num_tokens)
            content = pool.contents[pool.specs.index(spec)]
            out = backend.attend(content, queries, keys, values, backend.plan(plan), scale=0.2, window=24)
            mx.eval(out, *backend.state(pool.contents[0]))
            outs.append(np.array(out))
    return outs


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_that_share_a_pool_see_what_they_see_alone(name: str) -> None:
    backend, bits = BACKENDS[name](), KvBits.of(name.split()[1]) if "bits" in name else None
    got, wanted = (attend_all(backend, bits, is_shared=is_shared) for is_shared in (True, False))
    assert len(got) == len(wanted) == 9
    for ours, alone in zip(got, wanted):
        np.testing.assert_array_equal(ours, alone)


@pytest.mark.parametrize("fails", [LARGE, SMALL])
def test_where_kernels_cannot_write_for_one_kind_mlx_writes_for_all(
    fails: LayerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_backend, "write_failure", lambda _, spec: "cannot" if spec == fails else None)
    backend = make_backend()
    got = attend_all(backend, None, is_shared=True)
    assert backend.needs_synchronous_steps
    for ours, alone in zip(got, attend_all(ReferenceBackend(), None, is_shared=False), strict=True):
        np.testing.assert_allclose(ours, alone, atol=1e-5)


@pytest.mark.parametrize("bits", [None, KvBits(8, 8)], ids=str)
def test_layers_that_are_read_by_group_see_one_memory(bits: KvBits | None) -> None:
    large, small = (replace(spec, bits=bits) for spec in (LARGE, SMALL))
    pool = LayerPool(large, [large, small])
    pool.allocate(CpuBackend(threads=1), 3)
    rows = mx.random.normal((32, 1, 128), key=mx.random.key(0))
    slots, before = Slots(np.arange(96, 128)), Slots(np.arange(32, 64))  # the second half of block 1
    pool.rows(1).keys.write(slots, rows)
    pool.rows(1).values.write(slots, -rows)
    seen = pool.rows(1).keys.read(slots)
    assert float(mx.abs(seen - rows).max()) < (1e-9 if bits is None else 0.02)
    pool.change(PoolChange(2, (BlockMove(1, 0),), num_blocks_cut=1))
    whole = pool.rows(1)
    assert whole.num_blocks == 4
    assert mx.array_equal(whole.keys.read(before), seen)
    assert mx.array_equal(whole.values.read(before), -seen)
    assert pool.rows().num_blocks == 2
    numbers = pool.rows().keys.read(Slots(np.arange(32))).reshape(2, -1)
    if bits is None:
        assert mx.array_equal(numbers[1], seen.reshape(-1))
    assert float(mx.abs(numbers[0]).max()) == 0.0
