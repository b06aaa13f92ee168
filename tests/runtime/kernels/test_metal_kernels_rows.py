"""Rows that kernels read and write in place, on the emulated GPU: their bits, faults planted in them, falling back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from emulator.errors import EmulatorError
from emulator.kernel import Emulator
from emulator.worlds import kernel_maker, make_backend, toolchain

from mlx_server.runtime.cache.row_pool import PlainRows, QuantizedRows, RowsInPlace, Slots
from mlx_server.runtime.kernels.gpu.backend import MetalBackend
from mlx_server.runtime.kernels.gpu.pool import host_view
from mlx_server.runtime.kernels.gpu.rows import RowKernels, row_failure

WRONG_NUMBERS = "wrong numbers"
SLOTS = (7, 0, 11, 4, 3)
NUM_SLOTS = 12
Mutations = dict[str, tuple[tuple[str, str], ...]]


def numbered(slots: tuple[int, ...]) -> Slots:
    return Slots(np.array(slots, np.int32))


def bits_of(array: mx.array) -> np.ndarray:
    mx.eval(array)
    return host_view(array).view(np.uint8).copy()


def random_rows(shape: tuple[int, ...], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """All bits at random, as far as NumPy has no numbers of the type that it would change."""
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32) * 1000).astype(dtype)


def use(
    row: tuple[int, ...], dtype: mx.Dtype, emulator: Emulator | None = None, slots: tuple[int, ...] = SLOTS
) -> None:
    """Writes some rows of a pool that is full, and compares every bit of it, and of what is read."""
    before = random_rows((NUM_SLOTS, *row), dtype)
    mx.eval(before)
    wanted = np.array(bits_of(before))
    rows = RowsInPlace(RowKernels(emulator.metal_kernel if emulator else kernel_maker()), before)
    written = random_rows((len(slots), *row), dtype, 1)
    wanted[list(slots)] = bits_of(written)
    rows.write(numbered(slots), written)
    seen = rows.read(Slots(np.array([[slots[1], 9], [slots[0], slots[1]]])))
    array, token = rows.arrays()
    assert seen.shape == (2, 2, *row)
    np.testing.assert_array_equal(bits_of(seen), wanted[[[slots[1], 9], [slots[0], slots[1]]]])
    assert array is before
    np.testing.assert_array_equal(bits_of(array), wanted)
    assert token.tolist() == [0]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32], ids=str)
@pytest.mark.parametrize("row", [(1,), (3, 7), (128,), (3, 43), (5, 260)], ids=str)
def test_rows_of_any_size_and_type_are_moved_bit_by_bit(row: tuple[int, ...], dtype: mx.Dtype) -> None:
    use(row, dtype)


def test_no_two_threads_touch_one_element() -> None:
    use((3, 43), mx.float32, Emulator(toolchain(), check_races=True))


def kind_of_failure(mutations: Mutations, slots: tuple[int, ...] = SLOTS, *, check_races: bool = False) -> str | None:
    try:
        use((3, 43), mx.float16, Emulator(toolchain(), check_races=check_races, mutations=mutations), slots)
    except EmulatorError as error:
        return error.kind
    except AssertionError:
        return WRONG_NUMBERS
    return None


@pytest.mark.parametrize(
    ("kernel", "old", "new", "kind"),
    [
        ("row_write", "element < SIZE", "element < SIZE - 1", WRONG_NUMBERS),
        ("row_write", "element += WIDTH", "element += WIDTH + 1", WRONG_NUMBERS),
        ("row_write", "% WIDTH", "% WIDTH + 1", WRONG_NUMBERS),
        ("row_write", "int64_t(slots[row]) * SIZE", "int64_t(row) * SIZE", WRONG_NUMBERS),
        ("row_read", "token_out[0] = 0;", "", WRONG_NUMBERS),
        ("row_read", "element < SIZE", "element < SIZE - 1", WRONG_NUMBERS),
        ("row_read", "slots[row]", "slots[row] + 1", WRONG_NUMBERS),
        ("row_read", "int64_t(row) * SIZE", "int64_t(row) * (SIZE + 1)", "out of bounds"),
    ],
)
def test_a_fault_planted_in_a_kernel_is_caught(kernel: str, old: str, new: str, kind: str) -> None:
    assert kind_of_failure({kernel: ((old, new),)}) == kind


def test_two_rows_in_one_slot_are_a_race() -> None:
    assert kind_of_failure({}) is None
    assert kind_of_failure({}, (7, 0, 7, 4, 3), check_races=True) == "data race"


@pytest.mark.parametrize("kernel", ["row_write", "row_read"])
def test_offsets_have_64_bits(kernel: str) -> None:
    """The last slot of all: 64-bit offsets lead outside of the address space, 32-bit ones overflow."""
    far = Slots(np.array([2**31 - 1], np.int32))
    for old, kind in ((None, "out of bounds"), ("int64_t(slots[row])", "undefined behaviour")):
        mutations = {} if old is None else {kernel: ((old, "slots[row]"),)}
        rows = RowsInPlace(RowKernels(Emulator(toolchain(), mutations=mutations).metal_kernel), mx.zeros((4, 129)))
        with pytest.raises(EmulatorError) as caught:
            rows.write(far, mx.ones((1, 129))) if kernel == "row_write" else rows.read(far)
        assert caught.value.kind == kind


def test_one_kernel_of_each_kind_serves_every_number_of_rows() -> None:
    """And the start-up's test has compiled it."""
    emulator = Emulator(toolchain())
    kernels = RowKernels(emulator.metal_kernel)
    assert row_failure(kernels, 24, mx.float32) is None
    warm = set(emulator.sources)
    rows = RowsInPlace(kernels, mx.zeros((300, 4, 6)))
    for count in (1, 2, 9, 64):
        slots = Slots(np.arange(count, dtype=np.int32))
        rows.write(slots, mx.ones((count, 4, 6)))
        assert rows.read(slots).all()
    assert emulator.sources == warm
    assert len(warm) == 2


