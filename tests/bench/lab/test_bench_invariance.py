"""`bench invariance` on scripted servers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from mlx_server.bench.lab.invariance import count_equal, make_requests
from mlx_server.cli.main import main
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


class CountingServer(BaseHTTPRequestHandler):
    """Gives each request the same answer, and counts 10 cached tokens for it; `num_hits` is of all requests so far."""

    protocol_version = "HTTP/1.1"
    num_hits = 7_000
    has_metrics = True

    def do_GET(self) -> None:
        hits = f'vllm:prefix_cache_hits_total{{model_name="m"}} {CountingServer.num_hits}'
        counters = f"{hits}\nvllm:num_preemptions_total 5"
        self._answer(counters if self.has_metrics else "none", 200 if self.has_metrics else 404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        CountingServer.num_hits += 10
        choice = {"token_ids": [1], "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{}]}}
        self._answer(json.dumps({"choices": [choice]}))

    def _answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def counting_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), CountingServer) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.usefixtures("dead_proxy")
def test_counts_are_those_of_the_run_alone(
    counting_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ["bench", "invariance", "--url", counting_url, "--num-requests", "4"]
    for _ in range(2):
        assert main(run) == 0
        counts = "vllm:num_preemptions_total: +0; vllm:prefix_cache_hits_total: +80"
        assert capsys.readouterr().out.splitlines()[1:] == [counts]
    monkeypatch.setattr(CountingServer, "has_metrics", False)
    assert main(run) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_batch_of_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "invariance", "--max-batch", "1"]) == 2
    assert "1 is not a whole number of at least 2" in capsys.readouterr().err
