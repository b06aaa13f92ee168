"""What the host plans for the GPU kernels: work items, index arrays, variants, and the bytes they move."""

from __future__ import annotations

import dataclasses
import re

import mlx.core as mx
import numpy as np
import pytest
from emulator.worlds import Chunk, step_of

from mlx_server.runtime.attention.interface import LayerSpec
from mlx_server.runtime.kernels.gpu.kernels import KERNEL_TEXTS, read_text
from mlx_server.runtime.kernels.gpu.plan import GATHER_TOKENS, Cut, GpuMetadata, make_work
from mlx_server.runtime.kernels.gpu.variants import (
    DTYPES,
    HEAD_DIMS,
    DecodeShape,
    KernelVariant,
    check_variant,
    default_variant,
    unsupported_reason,
)

SHAPE = DecodeShape(num_query_heads=8, num_kv_heads=2, key_dim=128, value_dim=128, dtype=mx.float16)
KNOWN_DIMS = "32, 64, 80, 96, 112, 128, 160, 192, 256, 512"
VARIANT = KernelVariant(heads_per_simdgroup=4, simdgroups=4, lanes_per_row=32, rows_ahead=4)


def lens(*contexts: int) -> np.ndarray:
    return np.array(contexts, np.int32)


def cut(*contexts: int, window: int | None = None, tokens: int | None = None, num_cores: int = 10) -> list[list[int]]:
    variant = dataclasses.replace(VARIANT, partition_tokens=tokens)
    return make_work(lens(*contexts), window, SHAPE, variant, num_cores).items.tolist()


# ---- work items: sequence, first token, end token, 1 for a sequence's first


def test_sequences_are_cut_into_whole_blocks() -> None:
    assert cut(70, 64, 1, tokens=64) == [[0, 0, 64, 1], [0, 64, 70, 0], [1, 0, 64, 1], [2, 0, 1, 1]]


def test_an_empty_sequence_has_one_empty_item() -> None:
    assert cut(0, 33, tokens=32) == [[0, 0, 0, 1], [1, 0, 32, 1], [1, 32, 33, 0]]


def test_a_window_leaves_out_what_is_older_and_keeps_to_blocks() -> None:
    assert cut(100, 20, window=50, tokens=32) == [[0, 50, 64, 1], [0, 64, 96, 0], [0, 96, 100, 0], [1, 0, 20, 1]]
    assert cut(100, window=100, tokens=128) == [[0, 0, 100, 1]]
    assert cut(100, window=1, tokens=32) == [[0, 99, 100, 1]]


def test_items_of_a_sequence_are_found_by_its_starts() -> None:
    work = make_work(lens(70, 0, 33), None, SHAPE, dataclasses.replace(VARIANT, partition_tokens=32), 10)
    assert work.starts.tolist() == [0, 3, 4, 6]
    assert work.is_split
    assert not make_work(lens(70, 0, 33), None, SHAPE, VARIANT, 1).is_split


@pytest.mark.parametrize(
    ("contexts", "num_cores", "num_items"),
    [
        ([8192], 10, 40),  # 8 threadgroups a core, two KV heads an item: 40 items wanted
        ([8192], 40, 64),  # 160 wanted, but each of 4 streams gets a block: 128 tokens an item
        ([8192] * 4, 10, 160),  # each as if it were alone
        ([100], 10, 1),
        ([8192, 32], 10, 41),
        ([0], 10, 1),
    ],
)
def test_partitions_fill_the_gpu(contexts: list[int], num_cores: int, num_items: int) -> None:
    items = cut(*contexts, num_cores=num_cores)
    assert abs(len(items) - num_items) <= 4 * len(contexts)
    assert sum(end - first for _, first, end, _ in items) == sum(contexts)


MIXED = (
    [32_768],
    [32_768, *[500] * 7],
    [500, 32_768, *[500] * 15],
    [100_000, *[500] * 63],
    [100_000, 50_000, 33, *[4096] * 20],
    [1000] * 64,
    [8192] * 40,
    [1, 127, 128, 129, 0, 5000],
)


