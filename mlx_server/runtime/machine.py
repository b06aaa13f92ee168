"""This machine: its devices and their speed for people to read, the memory that is free, the memory limit of a
container or systemd unit, and the limit of open files, which mlx-lm must not change."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import resource
import sys
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

from mlx_server.environment import raise_file_limit

METAL = "Metal GPU"
SLOW_BLAS = (
    "OpenBLAS is some 40 times faster than the BLAS of MLX's Linux wheels: apt-get install libopenblas0-pthread, then "
    "start with LD_PRELOAD=$(echo /usr/lib/*/openblas-pthread/libblas.so.3), which ./scripts/serve sets by itself"
)
"""What to do if `is_blas_slow`."""
_SIZE = 512


@dataclass(frozen=True, slots=True)
class Machine:
    """`matmul_gflops`: billions of float32 operations per second in products of 512 x 512, on the default device."""

    chip: str
    devices: tuple[str, ...]
    blas: str
    is_blas_slow: bool
    matmul_gflops: float


def inspect_machine() -> Machine:
    """Takes well under a second. Any thread."""
    openblas = _loaded_openblas()
    is_reference = platform.system() == "Linux" and openblas is None
    blas = "MLX's own, the reference BLAS" if is_reference else openblas or "Accelerate"
    return Machine(
        chip=str(mx.device_info().get("device_name", platform.processor())),
        devices=_devices(),
        blas=blas,
        is_blas_slow=is_blas_slow(),
        matmul_gflops=_matmul_gflops(),
    )


def is_blas_slow() -> bool:
    """Whether MLX computes on the CPU with the reference BLAS of its Linux wheels. Measures nothing. Any thread."""
    return platform.system() == "Linux" and mx.default_device() == mx.cpu and _loaded_openblas() is None


def _devices() -> tuple[str, ...]:
    found = {METAL: mx.metal.is_available(), "CUDA GPU": mx.cuda.is_available(), "CPU": True}
    return tuple(name for name, is_there in found.items() if is_there)


def _matmul_gflops() -> float:
    """The best of a few tries, because threads start and clock frequencies rise during the first."""
    left, right = mx.random.normal((_SIZE, _SIZE)), mx.random.normal((_SIZE, _SIZE))
    mx.eval(left, right)
    best_s = min(timeit.repeat(lambda: mx.eval(left @ right), number=1, repeat=3))
    return 2 * _SIZE**3 / best_s / 1e9


def _loaded_openblas() -> str | None:
    """Path of the OpenBLAS in this process (Linux); NumPy's private copy is not what MLX calls."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "openblas" in line}
    return next((path for path in sorted(paths) if "numpy" not in path and "scipy" not in path), None)


_MAC_PAGES = ("vm.page_free_count", "vm.page_pageable_external_count", "vm.page_purgeable_count")
"""Free pages, caches of files, and what programs have marked as dispensable."""


def available_memory() -> int:
    """The bytes that the system can give without compressing or swapping what programs use. Cheap enough to call at any
    time. Any thread.

    psutil's value for a Mac is that of free and inactive pages. But a Mac keeps about half of its pages inactive,
    whatever is in them, so half of the caches of files would count as used, and half of what programs use as free. And
    the system answers that question only a few times a second, and then repeats its last answer. Example, 16 GiB: 2.5
    are wired, programs use 3.5, 9.5 are caches of files, 0.5 are free. Of the 13 that are not wired, half are
    inactive: psutil finds 7 GiB, and 10 can be had.
    """
    if platform.system() == "Darwin":
        with contextlib.suppress(OSError):
            return sum(map(_read_sysctl, _MAC_PAGES)) * _read_sysctl("vm.pagesize")
    return int(psutil.virtual_memory().available)


def _read_sysctl(name: str) -> int:
    """One of the kernel's numbers, of 4 or 8 bytes. Raises `OSError`."""
    value, size = ctypes.c_uint64(), ctypes.c_size_t(8)
    if ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)):
        raise OSError(f"there is no {name}")
    return value.value


_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """A control group's memory limit, and the memory that its processes use, without caches that can be dropped."""

    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


def read_group_memory(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> GroupMemory | None:
    """The control group of this process with the least memory left; None if no limit is set, as on a Mac. Cheap enough
    to call every second. Any thread. Reads both versions of control groups (cgroups(7))."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    readings = [reading for line in lines for reading in _readings(line, mount)]
    return min(readings, key=lambda reading: reading.available_bytes, default=None)


def _readings(line: str, mount: Path) -> Iterator[GroupMemory]:
    """The group in a line of `/proc/self/cgroup`, and its parents."""
    _, controllers, path = line.split(":", 2)
    if controllers not in ("", "memory"):
        return
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    root = mount / "memory"
    if not controllers:
        names, root = ("memory.max", "memory.current", "inactive_file"), mount
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        reading = _reading(group, *names)
        if reading is not None:
            yield reading
        if group == root:
            return


def _reading(group: Path, limit: str, usage: str, droppable: str) -> GroupMemory | None:
    try:
        limit_bytes = int((group / limit).read_text())  # `max` raises ValueError: no limit
        used_bytes = int((group / usage).read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return GroupMemory(limit_bytes, max(0, used_bytes - int(statistics.get(droppable, 0))))
    except (OSError, ValueError):
        return None


_set_limit = resource.setrlimit


def _set_limit_for_others(kind: int, limits: tuple[int, int], /) -> None:
    if sys._getframe(1).f_globals.get("__name__") == "mlx_lm.utils":
        raise_file_limit(limits[0])
    else:
        _set_limit(kind, limits)


def keep_file_limit() -> None:
    """Makes `setrlimit` lower nothing when mlx-lm calls it; call this before mlx-lm is imported.

    mlx-lm's import sets the limit of open files to 2,048 and the hard limit to 4,096 permanently, so that a model may
    have many files (macOS allows 256). If the hard limit is already lower, the import would fail.
    """
    resource.setrlimit = _set_limit_for_others
