"""The environment in which a figure was measured, and the file with both."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import psutil

from mlx_server.bench.tables import write_json
from mlx_server.runtime.machine import inspect_machine


def describe_environment() -> dict[str, object]:
    """Date, machine and versions, for JSON. Measures a matrix product, which takes less than a second."""
    return {
        "date": datetime.date.today().isoformat(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm")},
        "device": str(mx.default_device()),
        **asdict(inspect_machine()),
    }


def write_figures(path: Path | None, benchmark: str, **figures: object) -> None:
    """Writes the figures and the environment to the file of `--json`, if there is one."""
    if path is not None:
        write_json(path, {"benchmark": benchmark, "environment": describe_environment(), **figures})
