"""Rows that share reads of K/V, against float64: drafted tokens of a request, and requests that begin alike."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.kernel import Emulator
from emulator.worlds import Chunk, check_decode, decode_world, make_backend, step_of, step_rows, toolchain

from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend, StepPlan
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.gpu import plan as gpu_plan
from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.variants import HEAD_DIMS, DecodeShape, shared_tiles, shared_variant
from mlx_server.runtime.kernels.trials import exhaust
from tests.attention_worlds import EIGHT, EIGHT_FOUR, FOUR

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
DRAFTED = {"contexts": [40, 70, 33, 300], "counts": [1, 2, 5, 9]}
ALIKE = {"contexts": [200, 170, 300, 140, 50], "num_shared": [0, 4, 4, 4, 0]}
"""Four that share 128 tokens, and one that shares nothing."""

TREE = {
    "contexts": [330, 300, 420, 421, 200, 160],
    "counts": [1, 1, 1, 4, 2, 3],
    "num_shared": [0, 9, 4, 12, 4, 4],
}
"""All share 4 blocks, two of them 9 and two others 12; some draft."""


def shape_of(group: int, dim: int, dtype: mx.Dtype = mx.float32, **changes: int) -> DecodeShape:
    return dataclasses.replace(DecodeShape(2 * group, 2, dim, dim, dtype), **changes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [DRAFTED, ALIKE, TREE], ids=["drafted", "alike", "tree"])
def test_rows_that_share_reads(dtype: mx.Dtype, world: dict[str, Any]) -> None:
    backend = make_backend()
    check_decode(backend, decode_world(backend, shape_of(4, 64, dtype), **world))


@pytest.mark.parametrize(("dim", "group"), list(zip(HEAD_DIMS, (4, 2, 3, 8, 1, 5, 6, 2, 3, 8), strict=True)))
def test_every_head_dim(dim: int, group: int) -> None:
    backend = make_backend()
    check_decode(backend, decode_world(backend, shape_of(group, dim, mx.float16), [150, 140], counts=[1, 6]))


@pytest.mark.parametrize("window", [1, 33, 130])
def test_drafts_see_no_more_than_a_window(window: int) -> None:
    backend = make_backend()
    for world in (DRAFTED, TREE):
        check_decode(backend, decode_world(backend, shape_of(3, 64), **world), window=window, has_sinks=True)


def test_sinks_count_once() -> None:
    backend = make_backend()
    for world in (DRAFTED, ALIKE, TREE):
        check_decode(backend, decode_world(backend, shape_of(2, 80), **world), has_sinks=True)


@pytest.mark.parametrize(
    ("bits", "dtype"), [(EIGHT, mx.float16), (FOUR, mx.bfloat16), (EIGHT_FOUR, mx.float32)], ids=str
)
def test_fewer_bits(bits: KvBits, dtype: mx.Dtype) -> None:
    backend = make_backend()
    shape = shape_of(4, 64, dtype, value_dim=96, bits=bits)
    check_decode(backend, decode_world(backend, shape, **TREE))


def test_one_kv_head_for_more_query_heads_than_a_threadgroup_takes() -> None:
    backend = make_backend()
    shape = DecodeShape(71, 1, 64, 64, mx.float32)
    assert shared_tiles(shape, shared_variant(shape)) == 2
    check_decode(backend, decode_world(backend, shape, [160, 170], counts=[1, 2], num_shared=[0, 4]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "bits"), [(64, None), (80, None), (96, EIGHT_FOUR)])
def test_no_races_and_no_misaligned_vectors(dim: int, bits: KvBits | None, dtype: mx.Dtype) -> None:
    backend = MetalBackend(Emulator(toolchain(), check_races=True).metal_kernel, num_cores=4)
    check_decode(backend, decode_world(backend, shape_of(3, dim, dtype, bits=bits), **TREE), has_sinks=True)


def test_results_go_to_the_rows_they_are_of() -> None:
    """Of chunks of few and of many tokens in any order, some of which begin alike."""
    spec = LayerSpec(2, 64, 64, mx.float32)
    alike = tuple(range(6))
    steps = [
        (0, [Chunk((*alike, 6), 0, 200)]),
        (2, [Chunk((*alike, 6), 200), Chunk((*alike, 7), 192), Chunk((8, 9), 0, 3)]),
        (2, [Chunk((*alike, 6), 201), Chunk((8, 9), 3), Chunk((*alike, 7), 193, 5), Chunk((10, 11), 0, 40)]),
        (0, [Chunk((8, 9), 4, 2), Chunk((10, 11), 40, 20), Chunk((*alike, 7), 198, 7), Chunk((*alike, 6), 202, 18)]),
    ]
    outs = []
    for backend in (make_backend(), ReferenceBackend()):
        pool = backend.make_pool(spec, 12)
        for seed, (num_decodes, chunks) in enumerate(steps):
            step = step_of(chunks, num_decodes)
            out = backend.attend(pool, *step_rows(seed, spec, 6, step.num_tokens), backend.plan(step), scale=0.2)
            mx.eval(out, *backend.state(pool))
            outs.append(np.array(out))
    for out, wanted in zip(outs[: len(steps)], outs[len(steps) :], strict=True):
        np.testing.assert_allclose(out, wanted, atol=1e-5, rtol=0)


def test_many_rows_are_launched_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_plan, "DECODES_AT_ONCE", 6)
    backend = make_backend()
    for world in (DRAFTED, ALIKE, TREE):
        check_decode(backend, decode_world(backend, shape_of(3, 64), **world))


def test_by_row_a_row_has_the_bits_that_it_has_alone() -> None:
    """Though it could share reads with those beside it."""
    emulator = Emulator(toolchain())
    backend = MetalBackend(emulator.metal_kernel, num_cores=4)
    backend.by_row = True
    world = decode_world(backend, shape_of(4, 64), **TREE)

    def attend(step: StepPlan, queries: mx.array) -> np.ndarray:
        return np.array(backend.attend(world.pool, queries, None, None, backend.plan(step), scale=0.125))

    together = attend(world.step, world.queries)
    assert not any("paged_shared" in source for source in emulator.sources)
    rows = world.step.by_row()
    for row in range(rows.num_tokens):
        alone = dataclasses.replace(
            rows,
            num_decodes=1,
            positions=rows.positions[row : row + 1],
            slot_mapping=rows.slot_mapping[row : row + 1],
            query_starts=np.array([0, 1], np.int32),
            context_lens=rows.context_lens[row : row + 1],
            block_tables=rows.block_tables[row : row + 1],
        )
        np.testing.assert_array_equal(attend(alone, world.queries[row : row + 1])[0], together[row])


def test_a_shared_kernel_that_is_wrong_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    mutations = {"paged_shared": (("base + at < highs[j]", "base + at <= highs[j]"),)}
    emulator = Emulator(toolchain(), mutations=mutations)
    backend = MetalBackend(emulator.metal_kernel, num_cores=4)
    shape = shape_of(4, 64)
    with caplog.at_level(logging.WARNING):
        exhaust(backend.warm_up(shape.spec, shape.num_query_heads))
    assert "metal reads K/V once for each row and gathers drafts: attention over a context of" in caplog.text
    assert backend.refusals == ()
    check_decode(backend, decode_world(backend, shape, **TREE))


# ---- what is read

LOADED = DecodeShape(4, 1, 128, 128, mx.float16)
ROW_BYTES = 128 * 2


def bytes_loaded(may_share: bool, **world: Any) -> Counter[tuple[str, str]]:
    """What kernels read of the buffers of one attention."""
    emulator = Emulator(toolchain(), check_races=True)
    backend = MetalBackend(emulator.metal_kernel, num_cores=4)
    backend.by_row = not may_share
    decodes = decode_world(backend, LOADED, **world)
    emulator.loaded.clear()  # what making the pool has tried
    check_decode(backend, decodes)
    return emulator.loaded


def test_requests_that_begin_alike_read_that_an_eighth_as_often() -> None:
    contexts, shared = [1024 + 32] * 16, [0] + [32] * 15
    apart, together = (bytes_loaded(may_share, contexts=contexts, num_shared=shared) for may_share in (False, True))
    own = 16 * 32 * ROW_BYTES
    for pool in ("key_pool", "value_pool"):
        assert apart["paged_decode", pool] == 16 * 1024 * ROW_BYTES + own
        assert together["paged_decode", pool] == 0
        assert together["paged_shared", pool] == 2 * 1024 * ROW_BYTES + own


@pytest.mark.parametrize(("count", "reads"), [(2, 1), (8, 1), (9, 2), (16, 2)])
def test_drafts_read_their_context_once_for_eight_rows_and_gather_nothing(count: int, reads: int) -> None:
    loaded = bytes_loaded(True, contexts=[512], counts=[count])
    for pool in ("key_pool", "value_pool"):
        assert {kernel: size for (kernel, buffer), size in loaded.items() if buffer == pool} == {
            "paged_shared": reads * 512 * ROW_BYTES
        }
