"""The interface of tracing. Without tracing, nothing is imported and nothing is kept.

The engine knows no spans: it hands over requests with their timestamps, steps and their results, and `spans.py` makes
spans of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mlx_server.config import ObservabilityConfig
from mlx_server.outputs import ModelRunnerOutput, SchedulerOutput
from mlx_server.request import FinishReason, Request

Decode = Callable[[Sequence[int]], str]
Clock = Callable[[], float]


class EngineTracer:
    """Traces one engine; this class does nothing. Called on the event loop's thread; times are on the scheduler's
    clock."""

    def on_submitted(self, request: Request) -> None:
        """The request was queued. Its span will be a child of the current one."""

    def on_step(self, step: SchedulerOutput) -> None:
        """A step was submitted."""

    def on_step_done(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """The step's result is there."""

    def on_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """The request has ended."""


class Tracing:
    """The tracing of the process; this class does nothing."""

    def tracer(self, model_name: str, clock: Clock, decode: Decode | None) -> EngineTracer:
        """A tracer for the engine of the model; `decode` turns token ids into text."""
        return NO_TRACER

    def instrument(self, app: Any) -> None:
        """Traces the requests to a FastAPI application, and measures it and the process."""

    def close(self) -> None:
        """Sends the rest, for a few seconds at most."""


NO_TRACER = EngineTracer()
NO_TRACING = Tracing()


@cache
def open_tracing(settings: ObservabilityConfig) -> Tracing:
    """The tracing that `settings` ask for, one per process."""
    if settings.tracing == "off":
        return NO_TRACING
    from mlx_server.observability.spans import SpanTracing  # importing takes a second, and memory

    return SpanTracing(settings)
