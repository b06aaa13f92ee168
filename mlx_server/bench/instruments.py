"""Looks into this machine, and into whatever calls a model."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import mlx.core as mx
import psutil

from mlx_server.runtime.machine import inspect_machine


def describe_environment() -> dict[str, object]:
    """What a figure must be read with, ready for JSON. Measures a matrix product, which takes well under a second."""
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


@dataclass(slots=True)
class ModelCalls:
    """`num_positions` is the size of the `[batch, length]` ids of all calls: padding and rows that nobody
    wants any more are work too, and count."""

    num_calls: int = 0
    num_positions: int = 0


@contextmanager
def count_model_calls(model_class: type[Any]) -> Iterator[ModelCalls]:
    """Counts every call of a model of that class. It is the class that is changed, for Python looks up
    `__call__` there, and whoever runs the model calls the model."""
    calls = ModelCalls()
    original = model_class.__call__

    def counted(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        calls.num_calls += 1
        calls.num_positions += inputs.size
        return original(self, inputs, *args, **kwargs)

    model_class.__call__ = counted
    try:
        yield calls
    finally:
        model_class.__call__ = original
