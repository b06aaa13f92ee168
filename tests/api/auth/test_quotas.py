"""The limits of tiers, held by a running server; time is the world's own, so that minutes pass at once."""

from __future__ import annotations

import asyncio
import datetime
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mlx_server.api.auth.key_file import KeyFile
from mlx_server.api.auth.quotas import WINDOW_S, SlidingWindow
from mlx_server.config import CacheConfig, Config
from mlx_server.errors import InvalidRequestError, QuotaExceededError, ServeError
from mlx_server.request import Priority
from mlx_server.tiers import GENERATING_PATHS, Tier
from tests.api.worlds import World, until, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5] * 10


@pytest.fixture
def keys(world: World, tmp_path: Path) -> Iterator[Callable[..., list[str]]]:
    """Makes the server one with a tier, and returns keys of it."""
    path = tmp_path / "keys.sqlite"
    with KeyFile.create(path) as file:

        def make(num_keys: int = 1, **tier: Any) -> list[str]:
            world.configure_server(Tier(name="paid", **tier), key_file=str(path))
            return [file.add("paid", "").text for _ in range(num_keys)]

        yield make


async def ask(world: World, key: str, **body: Any) -> httpx.Response:
    return await world.complete(headers={"x-api-key": key}, **{"prompt": PROMPT, "max_tokens": 4, **body})


async def statuses(world: World, key: str, num: int, **body: Any) -> list[int]:
    return [(await ask(world, key, **body)).status_code for _ in range(num)]


# --- requests a minute ----------------------------------------------------------------------------------------------


async def test_one_request_too_many_in_a_minute_is_refused(world: World, keys: Any):
    (key,) = keys(requests_per_minute=3)
    assert await statuses(world, key, 2) == [200, 200]
    world.now_s += 40
    assert await statuses(world, key, 2) == [200, 429]
    world.now_s += 19.9
    assert await statuses(world, key, 1) == [429]
    world.now_s += 0.2  # the first two are a minute ago
    assert await statuses(world, key, 3) == [200, 200, 429]
    assert len(world.engine.requests) == 5


async def test_refusals_are_counted_by_tier(world: World, keys: Any):
    (key,) = keys(requests_per_minute=1)
    assert await statuses(world, key, 3) == [200, 429, 429]
    text = (await world.http.get("/metrics")).text
    assert 'mlx_serve:quota_refusals_total{tier="paid"} 2.0' in text


async def test_the_refusal_says_the_numbers_and_when_to_come_again(world: World, keys: Any):
    (key,) = keys(requests_per_minute=2)
    await statuses(world, key, 2)
    world.now_s += 12.5
    refused = await ask(world, key)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "48"
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("RateLimitError", 429, None)
    assert error["message"] == (
        "2 requests have come within a minute; a key of the tier paid may send 2. Try again in 48 s."
    )
    assert "x-should-retry" not in refused.headers


async def test_each_key_has_its_own_quota(world: World, keys: Any):
    first, second = keys(2, requests_per_minute=1)
    assert await statuses(world, first, 2) == [200, 429]
    assert await statuses(world, second, 2) == [200, 429]


async def test_a_burst_cannot_pass_all_at_once(world: World, keys: Any):
    (key,) = keys(requests_per_minute=4)
    answers = await asyncio.gather(*(ask(world, key) for _ in range(12)))
    assert sorted(answer.status_code for answer in answers) == [200] * 4 + [429] * 8


async def test_what_is_wrong_counts_and_is_not_read_any_more(world: World, keys: Any):
    (key,) = keys(requests_per_minute=3)
    assert await statuses(world, key, 2, temperature=-1) == [400, 400]
    assert await statuses(world, key, 1, prompt=None) == [400]
    refused = await world.http.post("/v1/completions", content=b"{", headers={"x-api-key": key})
    assert refused.status_code == 429


