"""Which parts of messages are images, and which errors the others get."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_server.engine.vision import parts
from mlx_server.engine.vision.parts import UNREADABLE_NOTE, ImageParts
from mlx_server.errors import InvalidRequestError

URL = "https://example.org/cat.png"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "image", "source": {"type": "url", "url": URL}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL}},
        {"type": "image", "image": URL},
        {"type": "computer_screenshot", "image_url": URL},
    ],
)
def test_images_of_every_protocol_are_found(part: dict[str, Any]):
    found = ImageParts()
    (message,) = found.mark_messages([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    (image,) = found.found
    assert (image.source, image.where, image.is_noted) == (URL, "messages[0].content[1]", False)
    assert message["content"][1] == {"type": "text", "text": found.mark(0)}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": {"detail": "low"}},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "image", "source": {"type": "file", "file_id": "file-1"}},
        {"type": "image", "image": ""},
        {"type": "image", "image": 5},
    ],
)
def test_an_image_without_a_source_is_reported_or_noted(part: dict[str, Any]):
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content\[0\] is an image without a source"):
        ImageParts().mark_messages([{"role": "user", "content": [part]}])
    (message,) = ImageParts().mark_messages([{"role": "tool", "content": [part]}])
    assert message["content"] == [{"type": "text", "text": UNREADABLE_NOTE}]


def test_whose_images_are_noted():
    image, found = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}, ImageParts()
    found.mark_messages(
        [
            {
                "role": "user",
                "content": [image, {"type": "document", "source": {"type": "content", "content": [image]}}],
            },
            {"role": "assistant", "content": [image]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image]}, image]},
            {"type": "function_call_output", "output": [image]},
        ]
    )
    assert [(part.where, part.is_noted) for part in found.found] == [
        ("messages[0].content[0]", False),
        ("messages[0].content[1].source.content[0]", False),
        ("messages[1].content[0]", True),
        ("messages[2].content[0].content[0]", True),
        ("messages[2].content[1]", True),
        ("messages[3].output[0]", True),
    ]


def test_images_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "MAX_IMAGES", 2)
    image = {"type": "image", "image": "AAAA"}
    with pytest.raises(InvalidRequestError, match=r"content\[2\] is image 3 of the request; the most is 2"):
        ImageParts().mark_messages([{"role": "user", "content": [image] * 3}])


@pytest.mark.parametrize("messages", [[5], [{"role": "user"}], [{"content": "a"}], [{"content": [5, None, {}]}]])
def test_what_is_no_message_is_left_for_its_reader(messages: list[Any]):
    assert ImageParts().mark_messages(messages) == messages


def test_a_text_is_split_without_the_line_breaks_that_joined_parts():
    image, words = {"type": "image", "image": URL}, {"type": "text", "text": "a"}
    alone, between = ImageParts(), ImageParts()
    alone.mark_messages([{"role": "user", "content": [image]}])
    between.mark_messages([{"role": "user", "content": [words, image, words]}])
    assert alone.split(f"a\n{alone.mark(0)}\nb") == [
        {"type": "text", "text": "a\n"},
        {"type": "image"},
        {"type": "text", "text": "\nb"},
    ]
    assert between.split(f"a\n{between.mark(0)}\nb") == [words, {"type": "image"}, {"type": "text", "text": "b"}]


def test_words_that_would_be_images_are_hidden_wherever_they_stand():
    found, words = ImageParts(), ["<i>", "<j>"]
    hidden = found.hide({"a": ["x <i> y<j>", 5, None, {"b": "<j>"}]}, words)
    assert not any(word in str(hidden) for word in words)
    assert hidden["a"][1:3] == [5, None]
    assert found.pieces(hidden["a"][0], words) == ["x <", "i> y<", "j>"]
    assert found.pieces(hidden["a"][3]["b"], words) == ["<", "j>"]
