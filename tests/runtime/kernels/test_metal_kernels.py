"""The decode kernels against float64, from the source that a Mac compiles: on the GPU, or emulated on the host."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.kernel import Emulator
from emulator.worlds import check_decode, decode_world, make_backend, toolchain

from mlx_server.runtime.attention.interface import StepPlan
from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.variants import HEAD_DIMS, DecodeShape, KernelVariant, default_variant

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
BATCHES = ([1], [31, 32, 33], [64, 0, 200, 5], [1, 1, 1, 1, 1, 1, 1, 1, 97])


def shape_of(
    group: int, dim: int, dtype: mx.Dtype = mx.float32, num_kv_heads: int = 2, value_dim: int = 0
) -> DecodeShape:
    return DecodeShape(num_kv_heads * group, num_kv_heads, dim, value_dim or dim, dtype)


def every_dim_and_type() -> list[Any]:
    """By default each size in one type and the common sizes in all; with `-m full` each in all, since every case is
    several texts to compile."""
    sizes = enumerate(zip(HEAD_DIMS, (4, 2, 3, 8, 1, 5, 6, 2, 3, 8), strict=True))
    return [
        pytest.param(dim, group, dtype, marks=() if dim in (64, 128) or turn == place % 3 else pytest.mark.full)
        for place, (dim, group) in sizes
        for turn, dtype in enumerate(DTYPES)
    ]


@pytest.mark.parametrize(("dim", "group", "dtype"), every_dim_and_type(), ids=str)
def test_every_head_dim_and_type(dim: int, group: int, dtype: mx.Dtype) -> None:
    backend = make_backend()
    for contexts in BATCHES:
        check_decode(backend, decode_world(backend, shape_of(group, dim, dtype), contexts))


@pytest.mark.parametrize("group", [1, 6, 7, 11, 16])
def test_every_way_to_share_a_kv_head(group: int) -> None:
    backend = make_backend()
    check_decode(backend, decode_world(backend, shape_of(group, 128, mx.float16), [70, 1, 130]))


def test_one_kv_head_for_more_query_heads_than_a_threadgroup_takes() -> None:
    backend = make_backend()
    shape = shape_of(71, 64, num_kv_heads=1)
    assert default_variant(shape).tiles(shape) == 2
    check_decode(backend, decode_world(backend, shape, [40, 3]))


def test_keys_and_values_of_different_sizes() -> None:
    backend = make_backend()
    check_decode(backend, decode_world(backend, shape_of(2, 192, mx.bfloat16, value_dim=128), [70, 33]))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(512, 256), (32, 64), (112, 96), (160, 128)])
def test_keys_and_values_of_the_rarer_sizes(key_dim: int, value_dim: int) -> None:
    backend = make_backend()
    check_decode(backend, decode_world(backend, shape_of(4, key_dim, mx.float16, value_dim=value_dim), [70, 33]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_result_is_the_same_to_the_bit_whoever_runs_beside_it(dtype: mx.Dtype) -> None:
    """Sequences of one and of several items, alone and among others that are split or are not."""
    backend = make_backend(num_cores=1)
    shape = shape_of(4, 64, dtype)
    contexts = [40, 700, 128, 129, 300]
    world = decode_world(backend, shape, contexts)

    def decode(*sequences: int) -> np.ndarray:
        step = world.step
        some = StepPlan(
            num_decodes=len(sequences),
            positions=step.positions[list(sequences)],
            slot_mapping=step.slot_mapping[list(sequences)],
            query_starts=np.arange(len(sequences) + 1, dtype=np.int32),
            context_lens=step.context_lens[list(sequences)],
            block_tables=step.block_tables[list(sequences)],
        )
        queries = world.queries[mx.array(sequences)]
        out = backend.attend(world.pool, queries, None, None, backend.plan(some), scale=0.125)
        return np.array(out.astype(mx.float32))

    alone = [decode(sequence)[0] for sequence in range(len(contexts))]
    for sequences in ([0, 1, 2, 3, 4], [2, 0], [1, 2], [4, 3, 0]):
        for out, sequence in zip(decode(*sequences), sequences, strict=True):
            np.testing.assert_array_equal(out, alone[sequence])


@pytest.mark.parametrize("window", [1, 5, 32, 33, 100, 1000])
def test_a_window_hides_what_is_older(window: int) -> None:
    backend = make_backend()
    check_decode(backend, decode_world(backend, shape_of(2, 64), [1, 32, 33, 64, 100, 131, 300]), window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_take_weight_and_give_no_value(dtype: mx.Dtype) -> None:
    backend = make_backend()
    for contexts in ([1], [0, 5], [300, 40]):
        check_decode(backend, decode_world(backend, shape_of(8, 64, dtype), contexts), window=128, has_sinks=True)


@pytest.mark.parametrize(
    "variant",
    [
        KernelVariant(1, 1, 32, 1),
        KernelVariant(2, 8, 32, 4),
        KernelVariant(3, 4, 16, 2),
        KernelVariant(4, 6, 8, 1, 64),
        KernelVariant(8, 3, 16, 3, 32),
        KernelVariant(6, 7, 8, 2, 96),
    ],
    ids=str,
)
def test_variants_differ_in_speed_alone(variant: KernelVariant) -> None:
    backend = make_backend(choose_variant=lambda shape: variant)
    check_decode(backend, decode_world(backend, shape_of(6, 64), [130, 70, 7]), has_sinks=True)


@pytest.mark.parametrize("partition_tokens", [None, 32, 96, 4096])
def test_partitions_of_long_contexts(partition_tokens: int | None) -> None:
    variant = KernelVariant(4, 4, 32, 4, partition_tokens)
    backend = make_backend(num_cores=8, choose_variant=lambda shape: variant)
    world = decode_world(backend, shape_of(4, 128, mx.float16), [1500, 3001, 64])
    check_decode(backend, world, has_sinks=True)
    check_decode(backend, world, window=1024)


def test_the_result_does_not_depend_on_the_order_of_threads() -> None:
    variant = KernelVariant(2, 8, 32, 2, 64)
    results = []
    for seed in range(6):
        backend = make_backend(seed=seed, choose_variant=lambda shape: variant)
        world = decode_world(backend, shape_of(4, 64), [130, 70])
        metadata = backend.plan(world.step)
        out = backend.attend(world.pool, world.queries, None, None, metadata, scale=0.125)
        results.append(np.array(out))
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (80, 8), (96, 5), (256, 2)])
def test_no_races_and_no_misaligned_vectors(dim: int, group: int, dtype: mx.Dtype) -> None:
    backend = MetalBackend(Emulator(toolchain(), check_races=True).metal_kernel, num_cores=4)
    check_decode(backend, decode_world(backend, shape_of(group, dim, dtype), [70, 33]), has_sinks=True)


@pytest.mark.full
def test_the_largest_batch_of_the_longest_context() -> None:
    backend = make_backend(num_cores=40)
    check_decode(backend, decode_world(backend, shape_of(2, 64, mx.float16), [8192, 0, *([1, 40] * 31)]))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
def test_random_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 3]
    shape = shape_of(
        int(rng.integers(1, 17)), HEAD_DIMS[seed % len(HEAD_DIMS)], dtype, num_kv_heads=int(rng.integers(1, 4))
    )
    batch = int(2 ** rng.uniform(0, 6.02))
    longest = int(2 ** rng.uniform(5, 13.01))
    contexts = rng.integers(0, longest, batch).tolist()
    backend = make_backend(seed=seed, num_cores=int(rng.integers(1, 41)))
    window = int(rng.integers(1, longest)) if seed % 4 == 1 else None
    check_decode(backend, decode_world(backend, shape, contexts, seed), window=window, has_sinks=seed % 5 == 2)
