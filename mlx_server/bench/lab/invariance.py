"""Checks over HTTP whether a server gives each request the same bits alone and in batches.

All requests are sent one at a time, and then in another order, in batches of 2 to `--max-batch` with random delays.
Prompts share heads, so that some hit cached prefixes, and each request is seeded and sampled in one of several ways.
Token ids and log-probabilities must be equal. A server with few `--num-kv-blocks` also preempts; the printed counts,
which are what the run added to the server's own, show it.

example:
  mlx-serve serve --batch-invariant --num-kv-blocks 64
  mlx-serve bench invariance --num-requests 500
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx

from mlx_server.bench.arguments import add_key_argument, add_server_arguments, api_key, from_1, from_2
from mlx_server.bench.serve.report import added_counts
from mlx_server.bench.serve.workloads import WORDS
from mlx_server.clients import NO_PROXY
from mlx_server.errors import ServeError

WAYS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
)
_NUM_HEADS = 5
_COUNTERS = ("vllm:num_preemptions", "vllm:prefix_cache_hits")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `mlx-serve bench invariance`."""
    add = parser.add_argument
    add_server_arguments(parser)
    add_key_argument(parser)
    add("--num-requests", type=from_1, default=500, metavar="N", help="requests, each sent twice")
    add("--max-batch", type=from_2, default=32, metavar="N", help="most requests at a time")
    add(
        "--max-prompt-words",
        type=from_1,
        default=300,
        metavar="N",
        help="most words of a prompt, without a shared head",
    )
    add("--max-tokens", type=from_1, default=48, metavar="TOKENS", help="most tokens of an answer")
    add("--seed", type=int, default=0, help="of the requests and of their batches")


def run(args: argparse.Namespace) -> int:
    """Prints how many answers are equal, and what the server counted meanwhile; 1 unless all are."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    key = api_key(args)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    requests = make_requests(args.num_requests, args.max_prompt_words, args.max_tokens, args.seed)
    async with httpx.AsyncClient(base_url=args.url, headers=headers, timeout=None, mounts=NO_PROXY) as http:
        try:
            before = (await http.get("/metrics")).text
            equal = await count_equal(http, args.model, requests, args.max_batch, args.seed)
            counts = added_counts(before, (await http.get("/metrics")).text)
        except httpx.ConnectError as error:
            raise ServeError(f"No server answers at {args.url}. Start one, or set --url.") from error
        except httpx.HTTPError as error:
            raise ServeError(f"{args.url} cannot be measured: {error or type(error).__name__}") from error
    print(f"{equal} of {len(requests)} answers are equal, token for token and log-probability for log-probability")
    if found := [f"{name}_total: {counts[name]:+}" for name in _COUNTERS if name in counts]:
        print("; ".join(found))
    return 0 if equal == len(requests) else 1


def make_requests(count: int, max_words: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Bodies for /v1/completions; half of the prompts begin with one of `_NUM_HEADS` shared heads."""
    rng = random.Random(seed)
    heads = [_words(rng, max_words) for _ in range(_NUM_HEADS)]
    return [
        {
            "prompt": (rng.choice(heads) + " " if rng.random() < 0.5 else "") + _words(rng, max_words),
            "max_tokens": rng.randint(1, max_tokens),
            "ignore_eos": True,
            "logprobs": 3,
            "return_token_ids": True,
            "seed": index,
            **rng.choice(WAYS),
        }
        for index in range(count)
    ]


def _words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


async def count_equal(
    http: httpx.AsyncClient,
    model: str | None,
    requests: Sequence[dict[str, Any]],
    max_batch: int,
    seed: int,
    max_delay_s: float = 0.5,
) -> int:
    """The number of requests with the same answer alone and in a batch. The requests of a batch are sent within
    `max_delay_s`. Raises `ServeError` for an answer without token ids or log-probabilities."""
    alone = [await _answer(http, model, request) for request in requests]
    rng = random.Random(f"{seed}:batches")
    order = rng.sample(range(len(requests)), len(requests))
    num_equal = 0
    while order:
        batch = [order.pop() for _ in range(min(len(order), rng.randint(2, max_batch)))]
        delays = [rng.uniform(0.0, max_delay_s) for _ in batch]
        answers = await asyncio.gather(
            *(_answer(http, model, requests[index], delay) for index, delay in zip(batch, delays, strict=True))
        )
        num_equal += sum(alone[index] == answer for index, answer in zip(batch, answers, strict=True))
    return num_equal


async def _answer(http: httpx.AsyncClient, model: str | None, request: dict[str, Any], delay_s: float = 0.0) -> Any:
    """Token ids and log-probabilities of an answer."""
    await asyncio.sleep(delay_s)
    response = await http.post("/v1/completions", json=request if model is None else {"model": model, **request})
    try:
        choice = response.raise_for_status().json()["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
        raise ServeError(f"an answer has no token ids or log-probabilities: {response.text[:200]}") from error
