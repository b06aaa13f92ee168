"""Images in chats: found in the messages, kept as marks in texts, and put into the prompt.

    [{"type": "text", "text": "See"}, {"type": "image_url", ...}]    as it came, in any protocol
    [{"type": "text", "text": "See"}, {"type": "text", "text": M}]   `mark`: M is a word that nobody can guess
    "See\\nM"                                                        what the protocol's reader makes of two texts
    [{"type": "text", "text": "See"}, {"type": "image"}]             `split`: what the chat template gets

So whatever the server does to texts (join turns, write results as text) includes the images. Then:

chat with marks -> Pictures.lay_out() -> template -> Layout.fill() -> Layout.encode() -> ids and `PromptImage`s
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from mlx_server.engine.vision.families import NUMBER, PreparedImage
from mlx_server.engine.vision.seeing import SeeingModel
from mlx_server.errors import InvalidRequestError
from mlx_server.request import PromptImage

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str | None]
"""Renders a chat with a template; None if the template raises."""

MAX_IMAGES = 256
"""Of one request, including its history."""

UNREADABLE_NOTE = "[image omitted: it cannot be read here]"
"""Replaces an unreadable image of the assistant or a tool, so that the agent's session can continue."""

_KINDS = ("image_url", "input_image", "image", "computer_screenshot")


class TooManyImagesError(InvalidRequestError):
    """A request has more images than one may have, or they take more memory."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as it was sent: `source` is a URL (data, http, https, file) or base64, `where` its path in the request.
    `is_noted`: if the image is unreadable, a note replaces it."""

    source: str
    where: str
    is_noted: bool = False


class ImageParts:
    """The images of one request, in the order of the request. One thread at a time."""

    def __init__(self) -> None:
        self.found: list[ImagePart] = []
        self._nonce = secrets.token_hex(8)
        self._marks = re.compile(rf"image{self._nonce}n(\d+)(b?)(a?)n")
        self._neighbours: list[str] = []  # of each image: `b` if a part is before it, `a` if one is after it

    def mark_messages(self, messages: Sequence[Any], where: str = "messages") -> list[Any]:
        """Returns copies of messages, or of a response's items, with marks as texts instead of images. Raises
        `InvalidRequestError` for a user's images without a source."""
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
            raise TooManyImagesError(
                f"{where} is image {MAX_IMAGES + 1} of the request; the most is {MAX_IMAGES}. Send fewer.", where
            )
        self.found.append(ImagePart(source, where, is_noted))
        self._neighbours.append(neighbours)
        return self.mark(len(self.found) - 1)

    def mark(self, index: int) -> str:
        """The word for an image in a text. It has no characters that a template would escape."""
        return f"image{self._nonce}n{index}{self._neighbours[index]}n"

    def order(self, text: str) -> list[int]:
        """The images in a text, as indices into `found`."""
        return [int(found[1]) for found in self._marks.finditer(text)]

    def replace(self, text: str, write: Callable[[int], str]) -> str:
        """Replaces each mark in the text by `write(index)`."""
        return self._marks.sub(lambda found: write(int(found[1])), text)

    def split(self, text: str) -> list[dict[str, Any]]:
        """Splits a text into a template's parts, texts and images, without the line breaks that joined them."""
        parts: list[dict[str, Any]] = []
        start = 0
        for found in self._marks.finditer(text):
            before = text[start : found.start()]
            parts += text_parts(before.removesuffix("\n") if found[2] else before)
            parts.append({"type": "image"})
            start = found.end() + bool(found[3] and text.startswith("\n", found.end()))
        return parts + text_parts(text[start:])

    def hide(self, value: Any, words: Sequence[str]) -> Any:
        """Replaces `words` in a message. The tokenizer would read them as images, but somebody wrote them as text."""
        if isinstance(value, str):
            for index, word in enumerate(words):
                value = value.replace(word, self._hidden(index))
            return value
        if isinstance(value, Mapping):
            return {key: self.hide(item, words) for key, item in value.items()}
        return [self.hide(item, words) for item in value] if isinstance(value, list) else value

    def pieces(self, text: str, words: Sequence[str]) -> list[str]:
        """Cuts a prompt into pieces that are tokenized one by one. Hidden words are restored, but cut after their first
        character, so that they are read as text."""
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


def text_parts(text: str) -> list[dict[str, Any]]:
    """A text as a template's parts: one, or none if it is empty."""
    return [{"type": "text", "text": text}] if text else []


def _is_parts(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, Mapping) else None


def _source_of(part: Mapping[str, Any], where: str) -> str:
    """The URL or base64 of a part: OpenAI's `image_url`, Anthropic's `source`, or `image` of other protocols."""
    given = part.get("image_url", part.get("source", part.get("image")))
    if isinstance(given, Mapping):
        given = given.get("url", given.get("data"))
    if not isinstance(given, str) or not given:
        raise InvalidRequestError(
            f"{where} is an image without a source: send image_url with a URL, or source with base64. This server "
            "stores no files, so there is no file_id.",
            where,
        )
    return given


