"""How much may be written a day, so that the SSD lasts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from mlx_server.kv_disk.files import Files

_NAME = "budget.json"
_DAY_S = 86_400.0
_SAVE_SHARE = 64


class WriteBudget:
    """A bucket that holds the bytes of one day, and fills up within one. It goes on where the last server left it: what
    is left is written down at every 64th part, and at the end.

    64 GB a day: after 64 GB of writes nothing is written until some time has passed; an hour later there are 2.7 GB.

    One thread at a time, but for `write`. A clock that is put back fills nothing, and one that is put forward fills the
    bucket at most.
    """

    def __init__(self, files: Files, bytes_per_day: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` counts seconds since the epoch. Raises `OSError`."""
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
        """So much is written. What `write` is to write down of it, if it is time to."""
        self._left -= num_bytes
        self._unsaved += num_bytes
        return self.state() if self._unsaved >= self._most / _SAVE_SHARE else None

    def state(self) -> bytes:
        """What is left, for `write`."""
        self._unsaved = 0.0
        return json.dumps({"left": self.left, "at_s": self._at_s}).encode()

    def write(self, state: bytes) -> None:
        """Writes a state down. Waits for the disk; raises `OSError`."""
        self._files.replace(_NAME, state)

    def _read(self) -> None:
        """Nothing is known of the last server if its file is gone or broken."""
        try:
            (text,) = self._files.read(_NAME, [0], 4096)
            saved = json.loads(text)
            self._left, self._at_s = min(self._most, float(saved["left"])), min(self._at_s, float(saved["at_s"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return
