"""How much may be written to the SSD each day."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

from mlx_server.kv_disk.files import Files

_NAME = "budget.json"
_DAY_S = 86_400.0
_SAVE_SHARE = 64


class WriteBudget:
    """A token bucket that holds one day's bytes and refills within a day. It continues where the last server left off:
    the state is written after every 64th part of a day's bytes, and at the end.

    With 64 GB a day: after writing 64 GB, nothing is written for a while; an hour later 2.7 GB may be written.

    One thread at a time, except for `write`. If the clock is set back, nothing refills; if it is set forward, the
    bucket becomes at most full.
    """

    def __init__(self, files: Files, bytes_per_day: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives the seconds since the epoch. Raises `OSError`."""
        self._files = files
        self._most = float(bytes_per_day)
        self._clock = clock
        self._left, self._at_s = self._most, clock()
        self._unsaved = 0.0
        self._read()

    @property
    def left(self) -> int:
        """Bytes that may be written now."""
        now = self._clock()
        gained = max(0.0, now - self._at_s) / _DAY_S * self._most
        self._left, self._at_s = min(self._most, self._left + gained), now
        return int(self._left)

    def spend(self, num_bytes: int) -> bytes | None:
        """Books `num_bytes` as written. Returns the state for `write` if it is time to save it."""
        self._left -= num_bytes
        self._unsaved += num_bytes
        return self.state() if self._unsaved >= self._most / _SAVE_SHARE else None

    def state(self) -> bytes:
        """The state of the bucket, for `write`."""
        self._unsaved = 0.0
        return json.dumps({"left": self.left, "at_s": self._at_s}).encode()

    def write(self, state: bytes) -> None:
        """Saves a state. Waits for the disk; raises `OSError`."""
        self._files.replace(_NAME, state)

    def _read(self) -> None:
        """Continues from the saved state, unless its file is missing or broken."""
        try:
            (text,) = self._files.read(_NAME, [0], 4096)
            saved = json.loads(text)
            left, at_s = float(saved["left"]), float(saved["at_s"])
            if math.isfinite(left + at_s):
                self._left, self._at_s = min(self._most, max(0.0, left)), min(self._at_s, at_s)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return
