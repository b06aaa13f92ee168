"""Parts of messages that are no text. Models are given text only, so what a user sends is refused by name; where a tool
or another model has put it into the history, a note stands in its place, since that agent's session could not go on.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from mlx_server.errors import InvalidRequestError

logger = logging.getLogger(__name__)

_MEDIA = {
    "image": "image",
    "screenshot": "image",
    "audio": "audio",
    "video": "video",
    "document": "document",
    "file": "file",
    "upload": "file",
}
"""Words in the types of such parts, in any protocol (`image_url`, `input_audio`, `computer_screenshot`), and what the
note calls them."""


def media_note(kind: str) -> str | None:
    """What a model reads in the place of a part of type `kind`; None for types of no medium. The log says so once for
    each medium."""
    medium = next((name for word, name in _MEDIA.items() if word in kind), None)
    return None if medium is None else _noted(medium)


@functools.cache
def _noted(medium: str) -> str:
    note = f"[{medium} omitted: this model reads text only]"
    logger.warning(
        "A conversation holds a tool's result of type %s: models are given text only here, so they read %r in its "
        "place. This is said once.",
        medium,
        note,
    )
    return note


class UnseenPartError(InvalidRequestError):
    """A part of type `kind` at `where` is no text, and the model is given text only; `reason` says why it sees no
    image, if that is known."""

    def __init__(self, kind: str, where: str, reason: str = "") -> None:
        because = f": {reason}" if reason and "image" in (_MEDIA[word] for word in _MEDIA if word in kind) else ""
        super().__init__(
            f"{where} is of type {kind}, which this model is not given here{because} (GET /v1/models says which models "
            "see). Leave the part out, or send what it says as a part of type text.",
            where,
        )
        self.kind = kind
        self.where = where


def unreadable_part(kind: Any, where: str) -> InvalidRequestError:
    """The refusal of a part of type `kind`: what no model is given here so far, or what has no place at `where`."""
    if isinstance(kind, str) and any(word in kind for word in _MEDIA):
        return UnseenPartError(kind, where)
    return InvalidRequestError(f"{where} is of type {kind}, which cannot stand there; send parts of type text.", where)
