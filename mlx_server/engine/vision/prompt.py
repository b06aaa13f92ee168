"""A chat's images on their way into its prompt: what a template is given for them, and what its text becomes.

chat with marks -> Pictures.lay_out() -> template -> Layout.fill() -> Layout.encode() -> ids and `PromptImage`s
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_server.engine.vision.parts import UNREADABLE_NOTE, ImageParts
from mlx_server.engine.vision.seeing import PreparedImage, SeeingModel
from mlx_server.errors import InvalidRequestError
from mlx_server.request import PromptImage

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str | None]
"""Renders a chat with a template; None where that raises."""

_PROBE = "what-stands-around-it"


@dataclass(frozen=True, slots=True)
class Pictures:
    """The images of one chat: `prepared` by their index in `parts.found`. For those that are not there a note is
    written."""

    model: SeeingModel
    parts: ImageParts
    prepared: Mapping[int, PreparedImage]

    def lay_out(self, chat: Sequence[Message], render: Render, wants_parts: bool) -> Layout:
        """The chat as its template is to be given it. A user's images are parts if the template shows such; all others,
        and these if not, stay marks in texts. What means an image to the tokenizer, but was written by somebody, is
        hidden."""
        chat = [self.parts.hide(self._with_notes(message), self.words) for message in chat]
        order = [index for message in chat for index in self.parts.order(message["content"])]
        snippet = self._snippet(render)

        def laid_out(message: Message) -> Message:
            text = message["content"]
            if snippet is not None and message["role"] == "user" and self.parts.order(text):
                return {**message, "content": self.parts.split(text)}
            return {**message, "content": [{"type": "text", "text": text}] if text else []} if wants_parts else message

        return Layout(self, [laid_out(message) for message in chat], order, snippet or self.model.snippet)

    @property
    def words(self) -> tuple[str, str]:
        """What means an image in a prompt's text."""
        return self.model.placeholder, self.model.image_token

    def _with_notes(self, message: Message) -> Message:
        def write(index: int) -> str:
            return self.parts.mark(index) if index in self.prepared else UNREADABLE_NOTE

        return {**message, "content": self.parts.replace(message["content"], write)}

    def _snippet(self, render: Render) -> str | None:
        """What the template writes for a user's image; None if it has no place for one."""
        text = {"type": "text", "text": _PROBE}
        shown = render([{"role": "user", "content": [text, {"type": "image"}, text]}]) or ""
        if self.model.placeholder not in shown:
            return None
        pieces = shown.split(_PROBE)
        is_between = len(pieces) == 3 and self.model.placeholder in pieces[1]
        return pieces[1] if is_between else self.model.snippet


@dataclass(frozen=True, slots=True)
class Layout:
    """A `chat` for a template, the `order` of the images in it, and what is written for those that are still marks."""

    pictures: Pictures
    chat: list[Message]
    order: list[int]
    snippet: str

    def fill(self, text: str) -> str:
        """The template's text with what stands for each image: the image token once for each of its pieces. Raises
        `InvalidRequestError` where the template has left images out."""
        placeholder, prepared = self.pictures.model.placeholder, self.pictures.prepared
        first, *rest = self.pictures.parts.replace(text, lambda _: self.snippet).split(placeholder)
        if len(rest) != len(self.order):
            raise InvalidRequestError(
                f"The chat template shows {len(rest)} images of the {len(self.order)} in the messages. Send images in "
                "messages of the user's.",
                "messages",
            )
        pieces = [first]
        for index, piece in zip(self.order, rest, strict=True):
            pieces += [prepared[index].text, piece]
        return "".join(pieces)

    def shown(self, text: str) -> str:
        """A filled text with the words that were hidden in it."""
        return "".join(self.pictures.parts.pieces(text, self.pictures.words))

    def encode(self, text: str, encode: Callable[[str], Sequence[int]]) -> tuple[list[int], tuple[PromptImage, ...]]:
        """The ids of a filled text, with the whole run of each image, and where these are.

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
    """The refusal to cut a prompt that has images."""
    return InvalidRequestError(
        "truncate_prompt_tokens would cut a prompt that has images, which cannot be cut. Leave it out, or send less.",
        "truncate_prompt_tokens",
    )


def _misread() -> InvalidRequestError:
    return InvalidRequestError(
        "The prompt has another number of image tokens than its images: tools or template variables name the token. "
        "Send them without it.",
        "messages",
    )
