"""Spans, by logfire and OpenTelemetry: one per request, one per sampled step. Nothing is sent to a logfire account.

span "request"   arrival ............................................ end
events             admitted, prefill chunk (each), first token, preempted, resumed, finished
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import logfire
from opentelemetry import context as otel_context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.system_metrics import SystemMetricsInstrumentor
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer

from mlx_server.config import ObservabilityConfig
from mlx_server.observability.tracing import Clock, Decode, EngineTracer, Tracing
from mlx_server.outputs import ModelRunnerOutput, SchedulerOutput
from mlx_server.request import FinishReason, Request

_SERVICE = "mlx-serve"
_ENDPOINT_VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
_UNTRACED_URLS = r"/(metrics|health|ping|version|load|dashboard.*)$"
_CLOSE_MS = 5000
_MESSAGE = "logfire.msg"
"""The text of a span in logfire's console."""

_PROCESS_METRICS: Any = {"process.cpu.utilization": None, "process.memory.usage": None, "process.thread.count": None}

Attributes = Mapping[str, str | int | float | Sequence[str]]


class SpanTracing(Tracing):
    """Tracing by logfire, with a configuration that is separate from other uses of logfire."""

    def __init__(
        self,
        settings: ObservabilityConfig,
        processors: Sequence[SpanProcessor] = (),
        readers: Sequence[MetricReader] = (),
    ) -> None:
        """`processors` and `readers` get all spans and metrics, in addition to the destination in `settings`."""
        self._settings = settings
        self._instruments = ExitStack()
        if settings.tracing == "otlp" and not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
            # logfire sends to the endpoint in the environment; without one, send to a collector on this machine.
            processors = [*processors, BatchSpanProcessor(OTLPSpanExporter())]
            readers = [*readers, PeriodicExportingMetricReader(OTLPMetricExporter())]
        self._logfire = logfire.configure(
            local=True,
            send_to_logfire=False,
            service_name=_SERVICE,
            console=logfire.ConsoleOptions(output=sys.stderr) if settings.tracing == "console" else False,
            additional_span_processors=processors,
            metrics=logfire.MetricsOptions(additional_readers=readers),
            scrubbing=False,
            inspect_arguments=False,
            distributed_tracing=True,
        )

    def tracer(self, model_name: str, clock: Clock, decode: Decode | None) -> SpanTracer:
        settings = self._settings
        return SpanTracer(
            self._logfire.config.get_tracer_provider().get_tracer(_SERVICE),
            model_name,
            clock,
            decode if settings.trace_prompts else None,
            settings.trace_every_steps,
        )

    def instrument(self, app: Any) -> None:
        # The arguments of endpoints are bodies, which contain prompts.
        traced = self._logfire.instrument_fastapi(
            app, excluded_urls=_UNTRACED_URLS, request_attributes_mapper=lambda request, arguments: None
        )
        self._instruments.enter_context(traced)
        self._logfire.instrument_system_metrics(_PROCESS_METRICS, base=None)
        self._instruments.callback(SystemMetricsInstrumentor().uninstrument)

    def close(self) -> None:
        self._instruments.close()
        self._logfire.shutdown(_CLOSE_MS)


@dataclass(slots=True)
class _Event:
    name: str
    at_s: float
    attributes: Attributes


@dataclass(slots=True)
class _Trace:
    """What is recorded of a request until its span is made."""

    request: Request
    parent: otel_context.Context
    num_preemptions: int = 0
    events: list[_Event] = field(default_factory=list)


