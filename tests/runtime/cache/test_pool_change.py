"""Pools of every backend that are moved, cut and grown between steps: what attention sees stays the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest
from emulator.worlds import Chunk, make_backend, step_of, step_rows

from mlx_server.config import BLOCK_SIZE
from mlx_server.outputs import BlockMove, PoolChange, ScheduledChunk
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend, block_sources
from mlx_server.runtime.cache.block_tables import BlockTables
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from mlx_server.runtime.kernels.gpu.pool import GpuPool
from tests.device_memory import active_bytes

SPEC = LayerSpec(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
NUM_HEADS = 4

STEPS = (
    (0, [Chunk((3, 7), 0, 40), Chunk((1,), 0, 5)]),
    (2, [Chunk((3, 7), 40), Chunk((1,), 5), Chunk((9, 0, 5), 0, 70)]),
    (2, [Chunk((3, 7), 41), Chunk((9, 0, 5), 70), Chunk((1,), 0, 8)]),
    (2, [Chunk((3, 7), 42), Chunk((9, 0, 5), 71)]),
)
"""(decodes, chunks) of each step, on a pool of 10 blocks."""

CHANGES = {
    1: PoolChange(16),
    2: PoolChange(6, (BlockMove(7, 2), BlockMove(9, 4)), num_blocks_cut=10),
    3: PoolChange(12),
}
"""What happens before a step; the ids in `STEPS` are those from before all changes."""

BACKENDS: dict[str, Callable[[], Any]] = {
    "reference": ReferenceBackend,
    "reference, 8 bits": ReferenceBackend,
    "cpu": lambda: CpuBackend(threads=2),
    "cpu, 8 bits": lambda: CpuBackend(threads=2),
    "cpu, 4 bits": lambda: CpuBackend(threads=2),
    "metal": make_backend,
    "metal, 8 bits": make_backend,
}


def attend_all(backend: Any, spec: LayerSpec, changes: dict[int, PoolChange]) -> list[np.ndarray]:
    pool = backend.make_pool(spec, 10, 16)
    place: dict[int, int] = {}
    outs = []
    for index, (num_decodes, chunks) in enumerate(STEPS):
        if index in changes:
            pool = backend.change_pool(pool, changes[index])
            place |= dict(changes[index].moves)
        moved = [replace(chunk, blocks=tuple(place.get(b, b) for b in chunk.blocks)) for chunk in chunks]
        step = step_of(moved, num_decodes)
        queries, keys, values = step_rows(index, SPEC, NUM_HEADS, step.num_tokens)
        out = backend.attend(pool, queries, keys, values, backend.plan(step), scale=0.2)
        mx.eval(out, *backend.state(pool))
        outs.append(np.array(out))
    return outs


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_sees_no_change(name):
    backend = BACKENDS[name]()
    spec = replace(SPEC, bits=KvBits.of(name.split()[1])) if "bits" in name else SPEC
    for out, wanted in zip(attend_all(backend, spec, CHANGES), attend_all(backend, spec, {}), strict=True):
        np.testing.assert_array_equal(out, wanted)


def test_every_block_after_a_change_has_a_source():
    assert block_sources(3, PoolChange(5)).tolist() == [0, 1, 2, 0, 0]
    assert block_sources(6, PoolChange(3, (BlockMove(5, 1),))).tolist() == [0, 5, 2]


def test_block_tables_follow_the_moves():
    tables = BlockTables()
    tables.add("gone")
    tables.add("stays")
    for name, ids in (("gone", (8, 9)), ("stays", (7, 2))):
        tables.plan([ScheduledChunk(name, 0, 40, None, (ids,), False, 0)])
    tables.drop("gone")
    tables.move((BlockMove(7, 0), BlockMove(30, 1)))
    (plan,) = tables.plan([ScheduledChunk("stays", 40, 1, None, (), True, 0)])
    assert plan.block_tables.tolist() == [[0, 2]]
    assert plan.slot_mapping.tolist() == [2 * BLOCK_SIZE + 8]


def test_a_gpu_pool_is_copied_one_array_at_a_time_and_its_old_memory_is_free():
    pool = GpuPool.make(SPEC, 64)
    before = active_bytes()
    mx.reset_peak_memory()
    pool.change(PoolChange(16))
    assert mx.get_peak_memory() - before < 12 * SPEC.block_bytes, "16 halves: K of what stays, beside what was there"
    assert pool.keys.shape == pool.values.shape == (16, 2, BLOCK_SIZE, 64)
    assert before - active_bytes() == 48 * SPEC.block_bytes


def test_a_host_pool_grows_in_place_and_gives_the_pages_of_its_end_back():
    backend, process = CpuBackend(threads=1), psutil.Process()
    pool = backend.make_pool(SPEC, 8, 2048)
    fields = pool.fields
    pool = backend.change_pool(pool, PoolChange(2048))
    assert pool.fields == fields
    before = process.memory_info().rss
    pool.keys[:] = pool.values[:] = 1.0
    written = process.memory_info().rss - before
    assert written >= 0.9 * 2048 * SPEC.block_bytes
    pool = backend.change_pool(pool, PoolChange(100, (BlockMove(2000, 3),), 1948))
    kept = process.memory_info().rss - before
    if sys.platform == "linux":  # a Mac takes the pages when it needs them, and counts them until then
        assert kept <= 100 * SPEC.block_bytes + 2 * 2**21
    assert float(_rows(pool.keys, 3).min()) == 1.0
    with pytest.raises(ValueError, match="for 2048 blocks cannot grow to 2049"):
        backend.change_pool(pool, PoolChange(2049))


def _rows(array: np.ndarray, block_id: int) -> Sequence[float] | np.ndarray:
    size = SPEC.num_kv_heads * BLOCK_SIZE * SPEC.key_dim
    return array[block_id * size : (block_id + 1) * size]
