"""The model's own sampling, for what a request leaves out, on every route that generates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_server.sampling_params import SamplingParams
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": user("Hi"), "max_tokens": 16},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": user("Hi"), "max_tokens": 16},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
}


@pytest.mark.parametrize("route", ROUTES)
async def test_the_model_s_sampling_fills_what_is_left_out(world: World, route: str):
    world.engine.default_sampling = DEFAULTS
    assert (await world.http.post(route, json=ROUTES[route])).status_code == 200
    given = {"temperature": 1.0, "top_k": 0, "top_p": None}
    assert (await world.http.post(route, json={**ROUTES[route], **given})).status_code == 200
    left_out, partly = (request.sampling for request in world.engine.requests)
    assert left_out == replace(DEFAULTS, max_tokens=16)
    assert partly == replace(DEFAULTS, max_tokens=16, temperature=1.0, top_k=0)


async def test_a_response_tells_the_sampling_that_it_had(world: World):
    world.engine.default_sampling = DEFAULTS
    body = (await world.http.post("/v1/responses", json={"input": "Hi", "top_p": 0.5})).json()
    assert (body["temperature"], body["top_p"]) == (0.6, 0.5)