READING = [
    ("/tokenize", {"prompt": "ab"}, 2),
    ("/tokenize", {"messages": user("a")}, None),
    ("/detokenize", {"tokens": [5, 6, 7]}, 3),
    ("/v1/completions/render", {"prompt": ["ab", "c"]}, 3),
    ("/v1/chat/completions/render", {"messages": user("a")}, None),
    ("/v1/messages/count_tokens", {"messages": user("a"), "model": "fake"}, None),
]
"""Routes that generate nothing, with a body and its tokens where they can be counted."""


WRONG = {"prompt": -1, "tokens": "x", "messages": 7, "model": "fake"}


@pytest.mark.parametrize("path", sorted({path for path, *_ in READING} | set(GENERATING_PATHS)))
async def test_wrong_requests_count_once_on_every_route(world: World, keys: Any, path: str):
    (key,) = keys(requests_per_minute=3)
    headers = {"x-api-key": key}
    for content in (json.dumps(WRONG).encode(), b"{", b'{"model": "none"}'):
        answer = await world.http.post(path, content=content, headers={**headers, "content-type": "application/json"})
        assert 400 <= answer.status_code < 500 != answer.status_code != 429
    url = world.http.base_url
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {path} HTTP/1.1\r\nhost: {url.host}\r\nx-api-key: {key}\r\ncontent-length: 9\r\n\r\n"
        writer.write(head.encode())
        assert b" 429 " in await reader.readline(), "refused although its body never comes"
        writer.close()


async def test_what_the_server_refuses_is_free(world: World, keys: Any):
    (key,) = keys(requests_per_minute=1)
    world.engine.max_open = 0
    assert await statuses(world, key, 2) == [503, 503]
    world.engine.max_open = 1000
    assert await statuses(world, key, 2) == [200, 429]


@pytest.mark.parametrize(("path", "body", "num_tokens"), READING)
async def test_reading_has_the_tier_s_rates_to_itself(
    world: World, keys: Any, path: str, body: Any, num_tokens: int | None
):
    (key,) = keys(requests_per_minute=2)

    async def read() -> int:
        return (await world.http.post(path, json=body, headers={"x-api-key": key})).status_code

    assert await statuses(world, key, 3) == [200, 200, 429]
    assert [await read() for _ in range(3)] == [200, 200, 429]
    world.now_s += 61
    assert [await read() for _ in range(3)] == [200, 200, 429]
    assert await statuses(world, key, 3) == [200, 200, 429]
    text = (await world.http.get("/metrics")).text
    assert 'mlx_serve:quota_refusals_total{tier="paid"} 4.0' in text


@pytest.mark.parametrize(("path", "body", "num_tokens"), READING)
async def test_headers_of_what_only_reads_are_of_the_rates_for_that(
    world: World, keys: Any, path: str, body: Any, num_tokens: int | None
):
    (key,) = keys(requests_per_minute=2, tokens_per_minute=1000)
    name = "anthropic-ratelimit-{}-remaining" if path.startswith("/v1/messages") else "x-ratelimit-remaining-{}"
    assert await statuses(world, key, 1, max_tokens=1) == [200]
    answers = [await world.http.post(path, json=body, headers={"x-api-key": key}) for _ in range(3)]
    assert [answer.headers[name.format("requests")] for answer in answers] == ["1", "0", "0"]
    if num_tokens is not None:
        left = [1000 - num_tokens, 1000 - 2 * num_tokens, 1000 - 2 * num_tokens]
        assert [int(answer.headers[name.format("tokens")]) for answer in answers] == left
    generated = await ask(world, key, max_tokens=1)
    assert generated.headers["x-ratelimit-remaining-requests"] == "0", "one for each of two"


@pytest.mark.parametrize(("path", "body", "num_tokens"), [case for case in READING if case[2] is not None])
async def test_tokens_that_are_only_read_count_apart(world: World, keys: Any, path: str, body: Any, num_tokens: int):
    (key,) = keys(tokens_per_minute=3 * num_tokens)

    async def read() -> int:
        return (await world.http.post(path, json=body, headers={"x-api-key": key})).status_code

    assert [await read() for _ in range(4)] == [200, 200, 200, 429]
    assert await statuses(world, key, 1, prompt=[5], max_tokens=1) == [200]
    world.now_s += 61
    assert await read() == 200


