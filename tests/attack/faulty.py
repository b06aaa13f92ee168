"""A whole server whose machine goes wrong after SIGUSR2: `python -m tests.attack.faulty CONFIG FAULT`.

clock   the wall clock jumps by years, there and back, each time it is looked at
disk    no file can grow by a byte any more
"""

from __future__ import annotations

import itertools
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

_JUMPS_S = (3.0e8, -2.0e8, 86_400.0, -86_400.0)
"""Ten years on, six back, and days."""


class Clock:
    """Takes the place of `time.time` before anything else is imported, which could keep that."""

    def __init__(self) -> None:
        self._plain = time.time
        self._jumps = itertools.repeat(0.0)
        time.time = self.read
        time.time_ns = lambda: int(self.read() * 1e9)

    def read(self) -> float:
        return self._plain() + next(self._jumps)

    def jump(self) -> None:
        self._jumps = itertools.cycle(_JUMPS_S)


def fill_disk() -> None:
    """Python leaves SIGXFSZ ignored, so that writing fails with EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def main() -> int:
    faults: Mapping[str, Callable[[], None]] = {"clock": Clock().jump, "disk": fill_disk}
    begin = faults[sys.argv[2]]

    def go_wrong(*_: Any) -> None:
        begin()

    from mlx_server.observability.logs import survive_lost_streams
    from tests.api import life_real

    signal.signal(signal.SIGUSR2, go_wrong)
    survive_lost_streams()
    return life_real.main()


if __name__ == "__main__":
    raise SystemExit(main())
