"""Looks into this machine and into a running system.

A system is looked into where all of its work must pass: the model's call, and its attention. Each instrument replaces a
function for a while, in this process, on whichever thread it is called. They are not locked: one model may be called at
a time.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import mlx.core as mx
import psutil

from mlx_server.runtime.cache.kv_cache import PagedLayerCache
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


@dataclass(slots=True)
class AttentionTimes:
    """Seconds in the engine's attention, layers and steps together.

    `attend_s` is all of it. `gather_s` is the part of a backend that hands K/V to MLX's own attention: to
    write them into the pool and to gather them from there.
    """

    attend_s: float = 0.0
    gather_s: float = 0.0


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

    with _replaced(model_class, "__call__", counted):
        yield calls


@contextmanager
def time_attention() -> Iterator[AttentionTimes]:
    """Times the engine's attention, with what it needs evaluated before and its result after. That leaves
    nothing to overlap, so a step takes longer than it does unobserved."""
    times = AttentionTimes()
    attend, update = PagedLayerCache.attend, PagedLayerCache.update_and_fetch
    mlx_attention = mx.fast.scaled_dot_product_attention

    def evaluated_update(self: PagedLayerCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        mx.eval(keys, values)
        return update(self, keys, values)

    def timed_attend(self: PagedLayerCache, queries: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        mx.eval(queries)
        start_s = time.perf_counter()
        out = attend(self, queries, *args, **kwargs)
        mx.eval(out)
        times.attend_s += time.perf_counter() - start_s
        return out

    def timed_mlx(queries: mx.array, keys: mx.array, values: mx.array, **kwargs: Any) -> mx.array:
        start_s = time.perf_counter()
        mx.eval(keys, values)
        times.gather_s += time.perf_counter() - start_s
        return mlx_attention(queries, keys, values, **kwargs)

    with (
        _replaced(PagedLayerCache, "update_and_fetch", evaluated_update),
        _replaced(PagedLayerCache, "attend", timed_attend),
        _replaced(mx.fast, "scaled_dot_product_attention", timed_mlx),
    ):
        yield times


@contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