_PROBE = "what-stands-around-it"


@dataclass(frozen=True, slots=True)
class Pictures:
    """The images of one chat: `prepared` by their index in `parts.found`. A note replaces those that are missing."""

    model: SeeingModel
    parts: ImageParts
    prepared: Mapping[int, PreparedImage]

    def lay_out(self, chat: Sequence[Message], render: Render, needs_parts: bool) -> Layout:
        """Prepares the chat for its template. A user's images become parts if the template shows these; all other
        images stay marks in texts. Words that the tokenizer would read as images, but that somebody wrote, are
        hidden."""
        chat = [self.parts.hide(self._with_notes(message), self.words) for message in chat]
        order = [index for message in chat for index in self.parts.order(message["content"])]
        snippet = self._snippet(render)

        def laid_out(message: Message) -> Message:
            text = message["content"]
            if snippet is not None and message["role"] == "user" and self.parts.order(text):
                return {**message, "content": self.parts.split(text)}
            return {**message, "content": text_parts(text)} if needs_parts else message

        return Layout(self, [laid_out(message) for message in chat], order, snippet or self.model.snippet)

    @property
    def words(self) -> tuple[str, str]:
        """The words that the tokenizer reads as images."""
        return self.model.placeholder, self.model.image_token

    def _with_notes(self, message: Message) -> Message:
        def write(index: int) -> str:
            return self.parts.mark(index) if index in self.prepared else UNREADABLE_NOTE

        return {**message, "content": self.parts.replace(message["content"], write)}

    def _snippet(self, render: Render) -> str | None:
        """The text that the template writes for a user's image; None if it has no place for one."""
        text = {"type": "text", "text": _PROBE}
        shown = render([{"role": "user", "content": [text, {"type": "image"}, text]}]) or ""
        if self.model.placeholder not in shown:
            return None
        pieces = shown.split(_PROBE)
        is_between = len(pieces) == 3 and self.model.placeholder in pieces[1]
        return pieces[1] if is_between else self.model.snippet


@dataclass(frozen=True, slots=True)
class Layout:
    """A `chat` for a template, the `order` of its images, and the `snippet` that replaces those that are still
    marks."""

    pictures: Pictures
    chat: list[Message]
    order: list[int]
    snippet: str

    def fill(self, text: str) -> str:
        """Puts each image's text into the template's text, with one image token for each of its pieces. Raises
        `InvalidRequestError` if the template left images out."""
        placeholder, prepared = self.pictures.model.placeholder, self.pictures.prepared
        first, *rest = self.pictures.parts.replace(text, lambda _: self.snippet).split(placeholder)
        if len(rest) != len(self.order):
            raise InvalidRequestError(
                f"The chat template shows {len(rest)} of the {len(self.order)} images in the messages. Send images in "
                "messages of the user.",
                "messages",
            )
        pieces = [first]
        for number, (index, piece) in enumerate(zip(self.order, rest, strict=True)):
            pieces += [prepared[index].text.replace(NUMBER, str(number)), piece]
        return "".join(pieces)

    def shown(self, text: str) -> str:
        """Restores the hidden words in a filled text."""
        return "".join(self.pictures.parts.pieces(text, self.pictures.words))

    def encode(self, text: str, encode: Callable[[str], Sequence[int]]) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Returns the ids of a filled text, with all placeholder tokens of each image, and the images' places.

        ids 5 6 I 7, one image of three tokens  ->  5 6 I I I 7, the image at [2, 5)
        """
        image_token_id, both_ways = self.pictures.model.image_token_id, self.pictures.model.is_bidirectional
        pieces = iter([piece for index in self.order for piece in self.pictures.prepared[index].pieces])
        token_ids: list[int] = []
        images: list[PromptImage] = []
        for part in self.pictures.parts.pieces(text, self.pictures.words):
            for token_id in encode(part):
                if token_id != image_token_id:
                    token_ids.append(token_id)
                    continue
                piece = next(pieces, None)
                if piece is None:
                    raise _misread()
                images.append(PromptImage(len(token_ids), piece.num_tokens, piece.digest, piece.inputs, both_ways))
                token_ids += piece.token_ids
        if next(pieces, None) is not None:
            raise _misread()
        return token_ids, tuple(images)


def cut_images() -> InvalidRequestError:
    """The error for a prompt with images that would have to be cut."""
    return InvalidRequestError(
        "truncate_prompt_tokens would cut a prompt that has images, which cannot be cut. Leave it out, or send less.",
        "truncate_prompt_tokens",
    )


def _misread() -> InvalidRequestError:
    return InvalidRequestError(
        "The prompt's image tokens do not match its images: tools or template variables contain the token. Send them "
        "without it.",
        "messages",
    )
