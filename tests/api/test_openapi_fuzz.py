"""Requests that schemathesis makes up from our own OpenAPI document, sent to the real engine with a tiny model.

Half of them follow the document and half break it. They run beside each other, as clients' do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mlx_server.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from mlx_server.pool.model_pool import build_pool
from mlx_server.tiers import GENERATING_PATHS
from tests.api.worlds import Site, until
from tests.engine_worlds import make_folder

pytestmark = pytest.mark.asyncio(loop_scope="session")

UNLOADING = ("/sleep", "/wake_up", "/admin/models/load", "/admin/models/unload")
"""They take the model away from others' requests, which is a 503 for those."""
NUM_ATTACKING = int(os.environ.get("ATTACK_REQUESTS", "3000")) * 6 // 10
"""Requests in `./scripts/test -m attack`: six for ten mutated ones, since they take longer to make up."""

MAX_MODEL_LEN = 192
NUM_AT_ONCE = 16
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
ERROR_KEYS = {"message", "type", "param", "code"}
ANTHROPIC_ERROR_KEYS = {"message", "type"}


@pytest_asyncio.fixture(loop_scope="session")
async def served(site: Site, tmp_path: Path) -> AsyncIterator[Site]:
    """A tiny model behind the site's server; at the end nothing may be left of any request."""
    config = Config(
        model=ModelConfig(
            model=str(make_folder(tmp_path / "tiny")), served_model_name="tiny", max_model_len=MAX_MODEL_LEN
        ),
        cache=CacheConfig(kv_cache_memory="8MB"),
        scheduler=SchedulerConfig(max_num_seqs=64),
    )
    pool = build_pool(config)
    await pool.start()
    context = site.serve(pool, config)
    yield site
    await pool.load("tiny")  # some of the requests unload it
    stats = pool.engines()[0].stats
    await until(lambda: not context.generations.num_in_progress and stats().num_free_blocks == stats().num_blocks)
    await pool.stop(0.0)


@pytest.mark.parametrize(
    ("num_examples", "num_requests"),
    [
        pytest.param(2, 60, id="few", marks=pytest.mark.slow),
        pytest.param(
            -(-NUM_ATTACKING // 20), NUM_ATTACKING, id="many", marks=[pytest.mark.attack, pytest.mark.timeout(3600)]
        ),
    ],
)
async def test_every_answer_is_a_documented_one(served: Site, num_examples: int, num_requests: int):
    """`num_examples` requests for each route and mode, at least `num_requests` in all."""
    document = (await served.http.get("/openapi.json")).json()
    cases = await asyncio.to_thread(lambda: list(made_up(document, num_examples)))
    assert len(cases) >= num_requests

    async def ask(case: Case, gate: asyncio.Semaphore) -> tuple[str, int]:
        async with gate:
            response = await send(served, case)
        check(case, response)
        return case.operation.path, response.status_code

    together, alone = asyncio.Semaphore(NUM_AT_ONCE), asyncio.Semaphore(1)
    answers = await asyncio.gather(*(ask(case, together) for case in cases if case.operation.path not in UNLOADING))
    answers += await asyncio.gather(*(ask(case, alone) for case in cases if case.operation.path in UNLOADING))
    statuses = Counter(answers)
    print(f"\n{len(answers)} answers: {dict(Counter(status for _, status in answers))}")
    for status in (200, 400):
        assert sum(statuses[path, status] for path in GENERATING_PATHS) >= num_examples // 2, statuses


def made_up(document: dict[str, Any], num_examples: int) -> Iterator[Case]:
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        for case in examples(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), num_examples):
            bring_into_reach(case)
            yield case
        with contextlib.suppress(Unsatisfiable):  # a route without parameters cannot be asked wrongly
            yield from examples(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), num_examples)


def examples(strategy: SearchStrategy[Case], num_examples: int) -> list[Case]:
    """The same ones in every run."""
    cases: list[Case] = []

    @seed(0)
    @settings(
        max_examples=num_examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: Case) -> None:
        cases.append(case)

    collect()
    return cases


def bring_into_reach(case: Case) -> None:
    """The document does not know which models there are, how long their contexts are, and that 5.0 is no 5 here."""
    case.body = with_whole_numbers(case.body)
    if not isinstance(case.body, dict):
        return
    for name, value in case.body.items():
        if name == "model" and value is not None:
            case.body[name] = "tiny"
        if name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens") and value is not None:
            case.body[name] = value % 20 + (name != "min_tokens")


def with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


async def send(site: Site, case: Case) -> httpx.Response:
    request = requests.Request(**case.as_transport_kwargs(site.url)).prepare()
    assert request.method is not None
    assert request.url is not None
    return await site.http.request(
        request.method, request.url, headers=dict(request.headers), content=request.body, timeout=60
    )


def check(case: Case, response: httpx.Response) -> None:
    """Raises when the answer is not one that the document and docs/clients.md know."""
    case.validate_response(response, checks=CHECKS)
    sent = f"{case.operation.label} {case.query} {case.body!r}: {response.status_code} {response.text[:500]}"
    assert response.status_code < 500 or response.status_code == 501, sent
    if response.status_code >= 400:
        error = response.json()["error"]
        if not case.operation.path.startswith("/api/"):
            is_anthropic = case.operation.path.startswith("/v1/messages")
            assert error.keys() == (ANTHROPIC_ERROR_KEYS if is_anthropic else ERROR_KEYS), sent
            error = error["message"]
        assert error, sent
        assert isinstance(error, str), sent
    elif response.headers.get("content-type", "").startswith("application/x-ndjson"):
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert lines, sent
        assert not any("error" in line for line in lines), sent
    elif response.headers.get("content-type", "").startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
        assert events, sent
        assert not any("error" in event and event["error"] for event in events), sent
