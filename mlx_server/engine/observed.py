"""Reports an engine's steps and requests to metrics, traces and readers, whose errors do not reach the engine."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from mlx_server.batching.scheduler import StepExecutor
from mlx_server.engine.parts import EngineParts
from mlx_server.observability.engine_metrics import EngineMetrics
from mlx_server.observability.tracing import NO_TRACER, EngineTracer
from mlx_server.outputs import EngineStats, ImageJob, ImageResult, ModelRunnerOutput, SchedulerOutput
from mlx_server.runtime.image_executor import ImageExecutor

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0

_logged_s: dict[str, float] = {}
"""When an error of a listener was last logged, by the listener's name."""


def notify(listener: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Calls a listener of metrics or traces, and returns its result. An error in it must not end requests: it is
    logged, at most once a minute for each listener since some are called at every step, and None is returned."""
    try:
        return listener(*args, **kwargs)
    except Exception:
        name, now = listener.__qualname__, time.monotonic()
        if now - _logged_s.get(name, -math.inf) >= _LOG_EVERY_S:
            _logged_s[name] = now
            logger.exception("%s failed: figures or traces are incomplete, requests go on", name)
        return None


def call_each(callbacks: Iterable[Callable[[], None]]) -> None:
    """Calls the readers of streams. An error in one of them is logged, and the others are still called."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            logger.exception("A reader failed on its output")


def current_stats(
    parts: EngineParts, num_adapters: int, running_adapters: tuple[str, ...], waiting_adapters: tuple[str, ...]
) -> EngineStats:
    """The current values of a loaded model, without counters."""
    scheduler, blocks, guard = parts.scheduler, parts.scheduler.blocks, parts.guard
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_deferred=scheduler.num_deferred,
        num_adapters=num_adapters,
        running_adapters=running_adapters,
        waiting_adapters=waiting_adapters,
        num_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free_blocks,
        num_cached_blocks=blocks.num_cached_blocks,
        num_state_checkpoints=0 if blocks.checkpoints is None else len(blocks.checkpoints),
        max_num_blocks=blocks.max_blocks,
        num_layer_groups=len(blocks.groups),
        weight_bytes=parts.share.need.weights_bytes,
        kv_pool_bytes=parts.kv_bytes,
        pressure_level=guard.level,
    )


@dataclass(frozen=True, slots=True)
class ObservedExecutor:
    """Executes steps, and encodes images. Reports each step to metrics and a tracer, in a few calls a step for any
    number of requests. Steps without chunks are not reported: they change the pools, copy blocks, or run the draft
    model."""

    executor: StepExecutor
    images: ImageExecutor | None
    metrics: EngineMetrics
    tracer: EngineTracer

    def encode(self, job: ImageJob) -> asyncio.Future[ImageResult]:
        assert self.images is not None, "images for a model that reads text only are refused before they are queued"
        return self.images.encode(job)

    def submit(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        if not output.chunks:
            return self.executor.submit(output)
        notify(self.metrics.on_step, output)
        if self.tracer is not NO_TRACER:
            notify(self.tracer.on_step, output)
        result = self.executor.submit(output)
        result.add_done_callback(partial(self._on_done, output))
        return result

    def _on_done(self, output: SchedulerOutput, future: asyncio.Future[ModelRunnerOutput]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        notify(self.metrics.on_step_done, output, future.result())
        if self.tracer is not NO_TRACER:
            notify(self.tracer.on_step_done, output, future.result())
