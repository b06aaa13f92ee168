"""Free text in which tags, once begun, are held to their schemas."""

from __future__ import annotations

from typing import Any

import pytest
from constraint_worlds import accepts, is_whole, start

OLD_TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "<tool_call>", "schema": {"type": "null"}, "end": "</tool_call>"},
    ],
    "triggers": ["<f=", "<tool_call>"],
}


@pytest.mark.parametrize(
    "text",
    ["no tags <f", "x <f=a>12</f> y <f=b>true</f>", "<tool_call>null</tool_call>", "x<tool_call>null</tool_call>y"],
)
def test_structural_tags_leave_text_free(text: str) -> None:
    assert is_whole(start(structural_tag=OLD_TAG), text)


@pytest.mark.parametrize("text", ["<f=c", "<f=a>x", "<f=a>1</f><f=b>1", "<tool_call>1"])
def test_structural_tags_hold_what_has_begun_to_its_schema(text: str) -> None:
    assert not accepts(start(structural_tag=OLD_TAG), text)


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY_TEXT = {"type": "any_text"}
TWO_TAGS = [tag("<a>", INTEGER, "</a>"), tag("<b>", ANY_TEXT, "</b>")]
FORMATS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "const_string", "value": "abc"}, ["abc"], ["ab", "abcd"]),
    (INTEGER, ["12"], ["x"]),
    ({"type": "regex", "pattern": "a/b+"}, ["a/bb"], ["ab"]),
    ({"type": "regex", "pattern": r"a\/b\\/"}, ["a/b\\/"], ["a/b/"]),
    ({"type": "regex", "pattern": "a\nb\\\n"}, ["a\nb\n"], ["ab"]),
    (ANY_TEXT, ["", "any\ntext"], []),
    (TWO_TAGS[0], ["<a>1</a>"], ["<a>x</a>", "<a>1"]),
    (TWO_TAGS[1], ["<b>x\n</a></b>"], ["<b>x</b>y"]),
    (tag("<think>", ANY_TEXT, "</think>"), ["<think>some</think>"], ["<think>some", "some"]),
    ({"type": "sequence", "elements": [TWO_TAGS[0], {"type": "const_string", "value": "!"}]}, ["<a>1</a>!"], ["!"]),
    ({"type": "or", "elements": TWO_TAGS}, ["<a>1</a>", "<b>1</b>"], ["", "<a>1</a><b>1</b>"]),
    (
        {"type": "triggered_tags", "triggers": ["<a"], "tags": TWO_TAGS[:1], "at_least_one": True},
        ["x<a>1</a>y<a>2</a>"],
        ["x", ""],
    ),
    (
        {"type": "triggered_tags", "triggers": ["<a"], "tags": TWO_TAGS[:1], "stop_after_first": True},
        ["x<a>1</a>", "x"],
        ["x<a>1</a>y"],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<a"],
            "tags": TWO_TAGS[:1],
            "stop_after_first": True,
            "at_least_one": True,
        },
        ["x<a>1</a>"],
        ["x"],
    ),
    (
        {"type": "tags_with_separator", "tags": TWO_TAGS, "separator": ","},
        ["", "<a>1</a>", "<a>1</a>,<b>x</b>,<a>2</a>"],
        ["<a>1</a><b>x</b>"],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": TWO_TAGS,
            "separator": ",",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<a>1</a>"],
        ["", "<a>1</a>,<b>x</b>"],
    ),
]


@pytest.mark.parametrize(("format_", "good", "bad"), FORMATS)
def test_structural_tags_of_the_newer_form(format_: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert is_whole(start(structural_tag={"type": "structural_tag", "format": format_}), text), text
    for text in bad:
        assert not is_whole(start(structural_tag={"type": "structural_tag", "format": format_}), text), text
