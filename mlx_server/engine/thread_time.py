"""How much processor time a thread has used, asked by others while it works."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

_THREAD_BASIC_INFO = 3
_NUM_INFO_WORDS = 10
"""Of `struct thread_basic_info` (mach/thread_info.h): seconds and microseconds in user and in system mode, and six
more that are not looked at."""


def own_clock() -> Callable[[], float]:
    """A clock of the calling thread's processor time in seconds, which any thread may read while this one lives. Once
    it has ended, the clock's reading means nothing; it may raise `OSError`."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)  # macOS has none
    return _mach_clock() if clock_of is None else _posix_clock(clock_of(threading.get_ident()))


def _posix_clock(clock_id: int) -> Callable[[], float]:
    return lambda: time.clock_gettime(clock_id)


def _mach_clock() -> Callable[[], float]:
    system = ctypes.CDLL(None)
    system.pthread_mach_thread_np.argtypes = [ctypes.c_void_p]
    system.pthread_mach_thread_np.restype = ctypes.c_uint32
    port = system.pthread_mach_thread_np(threading.get_ident())

    def read() -> float:
        words = (ctypes.c_int32 * _NUM_INFO_WORDS)()
        count = ctypes.c_uint32(_NUM_INFO_WORDS)
        status = system.thread_info(ctypes.c_uint32(port), _THREAD_BASIC_INFO, words, ctypes.byref(count))
        if status != 0:
            raise OSError(f"thread_info failed with {status}")
        return float(words[0] + words[2] + (words[1] + words[3]) / 1e6)

    return read
