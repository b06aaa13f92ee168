"""Launches a built kernel on the emulated GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from emulator.errors import EmulatorError
from emulator.toolchain import Toolchain

MAX_THREADGROUP_BYTES = 32768
MAX_BUFFERS = 31
_PAGE = 4096
_ALIGNMENT = 16
_POISON = 0xFF  # NaN in every float format
_ERROR_BYTES = 2048
_READ_WRITE = 3
_PRIVATE_ANONYMOUS = 0x22
_KINDS = ("divergence", "data race", "out of bounds", "undefined behaviour")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

Size3 = tuple[int, int, int]


class _Launch(ctypes.Structure):
    """The struct `Launch` of machine.cpp."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("buffer_names", ctypes.POINTER(ctypes.c_char_p)),
        ("buffer_sizes", ctypes.POINTER(ctypes.c_ulong)),
        ("num_buffers", ctypes.c_uint),
        ("threadgroup_memory", ctypes.c_void_p),
        ("threadgroup_bytes", ctypes.c_ulong),
        ("grid", ctypes.c_uint * 3),
        ("threadgroup", ctypes.c_uint * 3),
        ("seed", ctypes.c_ulong),
        ("check_races", ctypes.c_int),
        ("loaded", ctypes.POINTER(ctypes.c_ulong)),
        ("error", ctypes.c_char_p),
        ("error_size", ctypes.c_ulong),
    )


class BuiltKernel:
    """A kernel that is built as a shared library."""

    def __init__(self, toolchain: Toolchain, library: Path, names: Sequence[str], *, check_races: bool) -> None:
        self._toolchain = toolchain
        self._library = library
        self._names = [name.encode() for name in names]
        self._check_races = check_races
        self.loaded: dict[str, int] = {}
        self._code = ctypes.CDLL(str(library))
        self._code.kernel_threadgroup_memory.restype = ctypes.c_void_p
        self._code.kernel_threadgroup_bytes.restype = ctypes.c_ulong
        if self.threadgroup_bytes > MAX_THREADGROUP_BYTES:
            raise EmulatorError("launch", f"{self.threadgroup_bytes} bytes of threadgroup memory; Metal has 32768")
        if len(names) > MAX_BUFFERS:
            raise EmulatorError("launch", f"{len(names)} buffers; Metal binds {MAX_BUFFERS}")

    @property
    def threadgroup_bytes(self) -> int:
        return int(self._code.kernel_threadgroup_bytes())

    def launch(self, buffers: list[bytes], grid: Size3, threadgroup: Size3, seed: int) -> list[bytes]:
        """Runs every thread of the grid; returns the bytes of every buffer afterwards. Raises `EmulatorError`.

        In a build that checks races, `loaded` then has the number of bytes that were read from each buffer. Odd seeds
        put buffers directly before an inaccessible page, even ones directly after one.
        """
        assert len(buffers) == len(self._names), (len(buffers), self._names)
        guarded = [_GuardedBuffer(data, at_end=seed % 2 == 1) for data in buffers]
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        loaded = (ctypes.c_ulong * len(buffers))()
        launch = _Launch(
            kernel=ctypes.cast(self._code.kernel_entry, ctypes.c_void_p),
            buffers=(ctypes.c_void_p * len(buffers))(*(buffer.address for buffer in guarded)),
            buffer_names=(ctypes.c_char_p * len(buffers))(*self._names),
            buffer_sizes=(ctypes.c_ulong * len(buffers))(*(len(data) for data in buffers)),
            num_buffers=len(buffers),
            threadgroup_memory=self._code.kernel_threadgroup_memory(),
            threadgroup_bytes=self.threadgroup_bytes,
            grid=grid,
            threadgroup=threadgroup,
            seed=seed,
            check_races=self._check_races,
            loaded=loaded,
            error=ctypes.cast(error, ctypes.c_char_p),
            error_size=_ERROR_BYTES,
        )
        try:
            if self._toolchain.machine.emulator_launch(ctypes.byref(launch)):
                raise self._error(error.value.decode())
            self.loaded = dict(zip((name.decode() for name in self._names), loaded, strict=True))
            return [buffer.read() for buffer in guarded]
        finally:
            for buffer in guarded:
                buffer.free()

    def _error(self, message: str) -> EmulatorError:
        kind = next(kind for kind in _KINDS if message.startswith(kind))
        return EmulatorError(kind, self._toolchain.with_lines(message, self._library).removeprefix(f"{kind}: "))


class _GuardedBuffer:
    """A buffer between two inaccessible pages, adjacent to one of them."""

    def __init__(self, data: bytes, *, at_end: bool) -> None:
        self._size = len(data)
        pages = max(1, -(-len(data) // _PAGE))
        self._mapped = (pages + 2) * _PAGE
        self._base = _libc.mmap(None, self._mapped, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        _libc.mprotect(self._base, _PAGE, 0)
        _libc.mprotect(self._base + (pages + 1) * _PAGE, _PAGE, 0)
        slack = pages * _PAGE - -(-len(data) // _ALIGNMENT) * _ALIGNMENT
        self._before = slack if at_end else 0
        self._after = pages * _PAGE - self._before - len(data)
        self.address = self._base + _PAGE + self._before
        ctypes.memset(self._base + _PAGE, _POISON, pages * _PAGE)
        ctypes.memmove(self.address, data, len(data))

    def read(self) -> bytes:
        """The buffer's bytes; raises `EmulatorError` if the bytes around it have changed."""
        around = (
            ctypes.string_at(self._base + _PAGE, self._before),
            ctypes.string_at(self.address + self._size, self._after),
        )
        if any(side.strip(bytes([_POISON])) for side in around):
            raise EmulatorError("out of bounds", f"a write beside a buffer of {self._size} bytes")
        return ctypes.string_at(self.address, self._size)

    def free(self) -> None:
        _libc.munmap(self._base, self._mapped)
