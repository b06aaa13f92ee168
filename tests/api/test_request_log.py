"""The request log and the HTTP metrics: what each exchange leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
from typing import Any

import httpx
import pytest

from mlx_server.errors import EngineDeadError, QueueFullError
from tests.api.test_server_life import complete, in_progress, server
from tests.api.worlds import World, until, user
from tests.observability.test_metrics import samples

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "mlx_server.requests")

    def read() -> list[tuple[str, dict[str, Any]]]:
        return [(r.getMessage(), r.fields) for r in caplog.records if r.name == "mlx_server.requests"]

    return read


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_leaves_one_line(world: World, lines: Any, stream: bool):
    world.engine.num_cached_tokens = 3
    body = {"prompt": [5, 6, 7, 8], "stream": stream, "priority": 1}
    await world.http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    await world.settle()
    assert lines() == [
        (
            "request ended",
            {
                "request_id": "mine",
                "key": "anonymous",
                "model": "fake",
                "tier": "default",
                "choices": 1,
                "prompt_tokens": 4,
                "cached_tokens": 3,
                "output_tokens": 7,
                "queue_ms": 10.0,
                "ttft_ms": 15.0,
                "tpot_ms": 5.0,
                "finish_reason": "stop",
            },
        )
    ]


async def test_the_choices_of_a_request_share_its_line(world: World, lines: Any):
    await world.chat(n=3, messages=user("Hi"))
    ((_, fields),) = lines()
    assert (fields["choices"], fields["output_tokens"], fields["tpot_ms"]) == (3, 21, 5.0)


async def test_a_client_that_goes_away_leaves_a_line_too(world: World, lines: Any):
    world.engine.gate.clear()
    asking = asyncio.create_task(world.chat())
    await until(lambda: world.engine.open)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await until(lines)
    ((_, fields),) = lines()
    assert (fields["finish_reason"], fields["output_tokens"], fields["ttft_ms"]) == ("abort", 0, None)


async def test_an_error_is_a_finish_reason(world: World, lines: Any):
    world.engine.fail_with = EngineDeadError("no luck")
    assert (await world.chat()).status_code == 503
    ((_, fields),) = lines()
    assert (fields["finish_reason"], fields["output_tokens"]) == ("error", 1)


async def test_a_refusal_is_reported_with_its_error(world: World, lines: Any):
    world.engine.refuse_with = QueueFullError("full", "max_num_queued_reqs")
    assert (await world.http.post("/v1/completions", json={"prompt": [[1, 2], [3]], "n": 2})).status_code == 503
    ((message, fields),) = lines()
    assert message == "request refused"
    assert (fields["error"], fields["choices"], fields["prompt_tokens"]) == ("QueueFullError", 4, 6)


async def test_exchanges_are_counted_by_route_and_class_of_status(world: World):
    await world.chat()
    await world.chat(stream=True)
    await world.chat(messages=3)
    await world.http.get("/v1/models/fake")
    await world.http.get("/nowhere")
    await world.http.request("INVENTED", "/nowhere")
    await world.http.get("/health")
    found = samples((await world.http.get("/metrics")).content)
    counts = {key: value for key, value in found.items() if key.startswith("http_requests_total")}
    chat = "handler=/v1/chat/completions,method=POST"
    assert counts == {
        f"http_requests_total{{{chat},status=2xx}}": 2,
        f"http_requests_total{{{chat},status=4xx}}": 1,
        "http_requests_total{handler=/v1/models/{model:path},method=GET,status=2xx}": 1,
        "http_requests_total{handler=none,method=GET,status=4xx}": 1,
        "http_requests_total{handler=none,method=other,status=4xx}": 1,
    }
    assert found[f"http_request_duration_seconds_count{{{chat}}}"] == 3
    assert found["http_request_duration_highr_seconds_count"] == 6
    assert found["process_resident_memory_bytes"] > 1e6


async def test_bodies_are_measured_by_route(world: World):
    body = json.dumps({"prompt": "Hi"}).encode()
    headers = {"content-type": "application/json"}
    answers = [await world.http.post("/v1/completions", content=body, headers=headers) for _ in range(2)]
    streamed = json.dumps({"prompt": "Hi", "stream": True}).encode()
    answers.append(await world.http.post("/v1/completions", content=streamed, headers=headers))
    found = samples((await world.http.get("/metrics")).content)
    route = "{handler=/v1/completions}"
    assert found[f"http_request_size_bytes_sum{route}"] == 2 * len(body) + len(streamed)
    assert found[f"http_response_size_bytes_sum{route}"] == sum(len(answer.content) for answer in answers)
    assert found[f"http_request_size_bytes_count{route}"] == found[f"http_response_size_bytes_count{route}"] == 3


async def test_refusals_of_callers_are_counted(world: World):
    world.configure_server(api_key="secret")
    assert (await world.chat()).status_code == 401
    found = samples((await world.http.get("/metrics")).content)
    assert found["http_requests_total{handler=none,method=POST,status=4xx}"] == 1


@pytest.mark.slow
async def test_with_json_every_line_of_a_server_is_an_object():
    async with server(log_format="json") as running:
        await running.ready()
        async with httpx.AsyncClient(base_url=running.url, timeout=20) as http:
            asking = asyncio.create_task(complete(http))
            await in_progress(http, 1)
            running.signal(signal.SIGUSR1)  # lets it go on
            await asking
            assert (await complete(http, max_tokens=0)).status_code == 400
        running.signal(signal.SIGTERM)
        code, errors = await running.ended()
    entries = [json.loads(line) for line in errors.splitlines()]
    assert code == 0
    assert {"mlx_server.requests", "mlx_server.api.server", "uvicorn.access"} <= {entry["logger"] for entry in entries}
    accesses = [entry["message"] for entry in entries if entry["logger"] == "uvicorn.access"]
    assert [line.split()[-1] for line in accesses if "/v1/completions" in line] == ["400"]  # the other has its own line
    (ended,) = [entry for entry in entries if entry["message"] == "request ended"]
    assert (ended["model"], ended["finish_reason"], ended["output_tokens"]) == ("fake", "stop", 7)
