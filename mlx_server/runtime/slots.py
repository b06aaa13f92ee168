"""Which rows of an array a step reads or writes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt

SMALL_ARRAY = 8
"""MLX passes an input of fewer elements to a kernel in another address space, which would be another kernel."""


@dataclass(frozen=True)
class Slots:
    """Numbers of slots, of any shape. Known on the host; on the device once somebody asks there."""

    numbers: npt.NDArray[np.integer]

    @cached_property
    def array(self) -> mx.array:
        """As they are, for MLX's own operations."""
        return mx.array(self.numbers)

    @cached_property
    def padded(self) -> mx.array:
        """`[N]`, int32, for kernels: never a small array. What is behind the numbers is no slot of anybody's."""
        flat = self.numbers.reshape(-1).astype(np.int32)
        return mx.array(np.pad(flat, (0, max(0, SMALL_ARRAY - flat.size))))

    @cached_property
    def places(self) -> slice | npt.NDArray[np.integer]:
        """For NumPy's: a range where they are one, which is read without a search."""
        numbers = self.numbers
        if numbers.ndim == 1 and numbers.size and (np.diff(numbers) == 1).all():
            return slice(int(numbers[0]), int(numbers[-1]) + 1)
        return numbers