GENERATING = {
    "/v1/chat/completions": {"messages": user("Hi")},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "fake", "max_tokens": 8, "messages": user("Hi")},
}


POOLING = {"/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"}
"""Held to the same limits in test_embeddings.py."""

OTHERS = {"/infill", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings"}
"""Held to them in test_infill.py and test_ollama_wire.py: one path behind all of them knows the limits."""


async def test_these_are_the_routes_that_generate(world: World):
    assert set(GENERATING) | POOLING | OTHERS == set(GENERATING_PATHS)
    document = (await world.http.get("/openapi.json")).json()
    streaming = {
        path
        for path, methods in document["paths"].items()
        if "text/event-stream" in methods.get("post", {}).get("responses", {}).get("200", {}).get("content", {})
    }
    assert streaming == {*GENERATING, "/infill"}


@pytest.mark.parametrize(("path", "body"), GENERATING.items())
@pytest.mark.parametrize("stream", [False, True])
async def test_every_generating_route_is_limited(world: World, keys: Any, path: str, body: Any, stream: bool):
    (key,) = keys(requests_per_minute=1)
    for status in (200, 429):
        response = await world.http.post(path, json={**body, "stream": stream}, headers={"x-api-key": key})
        assert response.status_code == status
    assert response.headers["retry-after"] == "60"


@pytest.mark.parametrize(("path", "body"), GENERATING.items())
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_refused_after_it_has_begun_counts_once(
    world: World, keys: Any, path: str, body: Any, stream: bool
):
    """Like a grammar that cannot be followed, which shows when there is output."""
    (key,) = keys(requests_per_minute=2)
    world.engine.fail_with, world.engine.fail_after = InvalidRequestError("cannot be followed", "guided_grammar"), 0
    for status in (400, 400, 429):
        response = await world.http.post(path, json={**body, "stream": stream}, headers={"x-api-key": key})
        assert response.status_code == status


# --- tokens a minute ------------------------------------------------------------------------------------------------


async def test_prompt_tokens_count_at_once_and_output_as_it_comes(world: World, keys: Any):
    (key,) = keys(tokens_per_minute=30)
    world.engine.pause_after = 2
    running = asyncio.create_task(ask(world, key))
    await until(lambda: world.engine.num_paused == 1)
    assert world.engine.open
    refused = await ask(world, key, prompt=[5] * 19)
    assert refused.status_code == 429
    assert refused.headers["x-ratelimit-remaining-tokens"] == "18"
    assert "12 tokens were used within a minute and the prompt has 19" in refused.json()["error"]["message"]
    world.engine.resume()
    assert (await running).status_code == 200  # 4 tokens of output
    assert await statuses(world, key, 2) == [200, 429]
    world.now_s += 60
    assert await statuses(world, key, 1) == [200]


async def test_a_prompt_counts_once_however_many_answers_it_gets(world: World, keys: Any):
    (key,) = keys(tokens_per_minute=100)
    response = await ask(world, key, prompt=[PROMPT, PROMPT], n=3)
    assert response.headers["x-ratelimit-remaining-tokens"] == str(100 - 2 * 10 - 6 * 4)


async def test_a_prompt_above_the_limit_of_a_minute_never_fits(world: World, keys: Any):
    (key,) = keys(tokens_per_minute=30)
    refused = await ask(world, key, prompt=[5] * 31)
    assert refused.status_code == 400
    assert "The prompt has 31 tokens; a key of the tier paid may use 30 a minute" in refused.json()["error"]["message"]


# --- answers at a time ----------------------------------------------------------------------------------------------


async def test_seats_are_counted_in_answers_and_come_back(world: World, keys: Any):
    (key,) = keys(max_concurrent_requests=3)
    world.engine.gate.clear()
    running = [asyncio.create_task(ask(world, key, n=2)), asyncio.create_task(ask(world, key))]
    await until(lambda: len(world.engine.open) == 3)
    refused = await ask(world, key)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "3 answers are in progress" in refused.json()["error"]["message"]
    never = await ask(world, key, n=2, prompt=[PROMPT, PROMPT])
    assert never.status_code == 429  # looked at first: the key is busy anyway
    world.engine.gate.set()
    assert [(await task).status_code for task in running] == [200, 200]
    assert await statuses(world, key, 2, n=3) == [200, 200]
    never = await ask(world, key, n=2, prompt=[PROMPT, PROMPT])
    assert never.status_code == 400
    assert (never.json()["error"]["param"], "4 answers" in never.json()["error"]["message"]) == ("n", True)


async def disconnect(world: World, key: str, stream: bool) -> None:
    """A client that asks and goes away."""
    _, writer = await world.connect()
    body = b'{"prompt": [5, 6], "stream": %b}' % (b"true" if stream else b"false")
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await until(lambda: world.engine.num_paused == 1)
    writer.close()
    await world.settle()


async def abort(world: World, key: str, stream: bool) -> None:
    running = asyncio.create_task(ask(world, key, stream=stream))
    await until(lambda: world.engine.num_paused == 1)
    assert (await world.http.post("/abort_requests", json={"abort_all": True}, headers={"x-api-key": key})).is_success
    await running


async def fail(world: World, key: str, stream: bool) -> None:
    world.engine.fail_with, world.engine.fail_after = ServeError("broken"), 1
    await ask(world, key, stream=stream)
    world.engine.fail_with = None


async def refuse(world: World, key: str, stream: bool) -> None:
    world.engine.refuse_with = QuotaExceededError("the tier's queue is full")
    assert (await ask(world, key, stream=stream)).status_code == 429
    world.engine.refuse_with = None


async def refuse_the_second(world: World, key: str, stream: bool) -> None:
    world.engine.max_open = 1
    assert (await ask(world, key, n=2, stream=stream)).status_code == 503
    world.engine.max_open = 1000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", [disconnect, abort, fail, refuse, refuse_the_second])
async def test_a_seat_comes_back_however_a_request_ends(
    world: World, keys: Any, end: Callable[[World, str, bool], Awaitable[None]], stream: bool
):
    (key,) = keys(max_concurrent_requests=2, admin=True)
    world.engine.pause_after = 2
    await end(world, key, stream)
    await world.settle()
    world.engine.pause_after = None
    assert await statuses(world, key, 3, n=2) == [200, 200, 200]


# --- context, output, models, priorities ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "asked", "given"),
    [
        ({"max_output_tokens": 20}, {"max_tokens": 100}, 20),
        ({"max_output_tokens": 20}, {"max_tokens": 7}, 7),
        ({"max_output_tokens": 20, "max_context_tokens": 25}, {"max_tokens": 100}, 15),
        ({"max_context_tokens": 500}, {"max_tokens": 100}, 100),
        ({"max_context_tokens": 11}, {"max_tokens": 100}, 1),
        ({}, {"max_tokens": 100}, 100),
    ],
)
async def test_answers_are_cut_to_the_tier(world: World, keys: Any, limits: Any, asked: Any, given: int):
    (key,) = keys(**limits)
    answer = (await ask(world, key, ignore_eos=True, **asked)).json()
    assert [request.sampling.max_tokens for request in world.engine.requests] == [given]
    assert answer["usage"]["completion_tokens"] == given
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_chat_without_a_limit_gets_the_tier_s(world: World, keys: Any):
    (key,) = keys(max_output_tokens=3)
    answer = (await world.chat(headers={"x-api-key": key})).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (3, "length")


