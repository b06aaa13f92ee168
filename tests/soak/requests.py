"""The requests of a mixed load: each protocol, streamed and not, with constraints, tools, logprobs and several samples,
and invalid requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
LETTERS = "abcdefghij klmnopqrst"
_SHARED = "You are a helper whose instructions are the same for everyone. " * 2
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. `wanted` is the expected status, unless it is refused temporarily (429, 503)."""

    path: str
    body: dict[str, Any] = field(default_factory=dict)
    wanted: int = 200
    is_json: bool = False

    @property
    def is_stream(self) -> bool:
        return self.body.get("stream") is True


def seeded(number: int) -> Ask:
    """A text that has the same answer each time it is requested alone."""
    rng = random.Random(number)
    length = rng.randrange(10, 200)
    body = {"prompt": _SHARED + _text(rng, length), "seed": number, "temperature": 0.8 * (number % 2)}
    return Ask(TEXT, {**body, "max_tokens": rng.randrange(8, 40), "ignore_eos": True, "logprobs": 3})


def any_ask(rng: random.Random) -> Ask:
    make = rng.choice(
        (_chat, _chat, _text_completion, _text_completion, _message, _response, _structured, _tools, _free)
    )
    return _wrong(rng) if rng.random() < 0.1 else make(rng)


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(length))


def _sampling(rng: random.Random) -> dict[str, Any]:
    return {"temperature": rng.choice((0, 0.7, 1.5)), "top_p": rng.choice((1, 0.9)), "stream": rng.random() < 0.6}


def _turn(rng: random.Random) -> list[dict[str, Any]]:
    return [{"role": "user", "content": _SHARED + _text(rng, rng.randrange(1, 120))}]


def _chat(rng: random.Random) -> Ask:
    body = {"messages": _turn(rng), "max_tokens": rng.randrange(1, 60), "ignore_eos": True, **_sampling(rng)}
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": rng.randrange(6)}
    if rng.random() < 0.2:
        body |= {"n": 2, "stop": ["zz"]}
    return Ask(CHAT, body)


def _text_completion(rng: random.Random) -> Ask:
    body = {"prompt": _SHARED + _text(rng, rng.randrange(1, 250)), "max_tokens": rng.randrange(1, 60), **_sampling(rng)}
    extra: dict[str, Any] = rng.choice(
        (
            {},
            {"n": 3},
            {"logprobs": 2},
            {"echo": True},
            {"prompt": [[1, 2, 3], [4, 5]]},
            {"seed": 5, "ignore_eos": True},
        )
    )
    return Ask(TEXT, body | extra)


def _message(rng: random.Random) -> Ask:
    body = {"model": "tiny", "messages": _turn(rng), "max_tokens": rng.randrange(1, 50), **_sampling(rng)}
    return Ask(MESSAGES, {**body, "temperature": 1, "system": "Be short."})


def _response(rng: random.Random) -> Ask:
    body = {"input": _text(rng, rng.randrange(1, 150)), "max_output_tokens": rng.randrange(16, 50), **_sampling(rng)}
    return Ask(RESPONSES, {**body, "store": rng.random() < 0.5})


def _structured(rng: random.Random) -> Ask:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
    return Ask(CHAT, {"messages": _turn(rng), "response_format": form, "max_tokens": 80}, is_json=True)


def _tools(rng: random.Random) -> Ask:
    choice = {"type": "function", "function": {"name": "f"}}
    body = {"messages": _turn(rng), "tools": [_TOOL], "tool_choice": choice, "max_tokens": 100}
    return Ask(CHAT, {**body, "stream": rng.random() < 0.5})


def _free(rng: random.Random) -> Ask:
    text = _text(rng, rng.randrange(1, 2000))
    return rng.choice(
        (
            Ask("/tokenize", {"prompt": text}),
            Ask("/detokenize", {"tokens": [5] * 100}),
            Ask("/v1/messages/count_tokens", {"model": "tiny", "messages": _turn(rng)}),
            Ask("/v1/completions/render", {"prompt": text[:300]}),
        )
    )


def _wrong(rng: random.Random) -> Ask:
    return rng.choice(
        (
            Ask(CHAT, {"messages": []}, 400),
            Ask(TEXT, {"prompt": "a" * 1500}, 400),
            Ask(TEXT, {"prompt": "a", "temperature": -1}, 400),
            Ask(TEXT, {"prompt": "a", "guided_regex": "("}, 400),
            Ask(MESSAGES, {"messages": 5}, 400),
            Ask(RESPONSES, {"input": [{"type": "?"}]}, 400),
            Ask(CHAT, {"model": "none", "messages": _turn(rng)}, 404),
            Ask("/abort_requests", {"abort_all": True}, 403),
        )
    )