class Recorder:
    """Makes kernels that keep what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, mx.array], list[mx.array]]] = []

    def __call__(self, **definition: Any) -> Callable[..., list[mx.array]]:
        kernel = kernel_maker()(**definition)

        def call(**launch: Any) -> list[mx.array]:
            outputs: list[mx.array] = kernel(**launch)
            self.calls.append((definition["name"], dict(zip(definition["input_names"], launch["inputs"])), outputs))
            return outputs

        return call


def test_every_use_takes_the_token_of_the_one_before_in_whichever_shape() -> None:
    recorder = Recorder()
    rows = RowsInPlace(RowKernels(recorder), mx.zeros((4, 6)))
    view = rows.view((8, 3))
    _, token = rows.arrays()
    rows.write(numbered((1,)), mx.ones((1, 6)))
    view.write(numbered((2, 7)), mx.full((2, 3), 2))
    assert view.read(numbered((2, 3, 7))).tolist() == [[2] * 3, [1] * 3, [2] * 3]
    rows.write(numbered((1,)), mx.ones((1, 6)))
    for _, inputs, outputs in recorder.calls:
        assert inputs["token"] is token
        assert inputs["pool"].size < 24, "MLX ends command buffers by the size of inputs"
        token = outputs[-1]
    assert rows.arrays()[1] is view.arrays()[1] is token
    assert [name for name, _, _ in recorder.calls] == ["row_write", "row_write", "row_read", "row_write"]


def test_rows_that_are_taken_are_others() -> None:
    rows = RowsInPlace(RowKernels(kernel_maker()), mx.arange(24).reshape(4, 6))
    taken = rows.take(numbered((3, 3, 0)))
    rows.write(numbered((3,)), mx.zeros((1, 6), mx.int32))
    assert taken.read(numbered((0, 2))).tolist() == [list(range(18, 24)), list(range(6))]


def test_quantised_rows_are_written_in_place_too() -> None:
    backend = make_backend()
    rows, wanted = (
        QuantizedRows.zeros((8, 2, 32), mx.float32, 8, make) for make in (backend.make_rows, PlainRows.zeros)
    )
    for each in (rows, wanted):
        each.write(numbered((5, 2)), random_rows((2, 2, 32), mx.float32))
    slots = numbered((2, 5, 7))
    assert mx.array_equal(rows.read(slots), wanted.read(slots))
    assert not rows.needs_synchronous_steps
    assert wanted.needs_synchronous_steps


@pytest.mark.parametrize(
    ("kernel", "old", "new", "reason"),
    [
        ("row_write", "stored[to + element] = rows[from + element];", "", "write 0 of 8 was not read back"),
        ("row_write", "int64_t(slots[row])", "int64_t(slots[row] - 1)", "write 0 of 8 was not read back"),
        ("row_read", "slots[row]", "0", "write 0 of 8 was not read back"),
    ],
)
def test_rows_that_kernels_fail_to_write_are_plain_ones(
    kernel: str, old: str, new: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = MetalBackend(Emulator(toolchain(), mutations={kernel: ((old, new),)}).metal_kernel, num_cores=4)
    with caplog.at_level(logging.WARNING):
        rows = [backend.make_rows((4, 5), mx.float32) for _ in range(2)]
    assert [type(each) for each in rows] == [PlainRows, PlainRows]
    assert rows[0].needs_synchronous_steps
    assert len(caplog.messages) == 1, "once a kind"
    assert caplog.messages[0].startswith("metal cannot write rows of 5 numbers in place, so steps are not submitted")
    assert caplog.messages[0].endswith(reason)
