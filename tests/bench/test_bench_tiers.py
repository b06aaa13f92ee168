"""`mlx-serve bench tiers` on a server that keeps its own time: who is asked, what is counted, what is a miss."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import httpx
import pytest

from mlx_server.bench.lab.tiers import TierLoad, is_good, measure_tiers, render
from mlx_server.bench.serve.client import Target, Tier
from mlx_server.cli.main import main
from mlx_server.errors import ServeError

TIERS = [Tier("high", "key-h"), Tier("normal", "key-n"), Tier("low", "key-l")]


class Server:
    """Streams answers of the asked length, and knows who has asked. `refused` names a key that gets a 429."""

    def __init__(self, refused: str = "") -> None:
        self.asked: Counter[str] = Counter()
        self.orders: list[str] = []
        self._refused = refused

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.001)
        key = request.headers["authorization"].removeprefix("Bearer ")
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        if key == self._refused:
            return httpx.Response(429, json={"error": {"message": "too many"}})
        body = json.loads(request.content)
        self.asked[key] += 1
        self.orders.append(key)
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        events = [{"choices": [{"text": "x"}]}] * body["max_tokens"] + [{"choices": [], "usage": usage}]
        return httpx.Response(200, text="".join(f"data: {json.dumps(event)}\n\n" for event in events))


def load(**sizes: int) -> TierLoad:
    return TierLoad(
        TIERS, **{"num_requests": 5, "num_clients": 3, "num_prompt_tokens": 20, "num_output_tokens": 4, **sizes}
    )


async def test_the_best_tier_is_measured_alone_and_under_the_load_of_the_others():
    server = Server()
    result = await measure_tiers(Target(base_url="http://fake", transport=server.transport()), load(), seed=0)
    groups = result["groups"]
    assert [groups[f"high, {when}"]["completed"] for when in ("alone", "under load")] == [5, 5]
    assert server.asked["key-h"] == 2 + 5 + 5  # calibration, alone, under load
    assert server.orders[: 2 + 5] == ["key-h"] * 7
    assert set(server.orders[7:13]) == {"key-n", "key-l"}, "the crowd is there before the best tier asks again"
    assert result["last_tier_completed"] == groups["low"]["completed"] > 0
    assert server.asked["key-l"] >= groups["low"]["completed"]
    assert result["p95_ttft_ratio"] == groups["high, under load"]["p95_ttft_ms"] / groups["high, alone"]["p95_ttft_ms"]


@pytest.mark.parametrize("refused", ["key-h", "key-l"])
async def test_a_refused_load_is_an_error(refused: str):
    server = Server(refused)
    with pytest.raises(ServeError, match="too many"):
        await measure_tiers(Target(base_url="http://fake", transport=server.transport()), load(), seed=0)


@pytest.mark.parametrize(
    ("ratio", "num_answers", "good", "words"),
    [(1.4, 3, True, "is kept"), (1.6, 3, False, "is MISSED"), (1.4, 0, False, "low got 0 answers")],
)
def test_what_is_a_miss(ratio: float, num_answers: int, good: bool, words: str):
    result = {"groups": {}, "p95_ttft_ratio": ratio, "max_ratio": 1.5, "last_tier": "low"}
    result["last_tier_completed"] = num_answers
    assert is_good(result) is good
    assert words in render(result)


@pytest.mark.parametrize("tiers", [[], ["a=1"], ["a=1", "a=2"]])
def test_two_tiers_are_needed(tiers: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "tiers", *(word for tier in tiers for word in ("--tier", tier))]) == 2
    assert "Name two tiers or more, each once" in capsys.readouterr().err