class SpanTracer(EngineTracer):
    """Makes a span of each request when it has ended."""

    def __init__(self, tracer: Tracer, model_name: str, clock: Clock, decode: Decode | None, every_steps: int) -> None:
        """`decode` None leaves text out. One of `every_steps` steps gets a span; 0 is none."""
        self._tracer = tracer
        self._model_name = model_name
        self._clock = clock
        self._decode = decode
        self._every_steps = every_steps
        self._traces: dict[str, _Trace] = {}

    def on_submitted(self, request: Request) -> None:
        self._traces[request.request_id] = _Trace(request, otel_context.get_current())

    def on_step(self, step: SchedulerOutput) -> None:
        now = self._clock()
        for request_id in step.dropped_request_ids:
            trace = self._traces.get(request_id)
            if trace is not None:  # out of the batch, but not ended
                trace.num_preemptions = trace.request.num_preemptions
                trace.events.append(_Event("preempted", now, {"output_tokens": trace.request.num_output_tokens}))
        for new in step.new_requests:
            trace = self._traces.get(new.request_id)
            if trace is not None:
                name = "resumed" if trace.num_preemptions else "admitted"
                trace.events.append(_Event(name, now, {"cached_tokens": trace.request.num_cached_tokens or 0}))
        if step.num_prompt_tokens:
            self._add_chunks(step, now)

    def on_step_done(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        if not self._every_steps or step.step_id % self._every_steps:
            return
        now = self._clock()
        message = f"step {step.step_id}: {step.kind.value}, {step.num_tokens} tokens of {len(step.chunks)} requests"
        attributes: Attributes = {
            _MESSAGE: message,
            "model": self._model_name,
            "kind": step.kind.value,
            "step_id": step.step_id,
            "requests": len(step.chunks),
            "tokens": step.num_tokens,
            "prompt_tokens": step.num_prompt_tokens,
            "idle_s": result.idle_time_s,
        }
        # A step serves many requests, so it is not part of a request's trace.
        self._span("step", now - result.step_time_s, now, attributes, otel_context.Context(), ())

    def on_finished(self, request: Request, reason: FinishReason, now: float) -> None:
        trace = self._traces.pop(request.request_id, None)
        if trace is None:
            return
        events = trace.events
        if request.first_token_s is not None:
            ttft_s = request.first_token_s - request.arrival_s
            events.append(_Event("first token", request.first_token_s, {"ttft_s": ttft_s}))
            events.sort(key=lambda event: event.at_s)
        counts: Attributes = {
            "prompt_tokens": request.num_prompt_tokens,
            "cached_tokens": request.num_cached_tokens or 0,
            "output_tokens": request.num_counted_tokens,
            "preemptions": request.num_preemptions,
        }
        events.append(_Event("finished", now, {"finish_reason": reason.value, **counts}))
        attributes: Attributes = {
            _MESSAGE: (
                f"request {request.request_id} ({request.tier}): {request.num_prompt_tokens} prompt and "
                f"{request.num_counted_tokens} output tokens, {reason.value}"
            ),
            "request_id": request.request_id,
            "model": self._model_name if request.adapter is None else f"{self._model_name}:{request.adapter}",
            "tier": request.tier,
            "priority": int(request.priority),
            "finish_reason": reason.value,
            **counts,
            **self._texts(request),
        }
        self._span("request", request.arrival_s, now, attributes, trace.parent, events)

    def _add_chunks(self, step: SchedulerOutput, now: float) -> None:
        """Adds an event for each prompt chunk in the step, including those computed again after a preemption."""
        for chunk in step.chunks:
            trace = self._traces.get(chunk.request_id)
            if trace is not None and chunk.start < trace.request.num_prompt_tokens:
                attributes = {"start": chunk.start, "tokens": chunk.num_tokens, "step_id": step.step_id}
                trace.events.append(_Event("prefill chunk", now, attributes))

    def _texts(self, request: Request) -> dict[str, str]:
        if self._decode is None:
            return {}
        return {"prompt": self._decode(request.prompt_token_ids), "output": self._decode(request.output_token_ids)}

    def _span(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        parent: otel_context.Context,
        events: Sequence[_Event],
    ) -> None:
        epoch_s = time.time() - self._clock()  # read for each span: the clock stands still while a Mac sleeps

        def epoch_ns(at_s: float) -> int:
            return int((at_s + epoch_s) * 1e9)

        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=epoch_ns(start_s))
        for event in events:
            span.add_event(event.name, event.attributes, epoch_ns(event.at_s))
        span.end(epoch_ns(end_s))
