"""Spans of requests and steps, as an exporter gets them; and that tracing that is off is not even imported."""

from __future__ import annotations

import gzip
import http.server
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import ClassVar

import httpx
import pytest

from mlx_server.api.app import create_app
from mlx_server.config import Config, ObservabilityConfig
from mlx_server.observability.tracing import NO_TRACING, open_tracing
from mlx_server.request import FinishReason, Priority, Request
from tests.adapter_files import write_adapter
from tests.api.fakes import FakeEngine, fake_pool
from tests.engine.test_engine import ask, engine_of, read
from tests.engine_worlds import greedy, make_folder

with warnings.catch_warnings():  # of what logfire imports
    warnings.simplefilter("ignore")
    from opentelemetry import context as otel_context
    from opentelemetry import trace
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from mlx_server.observability.spans import SpanTracing

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
CALLER_SPAN_ID = 0xB7AD6B7169203331
TRACEPARENT = f"00-{TRACE_ID:032x}-{CALLER_SPAN_ID:016x}-01"


class Traced:
    """Tracing into memory."""

    def __init__(self, **settings: object) -> None:
        self._exporter = InMemorySpanExporter()
        self.metrics = InMemoryMetricReader()
        config = ObservabilityConfig(**{"trace_every_steps": 0, **settings})
        self.tracing = SpanTracing(config, [SimpleSpanProcessor(self._exporter)], [self.metrics])

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


@pytest.fixture(autouse=True)
def _nothing_global_changes() -> Iterator[None]:
    yield
    assert type(trace.get_tracer_provider()).__name__ in ("ProxyTracerProvider", "NoOpTracerProvider")


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


async def test_a_request_is_one_span_from_arrival_to_end(tmp_path):
    traced = Traced()
    async with engine_of(make_folder(tmp_path / "tiny"), tracing=traced.tracing, async_scheduling=False) as engine:
        await read(engine.submit(ask("first", [1] * 100, greedy(4), priority=Priority.LOW)))
        await read(engine.submit(ask("second", [1] * 100, greedy(4))))
    first, second = traced.spans("request")
    assert events(first) == ["admitted", "prefill chunk", "prefill chunk", "first token", "finished"]
    assert [(e.attributes["start"], e.attributes["tokens"]) for e in first.events[1:3]] == [(0, 64), (64, 36)]
    expected = {
        "request_id": "first",
        "model": "tiny",
        "tier": "low",
        "priority": 2,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 4,
        "preemptions": 0,
        "finish_reason": "length",
    }
    assert expected.items() <= dict(first.attributes).items()
    assert second.attributes["cached_tokens"] == second.events[0].attributes["cached_tokens"] == 96
    assert first.start_time <= min(e.timestamp for e in first.events)
    assert [e.timestamp for e in first.events] == sorted(e.timestamp for e in first.events)
    assert first.events[-1].timestamp == first.end_time < second.end_time
    assert traced.spans("step") == []


def test_a_span_has_the_time_of_day_also_after_the_machine_has_slept():
    traced, slept_s = Traced(), 0.0
    tracer = traced.tracing.tracer("tiny", lambda: time.monotonic() - slept_s, None)
    slept_s = 8 * 3600.0  # a Mac's monotonic clock stands still meanwhile
    now = time.monotonic() - slept_s
    request = Request("late", [1, 2, 3], greedy(1), arrival_s=now, max_total_tokens=4)
    tracer.on_submitted(request)
    tracer.on_finished(request, FinishReason.LENGTH, now)
    (span,) = traced.spans("request")
    assert abs(span.end_time / 1e9 - time.time()) < 3600


async def test_a_requests_adapter_is_part_of_its_models_name(tmp_path):
    traced, folder = Traced(), make_folder(tmp_path / "tiny")
    adapter = write_adapter(folder, tmp_path / "terse")
    async with engine_of(folder, tracing=traced.tracing, adapter=str(adapter)) as engine:
        for name in ("terse", None):
            await read(engine.submit(ask(f"with {name}", adapter=name)))
    assert [span.attributes["model"] for span in traced.spans("request")] == ["tiny:terse", "tiny"]


async def test_preemption_and_resumption_are_reported(tmp_path):
    traced = Traced()
    async with engine_of(make_folder(tmp_path / "tiny"), tracing=traced.tracing, max_num_seqs=1) as engine:
        low = engine.submit(ask("low", sampling=greedy(60), priority=Priority.LOW))
        await anext(low)
        await read(engine.submit(ask("high", priority=Priority.HIGH)))
        await read(low)
    span = traced.spans("request")[-1]
    names = [name for name in events(span) if name != "prefill chunk"]
    assert names == ["admitted", "first token", "preempted", "resumed", "finished"]
    assert span.attributes["preemptions"] == 1


async def test_one_of_so_many_steps_has_a_span(tmp_path):
    traced = Traced(trace_every_steps=4)
    async with engine_of(make_folder(tmp_path / "tiny"), tracing=traced.tracing) as engine:
        await read(engine.submit(ask("a", [1] * 70, greedy(12))))
        num_steps = engine.stats().num_steps
    steps = traced.spans("step")
    assert [span.attributes["step_id"] for span in steps] == list(range(0, num_steps, 4))
    assert [span.attributes["kind"] for span in steps][:2] == ["prefill", "decode"]
    assert (steps[0].attributes["tokens"], steps[0].attributes["prompt_tokens"]) == (64, 64)
    assert all(span.parent is None and span.start_time < span.end_time for span in steps)


