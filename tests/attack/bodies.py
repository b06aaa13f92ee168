"""Bodies that cost much to read: the largest of each kind that fit into the limit of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

MANY = 32 * 1024 * 1024 - 1000
"""Bytes; just below what the server reads."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One request. `status` is what it must be answered with."""

    path: str
    body: Callable[[], bytes]
    status: int = 400


def many(before: bytes, item: bytes, after: bytes, number: int | None = None) -> Callable[[], bytes]:
    """`number` items between commas, or as many as fit."""

    def make() -> bytes:
        room = (MANY - len(before) - len(after)) // (len(item) + 1)
        return before + b",".join([item] * (room if number is None else min(number, room))) + after

    return make


def biases(number: int) -> Callable[[], bytes]:
    return lambda: b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % index for index in range(number)) + b"}}"


def long(before: bytes, piece: bytes, after: bytes, num_bytes: int = MANY) -> Callable[[], bytes]:
    """One string of `piece`, again and again."""
    return lambda: before + b'"' + piece * ((num_bytes - len(before) - len(after)) // len(piece)) + b'"' + after


_CHAT, _TEXT, _MESSAGES, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
_MESSAGE = b'{"role":"user","content":"x"}'
_TOOL = b'{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
_HEAD = b'{"model":"mini","max_tokens":1,"messages":['

ATTACKS: Mapping[str, Attack] = {
    "a million messages": Attack(_MESSAGES, many(_HEAD, _MESSAGE, b"]}", 1_000_000)),
    "a million items": Attack(_RESPONSES, many(b'{"input":[', _MESSAGE, b"]}", 1_000_000)),
    "8.1 million prompts of one token": Attack(_TEXT, many(b'{"prompt":[', b"[1]", b"]}", 8_100_000)),
    "an unknown field of empty lists": Attack(_TEXT, many(b'{"prompt":"a","max_tokens":1,"x":[', b"[]", b"]}")),
    "a model's name of 31 MB": Attack(_TEXT, long(b'{"prompt":"a","model":', b"n", b"}", 31_000_000)),
    "300,000 tools": Attack(_CHAT, many(b'{"messages":[' + _MESSAGE + b'],"tools":[', _TOOL, b"]}", 300_000)),
    "two million biases": Attack(_TEXT, biases(2_000_000)),
    "3 MB of 100,000 items": Attack(_RESPONSES, many(b'{"input":[', _MESSAGE, b"]}", 100_000)),
    "100,000 messages": Attack(_CHAT, many(b'{"messages":[', _MESSAGE, b"]}", 100_000)),
    "as many messages as are read": Attack(_MESSAGES, many(_HEAD, _MESSAGE, b"]}", 16_384), 200),
    "as many items as are read": Attack(
        _RESPONSES, many(b'{"max_output_tokens":1,"input":[', _MESSAGE, b"]}", 16_384), 200
    ),
    "as many lists as are read": Attack(_TEXT, many(b'{"prompt":"a","x":[', b"[]", b"]}", 131_000), 200),
    "a prompt of two million tokens": Attack(_TEXT, many(b'{"prompt":[', b"5", b"]}", 2_000_000)),
    "stop strings": Attack(_TEXT, many(b'{"prompt":"a","stop":[', b'"x"', b"]}")),
    "deeply nested lists": Attack(_TEXT, lambda: b'{"prompt":"a","x":' + b"[" * 16_000_000 + b"]" * 16_000_000 + b"}"),
    "a prompt of 31 MB": Attack(_TEXT, long(b'{"prompt":', b"word ", b"}")),
    "a prompt of 31 MB of escapes": Attack(_TEXT, long(b'{"prompt":', b"\\n", b"}")),
    "a prompt of two million escapes": Attack(_TEXT, long(b'{"prompt":', b"\\u00e9 a text ", b"}")),
    "instructions of 31 MB": Attack(_RESPONSES, long(b'{"input":"a","instructions":', b"words \\n", b"}")),
    "a system prompt of 31 MB": Attack(_MESSAGES, long(_HEAD + _MESSAGE + b'],"system":', b"words \\n", b"}")),
    "metadata of 31 MB": Attack(_RESPONSES, long(b'{"input":"a","metadata":{"a":', b"\\u00e9", b"}}")),
}
