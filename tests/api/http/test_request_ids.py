"""Every error answer has an id, and what no handler knows is a 500 that is counted and logged as one."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

BAD: list[tuple[str, str, dict[str, Any], int]] = [
    ("POST", "/v1/completions", {"json": {"prompt": None}}, 400),
    ("POST", "/v1/completions", {"content": b"{"}, 400),
    ("POST", "/v1/completions", {"json": {"prompt": "a", "model": "nobody"}}, 404),
    ("POST", "/v1/embeddings", {"json": {}}, 400),
    ("POST", "/v1/messages", {"json": {"messages": user("Hi")}}, 400),
    ("GET", "/nowhere", {}, 404),
    ("GET", "/v1/completions", {}, 405),
    ("GET", "/v1/models", {"headers": {"host": "evil.example"}}, 403),
]


@pytest.mark.parametrize(("method", "path", "request_", "status"), BAD, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("sent", [None, "mine-1", "not good"])
async def test_every_error_answer_has_an_id(
    world: World, method: str, path: str, request_: dict[str, Any], status: int, sent: str | None
):
    headers = {**request_.get("headers", {}), **({} if sent is None else {"x-request-id": sent})}
    answer = await world.http.request(method, path, **{**request_, "headers": headers})
    assert answer.status_code == status, answer.text
    request_id = answer.headers["x-request-id"]
    assert request_id == sent if sent == "mine-1" else len(request_id) == 32


async def test_so_have_wrong_keys_and_the_client_s_own_id_of_the_body(world: World):
    refused = await world.complete(request_id="from-the-body", model="nobody")
    assert refused.headers["x-request-id"] == "from-the-body"
    world.configure_server(api_key="ours")
    assert len((await world.complete()).headers["x-request-id"]) == 32


async def test_what_nobody_foresaw_is_a_500_in_the_metrics_and_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def submit(request: Any) -> Any:
        raise ZeroDivisionError("what is this")

    monkeypatch.setattr(world.engine, "submit", submit)
    with caplog.at_level(logging.ERROR):
        answer = await world.complete(headers={"x-request-id": "number-7"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert answer.headers["x-request-id"] == "number-7"
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage() == "The request number-7 failed: POST /v1/completions"
    assert record.exc_info is not None
    text = (await world.http.get("/metrics")).text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="5xx"} 1.0' in text
    assert 'status="4xx"' not in text