async def test_text_is_in_spans_only_where_it_was_asked_for(tmp_path):
    folder = make_folder(tmp_path / "tiny")
    attributes = []
    for trace_prompts in (False, True):
        traced = Traced(trace_prompts=trace_prompts)
        async with engine_of(folder, tracing=traced.tracing) as engine:
            prompt = engine.tokenizer.encode("a secret")
            deltas = await read(engine.submit(ask("a", prompt, greedy(3))))
        (span,) = traced.spans("request")
        attributes.append(dict(span.attributes))
        assert ("secret" in str(span.to_json())) == trace_prompts
    assert {"prompt", "output"} - attributes[0].keys() == {"prompt", "output"}
    assert attributes[1]["prompt"] == "a secret"
    assert len(attributes[1]["output"]) >= len("".join(delta.text for delta in deltas))


async def test_a_request_belongs_to_the_trace_of_its_caller(tmp_path):
    traced = Traced()
    caller = trace.NonRecordingSpan(
        trace.SpanContext(TRACE_ID, CALLER_SPAN_ID, is_remote=True, trace_flags=trace.TraceFlags(1))
    )
    async with engine_of(make_folder(tmp_path / "tiny"), tracing=traced.tracing) as engine:
        token = otel_context.attach(trace.set_span_in_context(caller))
        stream = engine.submit(ask("a"))
        otel_context.detach(token)
        await read(stream)
    (span,) = traced.spans("request")
    assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, CALLER_SPAN_ID)


async def test_an_exchange_is_a_span_of_the_callers_trace_without_the_body():
    traced = Traced()
    pool = fake_pool(FakeEngine())
    await pool.start()
    app = create_app(pool, Config(), traced.tracing)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        body = {"messages": [{"role": "user", "content": "a secret"}]}
        answer = await http.post("/v1/chat/completions", json=body, headers={"traceparent": TRACEPARENT})
        assert answer.status_code == 200
        assert (await http.get("/metrics")).status_code == 200
    await pool.stop(0.0)
    (span,) = traced.spans("POST /v1/chat/completions")
    assert (span.context.trace_id, span.parent.span_id) == (TRACE_ID, CALLER_SPAN_ID)
    assert "secret" not in span.to_json()
    assert traced.spans("GET /metrics") == []
    data = traced.metrics.get_metrics_data()
    names = {m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert any(name.startswith("http.server.") for name in names)
    assert {"process.memory.usage", "process.cpu.utilization"} <= names
    traced.tracing.close()


def test_tracing_is_off_unless_asked_for_and_free_then():
    assert open_tracing(ObservabilityConfig()) is NO_TRACING
    program = (
        "import sys\n"
        "from mlx_server.cli.main import main\n"
        "assert main(['config', 'check']) == 0\n"
        "from mlx_server.api.app import create_app\n"
        "from mlx_server.config import Config\n"
        "from mlx_server.engine.engine import AsyncEngine\n"
        "import mlx_server.api.server\n"
        "from tests.api.fakes import FakeEngine, fake_pool\n"
        "create_app(fake_pool(FakeEngine()), Config())\n"
        "AsyncEngine(Config())\n"
        "print(sorted(name for name in sys.modules if name in ('logfire', 'opentelemetry.sdk', 'fastapi')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['fastapi']"


def test_the_console_gets_spans_on_standard_error_and_no_account_is_asked_for():
    program = (
        "from mlx_server.config import ObservabilityConfig\n"
        "from mlx_server.observability.tracing import open_tracing\n"
        "from mlx_server.outputs import ModelRunnerOutput, SchedulerOutput\n"
        "tracing = open_tracing(ObservabilityConfig(tracing='console', trace_every_steps=1))\n"
        "assert tracing is open_tracing(ObservabilityConfig(tracing='console', trace_every_steps=1))\n"
        "tracing.tracer('m', lambda: 1.0, None).on_step_done(SchedulerOutput(0, ()), ModelRunnerOutput(0, {}))\n"
        "tracing.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert "step 0: decode, 0 tokens of 0 requests" in done.stderr
    assert "logfire" not in done.stderr.lower()


class _Collector(http.server.BaseHTTPRequestHandler):
    """An OTLP collector that keeps what it gets: paths, and bodies."""

    received: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        self.received.append((self.path, dict(self.headers), body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_otlp_goes_to_the_collector_that_the_environment_names():
    program = (
        "from fastapi import FastAPI\n"
        "from mlx_server.config import ObservabilityConfig\n"
        "from mlx_server.observability.tracing import open_tracing\n"
        "from mlx_server.outputs import ModelRunnerOutput, SchedulerOutput\n"
        "tracing = open_tracing(ObservabilityConfig(tracing='otlp', trace_every_steps=1))\n"
        "tracing.instrument(FastAPI())\n"
        "tracing.tracer('m', lambda: 1.0, None).on_step_done(SchedulerOutput(0, ()), ModelRunnerOutput(0, {}))\n"
        "tracing.close()\n"
    )
    _Collector.received.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as collector:
        threading.Thread(target=collector.serve_forever, args=(0.01,), daemon=True).start()
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **endpoint}, capture_output=True, text=True, check=True
        )
        collector.shutdown()
    assert (done.stdout, done.stderr) == ("", "")
    bodies = {path: body for path, _, body in _Collector.received}
    assert b"step 0: decode" in bodies["/v1/traces"]
    assert b"process.memory.usage" in bodies["/v1/metrics"]
    assert not any(name.lower() == "authorization" for _, headers, _ in _Collector.received for name in headers)