@pytest.mark.parametrize("num_cores", [8, 16, 40, 80])
@pytest.mark.parametrize(
    "shape", [SHAPE, DecodeShape(32, 8, 128, 128, mx.float16), DecodeShape(16, 1, 256, 256, mx.float16)]
)
def test_no_item_is_longer_than_an_even_share(shape: DecodeShape, num_cores: int) -> None:
    """But for whole blocks, and a block for each stream. So one long context among short ones keeps nobody waiting."""
    variant = default_variant(shape)
    wanted = max(1, 8 * num_cores // (shape.num_kv_heads * variant.tiles(shape)))
    for contexts in MIXED:
        items = make_work(lens(*contexts), None, shape, variant, num_cores).items
        longest = max(end - first for _, first, end, _ in items.tolist())
        assert longest <= max(sum(contexts) / wanted + 32, 32 * variant.streams(shape))
        assert len(items) <= sum(-(-context // (32 * variant.streams(shape))) or 1 for context in contexts)
        assert len(items) <= len(contexts) * wanted


@pytest.mark.parametrize("window", [None, 700])
def test_a_sequence_is_cut_alike_whoever_runs_beside_it(window: int | None) -> None:
    for contexts in MIXED:
        together = make_work(lens(*contexts), window, SHAPE, VARIANT, 16)
        for sequence, context in enumerate(contexts):
            (alone,) = (cut(context, window=window, num_cores=16),)
            mine = together.items[together.starts[sequence] : together.starts[sequence + 1], 1:].tolist()
            assert mine == [item[1:] for item in alone]


# ---- index arrays


def test_small_index_arrays_are_padded_to_eight_elements() -> None:
    """MLX passes smaller inputs in another address space: another kernel to compile."""
    for batch in (1, 2, 9):
        plan = GpuMetadata.of(step_of([Chunk((1,), 3)] * batch, batch), 10)
        for variant in (VARIANT, dataclasses.replace(VARIANT, partition_tokens=32)):
            (launch,) = plan.launches(Cut(SHAPE, variant), None).decodes
            indices = launch.indices
            sizes = [plan.slots.size, *(array.size for array in indices.arrays)]
            assert min(sizes) >= 8
            assert indices.num_items == batch
    split = GpuMetadata.of(step_of([Chunk((1, 2), 40)], 1), 10)
    (launch,) = split.launches(Cut(SHAPE, dataclasses.replace(VARIANT, partition_tokens=32)), None).decodes
    starts = launch.indices.item_starts
    assert starts is not None
    assert starts.tolist() == [0, 2, 0, 0, 0, 0, 0, 0]


def test_layers_of_one_kind_share_their_index_arrays() -> None:
    plan = GpuMetadata.of(step_of([Chunk((1,), 3), Chunk((2, 3), 10, 40)], 1), 10)
    one = Cut(SHAPE, VARIANT)
    assert plan.launches(one, None) is plan.launches(one, None)
    assert plan.launches(one, None) is not plan.launches(one, 128)
    assert plan.chunk_gathers(2, None) is plan.chunk_gathers(2, None)


def test_a_chunk_gathers_its_context_and_no_more_than_its_window() -> None:
    plan = GpuMetadata.of(step_of([Chunk((5, 3, 8, 1), 90, 20)], 0), 10)
    (gather,) = plan.chunk_gathers(2, None)
    (whole,) = gather.seen
    assert whole.rows.tolist() == [[[10, 6, 16, 2], [11, 7, 17, 3]]]
    assert (whole.first, whole.end, whole.mask) == (0, 110, "causal")
    assert (gather.rows.tolist(), gather.num_rows) == ([10, 6, 16, 2, 11, 7, 17, 3], 8)
    (gather,) = plan.chunk_gathers(2, 40)
    (windowed,) = gather.seen
    assert windowed.rows.tolist() == [[[6, 16, 2], [7, 17, 3]]]  # tokens 51 to 109
    assert (windowed.first, windowed.end) == (51 - 32, 110 - 32)
    assert (gather.rows.tolist(), gather.num_rows) == ([6, 16, 2, 7, 17, 3, 0, 0], 6)
    mask = np.array(windowed.mask)[0, 0]
    for query, position in enumerate(range(90, 110)):
        assert np.flatnonzero(mask[query]).tolist() == [p - 51 for p in range(position - 39, position + 1)]


def test_chunks_are_gathered_together_up_to_a_bound() -> None:
    """In tokens of their contexts, whole blocks of them; one that is longer alone goes by itself."""
    half = GATHER_TOKENS // 2
    starts = [half - 2, half - 2, 30, 2 * GATHER_TOKENS, 5]
    tables = [tuple(range(-(-(start + 2) // 32))) for start in starts]
    plan = GpuMetadata.of(step_of([Chunk(*chunk, 2) for chunk in zip(tables, starts)], 0), 10)
    gathers = plan.chunk_gathers(1, None)
    assert [[seen.end for seen in gather.seen] for gather in gathers] == [
        [half, half],
        [32],
        [2 * GATHER_TOKENS + 2],
        [7],
    ]
    assert [seen.queries for gather in gathers for seen in gather.seen] == [slice(i, i + 2) for i in range(0, 10, 2)]
    assert [gather.num_rows for gather in gathers] == [GATHER_TOKENS // 32, 1, GATHER_TOKENS // 16 + 1, 1]


# ---- variants


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 16, 24, 48, 71])
def test_default_variants_can_be_launched(group: int, dtype: mx.Dtype) -> None:
    for key_dim in HEAD_DIMS:
        for value_dim in {key_dim, 128}:
            shape = DecodeShape(2 * group, 2, key_dim, value_dim, dtype)
            variant = default_variant(shape)
            check_variant(shape, variant)
            assert 32 <= variant.threads(shape) <= 256
            covered = variant.tiles(shape) * variant.head_simdgroups(shape) * variant.heads_per_simdgroup
            assert group <= covered < group + variant.heads_per_simdgroup * variant.head_simdgroups(shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes_per_row": 12}, "12 lanes cannot split"),
        ({"simdgroups": 9}, "9 simdgroups; a threadgroup takes 1 to 8"),
        ({"rows_ahead": 0}, "reads no heads or no rows"),
        ({"partition_tokens": 40}, "partition_tokens is 40; it must be a multiple of 32"),
    ],
)
def test_variants_that_cannot_be_launched_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_variant(SHAPE, dataclasses.replace(VARIANT, **change))


def test_lanes_must_split_both_rows() -> None:
    shape = dataclasses.replace(SHAPE, value_dim=80)
    with pytest.raises(ValueError, match="32 lanes cannot split rows of 128 and 80 elements evenly"):
        check_variant(shape, VARIANT)
    assert default_variant(shape).lanes_per_row == 8


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (SHAPE, None),
        (dataclasses.replace(SHAPE, key_dim=72), f"key head_dim 72 is none of {KNOWN_DIMS}"),
        (dataclasses.replace(SHAPE, value_dim=576), f"value head_dim 576 is none of {KNOWN_DIMS}"),
        (dataclasses.replace(SHAPE, dtype=mx.int8), "dtype mlx.core.int8 is none of float16, bfloat16, float32"),
        (dataclasses.replace(SHAPE, num_query_heads=7), "7 query heads do not divide over 2 KV heads"),
    ],
)
def test_unsupported_shapes_say_why(shape: DecodeShape, reason: str | None) -> None:
    assert unsupported_reason(shape) == reason
    assert DecodeShape.of(LayerSpec(2, 64, 96, mx.float16), 6) == DecodeShape(6, 2, 64, 96, mx.float16)


# ---- texts


@pytest.mark.parametrize("text", KERNEL_TEXTS, ids=lambda text: text.name)
def test_bodies_use_their_outputs_and_have_no_comments(text) -> None:
    assert "//" not in text.body
    assert all(name in text.body for name in text.outputs)
    assert text.body.count("\n") == read_text(f"{text.name}.msl").count("\n")  # compilers report the file's lines


@pytest.mark.parametrize("text", KERNEL_TEXTS, ids=lambda text: text.name)
def test_names_of_shapes_are_meant(text) -> None:
    """MLX adds arguments wherever it finds an input's name with one of these endings."""
    found = {f"{name}{ending}" for name in text.inputs for ending in ("_shape", "_strides", "_ndim")}
    assert {name for name in found if name in text.body} == (
        {"block_tables_shape"} if text.name in ("paged_decode", "paged_shared") else set()
    )


@pytest.mark.parametrize("text", KERNEL_TEXTS, ids=lambda text: text.name)
def test_tokens_are_bound_and_never_read(text) -> None:
    """A GPU may fetch what is in constant memory early: a value that was read could be stale, a binding cannot."""
    assert re.search(r"\btoken\b", text.body) is None
    assert ("token_out[0] = 0;" in text.body) == ("token" in text.inputs)
