"""The `cpu` backend against a float64 oracle and against `reference`; its memory and its threads.

Pools start full of NaN, as numbers or as scales of quantised rows, so reading one number outside a request's context
turns an output into NaN.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product

import mlx.core as mx
import numpy as np
import psutil
import pytest

from mlx_server.errors import ConfigError
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.cache.row_pool import KvBits
from mlx_server.runtime.kernels.cpu.attention import CpuBackend, CpuPool
from tests.attention_worlds import ALL_BITS, FOUR, Layer, Span, World, make_step

TOLERANCE, QUANTISED_TOLERANCE = 3e-6, 5e-6
QUANTISED_DIMS = (32, 64, 96, 128, 192, 256)


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    return CpuBackend(threads=2)


def poisoned_pool(cpu: CpuBackend, layer: Layer, num_blocks: int) -> CpuPool:
    pool = cpu.make_pool(layer.spec, num_blocks)
    pool.keys[:] = pool.values[:] = np.nan if layer.bits is None else 255
    return pool


def worst_error(cpu: CpuBackend, world: World) -> float:
    pool = poisoned_pool(cpu, world.layer, world.num_blocks)
    return float(np.abs(world.attend(cpu, pool) - world.expected()).max())


def random_layer(rng: np.random.Generator, bits: KvBits | None) -> Layer:
    num_kv_heads = int(rng.choice([1, 2, 3]))
    key_dim = int(rng.choice([5, 40, 64, 80, 96, 128, 192, 256] if bits is None else QUANTISED_DIMS))
    return Layer(
        num_heads=num_kv_heads * int(rng.integers(1, 17)),
        num_kv_heads=num_kv_heads,
        key_dim=key_dim,
        value_dim=int(rng.choice([key_dim, key_dim, 24, 64, 100] if bits is None else QUANTISED_DIMS)),
        window=int(rng.integers(1, 200)) if rng.random() < 0.4 else None,
        has_sinks=rng.random() < 0.4,
        bits=bits,
    )


def random_spans(rng: np.random.Generator) -> list[Span]:
    decodes = [Span(end - 1, end) for end in rng.integers(1, 400, size=rng.integers(0, 8)).tolist()]
    starts = [int(rng.choice([0, 0, 31, 32, int(rng.integers(300))])) for _ in range(rng.integers(1, 3))]
    return decodes + [Span(start, start + int(rng.integers(2, 120))) for start in starts]


@pytest.mark.parametrize(("bits", "seed"), [*product([None], range(40)), *product(ALL_BITS, range(15))], ids=str)
def test_random_mixed_steps_match_float64(cpu: CpuBackend, bits: KvBits | None, seed: int) -> None:
    """Quantised K/V are as MLX stores them."""
    rng = np.random.default_rng(seed)
    tolerance = TOLERANCE if bits is None else QUANTISED_TOLERANCE
    assert worst_error(cpu, World(random_layer(rng, bits), random_spans(rng), seed)) <= tolerance


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256, 40, 1, 33])
@pytest.mark.parametrize("group", [1, 2, 5, 16, 71])
def test_every_head_dim_and_group(cpu: CpuBackend, head_dim: int, group: int) -> None:
    layer = Layer(group, 1, head_dim, head_dim)
    assert worst_error(cpu, World(layer, [Span(99, 100), Span(0, 1), Span(40, 60)])) <= TOLERANCE


@pytest.mark.parametrize("window", [1, 31, 32, 33, 64])
def test_windows_at_block_edges(cpu: CpuBackend, window: int) -> None:
    spans = [Span(end - 1, end) for end in (1, 31, 32, 33, 64, 65, 300)] + [Span(0, 130), Span(250, 350)]
    assert worst_error(cpu, World(Layer(6, 2, 64, 64, window=window, has_sinks=True), spans)) <= TOLERANCE


def test_a_batch_of_64(cpu: CpuBackend) -> None:
    spans = [Span(end - 1, end) for end in range(1, 640, 10)]
    assert worst_error(cpu, World(Layer(9, 3, 64, 64), spans)) <= TOLERANCE


@pytest.mark.parametrize("window", [None, 5000])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_long_contexts_shared_among_threads(threads: int, window: int | None) -> None:
    spans = [Span(8191, 8192), Span(6000, 6001), Span(7000, 7020)]
    world = World(Layer(4, 2, 64, 64, window=window, has_sinks=True), spans)
    assert worst_error(CpuBackend(threads), world) <= TOLERANCE


@pytest.mark.parametrize("context", [200, 5000])
def test_scores_of_any_size_neither_overflow_nor_vanish(cpu: CpuBackend, context: int) -> None:
    """5000 tokens of one request are split among the threads."""
    world = World(Layer(2, 1, 64, 64), [Span(context - 1, context)])
    for queries, _, _ in world.rows:
        queries *= 1000
    got = world.attend(cpu, poisoned_pool(cpu, world.layer, world.num_blocks))
    scores = world.rows[0][0][-1, :, 0].astype(np.float64) @ world.rows[0][1][:, 0, 0].T
    np.testing.assert_allclose(got[0, :, 0], world.rows[0][2][scores.argmax(axis=1), 0, 0], atol=1e-5)


def test_sinks_that_count_for_nothing(cpu: CpuBackend) -> None:
    world = World(Layer(2, 1, 64, 64, has_sinks=True, window=40), [Span(99, 100), Span(50, 90)])
    world.sinks = np.full(2, -np.inf, dtype=np.float32)
    got = world.attend(cpu, poisoned_pool(cpu, world.layer, world.num_blocks))
    assert np.abs(got - world.expected()).max() <= TOLERANCE


@pytest.mark.parametrize(("bits", "seed"), [*product([None], range(6)), *product(ALL_BITS, range(4))], ids=str)
def test_agrees_with_reference_through_the_same_interface(cpu: CpuBackend, bits: KvBits | None, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    world, reference = World(random_layer(rng, bits), random_spans(rng), seed), ReferenceBackend()
    wanted = world.attend(reference, reference.make_pool(world.layer.spec, world.num_blocks))
    got = world.attend(cpu, poisoned_pool(cpu, world.layer, world.num_blocks))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2 * (TOLERANCE if bits is None else QUANTISED_TOLERANCE))


def test_repeats_to_the_bit(cpu: CpuBackend) -> None:
    world = World(Layer(8, 2, 64, 64), [Span(4999, 5000), Span(70, 71), Span(0, 200)])
    first, second = (world.attend(cpu, cpu.make_pool(world.layer.spec, world.num_blocks)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("bits", [None, *ALL_BITS], ids=str)
def test_a_layer_that_shares_a_pool_writes_nothing(cpu: CpuBackend, bits: KvBits | None) -> None:
    world = World(Layer(4, 2, 64, 64, bits=bits), [Span(69, 70), Span(10, 50)])
    pool = poisoned_pool(cpu, world.layer, world.num_blocks)
    wanted = world.attend(cpu, pool)
    before = pool.keys.copy(), pool.values.copy()
    queries = world.inputs([slice(span.start, span.end) for span in world.spans])[0]
    got = cpu.attend(pool, queries, None, None, cpu.plan(world.step()), scale=world.layer.scale)
    np.testing.assert_array_equal(np.array(got), wanted)
    np.testing.assert_array_equal(pool.keys, before[0])
    np.testing.assert_array_equal(pool.values, before[1])


@pytest.mark.parametrize("layout", ["token_and_head_swapped", "slice_of_a_wider_row", "last_axis_strided"])
def test_inputs_are_read_as_they_are_strided(cpu: CpuBackend, layout: str) -> None:
    world = World(Layer(4, 2, 64, 64), [Span(0, 40)])
    arrays = world.inputs([slice(0, 40)])
    if layout == "token_and_head_swapped":
        strided = [mx.contiguous(a.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3) for a in arrays]
    elif layout == "slice_of_a_wider_row":
        strided = [mx.concatenate([a, a], axis=1)[:, : a.shape[1]] for a in arrays]
    else:
        strided = [mx.contiguous(a.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2) for a in arrays]
        strided = [mx.contiguous(a.swapaxes(0, 3)).swapaxes(0, 3) for a in strided]
    pool = poisoned_pool(cpu, world.layer, world.num_blocks)
    got = cpu.attend(pool, *strided, cpu.plan(world.step()), scale=world.layer.scale)
    assert np.abs(np.array(got) - world.expected()).max() <= TOLERANCE


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(cpu: CpuBackend, dtype: mx.Dtype) -> None:
    world = World(Layer(4, 2, 64, 64), [Span(0, 40)])
    halves = [a.astype(dtype) for a in world.inputs([slice(0, 40)])]
    results = []
    for inputs in (halves, [a.astype(mx.float32) for a in halves]):
        pool = poisoned_pool(cpu, world.layer, world.num_blocks)
        results.append(cpu.attend(pool, *inputs, cpu.plan(world.step()), scale=world.layer.scale))
    assert results[0].dtype == dtype
    assert mx.array_equal(results[0], results[1].astype(dtype))


def test_what_it_cannot_do_is_refused_before_memory_is_touched(cpu: CpuBackend) -> None:
    world = World(Layer(4, 2, 64, 64), [Span(0, 40)])
    queries, keys, values = world.inputs([slice(0, 40)])
    plan, pool = cpu.plan(world.step()), cpu.make_pool(world.layer.spec, world.num_blocks)
    small = cpu.make_pool(world.layer.spec, int(world.tables.max()))
    for arguments, reason in [
        ((pool, queries[:39], keys, values), "queries"),
        ((pool, queries[:, :3], keys, values), "queries"),
        ((pool, queries, keys[..., :32], values), "keys"),
        ((pool, queries, keys, values[:, :1]), "values"),
        ((pool, queries, keys, None), "together"),
        ((small, queries, keys, values), "the plan names block"),
    ]:
        with pytest.raises(ValueError, match=reason):
            cpu.attend(*arguments, plan, scale=1.0)
    with pytest.raises(ValueError, match="float32"):
        cpu.make_pool(LayerSpec(2, 64, 64, mx.bfloat16), 4)
    step = world.step()
    with pytest.raises(ValueError, match="a context of 40 tokens is longer than its 1 blocks"):
        cpu.plan(replace(step, block_tables=world.tables[:, :1]))
    for wrong in (replace(step, block_tables=-world.tables), replace(step, slot_mapping=-step.slot_mapping - 1)):
        with pytest.raises(ValueError, match="negative"):
            cpu.plan(wrong)


def test_a_thousand_steps_move_and_take_no_memory(cpu: CpuBackend) -> None:
    layer = Layer(6, 2, 64, 64)
    pool = cpu.make_pool(layer.spec, 64)
    addresses = (pool.keys.ctypes.data, pool.values.ctypes.data)
    tables = np.arange(64, dtype=np.int32).reshape(2, 32)
    process = psutil.Process()
    resident = peak = 0
    for step in range(1000):
        queries = mx.zeros((2, 6, 1, 64))
        keys, values = mx.ones((2, 2, 1, 64)), mx.full((2, 2, 1, 64), step / 1000)
        out = cpu.attend(
            pool, queries, keys, values, cpu.plan(make_step([Span(step, step + 1)] * 2, tables)), scale=1.0
        )
        mx.eval(out)
        if step == 100:
            mx.reset_peak_memory()
        if step == 200:
            resident, peak = process.memory_info().rss, mx.get_peak_memory()
    np.testing.assert_allclose(np.array(out), 0.4995, rtol=1e-6)
    assert (pool.keys.ctypes.data, pool.values.ctypes.data) == addresses == tuple(one.address for one in pool.memory)
    assert mx.get_peak_memory() == peak
    assert process.memory_info().rss - resident < pool.keys.nbytes + pool.values.nbytes + 2**21


def test_blocks_cost_memory_only_once_written(cpu: CpuBackend) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    world = World(Layer(2, 1, 64, 64), [Span(0, 64)])
    pool = cpu.make_pool(world.layer.spec, 2**16)
    world.attend(cpu, pool)
    assert pool.keys.nbytes == 2**29
    assert process.memory_info().rss - before < 2**25


def test_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVE_CPU_THREADS", "3")
    assert CpuBackend().threads == 3
    assert CpuBackend(threads=2).threads == 2
    monkeypatch.setenv("MLX_SERVE_CPU_THREADS", "0")
    with pytest.raises(ConfigError, match="MLX_SERVE_CPU_THREADS is '0'"):
        CpuBackend()
    monkeypatch.delenv("MLX_SERVE_CPU_THREADS")
    assert 1 <= CpuBackend().threads <= (os.cpu_count() or 1)


THREADS = """
import psutil
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
before = psutil.Process().num_threads()
backend = CpuBackend(threads=6)
beside = psutil.Process().num_threads()
del backend
print(beside - before, psutil.Process().num_threads() - before)
"""


def test_threads_end_with_their_backend() -> None:
    result = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "5 0\n"


FORK = """
import os, warnings
from mlx_server.runtime.kernels.cpu.attention import CpuBackend
warnings.simplefilter("ignore")
backend = CpuBackend(threads=4)
child = os.fork()
del backend
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="Apple's frameworks end a forked child that uses them")
def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    result = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "0\n"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(9, 3, 64, 64),
        Layer(8, 1, 128, 64, window=300, has_sinks=True),
        Layer(4, 2, 32, 32, window=50),
        Layer(3, 3, 33, 24, has_sinks=True),
        Layer(6, 2, 64, 64, bits=FOUR),
    ],
)
def test_a_row_has_the_same_bits_in_any_chunk_beside_any_others(layer: Layer, threads: int) -> None:
    """One of a chunk of 700 rows over 3 pieces of keys, of chunks cut anywhere, and of decodes."""
    backend = CpuBackend(threads)
    whole = World(layer, [Span(0, 700)])
    wanted = World(layer, [Span(0, 700)]).attend(CpuBackend(1), CpuBackend(1).make_pool(layer.spec, whole.num_blocks))
    pool = backend.make_pool(layer.spec, whole.num_blocks)
    cuts = [0, 1, 37, 100, 355, 356, 357, 600, 601, 602, 699, 700]
    got = []
    for start, end in pairwise(cuts):
        step = make_step([Span(start, end)], whole.tables)
        got.append(whole.attend_step(backend, pool, step, [slice(start, end)]))
    np.testing.assert_array_equal(np.concatenate(got), wanted)
    np.testing.assert_array_equal(_last_of(backend, whole, pool, [520, 700, 33, 257]), wanted[[519, 699, 32, 256]])


def _last_of(backend: CpuBackend, world: World, pool: CpuPool, ends: list[int]) -> np.ndarray:
    """The last tokens of contexts that are all the beginning of one, as decodes of one step."""
    step = make_step([Span(end - 1, end) for end in ends], np.repeat(world.tables, len(ends), axis=0))
    queries, keys, values = (
        mx.array(np.concatenate([world.rows[0][kind][end - 1 : end] for end in ends])) for kind in range(3)
    )
    sinks = None if world.sinks is None else mx.array(world.sinks)
    layer = world.layer
    out = backend.attend(
        pool, queries, keys, values, backend.plan(step), scale=layer.scale, window=layer.window, sinks=sinks
    )
    return np.array(out)
