"""Numbers in 8 bits: how far off they come back, and which are not kept so."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_server.kv_disk.slab import Rounding

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@pytest.mark.parametrize("dtype", BYTES)
def test_each_number_comes_back_within_half_a_step_of_its_32(dtype: str) -> None:
    """And half a step of the type itself: bfloat16 has 8 bits of precision, float16 11."""
    rng = np.random.default_rng(0)
    rows = mx.array(rng.standard_normal((100, 32)) * 10.0 ** rng.integers(-3, 4, (100, 1))).astype(getattr(mx, dtype))
    rows[7] = 0.0
    content = memoryview(bytes(np.array(rows.view(mx.uint8))))
    rounding = Rounding(dtype, len(content))
    packed = rounding.pack(content)
    assert packed is not None
    assert len(packed) == rounding.packed_bytes == 100 * 36
    back = rounding.unpack(packed)
    assert len(back) == len(content) == 100 * 32 * BYTES[dtype]
    got = np.array(mx.array(np.frombuffer(back, np.uint8)).view(getattr(mx, dtype)).astype(mx.float32)).reshape(100, 32)
    wanted = np.array(rows.astype(mx.float32))
    largest = np.abs(wanted).max(axis=1, keepdims=True)
    own = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert (np.abs(got - wanted) <= largest * (0.501 / 127 + own)).all()
    assert not got[7].any()


@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_what_is_not_finite_is_not_kept(number: float) -> None:
    numbers = np.zeros(64, np.float16)
    numbers[40] = number
    assert Rounding("float16", 128).pack(numbers.view(np.uint8).data) is None


@pytest.mark.parametrize("largest", [2.0**-149, 190 * 2.0**-149, 2.0**-130, 3.4e38])
def test_the_smallest_and_the_largest_numbers_keep_their_sign(largest: float) -> None:
    numbers = np.full(32, largest, np.float32)
    numbers[::2] *= -1
    rounding = Rounding("float32", numbers.nbytes)
    packed = rounding.pack(numbers.view(np.uint8).data)
    assert packed is not None
    got = np.frombuffer(rounding.unpack(packed), np.float32)
    assert (got * numbers.astype(np.float64) >= 0).all()
    assert (np.abs(got) <= np.abs(numbers.astype(np.float64)) * 1.01).all()
