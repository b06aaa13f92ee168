"""`bench invariance` on a scripted server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from mlx_server.bench.lab.invariance import count_equal, make_requests
from mlx_server.errors import ServeError

REQUESTS = make_requests(30, max_words=5, max_tokens=4, seed=0)


def equal(answer: Callable[[int, int], float], **choice: object) -> int:
    """How many answers are equal if `answer` gives the log-probability of a seed's request, and how many have come."""
    num_asked = 0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        logprob = answer(json.loads(request.content)["seed"], num_asked)
        whole = {"token_ids": [1], "logprobs": {"token_logprobs": [logprob], "top_logprobs": [{}]}, **choice}
        return httpx.Response(200, json={"choices": [whole]})

    async def ask() -> int:
        async with httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(handle)) as http:
            return await count_equal(http, "m", REQUESTS, max_batch=30, seed=0, max_delay_s=0.0)

    return asyncio.run(ask())


def test_equal_answers_are_counted() -> None:
    assert equal(lambda seed, _: -0.5 * seed) == 30


def test_a_last_bit_counts() -> None:
    assert equal(lambda seed, num_asked: -0.1 if seed % 3 or num_asked <= 30 else -0.1 - 2**-56) == 20


def test_answers_without_log_probabilities_are_an_error() -> None:
    with pytest.raises(ServeError, match="no token ids or log-probabilities"):
        equal(lambda *_: 0.0, logprobs=None)


def test_the_same_seed_makes_the_same_requests() -> None:
    assert make_requests(30, max_words=5, max_tokens=4, seed=0) == REQUESTS
    assert len({json.dumps(request) for request in REQUESTS}) == 30
