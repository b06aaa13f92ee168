"""Standard output and error that may go away: a pipe whose reader has left, a terminal that was closed, a full disk."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Forgiving(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: ReadableBuffer, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


def forgive_lost_streams() -> None:
    """From now on nothing that is written to `sys.stdout` or `sys.stderr` fails: a server does not end because nobody
    reads its log. Descriptors 0 to 2 that are closed lead nowhere, so that no socket gets their numbers and with them
    what libraries print. Once, at the start of a process."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdout = _forgiving(sys.stdout, 1)
    sys.stderr = _forgiving(sys.stderr, 2)


def _forgiving(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    file = io.BufferedWriter(_Forgiving(descriptor, "w", closefd=False))
    encoding = "utf-8" if stream is None else stream.encoding
    return io.TextIOWrapper(file, encoding=encoding, errors="backslashreplace", line_buffering=True)
