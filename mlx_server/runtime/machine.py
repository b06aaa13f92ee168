"""What MLX finds on this machine, for people to read."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

METAL = "Metal GPU"
_SIZE = 512


@dataclass(frozen=True, slots=True)
class Machine:
    """`matmul_gflops`: billions of float32 operations a second in products of 512 x 512, on the default device."""

    chip: str
    devices: tuple[str, ...]
    blas: str
    is_blas_slow: bool
    matmul_gflops: float


def inspect_machine() -> Machine:
    """Looks and measures; takes well under a second. Any thread may call it."""
    gflops = _matmul_gflops()  # first: it makes MLX load its BLAS
    openblas = _loaded_openblas()
    is_reference = platform.system() == "Linux" and openblas is None
    blas = "MLX's own, the reference BLAS" if is_reference else openblas or "Accelerate"
    return Machine(
        chip=str(mx.device_info().get("device_name", platform.processor())),
        devices=_devices(),
        blas=blas,
        is_blas_slow=is_reference and mx.default_device() == mx.cpu,
        matmul_gflops=gflops,
    )


def _devices() -> tuple[str, ...]:
    found = {METAL: mx.metal.is_available(), "CUDA GPU": mx.cuda.is_available(), "CPU": True}
    return tuple(name for name, is_there in found.items() if is_there)


def _matmul_gflops() -> float:
    """The best of a few tries, so that waking threads and frequencies do not count."""
    left, right = mx.random.normal((_SIZE, _SIZE)), mx.random.normal((_SIZE, _SIZE))
    mx.eval(left, right)
    best_s = min(_timed_product(left, right) for _ in range(3))
    return 2 * _SIZE**3 / best_s / 1e9


def _timed_product(left: mx.array, right: mx.array) -> float:
    start_s = time.perf_counter()
    mx.eval(left @ right)
    return time.perf_counter() - start_s


def _loaded_openblas() -> str | None:
    """Path of the OpenBLAS in this process (Linux); NumPy's private copy is not what MLX calls."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "openblas" in line}
    return next((path for path in sorted(paths) if "numpy" not in path and "scipy" not in path), None)
