"""What a tracer is told of every request. Without tracing nothing is imported and nothing kept.

Batching and engine know no spans: they hand over what they have anyway (requests with their timestamps, steps and
their results), and `spans.py` makes spans of it.
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
    """Traces one engine; this one does nothing. Called on the event loop's thread; times are on the scheduler's
    clock."""

    def on_submitted(self, request: Request) -> None:
        """The request waits now. Its span will be a child of the current one."""

    def on_step(self, step: SchedulerOutput) -> None:
        """A step was submitted."""

    def on_step_done(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Its result is here."""

    def on_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """The request has ended."""


class Tracing:
    """The process's tracing; this one does nothing."""

    def tracer(self, model_name: str, clock: Clock, decode: Decode | None) -> EngineTracer:
        """A tracer of the engine of that model; `decode` turns its token ids into text."""
        return NO_TRACER

    def instrument(self, app: Any) -> None:
        """Traces the exchanges of a FastAPI application, and measures it and the process."""

    def close(self) -> None:
        """Sends what is not sent yet, for a few seconds at most."""


NO_TRACER = EngineTracer()
NO_TRACING = Tracing()


@cache
def open_tracing(settings: ObservabilityConfig) -> Tracing:
    """The tracing that `settings` ask for, one for the whole process."""
    if settings.tracing == "off":
        return NO_TRACING
    from mlx_server.observability.spans import SpanTracing  # takes a second, and memory

    return SpanTracing(settings)
