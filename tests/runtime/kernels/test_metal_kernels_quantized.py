"""K/V in 8 and 4 bits on a GPU: written, decoded in place and gathered by kernels, from the source a Mac compiles."""

from __future__ import annotations

import itertools
import logging

import mlx.core as mx
import numpy as np
import pytest
from emulator.kernel import Emulator
from emulator.worlds import (
    check_decode,
    decode_world,
    gpu,
    kernel_maker,
    make_backend,
    quantised,
    runs_of,
    step_of,
    step_rows,
    toolchain,
)

from mlx_server.runtime.attention import backends
from mlx_server.runtime.attention.interface import LayerSpec, ReferenceBackend
from mlx_server.runtime.cache.row_pool import KV_GROUP_SIZE, KvBits
from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.kernels import PagedKernels
from mlx_server.runtime.kernels.gpu.plan import Gather, Seen
from mlx_server.runtime.kernels.gpu.pool import GpuPool
from mlx_server.runtime.kernels.gpu.rows import read_rows
from mlx_server.runtime.kernels.gpu.variants import DecodeShape, KernelVariant
from mlx_server.runtime.kernels.trials import exhaust
from tests.attention_worlds import ALL_BITS, EIGHT, EIGHT_FOUR, FOUR
from tests.runtime.kernels.test_metal_kernels_backend import NUM_BLOCKS, NUM_HEADS, STEPS, attend_all, check_equal

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
DIMS = (32, 64, 96, 128, 160, 192, 256, 512)
BATCHES = ([1], [31, 32, 33], [64, 0, 200, 5])


def spec_of(bits: KvBits, dtype: mx.Dtype = mx.float32, key_dim: int = 64, value_dim: int = 64) -> LayerSpec:
    return LayerSpec(2, key_dim, value_dim, dtype, bits)


def shape_of(group: int, dim: int, bits: KvBits, dtype: mx.Dtype = mx.float32, value_dim: int = 0) -> DecodeShape:
    return DecodeShape(2 * group, 2, dim, value_dim or dim, dtype, bits)


# ---- decodes


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "bits"),
    [
        (64, 4, mx.float32, EIGHT),
        (96, 3, mx.float16, FOUR),
        (128, 8, mx.bfloat16, EIGHT),
        (192, 1, mx.float32, FOUR),
        (256, 5, mx.float16, EIGHT),
        (64, 2, mx.bfloat16, FOUR),
        (64, 4, mx.float16, EIGHT_FOUR),
        (96, 2, mx.float32, EIGHT_FOUR),
        (32, 4, mx.float16, EIGHT),
        (160, 2, mx.bfloat16, FOUR),
        (512, 4, mx.float32, EIGHT),
        *(pytest.param(*case, marks=pytest.mark.full) for case in itertools.product(DIMS, (6,), DTYPES, ALL_BITS)),
    ],
)
def test_every_head_dim_and_type(dim: int, group: int, dtype: mx.Dtype, bits: KvBits) -> None:
    backend = make_backend()
    for contexts in BATCHES:
        check_decode(backend, decode_world(backend, shape_of(group, dim, bits, dtype), contexts))


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_keys_and_values_of_different_sizes_and_groups(bits: KvBits) -> None:
    backend = make_backend()
    check_decode(backend, decode_world(backend, shape_of(2, 192, bits, mx.bfloat16, value_dim=96), [70, 33]))


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_windows_and_sinks(bits: KvBits) -> None:
    backend = make_backend()
    world = decode_world(backend, shape_of(2, 64, bits), [1, 32, 33, 64, 100, 131, 300])
    for window in (1, 33, 100):
        check_decode(backend, world, window=window, has_sinks=True)


@pytest.mark.parametrize(
    ("variant", "bits"),
    [
        (KernelVariant(1, 1, 32, 1), EIGHT),
        (KernelVariant(3, 4, 16, 2, 64), FOUR),
        (KernelVariant(6, 7, 8, 2, 96), EIGHT_FOUR),
    ],
    ids=str,
)
def test_variants_differ_in_speed_alone(variant: KernelVariant, bits: KvBits) -> None:
    backend = make_backend(choose_variant=lambda shape: variant)
    check_decode(backend, decode_world(backend, shape_of(6, 64, bits), [130, 70, 7]), has_sinks=True)


# ---- the writer, and rows that are gathered


def random_rows(spec: LayerSpec, num_tokens: int) -> tuple[mx.array, mx.array]:
    _, keys, values = step_rows(7, spec, 2, num_tokens)
    return keys, values


@pytest.mark.parametrize(
    ("bits", "dtype"), [(EIGHT, mx.float32), (FOUR, mx.float16), (EIGHT_FOUR, mx.bfloat16)], ids=str
)
def test_a_block_holds_what_mlx_makes_of_its_rows(dtype: mx.Dtype, bits: KvBits) -> None:
    """To the bit where division is exact, as it is in the emulator."""
    spec = spec_of(bits, dtype, key_dim=64, value_dim=96)
    kernels, pool = PagedKernels(kernel_maker()), GpuPool.make(spec, 3)
    keys, values = random_rows(spec, 64)
    keys[3, 0, 0, :] = 0.5
    kernels.of_pool(spec).write(pool, keys, values, mx.array([*range(64, 96), *range(32)], mx.int32))
    mx.eval(pool.memory.token)
    for array, rows, num_bits in ((pool.keys, keys, bits.keys), (pool.values, values, bits.values)):
        blocks = rows[:, :, 0].reshape(2, 32, 2, -1).swapaxes(1, 2)
        wanted = np.array(runs_of(*quantised(blocks, num_bits)))
        assert not np.array(array[1]).any()
        if gpu() is None:
            np.testing.assert_array_equal(np.array(array)[[2, 0]], wanted)
    gather = Gather.of(Seen(slice(0, 64), np.array([[[4, 0], [5, 1]]], np.int32), 0, 64, "causal"))
    (both,) = read_rows(kernels.of_pool(spec), pool, gather)
    for read, rows, num_bits in zip((both.keys, both.values), (keys, values), bits):
        parts = quantised(rows[:, :, 0].swapaxes(0, 1), num_bits)
        stored = mx.dequantize(*parts, group_size=KV_GROUP_SIZE, bits=num_bits)
        largest = float(mx.abs(stored).max())
        np.testing.assert_allclose(
            np.array(read[0].astype(mx.float32)), np.array(stored.astype(mx.float32)), rtol=0, atol=largest * 2**-8
        )


