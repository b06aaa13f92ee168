"""The `cpu` backend where requests begin with the same blocks: read once for all, with the bits of reads apart."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.cpu import attention as cpu_attention
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
from tests.attention_worlds import EIGHT_FOUR, Layer, Span, World

TOLERANCE = 3e-6
DECODES = [Span(end - 1, end) for end in (700, 640, 900, 513, 512)]
"""Decodes beside others: the last has no token of its own behind 512."""

MIXED = [*DECODES[:3], Span(600, 605), Span(540, 660), Span(99, 100)]


def alike(layer: Layer, spans: Sequence[Span], num_shared: int, apart: Sequence[int] = ()) -> World:
    """Requests with so many leading blocks in common, but for those in `apart`."""
    world = World(layer, spans)
    for index in range(1, len(world.spans)):
        if index not in apart:
            count = min(num_shared, world.spans[index].end // 32)
            world.tables[index, :count] = world.tables[0, :count]
            for kind in (1, 2):
                world.rows[index][kind][: 32 * count] = world.rows[0][kind][: 32 * count]
    return world


def attend(world: World, threads: int = 2) -> np.ndarray:
    cpu = CpuBackend(threads)
    pool = cpu.make_pool(world.layer.spec, world.num_blocks)
    if world.layer.bits is None:
        pool.keys[:] = np.nan
        pool.values[:] = np.nan
    return world.attend(cpu, pool)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("bits", [None, EIGHT_FOUR], ids=str)
@pytest.mark.parametrize("spans", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_shared_reads_give_the_bits_of_reads_apart(
    spans: list[Span], bits: KvBits | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(6, 2, 64, 96, has_sinks=True, bits=bits)
    world = alike(layer, spans, num_shared=18, apart=[2])
    together = attend(world, threads)
    if bits is None:
        assert np.abs(together - world.expected()).max() <= TOLERANCE
    monkeypatch.setattr(cpu_attention, "find_runs", lambda readers: [])
    np.testing.assert_array_equal(attend(world, threads), together)


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("num_shared", [240, 150])
def test_what_few_rows_share_and_what_they_do_not_are_split_among_the_threads(
    num_shared: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = alike(Layer(2, 1, 64, 64), [Span(8191, 8192), Span(8000, 8001)], num_shared=num_shared)
    together = attend(world, threads)
    assert np.abs(together - world.expected()).max() <= TOLERANCE
    monkeypatch.setattr(cpu_attention, "find_runs", lambda readers: [])
    np.testing.assert_array_equal(attend(world, threads), together)


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    world = alike(Layer(6, 2, 64, 64), DECODES, num_shared=16)
    cpu = CpuBackend(2)
    pool = cpu.make_pool(world.layer.spec, world.num_blocks)
    together = world.attend(cpu, pool)
    step = world.step()
    for row, span in enumerate(world.spans):
        alone = World(world.layer, [span])
        alone.tables, alone.rows = step.block_tables[row : row + 1], world.rows[row : row + 1]
        out = alone.attend_step(cpu, pool, alone.step(), [slice(span.start, span.end)])
        np.testing.assert_array_equal(out[0], together[row])


@pytest.mark.parametrize("window", [32, 300])
def test_windows_are_read_apart(window: int) -> None:
    world = alike(Layer(6, 2, 64, 64, window=window), DECODES, num_shared=16)
    assert np.abs(attend(world) - world.expected()).max() <= TOLERANCE


def test_whole_pieces_of_256_tokens_are_read_from_one_table_alone() -> None:
    """Of a request that shares 576 tokens, its own table's 512 could be anything."""
    world = alike(Layer(4, 2, 64, 64), [Span(699, 700), Span(649, 650)], num_shared=18)
    cpu = CpuBackend(2)
    pool = cpu.make_pool(world.layer.spec, world.num_blocks)
    wanted = world.attend(cpu, pool)
    step = world.step()
    slots, starts = step.slot_mapping.astype(np.int64), step.query_starts.astype(np.int32)
    lengths, tables = step.context_lens.astype(np.int32), step.block_tables.astype(np.int32)
    sharing = cpu_attention._sharing(starts, lengths, tables)
    assert sharing.tolist() == [[0, 18], [0, 18]]
    for num_wrong, is_right in ((16, True), (17, False)):
        tables[1, :num_wrong] = world.num_blocks - 1
        plan = cpu._native.Plan(*(array.tobytes() for array in (slots, starts, lengths, tables, sharing)), b"")
        metadata = cpu_attention.CpuMetadata(plan, step.num_tokens, world.num_blocks)
        queries = world.inputs([slice(span.start, span.end) for span in world.spans])[0]
        out = np.array(cpu.attend(pool, queries, None, None, metadata, scale=world.layer.scale))
        assert np.array_equal(out, wanted) == is_right
        mx.synchronize()
