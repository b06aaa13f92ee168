"""How much work MLX puts into one command buffer of Metal.

MLX keeps the arrays that an operation reads until the operation's command buffer has ended, and lets the host run 10 of
them ahead. So long ones cost memory, 12 times what one holds at worst, and short ones leave the host less time to
prepare the next step. MLX ends one after a number of operations or, whatever its name for it, of elements of all
buffers that it uses.
"""

from __future__ import annotations

import os

MAX_IN_FLIGHT = 12
"""Command buffers whose arrays are kept at a time: those that MLX lets run, the one that ends and the next."""

_OPS, _ELEMENTS = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
_MAX_OPS = 1000
"""More than most models' steps have: the elements decide."""

_MILLIONS_PER_GIB = 6
_FEWEST_MILLIONS, _MOST_MILLIONS = 40, 400
"""MLX's own number, and one at which the largest models' decode steps are some ten command buffers."""


def set_limits(machine_bytes: int, *, is_metal: bool) -> None:
    """What MLX reads when it is loaded, unless the user has set it.

    On a Mac with 16 GiB, 96 x 2^20 elements, with 32 twice as many, and 400 from 67 GiB on: all that are in flight keep
    a seventh of the memory at most, at 16 bits an element. CUDA ends graphs by the same numbers, and there a KV pool
    would end one at each operation that touches it, so there they end by their operations alone.
    """
    millions = 1_000_000
    if is_metal:
        os.environ.setdefault(_OPS, str(_MAX_OPS))
        millions = min(_MOST_MILLIONS, max(_FEWEST_MILLIONS, _MILLIONS_PER_GIB * machine_bytes >> 30))
    os.environ.setdefault(_ELEMENTS, str(millions))


def max_elements() -> int:
    """Elements at which a command buffer ends, as far as they matter for memory."""
    return min(_MOST_MILLIONS, int(os.environ[_ELEMENTS])) << 20
