"""Tells metrics and traces of every step on its way to the MLX thread and back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from mlx_server.batching.step import Executor
from mlx_server.observability.engine_metrics import EngineMetrics
from mlx_server.observability.tracing import EngineTracer
from mlx_server.outputs import ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class ObservedExecutor:
    """An executor that is watched. What it costs is a few calls a step, whatever the number of requests. A step that
    only changes the pools computes nothing and does not count."""

    executor: Executor
    metrics: EngineMetrics
    tracer: EngineTracer

    def submit(self, output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        if not output.chunks:
            return self.executor.submit(output)
        self.metrics.on_step(output)
        self.tracer.on_step(output)
        result = self.executor.submit(output)
        result.add_done_callback(partial(self._on_done, output))
        return result

    def _on_done(self, output: SchedulerOutput, future: asyncio.Future[ModelRunnerOutput]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        self.metrics.on_step_done(output, future.result())
        self.tracer.on_step_done(output, future.result())
