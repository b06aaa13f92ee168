"""Requests made wrong: from right ones, by changes of their values, their bytes and their heads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.api.anthropic.test_anthropic_fuzz import odd_piece
from tests.api.test_fuzz import ODD
from tests.soak.requests import any_ask

_NAMES = (
    *("prompt", "messages", "input", "model", "tools", "tool_choice", "stop", "seed", "n", "max_tokens", "stream"),
    *("logit_bias", "logprobs", "top_logprobs", "response_format", "structured_outputs", "guided_regex", "system"),
    *(
        "chat_template_kwargs",
        "priority",
        "cache_salt",
        "truncate_prompt_tokens",
        "stream_options",
        "previous_response_id",
    ),
    *("tokens", "request_ids", "level", "mode", "drain_timeout_s", "text", "reasoning", "thinking", "echo", "min_p"),
)
_HEADS = (
    b"content-type: text/plain",
    b"content-type: application/json; charset=utf-16",
    b"transfer-encoding: gzip",
    b"transfer-encoding: chunked",
    b"content-length: -1",
    b"content-length: 5\r\ncontent-length: 6",
    b"content-encoding: gzip",
    b"expect: 100-continue",
    b"x-request-id: " + b"\xff" * 50,
    b"x-request-id: " + b"i" * 4000,
    b"origin: http://evil.example",
    b"upgrade: websocket\r\nconnection: upgrade",
    b"traceparent: 00-zz-zz-01",
    b"authorization: Basic eHg6eHg=",
    b"range: bytes=0-1",
    b"x: " + b"y" * 20_000,
    b"no colon",
    b" folded",
)
_TAILS = ("", "", "?a=1", "?stream=x", "/", "//", "/..%2f..%2fetc/passwd", "%00", "?" + "q" * 5000, "/%ff", "#x")


def mutant(rng: random.Random, routes: Sequence[tuple[str, str]], keys: Sequence[str]) -> bytes:
    """The bytes of one request to one of the `routes` (method and path), with one of the `keys`."""
    method, path = rng.choice(routes)
    ask = any_ask(rng)
    body: Any = ask.body
    if "completions" in path or "messages" in path or "responses" in path:
        path = path if rng.random() < 0.2 else ask.path
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        body = changed_value(rng, body)
    content = json.dumps(body).encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        content = changed_bytes(rng, content)
    return _head(rng, method, path, len(content), rng.choice(keys)) + content


def changed_value(rng: random.Random, value: Any) -> Any:
    """The value with one piece of it made odd, left out, doubled or put deep."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        if rng.random() < 0.2:
            return {**value, rng.choice(_NAMES): rng.choice(ODD)}
        name = rng.choice(list(value))
        if rng.random() < 0.1:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: changed_value(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], changed_value(rng, value[index]), *value[index + rng.randrange(2) :]]
    return rng.choice(_ODDITIES)(rng, value)


_ODDITIES: Sequence[Callable[[random.Random, Any], Any]] = (
    lambda rng, _: rng.choice(ODD),
    lambda rng, _: odd_piece(rng),
    lambda rng, value: [value] * rng.choice((0, 2, 50)),
    lambda rng, value: _deep(value, rng.choice((5, 150, 250))),
    lambda rng, value: value * 3 if isinstance(value, (str, list)) else str(value),
    lambda rng, _: rng.choice(("\ud800", "\x00", "<|im_start|>", "{{ 1/0 }}", "a" * 100_000, "\u202e", "-0", "1e400")),
    lambda rng, _: rng.choice((-1, 2**63, 2**70, 1e308, -1e308, 0.1, 10**400)),
)


def _deep(value: Any, depth: int) -> Any:
    for level in range(depth):
        value = {"a": value} if level % 2 else [value]
    return value


def changed_bytes(rng: random.Random, content: bytes) -> bytes:
    """The bytes with a few of them cut, doubled, changed or put in."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 3))):
        start = rng.randrange(len(changed) + 1)
        end = min(len(changed), start + rng.choice((0, 1, 1, 10, 10_000)))
        piece = bytes(changed[start:end])
        changed[start:end] = rng.choice((b"", piece * 2, rng.randbytes(len(piece) + 1), b'"', b"\\u", b"NaN", b"]}"))
    return bytes(changed)


def _head(rng: random.Random, method: str, path: str, num_bytes: int, key: str) -> bytes:
    """Rarely wrong, or nothing behind it would be looked at."""
    lines = [b"host: localhost", b"connection: close", f"x-api-key: {key}".encode()]
    lines += [b"content-type: application/json", b"content-length: %d" % num_bytes]
    if rng.random() < 0.1:
        method = rng.choice(("GET", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE", "X" * 50, "post"))
    if rng.random() < 0.1:
        path += rng.choice(_TAILS)
    if rng.random() < 0.1:
        lines[rng.randrange(3, 5)] = rng.choice(_HEADS)
    elif rng.random() < 0.1:
        lines.append(rng.choice(_HEADS))
    filled = path.replace("{response_id}", "resp_0").replace("{model}", "tiny")
    return b"%s %s HTTP/1.1\r\n%s\r\n\r\n" % (method.encode(), filled.encode(), b"\r\n".join(lines))
