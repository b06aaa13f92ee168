"""Images in messages: found before anything else is read, and kept as marks in texts until the prompt is written.

    [{"type": "text", "text": "See"}, {"type": "image_url", ...}]    as it came, in any protocol
    [{"type": "text", "text": "See"}, {"type": "text", "text": M}]   `mark`: M is a word that nobody can guess
    "See\\nM"                                                        what the protocol's reader makes of two texts
    [{"type": "text", "text": "See"}, {"type": "image"}]             `split`: what a chat template is given

So all that is done to texts on the way (turns joined, results written as text) is done to images, too.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from mlx_server.errors import InvalidRequestError

MAX_IMAGES = 256
"""Of one request, its history included."""

UNREADABLE_NOTE = "[image omitted: it cannot be read here]"
"""In the place of an image of an agent's or a tool's: its session must be able to go on."""

_KINDS = ("image_url", "input_image", "image", "computer_screenshot")


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as it was sent: `source` is a URL (data, http, https, file) or base64, `where` its path in the request.
    If it `is_noted`, a note takes its place should it be unreadable."""

    source: str
    where: str
    is_noted: bool = False


class ImageParts:
    """The images of one request, in the order in which they were found. One thread at a time."""

    def __init__(self) -> None:
        self.found: list[ImagePart] = []
        self._nonce = secrets.token_hex(8)
        self._marks = re.compile(rf"image{self._nonce}n(\d+)(b?)(a?)n")
        self._neighbours: list[str] = []  # of each: `b` if there is a part before it, `a` if there is one behind

    def mark_messages(self, messages: Sequence[Any], where: str = "messages") -> list[Any]:
        """Copies of messages, or of a response's items, with marks as texts in the place of images. Raises
        `InvalidRequestError` for images of a user that have no readable form."""
        return [self._message(message, f"{where}[{index}]") for index, message in enumerate(messages)]

    def _message(self, message: Any, where: str) -> Any:
        if not isinstance(message, Mapping):
            return message
        content, output = message.get("content"), message.get("output")
        has_results = _is_parts(content) and any(_kind(part) == "tool_result" for part in content)
        by_agent = message.get("role") in ("tool", "assistant") or has_results
        marked = {**message}
        if _is_parts(content):
            marked["content"] = self._parts(content, f"{where}.content", by_agent)
        if _is_parts(output):
            marked["output"] = self._parts(output, f"{where}.output", True)
        return marked

    def _parts(self, parts: Sequence[Any], where: str, is_noted: bool) -> list[Any]:
        last = len(parts) - 1
        return [
            self._part(part, f"{where}[{index}]", is_noted, "b" * (index > 0) + "a" * (index < last))
            for index, part in enumerate(parts)
        ]

    def _part(self, part: Any, where: str, is_noted: bool, neighbours: str) -> Any:
        kind = _kind(part)
        if kind in _KINDS:
            return {"type": "text", "text": self._marked(part, where, is_noted, neighbours)}
        if kind == "tool_result" and _is_parts(part.get("content")):
            return {**part, "content": self._parts(part["content"], f"{where}.content", True)}
        source = part.get("source") if kind == "document" else None
        if isinstance(source, Mapping) and _is_parts(source.get("content")):
            inner = self._parts(source["content"], f"{where}.source.content", is_noted)
            return {**part, "source": {**source, "content": inner}}
        return part

    def _marked(self, part: Mapping[str, Any], where: str, is_noted: bool, neighbours: str) -> str:
        try:
            source = _source_of(part, where)
        except InvalidRequestError:
            if is_noted:
                return UNREADABLE_NOTE
            raise
        if len(self.found) == MAX_IMAGES:
            raise InvalidRequestError(
                f"{where} is image {MAX_IMAGES + 1} of the request; at most {MAX_IMAGES} are read. Send fewer.", where
            )
        self.found.append(ImagePart(source, where, is_noted))
        self._neighbours.append(neighbours)
        return self.mark(len(self.found) - 1)

    def mark(self, index: int) -> str:
        """What stands for an image in a text. Its letters are none that a template would escape."""
        return f"image{self._nonce}n{index}{self._neighbours[index]}n"

    # --- in the chat that a template is given ---------------------------------------------------------------

    def order(self, text: str) -> list[int]:
        """The images of a text, as indices into `found`."""
        return [int(found[1]) for found in self._marks.finditer(text)] if self._nonce in text else []

    def replace(self, text: str, write: Callable[[int], str]) -> str:
        """The text with what `write` says in the place of each mark."""
        return self._marks.sub(lambda found: write(int(found[1])), text) if self._nonce in text else text

    def split(self, text: str) -> list[dict[str, Any]]:
        """The text and its images as a template's parts, without the line breaks that joined them."""
        parts: list[dict[str, Any]] = []
        start = 0
        for found in self._marks.finditer(text):
            before = text[start : found.start()]
            parts += _text_part(before.removesuffix("\n") if found[2] else before)
            parts.append({"type": "image"})
            start = found.end() + bool(found[3] and text.startswith("\n", found.end()))
        return parts + _text_part(text[start:])

    def hide(self, value: Any, words: Sequence[str]) -> Any:
        """A message without `words`, which mean images to a tokenizer and text to whoever has written them."""
        if isinstance(value, str):
            for index, word in enumerate(words):
                value = value.replace(word, self._hidden(index))
            return value
        if isinstance(value, Mapping):
            return {key: self.hide(item, words) for key, item in value.items()}
        return [self.hide(item, words) for item in value] if isinstance(value, list) else value

    def pieces(self, text: str, words: Sequence[str]) -> list[str]:
        """A prompt in pieces to be tokenized one by one: hidden words are back, each cut behind its first character, so
        that it is read as text."""
        pieces, text_so_far = [], ""
        for index, piece in enumerate(re.split(rf"word{self._nonce}n(\d+)n", text)):
            if index % 2:
                word = words[int(piece)]
                pieces.append(text_so_far + word[0])
                text_so_far = word[1:]
            else:
                text_so_far += piece
        return [*pieces, text_so_far]

    def _hidden(self, index: int) -> str:
        return f"word{self._nonce}n{index}n"


def _text_part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _is_parts(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _source_of(part: Mapping[str, Any], where: str) -> str:
    """The URL or the base64 of a part: OpenAI's `image_url`, Anthropic's `source`, or `image` as others have it."""
    given = part.get("image_url", part.get("source", part.get("image")))
    if isinstance(given, Mapping):
        given = given.get("url", given.get("data"))
    if not isinstance(given, str) or not given:
        raise InvalidRequestError(
            f"{where} is an image without a source: send image_url with a URL, or source with base64. Files are not "
            "kept here, so a file_id names none.",
            where,
        )
    return given
