"""OpenAI's messages in all their forms become the one that templates expect, or are refused by their place."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mlx_server.engine.text import messages as messages_module
from mlx_server.engine.text.messages import (
    UnseenPartError,
    media_note,
    normalise_messages,
    parse_arguments,
    text_of,
    unreadable_part,
)
from mlx_server.errors import InvalidRequestError

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
NOTE = "[image omitted: this model reads text only]"
CALL = {"id": "c", "function": {"name": "look", "arguments": '{"at": 1}'}}


def text(value: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "refusal" if kind == "refusal" else "text": value}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "a"}, {"content": "a"}),
        ({"content": None, "name": None}, {"content": ""}),
        ({}, {"content": ""}),
        ({"content": "a", "name": "n", "own": 0}, {"content": "a", "name": "n", "own": 0}),
        ({"content": [text("a"), "b", text("c", "input_text")]}, {"content": "a\nb\nc"}),
        ({"content": (text("a", "output_text"), text("b", "refusal"))}, {"content": "a\nb"}),
        ({"content": []}, {"content": ""}),
        ({"content": "a", "reasoning": "r"}, {"content": "a", "reasoning_content": "r"}),
        ({"content": "a", "reasoning": "r", "reasoning_content": "own"}, {"content": "a", "reasoning_content": "own"}),
        ({"content": "a", "reasoning": {"effort": "low"}}, {"content": "a"}),
        ({"content": "a", "tool_calls": []}, {"content": "a"}),
        ({"content": "a", "tool_calls": None}, {"content": "a"}),
        (
            {"content": "a", "tool_calls": [CALL]},
            {"content": "a", "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": {"at": 1}}}]},
        ),
    ],
)
def test_a_message_is_given_the_form_that_templates_expect(message: dict[str, Any], expected: dict[str, Any]) -> None:
    given = {"role": "user", **message}
    assert normalise_messages([given]) == [{"role": "user", **expected}]
    assert given == {"role": "user", **message}, "the client's own is not changed"


@pytest.mark.parametrize(
    ("message", "where", "words"),
    [
        (5, "messages[1]", "must be an object with a role"),
        ({"content": "a"}, "messages[1]", "must be an object with a role"),
        ({"role": 5}, "messages[1]", "must be an object with a role"),
        ({"role": "user", "content": 5}, "messages[1].content", "must be a string or a list of parts"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content", "must be a string or a list"),
        ({"role": "user", "content": [5]}, "messages[1].content[0]", "must be a part with a type"),
        ({"role": "user", "content": ["a", {"text": "b"}]}, "messages[1].content[1]", "must be a part with a type"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "messages[1].content[0]", "must be a part with a type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text", "must be a string"),
        ({"role": "user", "content": [{"type": "refusal", "text": "a"}]}, "messages[1].content[0].refusal", "a string"),
        (
            {"role": "user", "content": [{"type": "own"}]},
            "messages[1].content[0]",
            "is of type own, which is not allowed",
        ),
        (
            {"role": "tool", "content": [{"type": "own"}]},
            "messages[1].content[0]",
            "is of type own, which is not allowed",
        ),
        (
            {"role": "user", "content": [IMAGE]},
            "messages[1].content[0]",
            "is of type image_url, which this model cannot",
        ),
        ({"role": "function", "content": "a"}, "messages[1].role", "OpenAI's old function calls are not supported"),
        ({"role": "a", "function_call": {}}, "messages[1].function_call", "OpenAI's old function calls are not"),
        ({"role": "a", "tool_calls": "abc"}, "messages[1].tool_calls", "must be a list"),
        ({"role": "a", "tool_calls": 5}, "messages[1].tool_calls", "must be a list"),
        ({"role": "a", "tool_calls": [CALL, 5]}, "messages[1].tool_calls[1]", "must have a function with a name"),
        (
            {"role": "a", "tool_calls": [{"function": 5}]},
            "messages[1].tool_calls[0]",
            "must have a function with a name",
        ),
        ({"role": "a", "tool_calls": [{"function": {"name": 5}}]}, "messages[1].tool_calls[0]", "must have a function"),
        (
            {"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[1].tool_calls[0].function.arguments",
            "must be a JSON object",
        ),
    ],
)
def test_what_is_no_message_is_refused_by_its_place(message: Any, where: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        normalise_messages([{"role": "user", "content": "a"}, message])
    assert caught.value.message.startswith(where)
    assert words in caught.value.message
    assert caught.value.param == where


@pytest.mark.parametrize(
    ("sent", "shown"), [("ba", "ab"), ("cab", "abc"), ("cxa", "cxa"), ("b", "b"), ("bac", "abc"), ("bacx", "abcx")]
)
def test_results_come_in_the_order_of_their_calls(sent: str, shown: str) -> None:
    calls = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in "abc"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in sent]
    user = {"role": "user", "content": "u"}
    chat = normalise_messages([user, {"role": "assistant", "tool_calls": calls}, *results, user])
    assert "".join(message["content"] for message in chat) == f"u{shown}u"


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        normalise_messages([])


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_media_of_the_agent_become_notes(role: str) -> None:
    assert normalise_messages([{"role": role, "content": [text("a"), IMAGE]}])[0]["content"] == f"a\n{NOTE}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        ("null", {}),
        (None, {}),
        *(
            (written, {"invalid_json": written})
            for written in (
                '{"a": ',
                '{"a": 1e999}',
                '{"a": NaN}',
                '{"a": "\\ud83d"}',
                '{"a": ' + "[" * 9000 + "]" * 9000 + "}",
            )
        ),
    ],
)
def test_arguments_are_an_object_whatever_was_sent(arguments: Any, expected: dict[str, Any]) -> None:
    assert parse_arguments(arguments, "it") == expected


def test_a_list_of_strings_is_content_only_where_that_is_allowed() -> None:
    assert text_of(["a", text("b")], "it", mixes_strings=True) == "a\nb"
    with pytest.raises(InvalidRequestError, match=r"it\[0\] must be a part with a type"):
        text_of(["a"], "it")


@pytest.mark.parametrize(
    ("kind", "medium"),
    [
        ("input_image", "image"),
        ("computer_screenshot", "image"),
        ("input_audio", "audio"),
        ("video_url", "video"),
        ("document", "document"),
        ("input_file", "file"),
        ("container_upload", "file"),
    ],
)
def test_a_note_names_the_medium_and_is_logged_once(kind: str, medium: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    messages_module._noted.cache_clear()
    for _ in range(2):
        assert media_note(kind) == f"[{medium} omitted: this model reads text only]"
    (line,) = caplog.messages
    assert f"a tool's result of type {medium}" in line
    assert media_note("text") is None
    error = unreadable_part(kind, "it")
    assert isinstance(error, UnseenPartError)
    assert (error.kind, error.where, error.param) == (kind, "it", "it")


def test_the_reason_why_images_are_not_seen_is_told_of_images_only() -> None:
    assert "cannot read: it is blind (GET /v1/models" in UnseenPartError("image_url", "it", "it is blind").message
    assert "cannot read (GET /v1/models" in UnseenPartError("input_audio", "it", "it is blind").message
    assert "cannot read (GET /v1/models" in UnseenPartError("image_url", "it").message
    assert not isinstance(unreadable_part(5, "it"), UnseenPartError)
    assert "it is of type 5, which is not allowed" in unreadable_part(5, "it").message