FAULTS = (
    ("kv_write_quantized", "int64_t(slot / BLOCK) * KV_HEADS + head", "int64_t(slot / BLOCK) * KV_HEADS"),
    ("kv_write_quantized", "codes[w] = word", "codes[0] = word"),
    ("kv_write_quantized", "<< (i * bits)", "<< (i * (bits - 1))"),
    ("kv_write_quantized", "is_low_far ? low : high", "high"),
    ("kv_write_quantized", "scales[BLOCK * groups] = T(bias);", ""),
    ("kv_write_quantized", "scales[0] = T(scale);", "scales[0] = T(-scale);"),
    ("kv_gather", "at * groups + first / KV_GROUP", "at * groups"),
    ("kv_gather", "(at * dim + first) * bits / 32", "(at * dim) * bits / 32"),
    ("kv_gather", "+ groups * GROUP_WORDS", ""),
    ("kv_gather", "float(scales[BLOCK * groups])", "float(scales[0])"),
)


@pytest.mark.parametrize(("kernel", "old", "new"), FAULTS)
def test_what_writes_or_reads_wrongly_is_not_used(kernel: str, old: str, new: str) -> None:
    backend = MetalBackend(Emulator(toolchain(), mutations={kernel: ((old, new),)}).metal_kernel, num_cores=4)
    with pytest.raises(RuntimeError, match=r"K/V of 8 bits cannot be written in place: (keys|values) of write"):
        backend.make_pool(spec_of(EIGHT, key_dim=96, value_dim=96), 4)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("KEY_GROUPS + element / KV_GROUP", "KEY_GROUPS"),
        ("VALUE_GROUPS + element / KV_GROUP", "VALUE_GROUPS"),
        ("KEY_CODES) + at * KEY_GROUPS", "KEY_CODES) + BLOCK * KEY_GROUPS + at * KEY_GROUPS"),
        ("codes >> (i * VALUE_BITS) & VALUE_MASK) * value_scale", "codes >> (i * VALUE_BITS)) * value_scale"),
        ("(element * KEY_BITS % 32)", "0"),
        ("(element * VALUE_BITS % 32)", "0"),
    ],
)
def test_a_decode_kernel_that_is_wrong_is_not_used(old: str, new: str, caplog: pytest.LogCaptureFixture) -> None:
    mutations = {"paged_decode": ((old, new),)}
    backend = MetalBackend(Emulator(toolchain(), mutations=mutations).metal_kernel, num_cores=4)
    spec = spec_of(EIGHT, key_dim=96, value_dim=96)
    with caplog.at_level(logging.WARNING):
        exhaust(backend.warm_up(spec, NUM_HEADS))
        outs = attend_all(backend, spec)
    assert "metal decodes gather K/V instead of reading it in place: attention over a context" in caplog.text
    check_equal(outs, attend_all(ReferenceBackend(), spec))


@pytest.mark.parametrize(
    ("bits", "dtype"), [(EIGHT, mx.float32), (FOUR, mx.bfloat16), (EIGHT_FOUR, mx.float16)], ids=str
)
def test_no_races_and_no_misaligned_vectors(bits: KvBits, dtype: mx.Dtype) -> None:
    backend = MetalBackend(Emulator(toolchain(), check_races=True).metal_kernel, num_cores=4)
    attend_all(backend, spec_of(bits, dtype, 64, 96))


# ---- the backend


def test_pools_are_never_copied_and_take_what_their_spec_says() -> None:
    spec = spec_of(EIGHT, mx.float16, 128, 96)
    backend = make_backend()
    pool = backend.make_pool(spec, NUM_BLOCKS)
    assert pool.keys.nbytes + pool.values.nbytes == NUM_BLOCKS * spec.block_bytes
    assert spec.block_bytes == 32 * 2 * (128 + 96 + 2 * 2 * (4 + 3))
    pool.check_moves()
    for num_decodes, chunks in STEPS * 3:
        step = step_of(chunks, num_decodes)
        out = backend.attend(pool, *step_rows(0, spec, NUM_HEADS, step.num_tokens), backend.plan(step), scale=0.1)
        mx.async_eval(out, *backend.state(pool))
    assert pool.check_moves() == 0


def test_where_kernels_cannot_write_them_another_backend_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mutations = {"kv_write_quantized": (("scales[0] = T(scale);", "scales[0] = T(-scale);"),)}

    def faulty() -> MetalBackend:
        return MetalBackend(Emulator(toolchain(), mutations=mutations).metal_kernel, num_cores=4)

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(backends, "_FACTORIES", {"metal": faulty, "reference": ReferenceBackend})
    with caplog.at_level(logging.WARNING):
        assert backends.choose_backend("auto", [spec_of(EIGHT)]).name == "reference"
    assert len(caplog.messages) == 1
    assert "The metal attention backend is not used: RuntimeError: K/V of 8 bits cannot be written" in caplog.text
    assert backends.choose_backend("metal", [LayerSpec(2, 64, 64, mx.float32)]).name == "metal"
