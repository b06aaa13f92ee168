"""The measured speeds by which copies beside a step are bounded, and by which a prefix is read or computed."""

from __future__ import annotations

import math

from mlx_server.batching.blocks.disk_saves import PIECE_BYTES

_FIRST_BYTES_PER_S = 1e9
"""As fast as copies and reads are taken to be before any is measured."""

_COPY_MEMORY_BYTES = 2 * PIECE_BYTES
"""The speed of copies is averaged over about this many bytes."""

_MAX_RATIO = 4.0
"""Copies that take longer than this multiple of their expected time were interrupted, and count as this multiple."""

_READ_GAIN = 0.3
_READ_FIXED_S = 0.005
_READ_TRIAL_S = 300.0
"""Loads alone renew the speed of reads. If the last was so long ago, one is tried although it does not seem to pay:
whatever made the disk slow may be over."""


class CopySpeed:
    """The speed of copies into and out of the pools."""

    def __init__(self) -> None:
        self._num_bytes = float(_COPY_MEMORY_BYTES)
        self._seconds = _COPY_MEMORY_BYTES / _FIRST_BYTES_PER_S

    @property
    def s_per_byte(self) -> float:
        return max(self._seconds, 1e-6) / self._num_bytes

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Learns from the copies of one step."""
        seconds = min(seconds, _MAX_RATIO * num_bytes * self.s_per_byte)
        share = min(1.0, _COPY_MEMORY_BYTES / (self._num_bytes + num_bytes))
        self._num_bytes = share * (self._num_bytes + num_bytes)
        self._seconds = share * (self._seconds + seconds)


class ReadSpeed:
    """The speed of reads, by what was read in the time in which reads were in progress."""

    def __init__(self, read_s: float) -> None:
        """`read_s` is how long reads have been in progress so far."""
        self.num_bytes = 0  # that were read since the speed was renewed; the caller adds to them
        self._bytes_per_s = _FIRST_BYTES_PER_S
        self._gain = _READ_GAIN
        self._read_s = read_s
        self._renewed_s = math.inf  # when it was renewed or a load was tried; infinite before the first load

    def pays(self, num_bytes: int, compute_s: float, now: float) -> bool:
        """Whether reading is expected to be faster than computing, or is to be tried again. True while `compute_s` is
        unknown (0)."""
        if compute_s == 0.0 or _READ_FIXED_S + num_bytes / self._bytes_per_s < compute_s:
            return True
        if now - self._renewed_s < _READ_TRIAL_S:
            return False
        self._renewed_s, self._gain = now, 1.0
        return True

    def renew(self, read_s: float, now: float, *, is_late: bool) -> None:
        """A load has ended, and reads have been in progress for `read_s` in all. The speed of a load that is late, or
        that was tried, replaces the old one. If nothing was read although it is not late, that says nothing."""
        if read_s > self._read_s and (self.num_bytes or is_late):
            rate = max(self.num_bytes / (read_s - self._read_s), 1.0)
            self._bytes_per_s += (1.0 if is_late else self._gain) * (rate - self._bytes_per_s)
            self._renewed_s, self._gain = now, _READ_GAIN
        self.num_bytes, self._read_s = 0, read_s