async def test_a_prompt_that_fills_the_tier_s_context_is_refused(world: World, keys: Any):
    (key,) = keys(max_context_tokens=10)
    refused = await ask(world, key)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_tokens")
    assert "10 tokens > 9 maximum" in refused.json()["error"]["message"]
    assert "context length is 10 tokens for a key of the tier paid" in refused.json()["error"]["message"]
    assert await statuses(world, key, 1, prompt=[PROMPT, PROMPT[1:]]) == [400]
    assert await statuses(world, key, 1, prompt=PROMPT[1:]) == [200]


async def test_more_tokens_at_least_than_the_tier_allows_at_most(world: World, keys: Any):
    (key,) = keys(max_output_tokens=3)
    refused = await ask(world, key, max_tokens=9, min_tokens=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


@pytest.mark.parametrize("listed", ["fake", "alias"])
async def test_models_that_a_tier_may_use(world: World, keys: Any, listed: str):
    (key,) = keys(models=("elsewhere", listed))
    headers = {"x-api-key": key}
    for name in ("fake", "alias", None):
        assert await statuses(world, key, 1, model=name) == [200]
    assert await statuses(world, key, 1, model="other") == [404]
    assert [card["id"] for card in (await world.http.get("/v1/models", headers=headers)).json()["data"]] == ["fake"]
    for path in ("/v1/models/alias", "/server_info", "/model_info"):
        assert (await world.http.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize("name", ["fake", "alias", None])
async def test_models_that_it_may_not_use(world: World, keys: Any, name: str | None):
    (key,) = keys(models=("elsewhere",))
    headers = {"x-api-key": key}
    refused = await ask(world, key, model=name)
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "PermissionDeniedError")
    assert "tier paid may not use the model `fake`; they may use elsewhere" in refused.json()["error"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    body = {"model": name, "prompt": "a", "tokens": [5]}
    for path in ("/tokenize", "/detokenize", "/v1/completions/render"):
        assert (await world.http.post(path, json=body, headers=headers)).status_code == 403
    assert (await world.http.get("/v1/models", headers=headers)).json()["data"] == []
    for path in ("/v1/models/fake", "/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        assert (await world.http.get(path, headers=headers)).status_code == 403


@pytest.mark.parametrize(
    ("path", "body", "priority"),
    [
        ("/v1/completions", {"prompt": "a"}, Priority.LOW),
        ("/v1/completions", {"prompt": "a", "priority": -5}, Priority.LOW),
        ("/v1/chat/completions", {"messages": user("a")}, Priority.HIGH),
        ("/v1/chat/completions", {"messages": user("a"), "priority": 1}, Priority.NORMAL),
        ("/v1/messages", {"messages": user("a"), "model": "fake", "max_tokens": 2}, Priority.NORMAL),
    ],
)
async def test_a_path_may_have_a_floor(world: World, keys: Any, path: str, body: Any, priority: Priority):
    (key,) = keys(priority=Priority.HIGH, floors={"/v1/completions": Priority.LOW, "/v1/messages": Priority.NORMAL})
    assert (await world.http.post(path, json=body, headers={"x-api-key": key})).status_code == 200
    assert [request.priority for request in world.engine.requests] == [priority]


# --- headers --------------------------------------------------------------------------------------------------------


async def test_openai_s_headers_tell_what_is_left(world: World, keys: Any):
    (key,) = keys(requests_per_minute=5, tokens_per_minute=1000)
    await ask(world, key)
    world.now_s += 20
    response = await ask(world, key, stream=True)
    limits = {name: value for name, value in response.headers.items() if "ratelimit" in name}
    assert limits == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "60s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "976",  # two prompts, and the first answer; the second is yet to come
        "x-ratelimit-reset-tokens": "60s",
    }
    world.now_s += 15.5
    response = await world.http.get("/v1/models", headers={"x-api-key": key})
    assert response.headers["x-ratelimit-remaining-tokens"] == "972"
    assert response.headers["x-ratelimit-reset-requests"] == "44.5s"


async def test_anthropic_s_headers_tell_what_is_left(world: World, keys: Any):
    (key,) = keys(requests_per_minute=2, tokens_per_minute=1000)
    body = {"model": "fake", "max_tokens": 4, "messages": user("Hi")}
    before = datetime.datetime.now(datetime.UTC)
    response = await world.http.post("/v1/messages", json=body, headers={"x-api-key": key})
    used = response.json()["usage"]
    limits = {name: value for name, value in response.headers.items() if "ratelimit" in name}
    resets = [
        datetime.datetime.fromisoformat(limits.pop(f"anthropic-ratelimit-{n}-reset")) for n in ("requests", "tokens")
    ]
    assert limits == {
        "anthropic-ratelimit-requests-limit": "2",
        "anthropic-ratelimit-requests-remaining": "1",
        "anthropic-ratelimit-tokens-limit": "1000",
        "anthropic-ratelimit-tokens-remaining": str(1000 - used["input_tokens"] - used["output_tokens"]),
    }
    for reset in resets:
        assert 59 <= (reset - before).total_seconds() <= 65


async def test_without_rates_there_are_no_headers(world: World, keys: Any):
    (key,) = keys(max_concurrent_requests=5)
    assert not [name for name in (await ask(world, key)).headers if "ratelimit" in name]


async def test_the_client_libraries_raise_their_own_errors(world: World, keys: Any):
    (key,) = keys(requests_per_minute=1)
    client = world.openai.with_options(api_key=key)
    await client.completions.create(model="fake", prompt="a")
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(model="fake", prompt="a")
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    async with anthropic.AsyncAnthropic(base_url=world.url, api_key=key, max_retries=0) as other:
        with pytest.raises(anthropic.RateLimitError) as refused:
            await other.messages.create(model="fake", max_tokens=4, messages=[{"role": "user", "content": "a"}])
    assert refused.value.response.json()["error"]["type"] == "rate_limit_error"


# --- whose prefixes are shared --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("isolation", "expected"),
    [("none", [(), ("salt",)]), ("tier", [("tier:default",), ("tier:default", "salt")])],
)
async def test_what_separates_prefixes(world: World, isolation: str, expected: list[tuple[str, ...]]):
    world.configure(Config(cache=CacheConfig(isolation=isolation)))
    for path, body in [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": user("a")})]:
        world.engine.requests.clear()
        for salt in ({}, {"cache_salt": "salt"}):
            assert (await world.http.post(path, json={**body, **salt})).status_code == 200
        assert [request.extra_keys for request in world.engine.requests] == expected


# --- the window -----------------------------------------------------------------------------------------------------


async def test_a_window_forgets_after_a_minute_and_never_early():
    window = SlidingWindow()
    window.add(3, 10.0)
    window.add(4, 10.2)  # in one slot with the first: both leave when it does
    window.add(5, 30.0)
    assert [window.used(now) for now in (30.0, 70.1, 70.2, 89.9, 90.0)] == [12, 12, 5, 5, 0]


async def test_a_window_says_how_long_to_wait():
    window = SlidingWindow()
    window.add(6, 0.0)
    window.add(3, 10.0)
    assert window.wait_s(1, 10, 20.0) == 0
    assert window.wait_s(2, 10, 20.0) == 40
    assert window.wait_s(8, 10, 20.0) == 50
    assert window.wait_s(11, 10, 20.0) == float("inf")
    assert (window.empty_in_s(20.0), window.empty_in_s(70.0)) == (50, 0)


@pytest.mark.parametrize("seed", range(5))
async def test_a_limit_holds_in_any_minute_and_refuses_nothing_that_fits(seed: int):
    rng, window, limit, now = random.Random(seed), SlidingWindow(), 20, 0.0
    taken: list[float] = []
    for _ in range(2000):
        now += rng.expovariate(rng.choice((0.2, 2.0, 50.0)))
        is_refused = window.wait_s(1, limit, now) > 0
        if not is_refused:
            window.add(1, now)
            taken.append(now)
        assert sum(time > now - WINDOW_S for time in taken) <= limit
        assert not is_refused or sum(time > now - WINDOW_S - 0.25 for time in taken) >= limit
    assert len(taken) > 3 * limit


async def test_a_window_stays_small():
    window = SlidingWindow()
    for step in range(100_000):
        window.add(1, step * 0.01)
    assert len(window._slots) <= 242
    assert 6000 <= window.used(999.99) <= 6050
