"""Text is read by tier and by key in turn; here, a text with `stop` in it is one that takes forever."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from mlx_server.api.auth.key_file import KeyFile
from mlx_server.api.http import text_turns
from mlx_server.api.http.text_turns import TextTurn, TextWorkers, encode_in_pieces
from mlx_server.engine.fair_slots import Requester
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.request import Priority
from mlx_server.tiers import Tier
from tests.api.worlds import World, until, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_STOPPED = 40
"""Of one tier, where their order counts."""


class Reading:
    """A server, a key of each tier, and texts that wait for `go`."""

    def __init__(self, world: World, keys: dict[str, str]) -> None:
        self.world = world
        self.keys = keys
        self.go = threading.Event()
        self.tasks: list[asyncio.Task[httpx.Response]] = []

    async def post(self, tier: str, path: str, **body: Any) -> httpx.Response:
        headers = {"x-api-key": self.keys[tier]}
        return await self.world.http.post(path, json=body, headers=headers, timeout=10)

    async def stop(self, tier: str, num: int | None = None) -> None:
        """So many requests of the tier that take forever; by default twice as many as there are threads."""
        slots = self.world.context.text_workers.slots
        num = num or 2 * slots.num_slots
        self.tasks += [asyncio.create_task(self.post(tier, "/tokenize", prompt="stop")) for _ in range(num)]
        await until(lambda: slots.num_held + slots.num_waiting == len(self.tasks))


@pytest_asyncio.fixture(loop_scope="session")
async def reading(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reading]:
    path = tmp_path / "keys.sqlite"
    tiers = [Tier(name=priority.name.lower(), priority=priority) for priority in Priority]
    with KeyFile.create(path) as file:
        keys = {tier.name: file.add(tier.name, "").text for tier in tiers}
        keys["other low"] = file.add("low", "").text
    world.configure_server(*tiers, key_file=str(path))
    reading, encode = Reading(world, keys), Tokenizer.encode

    def slow_encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
        if "stop" in text:
            assert reading.go.wait(20)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow_encode)
    yield reading
    reading.go.set()
    assert {answer.status_code for answer in await asyncio.gather(*reading.tasks)} <= {200, 429}


REQUESTS = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": user("Hi")},
    "/v1/messages": {"model": "fake", "max_tokens": 8, "messages": user("Hi")},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages/count_tokens": {"model": "fake", "messages": user("Hi")},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/completions/render": {"prompt": "Hi"},
    "/v1/chat/completions/render": {"messages": user("Hi")},
}


@pytest.mark.parametrize(("path", "body"), REQUESTS.items())
async def test_whatever_a_worse_tier_has_read_a_better_one_is_served(reading: Reading, path: str, body: Any):
    await reading.stop("low")
    for tier in ("normal", "high"):
        assert (await reading.post(tier, path, **body)).status_code == 200
    await reading.stop("normal")
    assert (await reading.post("high", path, **body)).status_code == 200


async def test_the_keys_of_a_tier_take_turns(reading: Reading):
    """The other key's request is served when two of the forty before it have ended, not after all."""
    await reading.stop("low", NUM_STOPPED)
    other = asyncio.create_task(reading.post("other low", "/tokenize", prompt="Hi"))
    slots = reading.world.context.text_workers.slots
    await until(lambda: slots.num_held + slots.num_waiting == NUM_STOPPED + 1)
    ended: list[int] = []
    for task in reading.tasks:
        task.add_done_callback(lambda _: ended.append(0))
    other.add_done_callback(lambda _: ended.append(1))
    reading.go.set()
    await asyncio.gather(other, *reading.tasks)
    assert ended.index(1) <= 4 * slots.num_slots


async def test_who_leaves_early_does_not_get_more_threads(reading: Reading):
    await reading.stop("low", 1)
    slots = reading.world.context.text_workers.slots
    reading.tasks.pop().cancel()
    await asyncio.sleep(0.1)
    assert slots.num_held == 1
    reading.go.set()
    await until(lambda: slots.num_held == 0)


