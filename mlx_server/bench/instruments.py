"""The environment in which a figure was measured."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict
from importlib import metadata

import mlx.core as mx
import psutil

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
