"""The K/V writer on the emulated GPU: what it writes, faults planted in it, and offsets of 64 bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from emulator.errors import EmulatorError
from emulator.kernel import Emulator
from emulator.worlds import NO_BLOCK, decode_world, toolchain

from mlx_server.runtime.attention.interface import LayerSpec
from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.kernels import PagedKernels
from mlx_server.runtime.kernels.gpu.pool import GpuPool, host_view
from mlx_server.runtime.kernels.gpu.variants import DecodeShape

WRONG_NUMBERS = "wrong numbers"
SLOTS = (37, 0, 95, 64, 63)
WRITE_SPEC = LayerSpec(num_kv_heads=2, key_dim=64, value_dim=96, dtype=mx.float16)


def write(emulator: Emulator, slots: tuple[int, ...]) -> None:
    """Writes five tokens into a pool of three blocks of NaN, and looks at every slot of it."""
    kernels = PagedKernels(emulator.metal_kernel)
    pool = GpuPool.make(WRITE_SPEC, 3)
    rng = np.random.default_rng(0)
    written = []
    for array in (pool.keys, pool.values):
        host_view(array)[...] = np.nan
        written.append(rng.standard_normal((len(slots), 2, 1, array.shape[-1])).astype(np.float16))
    rows_and_slots = *(mx.array(rows) for rows in written), mx.array((*slots, 0, 0, 0), mx.int32)
    kernels.of_pool(WRITE_SPEC).write(pool, *rows_and_slots)
    for array, rows in zip((pool.keys, pool.values), written):
        wanted = np.full(array.shape, np.nan, np.float16)
        for slot, row in zip(slots, rows):
            wanted[slot // 32, :, slot % 32] = row[:, 0]
        np.testing.assert_array_equal(np.array(array), wanted)
    assert pool.memory.token.tolist() == [0]


def kind_of_write_failure(
    slots: tuple[int, ...] = SLOTS, mutation: tuple[tuple[str, str], ...] = (), *, check_races: bool = False
) -> str | None:
    try:
        write(Emulator(toolchain(), check_races=check_races, mutations={"kv_write": mutation}), slots)
    except EmulatorError as error:
        return error.kind
    except AssertionError:
        return WRONG_NUMBERS
    return None


@pytest.mark.parametrize("check_races", [False, True])
def test_the_writer_writes_its_slots_and_nothing_else(check_races: bool) -> None:
    assert kind_of_write_failure(check_races=check_races) is None


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("BLOCK + slot % BLOCK", "BLOCK + (slot + 1) % BLOCK", WRONG_NUMBERS),
        ("slot / BLOCK", "slot / BLOCK + 1", "out of bounds"),
        ("* KV_HEADS + head;\nconst", "* KV_HEADS;\nconst", WRONG_NUMBERS),
        ("first < KEY_DIM", "first < VALUE_DIM", "out of bounds"),
        ("token_out[0] = 0;", "", WRONG_NUMBERS),
    ],
)
def test_a_fault_planted_in_the_writer_is_caught(old: str, new: str, kind: str) -> None:
    assert kind_of_write_failure(mutation=((old, new),)) == kind


def test_two_tokens_in_one_slot_are_a_race() -> None:
    assert kind_of_write_failure((37, 0, 95, 37, 63), check_races=True) == "data race"


# ---- offsets of large pools


def test_offsets_into_a_pool_have_64_bits() -> None:
    """The last possible slot of all: 64-bit offsets lead outside of the address space, 32-bit ones overflow."""
    narrow = (("int64_t(slot / BLOCK)", "(slot / BLOCK)"), ("const int64_t to", "const int to"))
    assert kind_of_write_failure((NO_BLOCK,)) == "out of bounds"
    assert kind_of_write_failure((NO_BLOCK,), narrow) == "undefined behaviour"

    shape = DecodeShape(num_query_heads=8, num_kv_heads=8, key_dim=256, value_dim=256, dtype=mx.float32)
    for mutations, kind in (
        ({}, "out of bounds"),
        ({"paged_decode": (("int64_t(block", "(block"),)}, "undefined behaviour"),
    ):
        backend = MetalBackend(Emulator(toolchain(), mutations=mutations).metal_kernel, num_cores=4)
        world = decode_world(backend, shape, [40])
        world.step.block_tables[:] = NO_BLOCK
        with pytest.raises(EmulatorError) as caught:
            backend.attend(world.pool, world.queries, None, None, backend.plan(world.step), scale=1.0)
        assert caught.value.kind == kind