async def test_too_many_of_one_key_are_refused(reading: Reading):
    slots = reading.world.context.text_workers.slots
    slots.max_num_waiting = 3
    await reading.stop("low", slots.num_slots - Priority.LOW + 3)
    refused = await reading.post("low", "/tokenize", prompt="Hi")
    assert refused.status_code == 429
    assert "3 requests of this key wait to be read; the limit is 3" in refused.text
    assert "retry-after" in refused.headers
    metrics = (await reading.world.http.get("/metrics")).text
    assert 'mlx_serve:quota_refusals_total{tier="low"} 1.0' in metrics
    assert 'mlx_serve:quota_refusals_total{tier="high"} 0.0' in metrics
    waiting = asyncio.create_task(reading.post("other low", "/tokenize", prompt="Hi"))
    reading.go.set()
    assert (await waiting).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": user("Hi"), "logprobs": True}),
    ],
)
async def test_an_answer_that_is_there_is_never_refused(reading: Reading, path: str, body: Any):
    """However much of its key waits by then."""
    slots, engine = reading.world.context.text_workers.slots, reading.world.engine
    engine.gate.clear()
    answer = asyncio.create_task(reading.post("low", path, **body))
    await until(lambda: bool(engine.requests) and slots.num_held == 0)
    slots.max_num_waiting = 3
    await reading.stop("low", slots.num_slots - Priority.LOW + 3)
    engine.gate.set()
    await until(lambda: slots.num_waiting == 4)
    assert (await reading.post("low", "/tokenize", prompt="Hi")).status_code == 429
    reading.go.set()
    assert (await answer).status_code == 200


async def test_who_waits_for_something_else_gives_the_turn_back():
    workers = TextWorkers(8)
    turn = TextTurn(workers, Requester())
    await turn.begin()
    assert workers.slots.num_held == 1
    await until(lambda: workers.slots.num_held == 0)
    assert await turn.in_thread(lambda: 7) == 7
    assert workers.slots.num_held == 1
    turn.end()
    await until(lambda: workers.slots.num_held == 0)


class Encoder:
    """Stands in for the encoder of large answers: the sizes of what it wrote, in bytes, and the threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.threads: set[str] = set()
        self._encode = text_turns.to_json
        monkeypatch.setattr(text_turns, "to_json", self.encode)

    def encode(self, value: Any, **options: Any) -> bytes:
        written = self._encode(value, **options)
        self.sizes.append(len(written))
        self.threads.add(threading.current_thread().name.partition("_")[0])
        return written


async def test_a_large_answer_is_encoded_in_small_pieces(monkeypatch: pytest.MonkeyPatch):
    encoder = Encoder(monkeypatch)
    positions = [{"token": f"ü{number}", "top": [{"logprob": -0.1}] * 5} for number in range(1000)]
    body = {
        "id": "a",
        "choices": [{"index": 0, "logprobs": {"content": positions}}] * 3,
        "ids": [*range(1000)],
        "of": {},
    }
    written = encode_in_pieces(body, "choices")
    assert json.loads(written) == body
    assert max(encoder.sizes) < len(written) / 30
    assert encode_in_pieces({"vectors": iter([[float("nan"), 1.5], []])}, "vectors") == b'{"vectors":[[null,1.5],[]]}'


@pytest.mark.parametrize(
    "body",
    [
        {"n": 4, "return_token_ids": True},
        {"logprobs": 2},
        {"prompt_logprobs": 2},
    ],
    ids=lambda body: [*body][-1],
)
async def test_large_answers_are_encoded_off_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
):
    encoder = Encoder(monkeypatch)
    answer = await world.http.post("/v1/completions", json={"prompt": [5] * 200, "max_tokens": 100, **body})
    assert answer.status_code == 200
    assert encoder.threads == {"text"}
    assert max(encoder.sizes) <= 64 * 300
